"""`megaprec parity RUN.toml`: check that the run trains the same model in any layout as on one
process.

The run is made small (not with --full) and takes a few steps on one process and in each layout, on
local ranks, in float64, where no fault can hide in rounding, or in the run's own precision.
Activations between modules, loss, every gradient and weight by logical name, gradient norm, zeros,
skipped steps, loss scale and samples are compared. The certificate is written to train.folder. Exit
code 0: all layouts are equal; 1: a layout differs or hangs, or none could be run; 2: wrong input.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megaprec.errors import UserError
from parallel.described_world import joined_world
from tools.config.layouts import problems
from tools.config.run_file import RunConfig, load_run
from tools.parity.again import updates
from tools.parity.certificate import (
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
from tools.parity.compare import compare
from tools.parity.gather import Record, gather
from tools.parity.layouts import Layout, asked, every, fitted, largest
from tools.parity.noise import DRAWS, Noise
from tools.parity.page import page, show
from tools.parity.ranks import (
    FLAG,
    Failure,
    Hands,
    Run,
    as_rank,
    corpus_of,
    run_alone,
    with_vocabulary,
)
from tools.parity.record import Plan
from tools.parity.runs import (
    EPSILON,
    alone,
    clipped,
    epsilon,
    in_float64,
    kept,
    made_ready,
    planned,
    tokens_per_expert,
    with_random_tokens,
)
from tools.parity.shrink import Most, changes
from tools.training.corpus import open_corpus
from tools.training.notes import add_strict, tell_notes

RANKS = 4  # ranks of the largest default layout
LOCAL = Hands()


def add_parser(subparsers: Any) -> None:
    """Add `parity` to the commands."""
    parser = subparsers.add_parser(
        "parity", help="prove that layouts train the same model as one process", description=__doc__
    )
    parser.add_argument("file", metavar="RUN.toml", help="run file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys that differ from the file; before options",
    )
    parser.add_argument(
        "--layouts", nargs="+", metavar="tp=2,pp=2", default=[],
        help="layouts to compare; further keys of [parallel] may follow, as in "
            f"tp=2,pp=2,schedule=zb-v; default: all that fit, of 2 to {RANKS} ranks",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("float64", "configured", "both"), default="float64",
        help=("precision of the comparison: float64, the run's own (configured) or both (default: "
            "float64)"),
    )  # fmt: skip
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="number of steps that are applied (default: 3)",
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
    """Run `megaprec parity`."""
    if args.as_rank:
        return as_rank(Path(args.file))
    if joined_world():
        raise UserError(
            "megaprec parity starts its own ranks: run it without torchrun or Slurm's srun"
        )
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: give at least 1")
    config = load_run(args.file, args.overrides)
    tell_notes(config.notes, args.strict)
    if config.fp8.kind == "delayed" and config.fp8.history == "te":
        raise UserError(
            'fp8.history = "te": scales are updated after each micro-batch, and their number '
            "depends on the number of replicas, so layouts train different models; parity compares "
            'runs with fp8.history = "step"'
        )
    torch.set_num_threads(1)  # as in the ranks
    with tempfile.TemporaryDirectory(prefix="megaprec_parity_") as folder, _told(args.json) as tell:
        made = proven(config, args, Path(folder), tell)
    text = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    left = write(Path(config.train.folder), {"parity.json": text, "parity.html": page(made)})
    if args.json:
        print(text, end="")
    else:
        show(made, Console() if Console().is_terminal else Console(width=110))
        print(*(f"written    {path}" for path in left), sep="\n")
    return 0 if made["verdict"] == PROVEN else 1


@contextmanager
def _told(quiet: bool) -> Iterator[Any]:
    """Yield a function that shows on stderr what is being done."""
    console = Console(stderr=True)
    with console.status("") as status:
        if quiet or not console.is_terminal:
            yield lambda text: None
        else:
            yield lambda text: status.update(text)


@dataclass(frozen=True)
class Reference:
    """The run on one process, and the differences that rounding explains. name: of the
    precision."""

    name: str
    config: RunConfig
    plan: Plan
    record: Record
    noise: Noise


def proven(
    config: RunConfig, args: argparse.Namespace, folder: Path, tell: Any, hands: Hands = LOCAL
) -> Certificate:
    """Run and compare all layouts and return the certificate. folder: an empty one for intermediate
    files."""
    sayings = asked(args.layouts, config.parallel) or every(RANKS)
    most = Most(
        *(largest(sayings, key) for key in ("tensor", "pipeline", "data", "context", "expert"))
    )
    ready = made_ready(config, most, args.full, args.steps, folder / "run")
    if not args.full:
        ready = with_random_tokens(ready, args.steps + 1, folder)
    layouts, misfits = fitting(ready, sayings, asked=bool(args.layouts))
    tell("one process")
    if args.full:
        ready = with_vocabulary(ready, open_corpus(config))
    probe = hands.alone(Run(in_float64(alone(ready)), Plan(1, not args.full), folder / "probe"))
    if not args.full:
        ready = clipped(ready, probe)
    plan = planned(ready, probe, args.steps, args.full)
    exact = in_float64(ready)
    truth = hands.alone(Run(alone(exact), plan, folder / "truth"))
    shaken = hands.alone(
        Run(alone(exact), replace(plan, shaken=EPSILON["fp64"]), folder / "shaken")
    )
    references = [Reference("float64", exact, plan, truth, Noise(shaken))]
    if args.precision != "float64":
        own = hands.alone(Run(alone(ready), plan, folder / "own"))
        noise = Noise(
            None,
            truth,
            moved(ready, plan, folder, hands),
            epsilon(ready),
            tokens_per_expert(ready),
            kept(ready),
        )
        references.append(Reference(ready.precision.compute, ready, plan, own, noise))
    if args.precision == "configured":
        del references[0]
    shown = {} if args.full else changes(config, ready)
    made = certificate(args.file, config, alone(ready), _of_interest(shown), plan, truth, shaken)
    made["layouts"] = list(_carried_out(layouts, references, folder, tell, hands))
    made["layouts"] += [not_tried(one, r.name, why) for one, why in misfits for r in references]
    verdicts = {one["verdict"] for one in made["layouts"]}
    made["verdict"] = next(verdict for verdict in (WRONG, PROVEN, NOT_TRIED) if verdict in verdicts)
    return made


def moved(ready: RunConfig, plan: Plan, folder: Path, hands: Hands) -> list[Record]:
    """Return runs in float64 on one process, from weights moved by rounding of the run's own
    precision."""
    by = [replace(plan, shaken=epsilon(ready) / 2, draw=draw) for draw in range(1, DRAWS + 1)]
    exact = alone(in_float64(ready))
    return [hands.alone(Run(exact, one, folder / f"moved{one.draw}")) for one in by]


def _of_interest(changed: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the changed keys without those that no number depends on."""
    hidden = {"train.folder", "train.threads", "train.device", "train.eval_every", "train.sentinel"}
    hidden |= {
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
    shown = {key: value for key, value in changed.items() if key not in hidden}
    if "data.source" in shown:
        shown["data.source"] = (
            shown["data.source"][0],
            "random tokens, some targets left out of the loss",
        )
    return shown


def fitting(
    config: RunConfig, sayings: Sequence[dict[str, Any]], asked: bool
) -> tuple[list[Layout], list[tuple[Layout, str]]]:
    """Return the layouts that fit the run, and the others with the reason.

    Raises UserError if a layout that was asked for does not fit, or if none does.
    """
    layouts = [fitted(config, said) for said in sayings]
    wrong = {layout.name: problems(config, layout.parallel) for layout in layouts}
    if asked and any(wrong.values()):
        raise UserError(
            *(f"--layouts {name}: {problem}" for name, some in wrong.items() for problem in some)
        )
    good = [layout for layout in layouts if not wrong[layout.name]]
    if not good:
        raise UserError(
            f"no layout of up to {RANKS} ranks fits this run: name one by --layouts to see why",
            *problems_of(wrong),
        )
    return good, [(layout, wrong[layout.name][0]) for layout in layouts if wrong[layout.name]]


def problems_of(wrong: dict[str, list[str]]) -> list[str]:
    """Return one line per layout."""
    return [f"{name}: {some[0]}" for name, some in wrong.items()]


def _carried_out(
    layouts: Sequence[Layout],
    references: Sequence[Reference],
    folder: Path,
    tell: Any,
    hands: Hands,
) -> Iterator[dict[str, Any]]:
    """Yield the entry of each layout in each precision."""
    for ranks, some in groupby(
        sorted(layouts, key=lambda layout: layout.ranks), key=lambda layout: layout.ranks
    ):
        together = list(some)
        runs = dict[tuple[int, int], Run]()
        for n, layout in enumerate(together):
            for m, reference in enumerate(references):
                config = reference.config.model_copy(update={"parallel": layout.parallel})
                runs[n, m] = Run(config, reference.plan, folder / f"ranks{ranks}" / f"{n:03}_{m}")
        tell(f"{len(runs)} runs of {ranks} ranks: {'; '.join(layout.name for layout in together)}")
        if ranks > 1:
            failures = hands.together(list(runs.values()), folder / f"ranks{ranks}")
        else:
            failures = _alone(runs)
        for ((n, m), run), failure in zip(runs.items(), failures, strict=True):
            layout = together[n]
            reference = references[m]
            if failure is not None:
                yield not_run(layout, reference.name, failure)
            else:
                yield _compared(layout, reference, run)


def _compared(layout: Layout, reference: Reference, run: Run) -> dict[str, Any]:
    """Return the entry of a run that has finished."""
    record = gather(run.folder)
    again = updates(alone(run.config), corpus_of(run.config), record)
    found = compare(record, reference.record, reference.noise, run.config.optimizer.norm, again)
    return entry(Compared(layout, reference.name, run.config, found, record, reference.record))


def _alone(runs: dict[tuple[int, int], Run]) -> list[Failure | None]:
    for run in runs.values():
        run_alone(run)
    return [None] * len(runs)
