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
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megaprec.durable import put_text, read_whole
from megaprec.errors import UserError
from megaprec.resources import cores
from megaprec.scratch import scratch_folder
from models.parameter_counts import num_parameters
from parallel.described_world import is_rank_of_world, read_number
from tools.commands.doctor_layout import follow, own_run, parity_here, parity_in_world
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides
from tools.config.resolved_run import resolve_run
from tools.config.rules.derived import make_rule
from tools.config.run_file import RunConfig
from tools.console.json_output import add_json, print_result
from tools.training.data_sources import check_sources
from tools.training.ends import RanksFailed
from tools.training.launch import run_local
from tools.training.machine import check_machine
from tools.verify.doctor.finding import (
    CODES,
    Finding,
    document,
    not_tried,
    ok,
    show,
    verdict,
    wrong,
)
from tools.verify.doctor.questions import RankContext
from tools.verify.doctor.ranks import DoctorRequest, take_part

# as many local ranks as there are GPUs, but at most so many; more cores allow a larger layout
MAX_LOCAL_RANKS = 8
ANY_LAYOUT = (0, 0, 0)  # the ranks that are there decide
# option: this process is a local rank, and rank 0 writes its findings to the file named
ANSWER = "--as-rank"
SKIPPED = "--no-parity was given"
OWN_RUN = "a small run of megaprec's own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.description = __doc__
    parser.add_argument(
        "file", metavar="RUN.toml", nargs="?", help="run file whose layout and folder are tried"
    )
    add_overrides(parser)
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
    """Run `megaprec doctor`; return the exit code."""
    start = time.monotonic()
    config = resolve_run(args.file, args.overrides) if args.file else None
    if config is not None and args.as_rank is None:
        tell_notes(config.notes, strict=False)
    key = "--folder" if args.folder else "train.folder ="
    folder = args.folder or (Path(config.train.folder) if config else Path())
    existing = nearest_existing(folder)
    if not existing.is_dir():
        raise UserError.of("command.doctor_folder", key=key, folder=folder, file=existing)
    request = DoctorRequest(
        layout=_layout(config),
        device=config.train.device if config else "auto",
        folder=existing,
        bytes_needed=_checkpoint_bytes(config),
    )
    if args.as_rank is not None:
        return _as_local_rank(request, args.as_rank)
    if is_rank_of_world():
        findings = list(_world_findings(request, config, args))
    else:
        findings = list(_local_findings(config, args))
    if not findings:  # not rank 0 of a launched world
        return 0
    seconds = time.monotonic() - start
    # only one process prints: rank 0, or the parent of local ranks
    print_result(args, lambda: document(findings, seconds), lambda: show(findings, seconds))
    return CODES[verdict(findings)]


def _layout(config: RunConfig | None) -> tuple[int, int, int]:
    """Return pipeline, data and tensor ranks; zeros without a run file. Ranks that share sequences
    count as data."""
    if config is None:
        return ANY_LAYOUT
    return config.parallel.pipeline, config.parallel.copies, config.parallel.tensor


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the lowest one above it that is there."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def _checkpoint_bytes(config: RunConfig | None) -> int:
    """Return the bytes of the checkpoints that the run has at most, one that is being written among
    them.

    0 if that is not known.
    """
    if config is None or config.model.factory or not config.model.vocab:
        return 0
    moments = len(make_rule(config.optimizer).names)
    replicated, sharded = config.plan.bytes_per_parameter(moments)
    # masters and moments; a rule and a plan without any leave the weights
    bytes_per_parameter = sharded or replicated
    if config.optimizer.ema:
        bytes_per_parameter += config.plan.average.itemsize
    checkpoint_bytes = num_parameters(config.sized_model) * bytes_per_parameter
    # an old checkpoint is deleted after a new one is complete
    return checkpoint_bytes * (_kept_checkpoints(config) + 1)


def _kept_checkpoints(config: RunConfig) -> int:
    """Return the number of checkpoints that the run has at its end."""
    settings = config.checkpoint
    steps = config.train.steps
    saves = math.ceil(steps / settings.every) if settings.every else 1
    if settings.kept.newest is None:
        return saves
    never_deleted = 0
    if settings.every and settings.keep_every:
        # steps that are multiples of both numbers
        never_deleted = steps // math.lcm(settings.every, settings.keep_every)
    best = 1 if settings.best else 0
    return min(saves, settings.kept.newest + never_deleted + best)


def _local_findings(config: RunConfig | None, args: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of local ranks, then of the layout."""
    if config is not None:
        ranks = config.world_size
        yield from _machine_findings(config, ranks)
        yield from _data_findings(config)
    else:
        ranks = max(2, min(MAX_LOCAL_RANKS, torch.cuda.device_count()))
    limit = max(MAX_LOCAL_RANKS, cores())
    if ranks > limit:
        reason = (
            f"the layout has {ranks:,} ranks, and at most {limit} are started here: run this under "
            "torchrun or srun"
        )
        # what one rank can find is told all the same
        yield from _launch_ranks(args, 1)
        yield not_tried("links", reason, needed=True)
        yield not_tried("parity", reason, needed=True)
        return
    findings = _launch_ranks(args, ranks)
    yield from findings
    yield _parity_finding(config, ranks, findings, args)


def _machine_findings(config: RunConfig, ranks: int) -> Iterator[Finding]:
    """Yield a finding for each reason why this machine cannot start the run."""
    has_gpus = torch.cuda.device_count() >= ranks
    device = "cuda" if config.train.device != "cpu" and has_gpus else "cpu"
    try:
        check_machine(config, ranks, device)
    except UserError as error:
        for problem in error.problems:
            yield wrong("machine", problem, "change the run, or use more machines")


def _data_findings(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each problem of the run's data, such as a text that is missing, or one
    finding that all is there."""
    try:
        check_sources(config)
    except UserError as error:
        for problem in error.problems:
            yield wrong("data", problem, "bring the data here, or name them as they are here")
        return
    yield ok("data", f"all texts and data sets are there: {', '.join(config.data.sources)}")


def _launch_ranks(args: argparse.Namespace, ranks: int) -> list[Finding]:
    """Start local ranks and return the findings of rank 0."""
    with scratch_folder("doctor") as folder:
        answer = Path(folder) / "findings"
        command = ["doctor"]
        if args.file:
            command += [args.file, *args.overrides]
        command += [ANSWER, str(answer)]
        if args.folder:
            command += ["--folder", str(args.folder)]
        try:
            run_local(command, ranks)
        except RanksFailed as failed:
            if not answer.is_file():
                return [_rank_failure(ranks, failed)]
        return [Finding(**fields) for fields in json.loads(read_whole(answer))]


def _rank_failure(ranks: int, failed: RanksFailed) -> Finding:
    """Return the finding that local ranks ended before they had answered, and why."""
    why = "; ".join(str(failed).splitlines())
    seen = f"{ranks} local ranks ended with code {failed.exit_code} before they had answered: {why}"
    return wrong("ranks", seen, "mend what this says, and run the command again")


def _as_local_rank(request: DoctorRequest, answer: Path) -> int:
    """Be one of the local ranks; rank 0 writes its findings to `answer`."""
    layout = request.layout
    # a layout that is too large for this machine was launched with one rank
    if math.prod(layout) != read_number("WORLD_SIZE"):
        layout = ANY_LAYOUT
    context, findings, _ = take_part(replace(request, layout=layout))
    if context.rank == 0:
        # renamed when it is complete, for the parent reads whatever has the name
        unfinished = answer.with_suffix(".part")
        fields = [asdict(finding) for finding in findings]
        put_text(unfinished, json.dumps(fields))
        unfinished.rename(answer)
        context.publish("over", 1)
    else:
        context.wait_for("over", 60.0)
    return 0


def _parity_finding(
    config: RunConfig | None, ranks: int, findings: Sequence[Finding], args: argparse.Namespace
) -> Finding:
    """Return the finding about the layout, on local ranks."""
    if reason := _parity_hindrance(findings, args):
        return not_tried("parity", reason, needed=not args.no_parity)
    return parity_here(config or own_run(1, 1, ranks), args.file or OWN_RUN)


def _parity_hindrance(findings: Sequence[Finding], args: argparse.Namespace) -> str:
    """Return why the layout is not tried, "" if it is."""
    if args.no_parity:
        return SKIPPED
    # by the first word: "shared" of "shared disk"
    wrong_checks = {finding.check.split()[0] for finding in findings if finding.verdict == "wrong"}
    # without these the ranks of the comparison could not meet, or not read each other's files
    hindering = wrong_checks & {"ranks", "world", "shared"}
    if hindering:
        return f"first mend what is wrong with {' and '.join(sorted(hindering))}"
    return ""


def _world_findings(
    request: DoctorRequest, config: RunConfig | None, args: argparse.Namespace
) -> Iterator[Finding]:
    """Yield the findings on rank 0 of a launched world; take part elsewhere."""
    size = read_number("WORLD_SIZE")
    if config is not None and config.world_size != size:
        raise UserError.of(
            "command.world_size", size=size, file=args.file, world_size=config.world_size
        )
    context, findings, answered = take_part(request)
    if context.rank:
        _follow_rank_0(context)
        return
    yield from findings
    reason = _parity_hindrance(findings, args)
    if not reason and not answered:
        reason = "a rank has not answered"
    if reason:
        yield not_tried("parity", reason, needed=not args.no_parity)
    else:
        run_config = config or own_run(*context.layout)
        yield parity_in_world(run_config, args.file or OWN_RUN, context)
    # no folder: the ranks in `follow` have nothing to wait for if no comparison was made
    context.publish("parity", "")
    time.sleep(0.5)  # others read it before this process, which may have the store, ends


def _follow_rank_0(context: RankContext) -> None:
    """Take part in the comparison that rank 0 leads. Raises UserError if it does not answer."""
    try:
        follow(context)
    except TimeoutError as error:
        raise UserError.of("command.rank_silent", error=error) from error
