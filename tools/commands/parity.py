"""`megaprec parity RUN.toml`: check that the run trains the same model in any layout as on one
process.

The run is made small (not with --full) and takes a few steps on one process and in each layout, on
local ranks, in float64, where no fault can hide in rounding, or in the run's own precision.
Activations between modules, loss, every gradient and weight by logical name, gradient norm, zeros,
skipped steps, loss scale and samples are compared. With --oracle all layouts, one process too, are
compared with a model of transformers, or a plain decoder, that torch's own optimizer trains. The
certificate is written to train.folder. Exit code 0: all layouts are equal; 1: a layout differs or
hangs, or none could be run; 2: wrong input.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from megaprec.errors import Problem, UserError
from megaprec.scratch import scratch_folder
from parallel.described_world import is_rank_of_world
from tools.analysis.report.parity_page import page
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.layouts import layout_problems
from tools.config.resolved_run import resolve_run
from tools.config.run_file import RunConfig
from tools.console.progress_bar import console_of
from tools.training.corpus import open_corpus
from tools.training.data_sources import sized_by_tokenizer
from tools.training.fp8_summary import require_fp8_computed
from tools.verify.oracle.compare import compare_with_oracle
from tools.verify.oracle.limits import (
    STEPS,
    TRANSFORMERS,
    left_out,
    require_possible,
    without_left_out,
)
from tools.verify.oracle.plain_model import PlainModel
from tools.verify.oracle.training import MakeModel, trained
from tools.verify.oracle.transformers_model import TransformersModel
from tools.verify.parity.certificate import (
    NOT_TRIED,
    PROVEN,
    WRONG,
    Certificate,
    Compared,
    certificate,
    entry,
    not_run,
    not_tried,
    write,
)
from tools.verify.parity.compare import Difference, compare
from tools.verify.parity.layouts import ComparedLayout, every, fitted, largest, requested_layouts
from tools.verify.parity.noise import DRAWS, Noise
from tools.verify.parity.ranks import (
    FLAG,
    Failure,
    Launcher,
    RecordedRun,
    as_rank,
    corpus_of,
    run_alone,
    with_vocabulary,
)
from tools.verify.parity.record import Plan, Record, gather
from tools.verify.parity.repeated_updates import updates
from tools.verify.parity.runs import (
    EPSILON,
    LayoutLimits,
    alone,
    changes,
    epsilon,
    in_float64,
    made_ready,
    make_plan,
    state_epsilons,
    tokens_per_expert,
    with_clipping,
    with_random_tokens,
    with_rates_of,
)
from tools.verify.parity.summary import show

RANKS = 4  # ranks of the largest layout if --layouts names none
LOCAL_LAUNCHER = Launcher()
GIVEN = "the run gives them to the oracle"
ORACLES: dict[str, MakeModel] = {TRANSFORMERS: TransformersModel, "plain": PlainModel}
AXES = ("tensor", "pipeline", "data", "context", "expert")
# keys that the small run changes although no number depends on them
NOT_SHOWN = {
    "train.folder",
    "train.threads",
    "train.device",
    "train.eval_every",
    "train.sentinel",
    "precision.trace_overflows",
    "log.sample",
    "log.timeline",
    "log.digests",
    "data.cache",
    "data.held_out",
    "data.validation",
    "data.max_chars",
    "data.vocab_size",
}
ReportProgress = Callable[[str], None]  # shows what is being done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `parity`."""
    parser.description = __doc__
    parser.add_argument("file", metavar="RUN.toml", help="run file")
    add_overrides(parser, "; before options")
    parser.add_argument(
        "--layouts",
        nargs="+",
        metavar="tp=2,pp=2",
        default=[],
        help="layouts to compare; further keys of [parallel] may follow, as in "
        f"tp=2,pp=2,schedule=zb-v; default: all that fit, of 2 to {RANKS} ranks",
    )
    parser.add_argument(
        "--precision",
        choices=("float64", "configured", "both"),
        default="float64",
        help="precision of the comparison: float64, the run's own (configured) or both (default: "
        "float64)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="number of steps that are applied (default: 3)",
    )
    parser.add_argument(
        "--oracle",
        choices=[*ORACLES],
        help="compare with a model of transformers, or with a plain decoder of torch's functions, "
        "trained by torch's optimizer, in place of one process of megaprec",
    )
    parser.add_argument(
        "--full", action="store_true", help="compare the run in its own size and with its own data"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the certificate and nothing else"
    )
    add_strict(parser)
    parser.add_argument(FLAG, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec parity`; return the exit code."""
    # started by `run_together`, in a folder of runs
    if args.as_rank:
        return as_rank(Path(args.file))
    if is_rank_of_world():
        raise UserError.of("command.parity_launched")
    if args.steps < 1:
        raise UserError.of("command.steps", steps=args.steps)
    config = resolve_run(args.file, args.overrides)
    tell_notes(config.notes, args.strict)
    require_fp8_computed(config)
    config, notes = _with_characters(config)
    tell_notes(notes, strict=False)
    if config.plan.fp8 is not None and not config.plan.fp8.repeatable:
        raise UserError.of("command.parity_fp8_history")
    torch.set_num_threads(1)  # as in the ranks
    with (
        scratch_folder("parity") as folder,
        _progress_on_stderr(args.json) as report_progress,
    ):
        options = Options(
            file=args.file,
            layouts=args.layouts,
            precision=args.precision,
            steps=args.steps,
            full=args.full,
            oracle=args.oracle,
        )
        certified = certify(config, options, Path(folder), report_progress)
    text = json.dumps(certified, indent=1, ensure_ascii=False) + "\n"
    pages = {"parity.json": text, "parity.html": page(certified)}
    written = write(Path(config.train.folder), pages)
    if args.json:
        print(text, end="")
    else:
        show(certified, Console() if Console().is_terminal else Console(width=110))
        for path in written:
            print(f"written    {path}")
    return 0 if certified["verdict"] == PROVEN else 1


def _with_characters(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the run with the number of characters of its text as vocabulary, if these are its
    tokens, and a note on it."""
    if config.model.vocab or not config.data.of_characters:
        return config, []
    try:
        return sized_by_tokenizer(config)
    except UserError:
        # only --full reads the text
        note = (
            'data.tokenizer = "characters": the text cannot be read here, so data.vocab_size = '
            f"{config.data.vocab_size:,} stands for the number of its characters"
        )
        return config, [note]


@contextmanager
def _progress_on_stderr(quiet: bool) -> Iterator[ReportProgress]:
    """Yield a function that shows on stderr what is being done, if that is a terminal."""
    console = console_of(stderr=True)
    with console.status("") as status:
        if quiet or not console.is_terminal:
            yield lambda text: None
        else:
            yield lambda text: status.update(text)


@dataclass(frozen=True)
class Options:
    """The options of the command, as its help explains them.

    file: name of the run file in the certificate. oracle: of `ORACLES`; None: one process.
    """

    file: str
    layouts: Sequence[str] = ()
    precision: Literal["float64", "configured", "both"] = "float64"
    steps: int = 3
    full: bool = False
    oracle: str | None = None


@dataclass(frozen=True)
class Reference:
    """The run on one process, or by an oracle, and the differences that rounding explains. name:
    of the precision."""

    name: str
    config: RunConfig
    plan: Plan
    record: Record
    noise: Noise
    is_oracle: bool = False


def certify(
    config: RunConfig,
    options: Options,
    folder: Path,
    report_progress: ReportProgress,
    launcher: Launcher = LOCAL_LAUNCHER,
) -> Certificate:
    """Run and compare all layouts and return the certificate. folder: an empty one for intermediate
    files."""
    requested = _requested(config, options)
    steps = max(options.steps, STEPS) if options.oracle else options.steps
    # the small run must be divisible by the most ranks that a layout has on each axis
    limits = LayoutLimits(*(largest(requested, axis) for axis in AXES))
    ready = _prepared(config, options, steps, limits, folder)
    # known before anything runs, so that a wrong --layouts costs no time
    layouts, misfits = fitting_layouts(ready, requested, explicit=bool(options.layouts))

    report_progress("one process")
    if options.full:
        ready = with_vocabulary(ready, open_corpus(config))
    ready, plan = _planned(ready, options, steps, folder, launcher)
    exact = alone(in_float64(ready))
    # what all layouts are compared with: one process in float64
    float64_record = launcher.alone(RecordedRun(exact, plan, folder / "float64"))
    # the same run from weights that are changed by one rounding of float64: how far numbers differ
    # that are equal but for rounding
    shaken_plan = replace(plan, shaken=EPSILON["fp64"])
    shaken = launcher.alone(RecordedRun(exact, shaken_plan, folder / "shaken"))
    references = list[Reference]()
    if options.precision != "configured":
        noise = Noise(perturbed_run=shaken)
        references.append(Reference("float64", in_float64(ready), plan, float64_record, noise))
    if options.precision != "float64":
        references.append(_own_precision(ready, plan, float64_record, folder, launcher))
    oracle = ""
    if options.oracle:
        report_progress("the oracle")
        references, oracle = _by_oracle(references, float64_record, ORACLES[options.oracle])

    changed = {} if options.full else _relevant_changes(changes(config, ready))
    certified = certificate(
        file=options.file,
        config=config,
        compared=alone(ready),
        changes=changed,
        plan=plan,
        float64_record=float64_record,
        shaken=shaken,
        by_oracle=bool(options.oracle),
    )
    entries = list(_compare_layouts(layouts, references, folder, report_progress, launcher))
    for layout, reason in misfits:
        entries += [not_tried(layout, reference.name, reason) for reference in references]
    certified["layouts"] = entries
    if options.oracle:
        certified["oracle"] = oracle
        for part in left_out(config, options.oracle):
            certified["not_tried"].append([part.part, part.reason])
        certified["not_tried"].append(["which samples a step takes, and loss masks", GIVEN])
    certified["verdict"] = _overall_verdict(entries)
    return certified


def _requested(config: RunConfig, options: Options) -> list[dict[str, Any]]:
    """Return the layouts that are to be compared. Raises UserError for what the oracle cannot
    train."""
    requested = requested_layouts(options.layouts, config.parallel) or every(RANKS)
    if not options.oracle:
        return requested
    own_precision = options.precision != "float64"
    require_possible(config, options.oracle, own_precision, full=options.full)
    # {} is one process, which the oracle is compared with too; named again it would come twice
    others = list[dict[str, Any]]()
    for keys in requested:
        is_one_process = all(value == 1 for value in keys.values())
        if not is_one_process:
            others.append(keys)
    return [{}, *others]


def _prepared(
    config: RunConfig, options: Options, steps: int, limits: LayoutLimits, folder: Path
) -> RunConfig:
    """Return the run to compare: small unless `options.full`, and without what takes time and
    changes no number. For an oracle it is also without what the oracle leaves out, and its learning
    rate changes as that of `config` does, in fewer steps."""
    ready = made_ready(config, limits, options.full, steps, folder / "run")
    if not options.full:
        # one step more, which is skipped
        ready = with_random_tokens(ready, steps + 1, folder)
    if options.oracle:
        ready = with_rates_of(without_left_out(ready, options.oracle), config)
    return ready


def _planned(
    ready: RunConfig, options: Options, steps: int, folder: Path, launcher: Launcher
) -> tuple[RunConfig, Plan]:
    """Return the run with a clip norm that is exceeded, and the plan of its steps."""
    # one step tells the gradient norm and the tensors, by which clipping and the skipped step are
    # planned
    probe_plan = Plan(1, small=not options.full)
    probe = launcher.alone(RecordedRun(in_float64(alone(ready)), probe_plan, folder / "probe"))
    if not options.full:
        ready = with_clipping(ready, probe)
    if options.oracle:
        return ready, Plan(steps)  # no infinity: it skips no step
    return ready, make_plan(ready, probe, steps, options.full)


def _overall_verdict(entries: Sequence[dict[str, Any]]) -> str:
    """Return the verdict on all layouts; those that were not tried count only if no other was."""
    verdicts = {entry["verdict"] for entry in entries}
    return next(verdict for verdict in (WRONG, PROVEN, NOT_TRIED) if verdict in verdicts)


def _own_precision(
    ready: RunConfig, plan: Plan, float64_record: Record, folder: Path, launcher: Launcher
) -> Reference:
    """Carry out the run on one process in its own precision, and runs that tell what rounding does;
    return the reference that they make. float64_record: of the same run in float64."""
    record = launcher.alone(RecordedRun(alone(ready), plan, folder / "own"))
    noise = Noise(
        float64_run=float64_record,
        perturbed_draws=perturbed_runs(ready, plan, folder, launcher),
        epsilon=epsilon(ready),
        expert_tokens=tokens_per_expert(ready),
        state_epsilons=state_epsilons(ready),
    )
    return Reference(ready.precision.compute, ready, plan, record, noise)


def perturbed_runs(ready: RunConfig, plan: Plan, folder: Path, launcher: Launcher) -> list[Record]:
    """Return runs in float64 on one process, from weights moved by rounding of the run's own
    precision."""
    exact = alone(in_float64(ready))
    records = list[Record]()
    for draw in range(1, DRAWS + 1):
        # half a unit in the last place is the error of one rounding
        perturbed = replace(plan, shaken=epsilon(ready) / 2, draw=draw)
        records.append(launcher.alone(RecordedRun(exact, perturbed, folder / f"moved{draw}")))
    return records


def _by_oracle(
    references: Sequence[Reference], float64_record: Record, make_model: MakeModel
) -> tuple[list[Reference], str]:
    """Return the references with the records of the oracle in the place of one process's, and what
    the oracle is, in words.

    The oracle trains in float64 ("wide"). For a reference in the run's own precision it trains once
    more, from the weights of that run. float64_record: of one process.
    """
    first, *_ = references
    initial = float64_record.tensors["before/weight"]
    wide_record, oracle = trained(alone(in_float64(first.config)), first.plan, initial, make_model)
    replaced = list[Reference]()
    for reference in references:
        record = wide_record
        noise = replace(reference.noise, unmoved_run=float64_record)
        if noise.float64_run is not None:  # a reference in the run's own precision
            own_weights = reference.record.tensors["before/weight"]
            in_fp32 = {name: values.float() for name, values in own_weights.items()}
            record, _ = trained(alone(reference.config), reference.plan, in_fp32, make_model)
            noise = replace(noise, float64_run=wide_record)
        replaced.append(replace(reference, record=record, noise=noise, is_oracle=True))
    return replaced, oracle


def _relevant_changes(changed: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the changed keys without those that no number depends on."""
    shown = {key: values for key, values in changed.items() if key not in NOT_SHOWN}
    # the folder of the tokens is a temporary one
    if "data.source" in shown:
        original, _ = shown["data.source"]
        shown["data.source"] = (original, "random tokens, some targets left out of the loss")
    return shown


def fitting_layouts(
    config: RunConfig, requested: Sequence[dict[str, Any]], explicit: bool
) -> tuple[list[ComparedLayout], list[tuple[ComparedLayout, str]]]:
    """Return the layouts that fit the run, and the others with the reason.

    explicit: the user named the layouts. Raises UserError if one of these does not fit, or if none
    does.
    """
    layouts = [fitted(config, keys) for keys in requested]
    problems_of = {layout.name: layout_problems(config, layout.parallel) for layout in layouts}
    if explicit and any(problems_of.values()):
        lines = list[str]()
        for name, problems in problems_of.items():
            lines += [f"--layouts {name}: {problem}" for problem in problems]
        raise UserError(*lines)
    fits = list[ComparedLayout]()
    misfits = list[tuple[ComparedLayout, str]]()
    for layout in layouts:
        problems = problems_of[layout.name]
        if problems:
            misfits.append((layout, problems[0]))
        else:
            fits.append(layout)
    if not fits:
        raise UserError(
            Problem.of("command.no_layout_fits", ranks=RANKS),
            *(f"{layout.name}: {reason}" for layout, reason in misfits),
        )
    return fits, misfits


def _compare_layouts(
    layouts: Sequence[ComparedLayout],
    references: Sequence[Reference],
    folder: Path,
    report_progress: ReportProgress,
    launcher: Launcher,
) -> Iterator[dict[str, Any]]:
    """Yield the entry of each layout in each precision, layouts of the fewest ranks first.

    All layouts of equally many ranks share one launch.
    """

    # A launch costs seconds, most of them for importing torch.
    def ranks_of(layout: ComparedLayout) -> int:
        return layout.ranks

    by_ranks = sorted(layouts, key=ranks_of)
    for ranks, layouts_of_group in groupby(by_ranks, key=ranks_of):
        group = list(layouts_of_group)
        pairs = list(product(group, references))
        group_folder = folder / f"ranks{ranks}"
        runs = list[RecordedRun]()
        for number, (layout, reference) in enumerate(pairs):
            config = reference.config.model_copy(update={"parallel": layout.parallel})
            runs.append(RecordedRun(config, reference.plan, group_folder / f"{number:03}"))
        names = "; ".join(layout.name for layout in group)
        report_progress(f"{len(runs)} runs of {ranks} ranks: {names}")
        if ranks > 1:
            failures = launcher.together(runs, group_folder)
        else:
            failures = _run_alone(runs)
        for (layout, reference), run, failure in zip(pairs, runs, failures, strict=True):
            if failure is not None:
                yield not_run(layout, reference.name, failure)
            else:
                yield _compare(layout, reference, run)


def _compare(layout: ComparedLayout, reference: Reference, run: RecordedRun) -> dict[str, Any]:
    """Return the entry of a run that has finished."""
    record = gather(run.folder)
    if reference.is_oracle:
        differences = compare_with_oracle(record, reference.record, reference.noise)
        return _entry(layout, reference, run, record, differences)
    # updates by the recorded gradients: an error of a gradient is not one of the update as well
    repeated = updates(alone(run.config), corpus_of(run.config), record)
    norm_order = run.config.optimizer.norm
    differences = compare(record, reference.record, reference.noise, norm_order, repeated)
    return _entry(layout, reference, run, record, differences)


def _entry(
    layout: ComparedLayout,
    reference: Reference,
    run: RecordedRun,
    record: Record,
    differences: Sequence[Difference],
) -> dict[str, Any]:
    """Return the entry of a run that was compared."""
    compared = Compared(
        layout=layout,
        precision=reference.name,
        run=run.config,
        differences=differences,
        ours=record,
        theirs=reference.record,
        is_oracle=reference.is_oracle,
    )
    return entry(compared)


def _run_alone(runs: Sequence[RecordedRun]) -> list[Failure | None]:
    """Carry out runs of one process in this one."""
    for run in runs:
        run_alone(run)
    return [None] * len(runs)
