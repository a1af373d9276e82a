"""`megaprec doctor [RUN.toml]`: check this machine, or all hosts of a launched world, and say what
to mend.

Checked are versions, devices, kernels, the filesystem, clocks, and the links between all ranks by
axis of the mesh; then a small run takes 20 steps in the layout and on one process, which must train
the same model. With a run file the layout, the folder and the device are the run's. By hand the
command starts local ranks; under torchrun or srun the ranks that are there take part, with one
replica on each host if no run file says otherwise.

Exit code 0: all is well; 1: something is wrong, with a line for each; 2: a check that the layout
needs could not be tried, or wrong input.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.resources import cores
from parallel.described_world import joined_world
from tools.commands.doctor_layout import follow, own_run, parity_here, parity_in_world
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig, load_run
from tools.console.tables import add_json, put
from tools.doctor.finding import CODES, Finding, not_tried, verdict, wrong
from tools.doctor.place import Place
from tools.doctor.ranks import Asked, take_part
from tools.doctor.verdict import document, show
from tools.training.launch import launch_local
from tools.training.machine import check_machine
from tools.training.notes import tell_notes

MOST = 8  # local ranks that are started at most, or as many as there are cores
# option: this process is a local rank, and rank 0 writes its findings to the file named
ANSWER = "--as-rank"
SKIPPED = "--no-parity was given"


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the commands."""
    parser = subparsers.add_parser(
        "doctor",
        help="check machines, links, disks and the layout before a run",
        description=__doc__,
    )
    parser.add_argument(
        "file", metavar="RUN.toml", nargs="?", help="run file whose layout and folder are tried"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys that differ from the file",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        help="folder to check (default: train.folder, or here)",
    )
    parser.add_argument(
        "--no-parity", action="store_true", help="leave out the 20 steps in the run's layout"
    )
    add_json(parser)
    parser.add_argument(ANSWER, metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec doctor`."""
    start = time.monotonic()
    config = load_run(args.file, args.overrides) if args.file else None
    if config is not None and args.as_rank is None:
        tell_notes(config.notes, strict=False)
    folder = args.folder or (Path(config.train.folder) if config else Path())
    asked = Asked(
        _layout(config), config.train.device if config else "auto", existing(folder), _bytes(config)
    )
    if args.as_rank is not None:
        return _as_local_rank(asked, args.as_rank)
    findings = list(
        _in_world(asked, config, args) if joined_world() else _local(asked, config, args)
    )
    if not findings:  # not rank 0 of a launched world
        return 0
    seconds = time.monotonic() - start
    put(args, lambda: document(findings, seconds), lambda: show(findings, seconds))
    return CODES[verdict(findings)]


def _layout(config: RunConfig | None) -> tuple[int, int, int]:
    """Return pipeline, data and tensor ranks; zeros without a run file. Ranks that share sequences
    count as data."""
    if config:
        return (config.parallel.pipeline, config.parallel.copies, config.parallel.tensor)
    return (0, 0, 0)


def existing(folder: Path) -> Path:
    """Return the folder, or the lowest one above it that is there."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return there


def _bytes(config: RunConfig | None) -> int:
    """Return the bytes of the checkpoints that the run has at most, one that is being written among
    them.

    0 if that is not known.
    """
    if config is None or config.model.factory or not config.model.vocab:
        return 0
    held, sharded = config.plan.bytes_per_parameter(len(make_rule(config.optimizer).names))
    one = config.sized_model.num_parameters * (sharded or held)
    return one * (_kept(config) + 1)


def _kept(config: RunConfig) -> int:
    """Return the number of checkpoints that the run has at its end."""
    settings = config.checkpoint
    steps = config.train.steps
    saves = math.ceil(steps / settings.every) if settings.every else 1
    if settings.kept.newest is None:
        return saves
    spared = 0
    if settings.every and settings.keep_every:
        spared = steps // math.lcm(settings.every, settings.keep_every)
    return min(saves, settings.kept.newest + spared)


def _local(asked: Asked, config: RunConfig | None, args: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of local ranks, then of the layout."""
    ranks = config.world_size if config else max(2, min(MOST, torch.cuda.device_count()))
    if config is not None:
        yield from _fits(config, ranks)
    most = max(MOST, cores())
    if ranks > most:
        why = (
            f"the layout has {ranks:,} ranks, and at most {most} are started here: run this under "
            "torchrun or srun"
        )
        yield from _of_ranks(args, 1)
        yield from (not_tried(check, why, needed=True) for check in ("links", "parity"))
        return
    findings = _of_ranks(args, ranks)
    yield from findings
    yield _parity(config, ranks, findings, args)


def _fits(config: RunConfig, ranks: int) -> Iterator[Finding]:
    """Yield a finding for each reason why this machine cannot start the run."""
    if config.train.device != "cpu" and torch.cuda.device_count() >= ranks:
        device = "cuda"
    else:
        device = "cpu"
    try:
        check_machine(config, ranks, device)
    except UserError as error:
        yield from (
            wrong("machine", problem, "change the run, or use more machines")
            for problem in error.problems
        )


def _of_ranks(args: argparse.Namespace, ranks: int) -> list[Finding]:
    """Start local ranks and return the findings of rank 0."""
    with tempfile.TemporaryDirectory(prefix="megaprec_doctor_") as folder:
        answer = Path(folder) / "findings"
        options = [ANSWER, str(answer), *(["--folder", str(args.folder)] if args.folder else [])]
        given = [args.file, *args.overrides] if args.file else []
        code = launch_local(["doctor", *given, *options], ranks)
        if not answer.is_file():
            said = f"{ranks} local ranks ended with code {code} before they had answered"
            return [wrong("ranks", said, "the line above says why")]
        return [Finding(**one) for one in json.loads(read_whole(answer))]


def _as_local_rank(asked: Asked, answer: Path) -> int:
    """Be one of `ranks` local ranks."""
    layout = asked.layout if _size(asked.layout) == int(os.environ["WORLD_SIZE"]) else (0, 0, 0)
    place, findings, _ = take_part(Asked(layout, asked.device, asked.folder, asked.bytes_needed))
    if place.rank == 0:
        unfinished = answer.with_suffix(".part")
        unfinished.write_text(json.dumps([asdict(one) for one in findings]), encoding="utf-8")
        unfinished.rename(answer)
        place.tell("over", 1)
    else:
        place.told("over", 60.0)
    return 0


def _size(layout: Sequence[int]) -> int:
    return layout[0] * layout[1] * layout[2]


def _parity(
    config: RunConfig | None, ranks: int, findings: Sequence[Finding], args: argparse.Namespace
) -> Finding:
    """Return the finding about the layout, on local ranks."""
    if why := _hindrance(findings, args):
        return not_tried("parity", why, needed=not args.no_parity)
    return parity_here(config or own_run(1, 1, ranks), args.file or "a small run of megaprec's own")


def _hindrance(findings: Sequence[Finding], args: argparse.Namespace) -> str:
    """Return why the layout is not tried, "" if it is."""
    if args.no_parity:
        return SKIPPED
    needed = {one.check.split()[0] for one in findings if one.verdict == "wrong"} & {
        "ranks",
        "world",
        "shared",
    }
    if needed:
        return f"first mend what is wrong with {' and '.join(sorted(needed))}"
    return ""


def _in_world(
    asked: Asked, config: RunConfig | None, args: argparse.Namespace
) -> Iterator[Finding]:
    """Yield the findings on rank 0 of a launched world; take part elsewhere."""
    size = int(os.environ["WORLD_SIZE"])
    if config is not None and config.world_size != size:
        raise UserError(
            f"{size} ranks are started, but [parallel] of {args.file} needs {config.world_size}: "
            "start as many, or change the layout"
        )
    place, findings, answered = take_part(asked)
    if place.rank:
        _followed(place)
        return
    yield from findings
    why = _hindrance(findings, args) or ("" if answered else "a rank has not answered")
    if why:
        yield not_tried("parity", why, needed=not args.no_parity)
    else:
        yield parity_in_world(
            config or own_run(*place.layout), args.file or "a small run of megaprec's own", place
        )
    place.tell("parity", "")
    time.sleep(0.5)  # others read it before this process, which may have the store, ends


def _followed(place: Place) -> None:
    try:
        follow(place)
    except TimeoutError as error:
        raise UserError(f"rank 0 does not answer ({error}): see what it printed") from error
