"""`megaprec train RUN.toml [table.key=value ...]`: pretrain a model and leave a run folder.

Started by hand, the command checks all that can be checked beforehand, prepares the data and starts
local ranks. Started by torchrun, Slurm or itself, it is one rank of the world that it joins. The
run file is the same in both cases.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.checkpoint.atomic import latest, require_room
from megaprec.checkpoint.reader import INDEX, Store
from megaprec.data.files import exclusive_lock, with_suffix
from megaprec.diagnose.position import Phase, Position
from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.tested_versions import untested
from models.own_model import require_builtin
from parallel.described_world import joined_world
from parallel.hangs.watchdog import longest_wait
from parallel.mesh import broadcast_from_first, make_mesh, world
from tools.commands.convert import write_model
from tools.config.checks import check_all
from tools.config.run_file import RunConfig, load_run
from tools.console.streams import spare_output
from tools.console.wrapped import say
from tools.convert.formats import open_intact
from tools.convert.hf.write_config import config_of
from tools.convert.initial import open_initial
from tools.convert.probe import check_config, verify_initial
from tools.convert.train_state import open_newest_checkpoint
from tools.journal.records import DIGESTS, EVENTS, METRICS
from tools.journal.trackers import require_trackers
from tools.planning.report import summary_line
from tools.plots.shadow_plot import plot_shadow
from tools.plots.training_plot import plot_run
from tools.training.allocator import keep_freed_memory
from tools.training.banner import print_outcome, print_skipped
from tools.training.corpus import (
    Corpus,
    check_sources,
    data_folder,
    looked_at,
    open_built,
    open_corpus,
)
from tools.training.data_identity import ALLOW, Identity
from tools.training.doubts import run_warnings
from tools.training.elastic import (
    in_this_world,
    is_spare,
    publish_end_reason,
    record_restart,
    release_spares,
    require_fresh_store,
    require_no_ended_ranks,
    stand_by,
)
from tools.training.end_records import forget_records
from tools.training.fp8_summary import check_fp8
from tools.training.hangs import print_waiting, straggler_events, watching
from tools.training.harness import require_harness
from tools.training.launch import (
    has_own_device,
    is_local_rank,
    launch_local,
    note_failure,
    share_of_cores,
)
from tools.training.machine import check_machine
from tools.training.notes import add_strict, moved_notes, tell_notes
from tools.training.restarts import Restarts
from tools.training.resume import check_resumable, check_tokens, data_differences, other_tokens
from tools.training.run_folder import LOCK
from tools.training.skipped_steps import require_applied
from tools.training.trainer import Trainer
from tools.training.validation_sets import open_validation

# seconds after which NFS shows a new file to other hosts with its default settings (acdirmax)
NFS_DELAY = 60.0
SLOW_TO_BUILD = 1000  # feed-forwards; a model that has more takes seconds to build


def add_parser(subparsers: Any) -> None:
    """Add `train` to the commands."""
    parser = subparsers.add_parser("train", help="pretrain a model", description=__doc__)
    parser.add_argument(
        "file", metavar="RUN.toml", help="run file (`megaprec keys` lists its keys)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys that differ from the file",
    )
    parser.add_argument(
        "--export-hf",
        metavar="DIR",
        help="after training, export the model to this folder in Hugging Face format",
    )
    add_strict(parser)
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=ALLOW,
        help="resume although this differs from the checkpoint; may be given several times",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help=(
            "skip the comparison with transformers of the model of train.init_from and of "
            "--export-hf"
        ),
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run `megaprec train`."""
    spare_output()
    config = load_run(args.file, args.overrides)
    export = Path(args.export_hf) if args.export_hf else None
    tell_notes([*config.notes, *moved_notes(args.file, config)], args.strict)
    tell_notes(untested(), strict=False)
    # a rank of a world that torchrun, Slurm or `launch_local` below has started
    if joined_world():
        return _run_rank(config, export, args.allow, not args.no_verify)

    if export:
        require_builtin(config.model, "--export-hf")
    if export and export.exists():
        raise UserError.of("command.export_exists", export=export)
    _open_checked(config, args.allow)
    _print_plan(config)
    _warn_of_slow_build(config)
    # before ranks are started, so that a difference costs no start
    if not args.no_verify:
        _verify(config, export)

    if config.world_size == 1:
        return _run_rank(config, export, args.allow, verify=False)
    # the ranks need not verify again
    options = ["--no-verify", *(f"--allow={difference}" for difference in args.allow)]
    if export:
        options += ["--export-hf", str(export)]
    restarts = Restarts(config, lambda: _lock_folder(config))
    command = ["train", args.file, *args.overrides, *options]
    return launch_local(command, config.world_size, config.train.threads, restarts.again)


def _print_plan(config: RunConfig) -> None:
    """Print the plan of the run, in a line, before ranks start."""
    if line := summary_line(config):
        say(f"plan       {line}")


def _warn_of_slow_build(config: RunConfig) -> None:
    """Say on stderr that a model of very many blocks takes a while to build."""
    blocks = config.model.layers * max(1, config.model.experts)
    if blocks > SLOW_TO_BUILD:
        print(
            f"building a model of {blocks:,} feed-forwards, which takes a while",
            file=sys.stderr,
            flush=True,
        )


def _open_checked(config: RunConfig, allowed: Collection[str]) -> Corpus:
    """Check everything before anything is written, then open or build the data and check that the
    run can resume."""
    check_all(
        config,
        _device,
        _check_machine,
        _check_native,
        check_fp8,
        _check_folders,
        check_sources,
        partial(check_resumable, allowed=allowed),
        _check_initial,
        lambda config: require_trackers(config.log.to),
        require_harness,
    )
    corpus = open_corpus(config, allowed)
    # once more, for the data decides whether the checkpoint is one of this run
    check_resumable(config, corpus, allowed)
    check_tokens(config, corpus, allowed)
    return corpus


def _check_folders(config: RunConfig) -> None:
    """Raise UserError if the folders of the run cannot be written to."""
    _check_writable("train.folder", config.train.folder)
    _check_writable("data.cache", config.data.cache)
    _check_outside(config)
    require_room(config.checkpoint_folder)
    folder = Path(config.train.folder)
    for name in (METRICS, EVENTS, DIGESTS):
        _require_file(folder / name, "the records of steps")
    _require_file(folder / "run.toml", "the run's keys")
    if _lock_path(config).exists():
        with _lock_folder(config):  # raises if another process trains there
            pass


def _check_writable(key: str, folder: str) -> None:
    """Raise UserError if `folder`, the value of `key`, cannot be made or written to."""
    if not folder:
        return
    # the folder itself, or the nearest one above it that exists
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError.of("command.folder_is_file", key=key, folder=folder, existing=existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError.of("command.folder_read_only", key=key, folder=folder, existing=existing)


def _require_file(path: Path, content: str) -> None:
    """Raise UserError if something else than a file is where `content` will be written."""
    if os.path.lexists(path) and not path.is_file():
        raise UserError.of("command.name_of_file_taken", path=path, content=content)


def _check_outside(config: RunConfig) -> None:
    """Raise UserError if the run folder lies in a folder of text: its records would be read as text
    the next time."""
    data = config.data
    folder = Path(config.train.folder).resolve()
    sources = [(f"data.blend[{i}].source", part.source) for i, part in enumerate(data.blend)]
    # data.source alone is read if there is no blend
    if not sources:
        sources = [("data.source", data.source)]
    sources += [(f"data.validation {part.name}", part.source) for part in data.validation]
    for key, source in sources:
        # "python" names the sources of the interpreter, not a folder
        if source == "python" or not Path(source).is_dir():
            continue
        if folder.is_relative_to(Path(source).resolve()):
            raise UserError.of(
                "command.folder_in_source", folder=config.train.folder, key=key, source=source
            )


def _lock_folder(config: RunConfig) -> AbstractContextManager[None]:
    """Lock the run folder, so that no other process trains in it. Raises UserError if one does."""

    def refuse() -> None:
        raise UserError.of("command.folder_in_use", folder=config.train.folder)

    # a lock of the operating system, which ends with the process
    return exclusive_lock(_lock_path(config), refuse)


def _lock_path(config: RunConfig) -> Path:
    return Path(config.train.folder) / LOCK


def _check_initial(config: RunConfig) -> None:
    """Raise UserError if the checkpoint of train.init_from is incomplete or damaged."""
    if config.train.init_from:
        open_initial(Path(config.train.init_from))


def _verify(config: RunConfig, export_folder: Path | None) -> None:
    """Raise UserError if transformers computes other logits than megaprec for the initial or the
    exported model."""
    lines = []
    # a run that resumes has weights of its own
    if config.train.init_from and not latest(config.checkpoint_folder):
        lines.append(verify_initial(Path(config.train.init_from)))
    if export_folder:
        exported = config_of(config.sized_model, "float32")
        lines.append(check_config(exported, f"--export-hf {export_folder}"))
    for line in filter(None, lines):
        print(line)


def _run_rank(
    config: RunConfig, export_folder: Path | None, allowed: Collection[str], verify: bool
) -> int:
    """Train as one rank of the world that the process joins; return the exit code."""
    # torchrun may keep the addresses of ranks that it has restarted since
    require_fresh_store(config)
    started_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # with parallel.elastic, the layout follows from the ranks that are there; others stand by
    config = in_this_world(config)
    if is_spare(config):
        stand_by()
        return 0
    device = _device(config)
    torch.set_num_threads(config.train.threads or share_of_cores(_local_ranks(config)))
    # steps allocate and free the same sizes over and over
    keep_freed_memory()
    position = Position()
    folder = Path(config.train.folder)
    parallel = config.parallel
    # longer than any phase, so that the watchdog acts first and names the culprit
    minutes = longest_wait(parallel.timeout) / 60
    with (
        world(device, minutes, note_failure) as store,
        ExitStack() as locks,
        watching(
            folder, store, position, parallel.timeout, parallel.tensor * parallel.copies
        ) as watchdog,
    ):
        mesh = make_mesh(
            parallel.pipeline, parallel.data, parallel.tensor, device, parallel.context
        )
        publish_end_reason(store)
        position.enter(Phase.WAITING if dist.get_rank() else Phase.PREPARATION)
        prepare_run = partial(_prepare_again, config, store, locks, allowed, export_folder, verify)
        prepared = broadcast_from_first(store, prepare_run, partial(print_waiting, watchdog))
        position.enter(Phase.LOADING)
        position.at("opening of data and checkpoint")
        corpus, checkpoint = open_prepared(config, prepared)
        noticed = partial(straggler_events, watchdog)
        trainer = Trainer(config, corpus, mesh, checkpoint, position=position, noticed=noticed)
        trainer.run()
        # spares may go only once the run has ended well
        is_first = dist.get_rank() == 0
        if is_first:
            release_spares(store, range(config.world_size, started_ranks))
    # outside of the world, whose other ranks need not wait for plots and export
    if is_first:
        print_skipped(config, trainer.progress)
        print_outcome(config, _write_plots(config) if config.log.plot else [])
        if export_folder:
            write_model(open_intact(folder), "hf", export_folder)
        require_applied(trainer.progress, trainer.monitor)
    return 0


def _prepare_again(
    config: RunConfig,
    store: dist.Store,
    locks: ExitStack,
    allowed: Collection[str],
    export: Path | None,
    verify: bool,
) -> dict[str, Any]:
    """Return the paths that rank 0 names (`prepare`), after a restart only if the ranks are to
    train again."""
    require_no_ended_ranks(store)
    prepared = prepare(config, locks, allowed, export, verify)
    # only of a run that has passed all checks
    record_restart(config)
    return prepared


def _write_plots(config: RunConfig) -> list[Path]:
    """Write the plots of the run and return their paths; none, with a warning, if they cannot be
    written."""
    folder = Path(config.train.folder)
    try:
        plots = plot_run(folder, config.log.plot_over), plot_shadow(folder, config.fp8)
    except OSError as error:
        # a run that has trained is not lost for a picture
        print(f"warning    no plot: {file_error(error)}", file=sys.stderr, flush=True)
        return []
    return [plot for plot in plots if plot is not None]


def _device(config: RunConfig) -> str:
    """Return the device, cpu or cuda, which is the same for all ranks of a machine."""
    wanted = config.train.device
    ranks = _local_ranks(config)
    # Slurm may show each rank its own device only
    devices = ranks if has_own_device() else torch.cuda.device_count()
    if wanted == "cuda" and devices < ranks:
        raise UserError.of("command.too_few_devices", devices=devices, ranks=ranks)
    return "cuda" if wanted != "cpu" and devices >= ranks else "cpu"


def _check_machine(config: RunConfig) -> None:
    """Raise UserError if this machine cannot run its ranks; for a device that is not there
    `_device` does."""
    try:
        device = _device(config)
    except UserError:
        return
    check_machine(config, _local_ranks(config), device)


def _check_native(config: RunConfig) -> None:
    """Raise UserError if train.device = "auto" takes a CUDA device but optimizer.native needs a
    CPU."""
    # "cuda" beside it is refused by the checks between tables
    if config.optimizer.native and _device(config) != "cpu":
        raise UserError.of("command.native_on_gpu")


def _local_ranks(config: RunConfig) -> int:
    """Return the number of ranks on this machine, according to the launcher."""
    # some launchers tell the rank on this host, but not how many there are
    if joined_world():
        return int(os.environ.get("LOCAL_WORLD_SIZE") or int(os.environ.get("LOCAL_RANK", "0")) + 1)
    return config.world_size


def prepare(
    config: RunConfig,
    locks: ExitStack,
    allowed: Collection[str] = (),
    export: Path | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Check the run, build missing data and return the paths that all ranks open, "" for those that
    it does without.

    The run folder is locked until `locks` is closed. allowed: see `check_resumable`.
    """
    corpus = _open_checked(config, allowed)
    if joined_world() and not is_local_rank():  # otherwise the launcher has printed it
        _print_plan(config)
    if verify:
        _verify(config, export)
    # held until the run ends: the launcher's own check above has released it
    try:
        locks.enter_context(_lock_folder(config))
    except OSError as error:
        raise UserError.of(
            "command.folder_not_writable", folder=config.train.folder, strerror=error.strerror
        ) from error
    # of the run before this one, which may have ended abnormally
    forget_records(Path(config.train.folder))
    for doubt in run_warnings(config, corpus, _local_ranks(config), _device(config)):
        say(f"warning    {doubt}")
    checkpoint = open_newest_checkpoint(config.checkpoint_folder)
    _note_needless_allowances(config, corpus, checkpoint, allowed)
    return {
        "prefixes": [str(dataset.prefix) for dataset in corpus.datasets],
        "tokenizer": str(corpus.tokenizer.path) if corpus.tokenizer else "",
        "checkpoint": str(checkpoint.path) if checkpoint else "",
        "identity": corpus.identity.model_dump() if corpus.identity else None,
        "notes": corpus.notes,
    }


def _note_needless_allowances(
    config: RunConfig, corpus: Corpus, checkpoint: Store | None, allowed: Collection[str]
) -> None:
    """Print a note for each --allow that names something in which run and checkpoint agree."""
    differing = set[str]()
    if checkpoint is not None:
        differing = {difference.what for difference in data_differences(checkpoint, config, corpus)}
    if any(other_tokens(config, corpus)):
        differing.add("tokenizer")
    for name in sorted(set(allowed) - differing):
        print(
            f"note       --allow {name}: not needed, for the checkpoint has the same one, or "
            "there is no checkpoint"
        )


def _missing_files(required: Sequence[Path]) -> list[Path]:
    """Return the files that are not there.

    On another host than that of rank 0, which has just named or made them, a network filesystem may
    show them late.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_one_host = ranks <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    deadline = time.monotonic() + (0 if on_one_host else NFS_DELAY)
    while missing := [path for path in required if not path.is_file()]:
        if time.monotonic() >= deadline:
            return missing
        for folder in {path.parent for path in missing}:
            with suppress(OSError):
                os.listdir(folder)  # asks the server again
        time.sleep(0.5)
    return []


def open_prepared(config: RunConfig, named: dict[str, Any]) -> tuple[Corpus, Path | None]:
    """Return the data and the checkpoint that rank 0 named. Raises UserError if this machine lacks
    a file of them.

    named: what `prepare` returned on rank 0.
    """
    prefixes = [Path(prefix) for prefix in named["prefixes"]]
    tokenizer = Path(named["tokenizer"]) if named["tokenizer"] else None
    checkpoint = Path(named["checkpoint"]) if named["checkpoint"] else None
    required = list[Path]()
    for prefix in prefixes:
        required += [with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")]
    if tokenizer:
        required.append(tokenizer)
    if checkpoint:
        required.append(checkpoint / INDEX)
    if missing := _missing_files(required):
        host = socket.gethostname()
        raise UserError(
            *(
                f"{path} is not on {host}: it must be on a filesystem that all ranks share"
                for path in missing
            )
        )
    corpus = open_built(config, prefixes, tokenizer)
    if os.environ.get("LOCAL_RANK") == "0" and os.environ.get("RANK") != "0":
        # checks the files of this machine; rank 0 has checked those of the first
        looked_at(config, corpus)
    # rank 0 has digested the data; the others take its word
    identity = named["identity"] and Identity.model_validate(named["identity"])
    validation = open_validation(config, data_folder(config), corpus.begin)
    corpus = replace(corpus, identity=identity, notes=tuple(named["notes"]), validation=validation)
    return corpus, checkpoint
