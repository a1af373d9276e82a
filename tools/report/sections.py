"""The sections of a report, in the order of the page. Each is made of a run alone; None leaves it
out."""

import base64
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from megaprec.durable import read_whole
from megaprec.errors import UserError
from parallel.pipeline.simulation import bubble, simulate
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig
from tools.console.units import flops
from tools.journal.records import NO_TOKENS_EVENT
from tools.parity.certificate import run_digest
from tools.parity.page import conclusion, verdict
from tools.plots.compare_plot import LAST, Curve
from tools.plots.drawing import to_svg as to_svg_file
from tools.plots.panels import Over, pictures
from tools.plots.perfetto import TIMELINE, read_trace
from tools.plots.shadow_plot import PICTURE, SHADOW
from tools.plots.svg_panels import legend, to_svg
from tools.plots.timeline import Panel as Timeline
from tools.plots.timeline import draw
from tools.report.html import Html, Text, facts, folded, html, paragraph, table
from tools.report.run import Run
from tools.training.end_records import read_records

MOST_INSTRUCTIONS = 20_000  # of a schedule that is simulated for the page
MOST_DRAWN = 2_000  # instructions of a timeline that is drawn
LARGEST_PICTURE = 1_000_000  # bytes
NO_CERTIFICATE = "There is no certificate of parity: megaprec parity RUN.toml makes one."
NO_PROOF = "There is no proof that the run resumes bit for bit: megaprec prove RUN_DIR makes one."

Section = Callable[[Run], Html | None]


def summary(run: Run) -> Html:
    """Return how far the run got, and its most important numbers."""
    last = run.records[-1]
    ends = run.of_kind("end")
    steps = run.config.train.steps if isinstance(run.config, RunConfig) else 0
    curve = Curve(run.name, run.records)
    done = f"{last['step']:,}{f' of {steps:,}' if steps else ''}"
    rows: list[tuple[str, Text]] = [("steps", done), ("skipped steps", f"{curve.skipped:,}")]
    if isinstance(last.get("tokens"), int | float):
        rows.append(("tokens read", f"{last['tokens']:,}"))
    if isinstance(last.get("learned_tokens"), int | float) and last["learned_tokens"] != last.get(
        "tokens"
    ):
        rows.append(("tokens learned", f"{last['learned_tokens']:,}"))
    rows.append(
        (
            f"loss, mean of last {LAST} steps",
            "none" if math.isnan(curve.final) else f"{curve.final:.4f}",
        )
    )
    if not math.isnan(curve.held_out):
        at = curve.held_out_step
        after = "" if at == last["step"] else f", after step {at:,}"
        rows.append(("held-out loss", f"{curve.held_out:.4f}{after}"))
    if ends:
        rows.append(("last end", str(ends[-1]["why"])))
    if isinstance(run.config, RunConfig):
        rows += _model_facts(run.config)
    notes = [
        *run.notes,
        *(
            ["every step was skipped: nothing was learned"]
            if curve.skipped == len(run.records)
            else []
        ),
    ]
    return Html(
        "".join(
            html(part) for part in (facts(rows), *(paragraph("Note: ", note) for note in notes))
        )
    )


def _model_facts(config: RunConfig) -> list[tuple[str, Text]]:
    p = config.parallel
    model = config.sized_model
    if not model.factory:
        size = f"{model.family}, {model.num_parameters:,} parameters"
    else:
        size = model.factory
    return [("model", size), ("layout", in_words(p)), ("precision", str(config.precision.compute))]


def curves(run: Run) -> Html:
    """Return the pictures of `training.png`, as SVG."""
    over: Over = config.log.plot_over if isinstance(config := run.config, RunConfig) else "steps"
    resumes = [event["step"] for event in run.of_kind("resume")]
    shown = pictures(run.records, over, resumes)
    figures = [
        f"<figure><figcaption><b>{html(panel.title)}</b> "
        f"{legend(panel, shown) if not number else ''}</figcaption>{to_svg(panel, shown)}</figure>"
        for number, panel in enumerate(shown.panels)
    ]
    remarks = "; ".join(shown.remarks)
    below = paragraph(
        f"Horizontal axis: {shown.x_label}. ", f"Without a picture: {remarks}." if remarks else ""
    )
    return Html(f'<div class="figures">{"".join(figures)}</div>{below.text}')


def changes(run: Run) -> Html | None:
    """Return what changed on each resume."""
    resumes = run.of_kind("resume")
    if not resumes:
        return None
    rows = [
        (
            event["step"],
            event.get("ranks", ""),
            _list(event["changed"]) if event["changed"] else "nothing",
            f"{_number(event['lr_before'])} → {_number(event['lr_next'])}",
            _list(event["notes"]),
        )
        for event in resumes
    ]
    return table(("after step", "ranks", "changed keys", "learning rate", "notes"), rows)


def skips(run: Run) -> Html | None:
    """Return the skipped steps and their causes."""
    events = run.of_kind("overflow")
    empty = run.of_kind(NO_TOKENS_EVENT)
    if not events and not empty:
        return None
    rows = [
        (
            event["step"],
            _scale(event["loss_scale"]),
            event.get("outcome", ""),
            _offenders(event),
            event["advice"],
        )
        for event in events
    ]
    rows += [
        (event["step"], "", event.get("outcome", ""), "no token counts", event["advice"])
        for event in empty
    ]
    return table(("step", "loss scale", "outcome", "not finite in", "advice"), rows)


def _scale(scale: Any) -> str:
    """Return a loss scale, a power of two as 2^n."""
    mantissa, exponent = math.frexp(scale) if isinstance(scale, int | float) else (0.0, 0)
    return f"2^{exponent - 1}" if mantissa == 0.5 else _number(scale)


def _offenders(event: dict[str, Any]) -> Text:
    found = event["offenders"]
    if not isinstance(found, list):
        return "not known"
    named = [
        f"{one.get('name')}: {one.get('infs')} inf, {one.get('nans')} NaN"
        for one in found
        if isinstance(one, dict)
    ]
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return f"{named[0]}{more}" if named else "not known"


def speed(run: Run) -> Html:
    """Return seconds, tokens per second and utilization of the steps."""
    seconds = _finite(run, "seconds")
    rows: list[tuple[str, Text]] = []
    if seconds:
        ranked = sorted(seconds)
        rows += [
            ("seconds a step, median", f"{median(seconds):.4g}"),
            (
                "19 of 20 steps take at most",
                f"{ranked[min(len(ranked) - 1, len(ranked) * 19 // 20)]:.4g} s",
            ),
            ("time in steps", _duration(sum(seconds))),
        ]
    shown: Sequence[tuple[str, str, Callable[[float], str]]] = (
        ("tokens_per_s", "tokens/s, median", "{:,.0f}".format),
        (
            "tflops",
            "speed of the model's products, a rank, median",
            lambda count: f"{flops(count * 1e12)}/s",
        ),
        ("mfu", "model FLOPs utilization, median", "{:.1%}".format),
    )
    for key, name, words in shown:
        if found := _finite(run, key):
            rows.append((name, words(median(found))))
    return facts(rows)


def memory(run: Run) -> Html | None:
    """Return the memory of rank 0."""
    ends = [event for event in run.of_kind("end") if isinstance(event["peak_memory"], int | float)]
    if not ends:
        return None
    largest = max(ends, key=lambda event: event["peak_memory"])
    rows: list[tuple[str, Text]] = []
    if isinstance(largest.get("held_memory"), int | float):
        rows.append(("weights, gradients, optimizer state", _bytes(largest["held_memory"])))
    if largest.get("memory_of") == "device":
        whose = "of the device"
    else:
        whose = "of the process, libraries included"
    rows.append((f"peak {whose}", _bytes(largest["peak_memory"])))
    return Html(facts(rows).text + paragraph("On rank 0, the largest of all starts.").text)


def schedule(run: Run) -> Html | None:
    """Return the pipeline schedule: its predicted timeline, and the measured one if the run has
    recorded one."""
    config = run.config
    if not isinstance(config, RunConfig):
        return paragraph(f"Not known: {config}.")
    if config.parallel.pipeline == 1:
        return None
    stages = config.parallel.pipeline * max(1, config.parallel.chunks)
    if 4 * stages * config.num_microbatches > MOST_INSTRUCTIONS:
        return paragraph("Too large for this page: `megaprec schedule RUN.toml` shows it.")
    made = config.schedule
    costs = config.stage_costs(config.sized_model, made.rank_of_stage)
    predicted = simulate(made, lambda i: costs[i.stage].of(i))
    rows: list[tuple[str, Text]] = [
        ("schedule", config.parallel.schedule),
        ("bubble, predicted", _percent(predicted)),
    ]
    panels = [Timeline("predicted", predicted, len(made.programs), "FLOPs")]
    path = run.folder / TIMELINE
    wanted = [(r, i) for r, program in enumerate(made.programs) for i in program]
    try:
        measured = read_trace(path) if path.is_file() else []
    except UserError as error:
        measured = []
        rows.append(("measured", str(error)))
    if [(span.rank, span.instruction) for span in measured] == wanted and measured:
        rows.append(("bubble, measured", _percent(measured)))
        panels.append(Timeline("measured", measured, len(made.programs), "s"))
    pictures = [_timeline(panel) for panel in panels if len(panel.spans) <= MOST_DRAWN]
    return Html(facts(rows).text + "".join(pictures))


def _timeline(panel: Timeline) -> str:
    """Return a timeline as an image, so that nothing in it can act on the page."""
    data = base64.b64encode(to_svg_file(draw(panel.title, [], [panel])).encode()).decode()
    return (
        f'<div class="scroll"><img class="wide" alt="timeline, {html(panel.title)}" '
        f'src="data:image/svg+xml;base64,{data}"/></div>'
    )


def fp8(run: Run) -> Html | None:
    """Return the comparisons of FP8 with the same passes without it."""
    events = run.of_kind(SHADOW)
    if not events:
        return None
    alarmed = [event for event in events if event["alarms"]]
    rows: list[tuple[str, Text]] = [
        ("compared micro-batches", len(events)),
        ("alarms", len(alarmed)),
    ]
    body = facts(rows).text
    if alarmed:
        cells = [(event["step"], _list(event["alarms"])) for event in alarmed]
        body += table(("step", "alarms"), cells).text
    path = run.folder / PICTURE
    if path.is_file() and path.stat().st_size < LARGEST_PICTURE:
        content = read_whole(path)
        if content.startswith(b"\x89PNG"):
            data = base64.b64encode(content).decode()
            body += (
                '<div class="scroll"><img class="wide" alt="FP8 shadow" '
                f'src="data:image/png;base64,{data}"/></div>'
            )
    return Html(body)


def evidence(run: Run) -> Html:
    """Return what proves that the run computed what it should: certificates and checks. Later kinds
    are added here."""
    parts = [_parity(run), _proof(run)]
    checked = [record["sentinel"] for record in run.records if "sentinel" in record]
    if checked:
        clean = sum(word == "clean" for word in checked)
        parts.append(
            paragraph(f"The sentinel checked {len(checked):,} steps; {clean:,} were clean.")
        )
    return Html("".join(part.text for part in parts))


def _parity(run: Run) -> Html:
    made = run.json("parity.json")
    if made is None:
        return paragraph(NO_CERTIFICATE)
    try:
        rows = [
            (str(one["layout"]), str(one["precision"]), verdict(one)) for one in made["layouts"]
        ]
        said = conclusion(made)
    except (KeyError, TypeError, AttributeError, ValueError):
        return paragraph("parity.json is not a certificate.")
    body = paragraph(f"Parity: {said}.").text + table(("layout", "precision", "verdict"), rows).text
    return Html(_of_other_keys(run, made).text + body)


def _proof(run: Run) -> Html:
    made = run.json("prove.json")
    if made is None:
        return paragraph(NO_PROOF)
    try:
        rows = [
            (
                str(row["row"]),
                f"{row['steps'][0]} to {row['steps'][1]}",
                str(row["verdict"]),
                str(row.get("why", "")),
            )
            for row in made["rows"]
        ]
        said = f"steps {made['first_step']} to {made['last_step']}: {made['verdict']}"
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return paragraph("prove.json is not a certificate.")
    head = ("compared with the straight run", "steps", "verdict", "why")
    body = paragraph(f"Repeating and resuming bit for bit, {said}.").text + table(head, rows).text
    return Html(_of_other_keys(run, made).text + body)


def _of_other_keys(run: Run, made: Any) -> Html:
    """Return a note if a certificate is not of the run as run.toml describes it; nothing if it
    is."""
    about = made.get("configuration")
    digest = about.get("sha256") if isinstance(about, dict) else None
    if not isinstance(run.config, RunConfig):
        return paragraph(
            "Note: whether the certificate below is of this run is not known: run.toml cannot be "
            "read."
        )
    if digest == run_digest(run.config):
        return Html("")
    other = (
        "of another run, or made before a key was changed: that it holds for this run as it is "
        "was not tried."
    )
    return paragraph(
        f"Note: the certificate below is of other keys than those of run.toml, {other}"
    )


def faults(run: Run) -> Html | None:
    """Return restarts, silent faults and the record of an abnormal end."""
    parts = []
    if restarts := run.of_kind("restart"):
        rows = [
            (event["step"], event["ranks"], event["why"], _number(event["left"]))
            for event in restarts
        ]
        parts.append(table(("from step", "ranks", "why", "restarts left"), rows))
    if silent := run.of_kind("silent_fault"):
        rows = [
            (e["checked_step"], e["kind"], e["what"], str(e["ranks"]), str(e["hosts"]))
            for e in silent
        ]
        parts.append(table(("checked step", "kind", "seen in", "ranks", "hosts"), rows))
    stopped = [event for event in run.of_kind("end") if not event["complete"]]
    if stopped:
        parts.append(
            table(
                ("stopped after step", "why"), [(event["step"], event["why"]) for event in stopped]
            )
        )
    try:
        ended = [
            (record.rank.rank, record.rank.host, record.verdict or record.ended)
            for record in read_records(run.folder)
        ]
        parts.append(table(("rank", "host", "abnormal end"), ended))
    except (UserError, OSError):
        pass  # no record: it ended in order
    return Html("".join(part.text for part in parts)) if parts else None


def configuration(run: Run) -> Html:
    """Return the keys that were given, and all keys on demand, with their origins."""
    if not run.keys:
        return paragraph("There is no run.toml that the run has written.")
    rows = [(key.name, key.value, key.origin) for key in run.keys]
    head = ("key", "value", "origin")
    given = [row for row in rows if row[2] != "default"]
    return Html(
        table(head, given, len(rows)).text
        + folded(f"all {len(rows)} keys", table(head, rows, len(rows))).text
    )


SECTIONS: Sequence[tuple[str, Section]] = (
    ("Summary", summary),
    ("Curves", curves),
    ("Changes on resume", changes),
    ("Skipped steps", skips),
    ("Speed", speed),
    ("Memory", memory),
    ("Pipeline schedule", schedule),
    ("FP8", fp8),
    ("Evidence", evidence),
    ("Faults and restarts", faults),
    ("Configuration", configuration),
)


def _list(words: Any) -> Html:
    return Html(
        "<br/>".join(html(str(word)) for word in (words if isinstance(words, list) else [words]))
    )


def _finite(run: Run, key: str) -> list[float]:
    found = (record.get(key) for record in run.records)
    return [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]


def _number(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.4g}"
    if value is None:
        return "not known"
    return str(value)


def _percent(spans: Any) -> str:
    return f"{bubble(spans):.1%}"


def _bytes(count: float) -> str:
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s"
