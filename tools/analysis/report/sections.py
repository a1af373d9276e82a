"""The page of a report: its sections, in order. Each is made of a run alone; None leaves it out."""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import Any

from megaprec.checkpoint.keeping import best_made_here, describe_evaluations
from megaprec.durable import read_whole
from megaprec.errors import UserError
from models.parameter_counts import num_parameters
from parallel.pipeline.simulation import Span, bubble, simulate
from tools.analysis.plots.charts import ChartRow as ChartRow
from tools.analysis.plots.charts import draw_rows
from tools.analysis.plots.compare_plot import LAST, Curve
from tools.analysis.plots.drawing import to_svg, to_themed_svg
from tools.analysis.plots.shadow_plot import PICTURE
from tools.analysis.plots.statistics_map import draw_map, maps_of
from tools.analysis.plots.step_plot import StepBar, draw_steps
from tools.analysis.plots.timeline import Panel as Timeline
from tools.analysis.plots.timeline import draw
from tools.analysis.plots.training_plot import Over, first_losses, pictures
from tools.analysis.report.page import Html, Text, document, facts, folded, html, paragraph, table
from tools.analysis.report.run import ReportedKey, Run
from tools.analysis.verdict.measure import find_yardsticks
from tools.analysis.verdict.verdict import (
    describe_amount,
    describe_forecast,
    describe_loss,
    describe_yardsticks,
    read_verdict,
)
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig, checkpoint_folder
from tools.console.units import duration, first_of, flops, loss_scale, size
from tools.journal.invariant_records import read_findings
from tools.journal.records import (
    BRANCHED,
    COLLAPSE,
    FIRST_EVALUATION,
    HELD_OUT_LOSS,
    INITIAL,
    NO_TOKENS_EVENT,
    PREDICTION,
    SAMPLE,
    SOURCE_LOSS_PREFIX,
    SOURCE_TOKENS_PREFIX,
    SPIKE_EVENT,
    STATISTICS_FILE,
    odd_lines,
    read_statistics,
)
from tools.journal.router_records import router_values
from tools.journal.shadow_records import SHADOW
from tools.journal.source_records import source_names
from tools.journal.timeline_file import TIMELINE, read_trace_of
from tools.saved.save_record import odd_saves
from tools.training.hangs import read_records
from tools.verify.parity.certificate import run_digest
from tools.verify.parity.summary import conclusion, verdict

# pixels of a curve, before the page makes it as wide as its column
CURVE_WIDTH = 480.0
CURVE_HEIGHT = 180.0
MOST_INSTRUCTIONS = 20_000  # of a schedule that is simulated for the page
MOST_CHANGES = 8  # of train.batch_schedule that are named
MOST_DRAWN = 2_000  # instructions of a timeline that is drawn
LARGEST_PICTURE = 1_000_000  # bytes
PNG_SIGNATURE = b"\x89PNG"
# measures of routers, and the heads of their columns
EXPERT_COLUMNS = {
    "used_experts": "used experts",
    "max_load": "largest load",
    "min_load": "smallest load",
    "entropy": "entropy",
    "balance_loss": "balance loss",
    "z_loss": "z-loss",
    "min_correction": "lowest correction",
    "max_correction": "highest correction",
}
NEWEST_LOSSES = 20  # steps whose losses of a data set are averaged
NOT_BY_KIND = "all kinds together"
NO_CERTIFICATE = "There is no certificate of parity: megaprec parity RUN.toml makes one."
NO_PROOF = "There is no proof that the run resumes bit for bit: megaprec prove RUN_DIR makes one."
VERDICT_CLASSES = {
    "still learning": "proven",
    "fell with its rate": "untried",
    "has stopped": "untried",
    "rises": "wrong",
    "not known": "untried",
}
# what a certificate of another version, or a file of that name, may raise
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError)

Section = Callable[[Run], Html | None]
Fact = tuple[str, Text]  # a name and its value
Row = tuple[Text, ...]  # of a table


def summary(run: Run) -> Html:
    """Return how far the run got, and its most important numbers."""
    last_record = run.records[-1]
    curve = Curve(run.name, run.records)
    rows = [
        ("steps", _describe_steps(run)),
        *_branch_facts(run),
        ("skipped steps", f"{curve.skipped:,}"),
        *_token_facts(last_record),
        *_loss_facts(curve, last_record["step"]),
        *_first_facts(run),
        *_best_facts(run),
    ]
    end_events = run.of_kind("end")
    if end_events:
        rows.append(("last end", str(end_events[-1]["why"])))
    if isinstance(run.config, RunConfig):
        rows += _model_facts(run.config)

    notes = [*run.notes]
    if curve.skipped == len(run.records):
        notes.append("every step was skipped: nothing was learned")
    return _join(facts(rows), *(paragraph("Note: ", note) for note in notes))


def _describe_steps(run: Run) -> str:
    done = f"{run.records[-1]['step']:,}"
    total = run.config.train.steps if isinstance(run.config, RunConfig) else 0
    return f"{done} of {total:,}" if total else done


def _branch_facts(run: Run) -> Iterator[Fact]:
    branching = run.branching
    if branching:
        yield "branched", f"after step {branching['step']:,} from {branching['checkpoint']}"


def _token_facts(record: dict[str, Any]) -> Iterator[Fact]:
    tokens = record.get("tokens")
    if isinstance(tokens, int | float):
        yield "tokens read", f"{tokens:,}"
    learned = record.get("learned_tokens")
    if isinstance(learned, int | float) and learned != tokens:
        yield "tokens learned", f"{learned:,}"


def _loss_facts(curve: Curve, last_step: int) -> Iterator[Fact]:
    """Yield the last losses of a run, those that were measured."""
    final = f"{curve.final:.4f}"
    if math.isnan(curve.final):  # every step was skipped
        final = "none"
    yield f"loss, mean of last {LAST} steps", final
    if not math.isnan(curve.held_out):
        step = curve.held_out_step
        held_out = f"{curve.held_out:.4f}"
        if step != last_step:
            held_out += f", after step {step:,}"
        yield "held-out loss", held_out
    if not math.isnan(curve.held_out_of_average):
        yield "held-out loss of the average", f"{curve.held_out_of_average:.4f}"


def _first_facts(run: Run) -> Iterator[Fact]:
    """Yield the held-out loss before the first step, if it was evaluated."""
    loss = first_losses(run.of_kind(FIRST_EVALUATION)).get(HELD_OUT_LOSS)
    if isinstance(loss, int | float):
        yield "held-out loss before the first step", f"{loss:.4f}"


def _best_facts(run: Run) -> Iterator[Fact]:
    """Yield the best of the checkpoints that are there, if the run keeps it, and a note on what
    cannot be read in the record of saves, by which it is found."""
    if not isinstance(run.config, RunConfig) or not run.config.checkpoint.keep_best:
        return
    evaluations = run.config.checkpoint.best
    folder = checkpoint_folder(run.config.checkpoint.folder, run.folder)
    best = best_made_here(folder, evaluations)
    if best is not None:
        lowest = describe_evaluations(evaluations)
        yield "best checkpoint", f"{best.path.name}, {lowest} {best.loss:.4f}"
    if note := odd_saves(folder):
        yield "record of saves", note


def _model_facts(config: RunConfig) -> Iterator[Fact]:
    """Yield what is trained: model, layout, changes of batch and length, precision."""
    model = config.sized_model
    if model.factory:
        yield "model", model.factory
    else:
        yield "model", f"{model.family}, {num_parameters(model):,} parameters"
    yield "layout", in_words(config.parallel)
    if config.train.batch_schedule:
        changes = config.batches.changes
        parts = [f"{batch:,} from sample {samples:,} on" for samples, batch in changes]
        yield "batch", first_of(parts, MOST_CHANGES)
    if config.train.seq_schedule:
        changes = config.lengths.changes
        parts = [f"{length:,} from sample {samples:,} on" for samples, length in changes]
        yield "lengths", first_of(parts, MOST_CHANGES)
    yield "precision", str(config.precision.compute)


def learning(run: Run) -> Html | None:
    """Return whether the model is any good, and whether it still learns."""
    verdict = read_verdict(run.folder)
    if verdict is None:
        return None
    css_class = VERDICT_CLASSES[verdict.trend.kind]
    conclusion = html(f"{verdict.trend.kind}: {verdict.trend.reason}")
    rows = [
        ("held-out loss", describe_loss(verdict)),
        ("compared with", describe_yardsticks(verdict)),
        ("amount of text", describe_amount(verdict)),
        ("twice the steps", describe_forecast(verdict)),
    ]
    return _join(Html(f'<p class="verdict {css_class}">{conclusion}</p>'), table(("", ""), rows))


def samples(run: Run) -> Html | None:
    """Return the texts that the model has written, the newest last."""
    rows = list[Row]()
    for event in run.of_kind(SAMPLE):
        text = Html(f"<pre>{html(str(event['text']))}</pre>")
        rows.append((event["step"], str(event["date"]), text))
    return table(("after step", "date", "text"), rows) if rows else None


def dates(run: Run) -> Html | None:
    """Return when the processes of the run began and ended."""
    rows = list[Row]()
    for event in run.of_kind("end"):
        if "began" in event and "date" in event:
            rows.append((str(event["began"]), str(event["date"]), event["step"], str(event["why"])))
    return table(("began", "ended", "after step", "why"), rows) if rows else None


def curves(run: Run) -> Html:
    """Return the pictures of `training.png`, as SVG."""
    over: Over = "steps"
    if isinstance(run.config, RunConfig):
        over = run.config.log.plot_over
    resumes = [event["step"] for event in run.of_kind("resume")]
    # as in training.png
    first = first_losses(run.of_kind(FIRST_EVALUATION))
    drawing = pictures(run.records, over, resumes, find_yardsticks(run.folder), first)
    figures: list[str] = []
    for chart in drawing.charts:
        # its title is text of the page
        untitled = replace(chart, title="", tick_notes={})
        rows = [ChartRow([untitled], 1, CURVE_HEIGHT)]
        drawn = draw_rows("", rows, CURVE_WIDTH)
        picture = to_themed_svg(drawn, f"{chart.title} over {drawing.x_label}")
        caption = f"<figcaption><b>{html(chart.title)}</b></figcaption>"
        figures.append(f"<figure>{caption}{picture}</figure>")
    remarks = f"Without a picture: {'; '.join(drawing.remarks)}." if drawing.remarks else ""
    below = paragraph(f"Horizontal axis: {drawing.x_label}. ", remarks)
    return Html(f'<div class="figures">{"".join(figures)}</div>{below.text}')


def changes(run: Run) -> Html | None:
    """Return what changed on each resume, where the run branched, and what it changed of the model
    of its first weights."""
    kinds = ("resume", BRANCHED, INITIAL)
    beginnings = [event for event in run.events if event.get("event") in kinds]
    if not beginnings:
        return None
    rows = list[Row]()
    for event in beginnings:
        changed = _list_items(event["changed"]) if event["changed"] else "nothing"
        last_rate = _format_number(event["lr_before"])
        rates = f"{last_rate} → {_format_number(event['lr_next'])}"
        notes = _list_items(event["notes"])
        rows.append((event["step"], event.get("ranks", ""), changed, rates, notes))
    return table(("after step", "ranks", "changed keys", "learning rate", "notes"), rows)


def skips(run: Run) -> Html | None:
    """Return the skipped steps and their causes, and spikes, skipped or not."""
    overflows = run.of_kind("overflow")
    without_tokens = run.of_kind(NO_TOKENS_EVENT)
    spikes = run.of_kind(SPIKE_EVENT)
    if not overflows and not without_tokens and not spikes:
        return None
    rows = list[Row]()
    for event in overflows:
        scale = _format_scale(event["loss_scale"])
        offenders = _describe_offenders(event["offenders"])
        rows.append(_skip_row(event, scale, offenders))
    for event in without_tokens:
        rows.append(_skip_row(event, "", "no token counts"))
    for event in spikes:
        rows.append((event["step"], "", event["outcome"], "a spike", event["said"]))
    return table(("step", "loss scale", "outcome", "cause", "advice"), rows)


def _skip_row(event: dict[str, Any], scale: str, offenders: Text) -> Row:
    outcome = event.get("outcome", "")
    return event["step"], scale, outcome, offenders, event["advice"]


def _format_scale(scale: Any) -> str:
    if isinstance(scale, int | float):
        return loss_scale(scale)
    return _format_number(scale)


def _describe_offenders(offenders: Any) -> Text:
    """Return the first tensor that was not finite, and the number of the others."""
    if not isinstance(offenders, list):
        return "not known"
    tensors = [offender for offender in offenders if isinstance(offender, dict)]
    if not tensors:
        return "not known"
    first, *others = tensors
    counts = f"{first.get('infs')} inf, {first.get('nans')} NaN"
    text = f"{first.get('name')}: {counts}"
    return f"{text} and {len(others)} more" if others else text


def speed(run: Run) -> Html:
    """Return seconds, tokens per second and utilization of the steps."""
    rows = list[Fact]()
    # Medians, for the first steps take longer than the others.
    seconds = _finite_values(run, "seconds")
    if seconds:
        slow = sorted(seconds)[len(seconds) * 19 // 20]
        rows += [
            ("seconds a step, median", f"{median(seconds):.4g}"),
            ("19 of 20 steps take at most", f"{slow:.4g} s"),
            ("time in steps", duration(sum(seconds))),
        ]
    if rates := _finite_values(run, "tokens_per_s"):
        rows.append(("tokens/s, median", f"{median(rates):,.0f}"))
    if teraflops := _finite_values(run, "tflops"):
        rate = f"{flops(median(teraflops) * 1e12)}/s"
        rows.append(("speed of the model's products, a rank, median", rate))
    if utilizations := _finite_values(run, "mfu"):
        rows.append(("model FLOPs utilization, median", f"{median(utilizations):.1%}"))
    return _join(facts(rows), *_predicted_step(run))


def _predicted_step(run: Run) -> Iterator[Html]:
    """Yield the predicted step by kind above the measured one, of the last end of the run; nothing
    if it had no prediction."""
    predictions = run.of_kind(PREDICTION)
    if not predictions:
        return
    event = predictions[-1]
    try:
        kinds = {str(kind): float(seconds) for kind, seconds in event["kinds"].items()}
        measured = float(event["measured"])
        basis = str(event["basis"])
    except MALFORMED:
        yield paragraph("The prediction in events.jsonl is damaged.")
        return
    bars = [StepBar("predicted", kinds), StepBar("measured", {NOT_BY_KIND: measured})]
    if not all(math.isfinite(bar.seconds) and bar.seconds > 0 for bar in bars):
        yield paragraph("The prediction in events.jsonl is damaged.")
        return
    picture = to_svg(draw_steps(bars)).encode()
    yield paragraph(
        f"A step by kind, predicted by {basis}; the measured one is the median and is not "
        "measured by kind."
    )
    yield _image("predicted and measured step", "svg+xml", picture)


def data_sets(run: Run) -> Html | None:
    """Return what was read of each data set of a blend, and the loss of its newest steps."""
    rows = list[Row]()
    newest = run.records[-1]
    read = {name: newest.get(f"{SOURCE_TOKENS_PREFIX}{name}") for name in source_names(run.records)}
    known = [tokens for tokens in read.values() if isinstance(tokens, int | float)]
    total = sum(known)
    for name, tokens in read.items():
        # of a data set that a resumed run no longer has
        if not isinstance(tokens, int | float) or not total:
            continue
        losses = _finite_values(run, f"{SOURCE_LOSS_PREFIX}{name}")[-NEWEST_LOSSES:]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "none"
        rows.append((name, f"{tokens:,}", f"{tokens / total:.2%}", loss))
    if not rows:
        return None
    head = ("data set", "tokens read", "share", f"loss, mean of its last {NEWEST_LOSSES} steps")
    return table(head, rows)


def experts(run: Run) -> Html | None:
    """Return what the routers did in the last step, by layer, and which have collapsed."""
    measures: dict[str, list[float]] = {}
    for name in EXPERT_COLUMNS:
        if column := router_values(run.records[-1], name):
            measures[name] = column
    collapses = run.of_kind(COLLAPSE)
    if not measures and not collapses:
        return None
    parts = [_collapses(event) for event in collapses]
    rows = list[Row]()
    for layer, values in enumerate(zip_longest(*measures.values(), fillvalue=math.nan)):
        if not all(math.isnan(value) for value in values):
            rows.append((layer, *(f"{value:.4g}" for value in values)))
    head = ("layer", *(EXPERT_COLUMNS[name] for name in measures))
    below = paragraph(f"Of step {run.records[-1]['step']:,}, the last one.")
    return _join(*parts, table(head, rows), below)


def _collapses(event: dict[str, Any]) -> Html:
    return paragraph(f"Step {event['step']:,}: {event['said']}.")


def statistics(run: Run) -> Html | None:
    """Return the maps of log.statistics: layers by steps."""
    maps = maps_of(read_statistics(run.folder))
    damaged = odd_lines(run.folder / STATISTICS_FILE)
    if not maps:
        return paragraph("Note: ", damaged) if damaged else None
    figures: list[str] = []
    for statistics_map in maps:
        drawn = draw_map(statistics_map)
        picture = to_themed_svg(drawn, f"{statistics_map.title}, by layer and step")
        figures.append(f"<figure>{picture}</figure>")
    notes = [paragraph("Colours go with the logarithm. White: 0, or not finite.")]
    if damaged:
        notes.append(paragraph("Note: ", damaged))
    return _join(Html(f'<div class="figures">{"".join(figures)}</div>'), *notes)


def memory(run: Run) -> Html | None:
    """Return the memory of rank 0."""
    end_events = list[dict[str, Any]]()
    for event in run.of_kind("end"):
        if isinstance(event["peak_memory"], int | float):
            end_events.append(event)
    if not end_events:
        return None
    # A run has an end for each start; a later one may have evaluated less.
    largest = max(end_events, key=lambda event: event["peak_memory"])
    rows = list[Fact]()
    if isinstance(largest.get("held_memory"), int | float):
        state_memory = size(largest["held_memory"])
        rows.append(("weights, gradients, optimizer state", state_memory))
    if largest.get("memory_of") == "device":
        owner = "of the device"
    else:
        owner = "of the process, libraries included"
    rows.append((f"peak {owner}", size(largest["peak_memory"])))
    return _join(facts(rows), paragraph("On rank 0, the largest of all starts."))


def schedule(run: Run) -> Html | None:
    """Return the pipeline schedule: the predicted timeline, and the measured one if recorded.

    Predicted is the step that `log.timeline` records, for steps may have batches of different
    sizes; without one, a step of `train.global_batch`.
    """
    config = run.config
    if not isinstance(config, RunConfig):
        return paragraph(f"Not known: {config}.")
    if config.parallel.pipeline == 1:
        return None
    config = config.with_batch_of_timeline
    stages = config.parallel.pipeline * max(1, config.parallel.chunks)
    # forward, two halves of a backward and transfers for each stage and micro-batch
    if 4 * stages * config.num_microbatches > MOST_INSTRUCTIONS:
        return paragraph("Too large for this page: `megaprec schedule RUN.toml` shows it.")

    pipeline = config.schedule
    ranks = len(pipeline.programs)
    costs = config.stage_costs(config.sized_model, pipeline.rank_of_stage)
    predicted = simulate(pipeline, lambda item: costs[item.stage].flops(item))
    rows: list[Fact] = [
        ("schedule", config.parallel.schedule),
        ("bubble, predicted", f"{bubble(predicted):.1%}"),
    ]
    panels = [Timeline("predicted", predicted, ranks, "FLOPs")]
    measured = list[Span]()
    trace = run.folder / TIMELINE
    if trace.is_file():
        try:
            measured = read_trace_of(trace, pipeline)
        except UserError as error:
            rows.append(("measured", str(error)))
    if measured:
        rows.append(("bubble, measured", f"{bubble(measured):.1%}"))
        panels.append(Timeline("measured", measured, ranks, "s"))
    timelines = [_draw_timeline(panel) for panel in panels if len(panel.spans) <= MOST_DRAWN]
    return _join(facts(rows), *timelines)


def _draw_timeline(panel: Timeline) -> Html:
    """Return a timeline as an image, so that nothing in it can act on the page."""
    picture = to_svg(draw(panel.title, [], [panel])).encode()
    return _image(f"timeline, {panel.title}", "svg+xml", picture)


def _image(description: str, kind: str, content: bytes) -> Html:
    """Return a picture that is a part of the page. kind: the subtype of its media type."""
    data = base64.b64encode(content).decode()
    return Html(
        f'<div class="scroll"><img class="wide" alt="{html(description)}" '
        f'src="data:image/{kind};base64,{data}"/></div>'
    )


def fp8(run: Run) -> Html | None:
    """Return the comparisons of FP8 with the same passes without it."""
    events = run.of_kind(SHADOW)
    if not events:
        return None
    alarmed = [event for event in events if event["alarms"]]
    compared = ("compared micro-batches", len(events))
    parts = [facts([compared, ("alarms", len(alarmed))])]
    if alarmed:
        rows = [(event["step"], _list_items(event["alarms"])) for event in alarmed]
        parts.append(table(("step", "alarms"), rows))
    path = run.folder / PICTURE
    # A file of that name may be anything: only a picture of reasonable size is put into the page.
    if path.is_file() and path.stat().st_size < LARGEST_PICTURE:
        content = read_whole(path)
        if content.startswith(PNG_SIGNATURE):
            parts.append(_image("FP8 shadow", "png", content))
    return _join(*parts)


def evidence(run: Run) -> Html:
    """Return what proves that the run computed what it should: certificates and checks.

    Later kinds are added here.
    """
    parts = [_parity(run), _proof(run)]
    checks = [record["sentinel"] for record in run.records if "sentinel" in record]
    if checks:
        clean = checks.count("clean")
        parts.append(
            paragraph(f"The sentinel checked {len(checks):,} steps; {clean:,} were clean.")
        )
    parts.append(_invariants(run))
    return _join(*parts)


def _invariants(run: Run) -> Html:
    """Return what is known of the run's invariants."""
    rows = list[Row]()
    for name, finding in read_findings(run.events).items():
        rows.append((name, finding.verdict, finding.why))
    return table(("invariant of the run", "verdict", "why"), rows)


def _parity(run: Run) -> Html:
    """Return what the certificate of parity in a run's folder says."""
    certificate = run.json("parity.json")
    if certificate is None:
        return paragraph(NO_CERTIFICATE)
    rows = list[Row]()
    try:
        for layout in certificate["layouts"]:
            rows.append((str(layout["layout"]), str(layout["precision"]), verdict(layout)))
        result = conclusion(certificate)
    except MALFORMED:
        return paragraph("parity.json is not a certificate.")
    return _join(
        _note_on_other_keys(run, certificate),
        paragraph(f"Parity: {result}."),
        table(("layout", "precision", "verdict"), rows),
    )


def _proof(run: Run) -> Html:
    """Return what the certificate of repeating and resuming in a run's folder says."""
    certificate = run.json("prove.json")
    if certificate is None:
        return paragraph(NO_PROOF)
    try:
        rows = [_proof_row(row) for row in certificate["rows"]]
        steps = f"steps {certificate['first_step']} to {certificate['last_step']}"
        result = f"{steps}: {certificate['verdict']}"
    except MALFORMED:
        return paragraph("prove.json is not a certificate.")
    return _join(
        _note_on_other_keys(run, certificate),
        paragraph(f"Repeating and resuming bit for bit, {result}."),
        table(("compared with the straight run", "steps", "verdict", "why"), rows),
    )


def _proof_row(row: Any) -> tuple[str, str, str, str]:
    first, last = row["steps"]
    steps = f"{first} to {last}"
    reason = str(row.get("why", ""))
    return str(row["row"]), steps, str(row["verdict"]), reason


def _note_on_other_keys(run: Run, certificate: Any) -> Html:
    """Return a note if a certificate is not of the run as run.toml describes it, else nothing."""
    certified = certificate.get("configuration")
    digest = certified.get("sha256") if isinstance(certified, dict) else None
    if not isinstance(run.config, RunConfig):
        return paragraph(
            "Note: whether the certificate below is of this run is not known: run.toml cannot be "
            "read."
        )
    if digest == run_digest(run.config):
        return Html("")
    return paragraph(
        "Note: the certificate below is of other keys than those of run.toml, of another run, or "
        "made before a key was changed: that it holds for this run as it is was not tried."
    )


def faults(run: Run) -> Html | None:
    """Return restarts, silent faults, ends before the last step, and the ranks that ended otherwise
    than in order."""
    parts = list[Html]()
    if restarts := run.of_kind("restart"):
        rows = list[Row]()
        for event in restarts:
            left = _format_number(event["left"])
            rows.append((event["step"], event["ranks"], event["why"], left))
        parts.append(table(("from step", "ranks", "why", "restarts left"), rows))
    if silent_faults := run.of_kind("silent_fault"):
        rows = list[Row]()
        for event in silent_faults:
            ranks = str(event["ranks"])
            hosts = str(event["hosts"])
            rows.append((event["checked_step"], event["kind"], event["what"], ranks, hosts))
        parts.append(table(("checked step", "kind", "seen in", "ranks", "hosts"), rows))
    stops = list[Row]()
    for event in run.of_kind("end"):
        if not event["complete"]:
            stops.append((event["step"], event["why"]))
    if stops:
        parts.append(table(("stopped after step", "why"), stops))
    parts += _abnormal_end(run)
    return _join(*parts) if parts else None


def _abnormal_end(run: Run) -> Iterator[Html]:
    """Yield a table of the ranks that ended otherwise than in order; nothing if none did."""
    try:
        records = read_records(run.folder)
    except (UserError, OSError):
        return  # no record: it ended in order
    rows = list[Row]()
    for record in records:
        rank = record.rank
        rows.append((rank.rank, rank.host, record.verdict or record.ended))
    yield table(("rank", "host", "abnormal end"), rows)


def configuration(run: Run) -> Html:
    """Return the keys that were given, and all keys on demand, with their origins."""
    if not run.keys:
        return paragraph("There is no run.toml that the run has written.")
    head = ("key", "value", "origin")
    # what the user has chosen is shown, the rest on demand
    all_keys = [_key_row(key) for key in run.keys]
    set_keys = [_key_row(key) for key in run.keys if key.origin != "default"]
    count = len(all_keys)
    return _join(
        table(head, set_keys, count),
        folded(f"all {count} keys", table(head, all_keys, count)),
    )


def _key_row(key: ReportedKey) -> tuple[str, str, str]:
    return key.name, key.value, key.origin


SECTIONS: Sequence[tuple[str, Section]] = (
    ("Summary", summary),
    ("Is it any good", learning),
    ("Curves", curves),
    ("Samples", samples),
    ("Dates", dates),
    ("Changes on resume", changes),
    ("Skipped steps and spikes", skips),
    ("Data sets", data_sets),
    ("Speed", speed),
    ("Experts", experts),
    ("Inside the model", statistics),
    ("Memory", memory),
    ("Pipeline schedule", schedule),
    ("FP8", fp8),
    ("Evidence", evidence),
    ("Faults and restarts", faults),
    ("Configuration", configuration),
)


def _join(*parts: Html) -> Html:
    return Html("".join(part.text for part in parts))


def _list_items(items: Any) -> Html:
    """Return the items of a list a line each; of a damaged record its value as it is."""
    listed = items if isinstance(items, list) else [items]
    return Html("<br/>".join(html(str(item)) for item in listed))


def _finite_values(run: Run, key: str) -> list[float]:
    values = (record.get(key) for record in run.records)
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return [number for number in numbers if math.isfinite(number)]


def _format_number(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.4g}"
    if value is None:
        return "not known"
    return str(value)


def page(run: Run) -> str:
    """Return the page of a run."""
    # numbered by what is there, so that the anchors have no gaps
    links: list[str] = []
    sections: list[Html] = []
    for title, make_section in SECTIONS:
        content = make_section(run)
        if content is None:
            continue
        anchor = f"s{len(sections)}"
        links.append(f'<a href="#{anchor}">{html(title)}</a>')
        heading = f"<h2>{html(title)}</h2>"
        sections.append(Html(f'<section id="{anchor}">{heading}\n{content.text}</section>'))
    return document(run.name, Html(f"<nav>{''.join(links)}</nav>"), *sections)
