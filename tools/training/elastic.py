"""Going on after ranks were lost: which layout the ranks that are there train in, and restarts.

`Restarts` decides for the launcher of local ranks. Ranks are started again after a crash, whether
of the machine or of the program, not after an end on purpose (`stopping`). If no step was applied
since the last start, another would end in the same way: the run ends, unless parallel.elastic
allows a smaller layout without the rank that could not be started. The ranks resume from the newest
checkpoint as after a restart by hand. Records of later steps are removed before, so that no step is
recorded twice, and events.jsonl receives an event "restart".

torchrun restarts ranks after any failure, with `--nnodes=1:2` on the hosts that are left, and so in
a world of another size than [parallel] needs. With parallel.elastic the ranks then take the largest
layout that fits (`tools.config.layouts`), and the given one as soon as a restart finds enough of
them. Checkpoints load into every layout, and the global batch and the order of its samples stay, so
the run goes on as if nothing had happened. Ranks that the layout has no place for are spares: they
wait, so that torchrun keeps their host in the run, and end when the run does. They are the last
ranks of the world. Ranks that ended on purpose must not train again, so each restarted rank looks
for the reasons that the ranks of its host noted in the attempt before (`reason_to_end`).
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from megaprec.checkpoint.atomic import latest, step_of
from megaprec.durable import read_whole
from megaprec.errors import UserError
from parallel.described_world import INTERACTIVE_STEP, lone_task, read_number
from tools.config.layouts import (
    AXES,
    FittingLayout,
    check_world,
    in_words,
    largest_fitting,
    layout_problems,
)
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel
from tools.console.units import counted
from tools.journal.journal import rewind
from tools.journal.records import read_metrics
from tools.saved.train_state import open_newest_checkpoint, read_progress
from tools.training.branch import open_start
from tools.training.ends import EXIT_CODES, SIGNALS, ended_on_purpose
from tools.training.launched import LostRank, under_torchrun

OVER_KEY = "the run is over"  # of the store; a spare that has seen it adds one with its number
ENDED_KEY = "why the ranks of this host ended"  # of the store, with the rank
RELEASE_TIME = timedelta(seconds=10)  # how long rank 0 waits for the spares to see the end
STORE_TIME = timedelta(minutes=10)  # how long a spare waits for the store to answer
POLL_SECONDS = 0.5  # between two looks of a spare
STOP_SIGNALS = (*SIGNALS, signal.SIGQUIT)  # signals that ask a run to stop


def require_fresh_store(config: RunConfig) -> None:
    """Raise UserError if torchrun would restart the ranks over the store of those before, whose
    keys name the addresses of ranks that are gone.
    """
    restarts = config.parallel.elastic or read_number("TORCHELASTIC_MAX_RESTARTS", default="0")
    if restarts and under_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError.of("training.shared_store")


def in_this_world(config: RunConfig) -> RunConfig:
    """Return the run in the layout that this world trains, and set WORLD_SIZE to its ranks.

    A run file that names no axis of the layout has a replica on each rank. Raises UserError if the
    world has another size than the layout and parallel.elastic is false, or if none fits.
    """
    ranks = read_number("WORLD_SIZE", default="1")
    # A user who names no axis wants all ranks used, whatever their number.
    if ranks > 1 and not any(config.given(f"parallel.{axis}") for axis in AXES):
        return _with_replicas(config, ranks)
    if ranks == config.world_size or not config.parallel.elastic:
        check_world(config, ranks)
        return config
    fitting = largest_fitting(config, ranks)
    if fitting is None:
        raise UserError.of("training.no_elastic_layout", ranks=ranks)
    if os.environ.get("RANK") == "0":
        verb = "is" if ranks == 1 else "are"
        change = _describe_change(config, fitting, ranks)
        print(f"elastic    {counted(ranks, 'rank')} {verb} there: {change}")
    # Spares do not join: what is initialized later has the size of the layout.
    os.environ["WORLD_SIZE"] = str(fitting.ranks)
    return config.with_parallel(fitting.parallel, f"parallel.elastic, {counted(ranks, 'rank')}")


def _with_replicas(config: RunConfig, ranks: int) -> RunConfig:
    """Return a run whose file names no axis of the layout with a replica on each rank, and say so.

    Ranks that the global batch has no part for are spares with parallel.elastic, and raise
    UserError without.
    """
    # The most replicas that pass the checks; the ranks that are left over stand by.
    sizes = range(ranks, 0, -1) if config.parallel.elastic else (ranks,)
    layouts = [config.parallel.model_copy(update={"data": size}) for size in sizes]
    parallel = next((layout for layout in layouts if not layout_problems(config, layout)), None)
    if parallel is None:
        # In an interactive shell of SLURM the number of ranks is what is wrong, not the batches.
        in_shell = os.environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP
        if in_shell and (alone := lone_task(os.environ)):
            raise UserError(alone)
        reason = f"no layout is given, so each of the {ranks} ranks is a replica"
        reasons = [f"{problem} ({reason})" for problem in layout_problems(config, layouts[0])]
        raise UserError(*reasons)
    if os.environ.get("RANK") == "0":
        print(
            f"parallel   no layout is given: parallel.data = {parallel.data}, a replica on each "
            f"of {ranks} ranks"
        )
    os.environ["WORLD_SIZE"] = str(parallel.data)
    return config.with_parallel(parallel, f"{counted(ranks, 'rank')} in the world")


def _describe_change(config: RunConfig, fitting: FittingLayout, ranks: int) -> str:
    """Return the given and the fitting layout in words, with the keys that do not fit and the
    number of spares.
    """
    given_layout = in_words(config.parallel)
    layout = in_words(fitting.parallel)
    changes = [layout if layout == given_layout else f"{given_layout} -> {layout}"]
    changes += [f"without parallel.{key}" for key in fitting.left_out]
    spares = ranks - fitting.ranks
    if spares:
        changes.append(counted(spares, "spare"))
    return ", ".join(changes)


def is_spare(config: RunConfig) -> bool:
    """Return True if the layout of `in_this_world` has no place for this rank."""
    return read_number("RANK", default="0") >= config.world_size


def stand_by() -> None:
    """Wait as a spare until rank 0 says that the run is over. Raises torch's errors if its store is
    lost.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        read_number("MASTER_PORT"),
        is_master=False,
        wait_for_workers=False,
        timeout=STORE_TIME,
    )
    # Polls: a wait would end by the store's time limit, and a run takes longer.
    while not store.check([OVER_KEY]):
        time.sleep(POLL_SECONDS)
    store.set(f"{OVER_KEY} {os.environ['RANK']}", "")


def release_spares(store: dist.Store, spares: Iterable[int]) -> None:
    """Tell the spares, ranks beyond those of the layout, that the run is over. For rank 0."""
    store.set(OVER_KEY, "")
    # Rank 0 may hold the store: it waits until all have read it, unless one is gone.
    with suppress(dist.DistStoreError):
        store.wait([f"{OVER_KEY} {rank}" for rank in spares], RELEASE_TIME)


def publish_end_reason(store: dist.Store) -> None:
    """Tell rank 0 why ranks of this host ended on purpose before torchrun restarted them, "" if
    they did not.
    """
    if under_torchrun():
        store.set(f"{ENDED_KEY} {dist.get_rank()}", reason_to_end())


def require_no_ended_ranks(store: dist.Store) -> None:
    """Raise UserError on rank 0 if ranks of any host ended on purpose before torchrun restarted
    them.
    """
    if not under_torchrun():
        return
    # Each rank has published its own before rank 0 got here, or does so now: `get` waits.
    for rank in range(dist.get_world_size()):
        reason = store.get(f"{ENDED_KEY} {rank}").decode()
        if reason:
            raise UserError.of("training.restarted_on_purpose", reason=reason)


def record_restart(config: RunConfig) -> None:
    """Print and record on rank 0 that torchrun has started the ranks again or in another layout."""
    if not under_torchrun():
        return
    restart_count = read_number("TORCHELASTIC_RESTART_COUNT", default="0")
    max_restarts = read_number("TORCHELASTIC_MAX_RESTARTS", default="0")
    saved_layout = _saved_layout(config)
    current_layout = in_words(config.parallel)
    reasons = list[str]()
    if restart_count:
        reasons.append(
            f"torchrun has started the ranks again, {restart_count} of {max_restarts} restarts "
            "are used"
        )
    if config.parallel.elastic and saved_layout and saved_layout != current_layout:
        reasons.append(f"{saved_layout} -> {current_layout}")
    if not reasons:
        return

    step = newest_step(config)
    reason = "; ".join(reasons)
    print(f"restart    {reason}: training goes on {_describe_origin(step)}")
    # torchrun counts the restarts that are left
    event = restart_event(step, config.world_size, reason, left=None)
    rewind(Path(config.train.folder), step, event)


def _saved_layout(config: RunConfig) -> str:
    """Return the axes of the newest checkpoint in words; "" if none says its axes."""
    store = open_newest_checkpoint(config.checkpoint_folder)
    layout = store.index.get("layout") if store else None
    if not layout:
        return ""
    try:
        return in_words(Parallel.model_validate(layout))
    except ValidationError:  # of a version with other keys
        return ""


class Restarts:
    """Decides after each failure on how many local ranks a run goes on: `ranks_after` is what
    `launch_local` asks.

    lock_folder: returns a lock on the run folder. Raises UserError if another run holds it.
    """

    def __init__(
        self, config: RunConfig, lock_folder: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.config = config
        self.lock_folder = lock_folder
        self.left = config.train.restarts
        self.ranks = config.world_size
        self.restarted = False
        self._remember_start()

    def ranks_after(self, lost_rank: LostRank) -> int:
        """Return how many ranks are started after `lost_rank`, and print it; 0 if the run ends."""
        if not self.config.train.restarts or ended_by_choice(lost_rank.exitcode):
            return 0
        try:
            ranks = self._ranks_to_start()
            if ranks:
                self._record_restart(lost_rank, ranks)
        except UserError as error:
            return _refuse_restart("; ".join(error.problems))
        return ranks

    def _ranks_to_start(self) -> int:
        """Return how many ranks are started after a crash; 0, and print the reason, if none is."""
        if not self.left:
            return _refuse_restart(
                f"the restarts are used up (train.restarts = {self.config.train.restarts})"
            )
        if self._has_applied_a_step():
            return self.ranks
        # A second start in vain: the rank that was lost may be one that cannot be started.
        if self.restarted and self.config.parallel.elastic:
            fitting = largest_fitting(self.config, self.ranks - 1)
            if fitting and fitting.ranks:
                return fitting.ranks
        return _refuse_restart("no step was applied since the last start")

    def _record_restart(self, lost_rank: LostRank, ranks: int) -> None:
        """Announce and record the restart."""
        step = newest_step(self.config)
        without = ""
        if ranks < self.ranks:
            without = f", without rank {lost_rank.rank}, which could not be started again"
        self.left -= 1  # counted before the record, which names the restarts that are left
        self.ranks = ranks
        self.restarted = True
        event = restart_event(step, ranks, lost_rank.message, self.left)
        with self.lock_folder():  # another run may have begun there
            rewind(Path(self.config.train.folder), step, event)
        left = f"{counted(self.left, 'restart')} left"
        print(
            f"restart    {lost_rank.message}: training goes on {_describe_origin(step)}{without}; "
            f"{left}",
            file=sys.stderr,
            flush=True,
        )
        self._remember_start()

    def _remember_start(self) -> None:
        """Remember the state of the run before its ranks are started."""
        records = read_metrics(Path(self.config.train.folder))
        self._last_record = records[-1] if records else None
        self._start_step = newest_step(self.config)

    def _has_applied_a_step(self) -> bool:
        """Return True if the ranks have applied a step since they were started."""
        records = read_metrics(Path(self.config.train.folder))
        # Ranks remove the records of steps after the checkpoint when they resume. Until then, and
        # until they have added one, the last record is the old one.
        if not records or records[-1] == self._last_record:
            return False
        return any(
            record["step"] > self._start_step and record["outcome"] == "applied"
            for record in records
        )


def ended_by_choice(exitcode: int) -> bool:
    """Return True if a rank ended by wrong input, by a run that stopped itself, or by a signal that
    asked it to.
    """
    by_signal = {-number for number in STOP_SIGNALS}
    # as a shell tells it; `by_signal` is as the parent process sees it
    after_signal = {128 + number for number in STOP_SIGNALS}
    return exitcode in EXIT_CODES.values() or exitcode in by_signal | after_signal


def newest_step(config: RunConfig) -> int:
    """Return the step of the newest checkpoint; without one that at which the run branches, 0 if it
    does not. Raises UserError for a damaged one.
    """
    newest = latest(config.checkpoint_folder)
    if newest:
        return step_of(newest)
    origin = open_start(config)
    return read_progress(origin).step if origin else 0


def restart_event(step: int, ranks: int, reason: str, left: int | None) -> dict[str, Any]:
    """Return the event of a restart after `step`.

    left: restarts that are left, None if another program counts.
    """
    return {"event": "restart", "step": step, "ranks": ranks, "why": reason, "left": left}


def _describe_origin(step: int) -> str:
    return f"from the checkpoint of step {step}" if step else "from the start"


def _refuse_restart(reason: str) -> int:
    """Print why the run is not restarted; return 0, the number of ranks to start."""
    print(f"not restarted: {reason}", file=sys.stderr, flush=True)
    return 0


def reason_to_end(environ: Mapping[str, str] = os.environ) -> str:
    """Return why ranks of this host ended on purpose before torchrun restarted them; "" if they
    crashed.

    torchrun gives the attempts of a host folders side by side, and each rank a file for its reason.
    A new attempt with the same number, after a host has joined, replaces its folder.
    """
    error_file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    attempt_folder = error_file.parent.parent
    attempt = read_number("TORCHELASTIC_RESTART_COUNT", environ, "0")
    if not attempt or attempt_folder.name != f"attempt_{attempt}":
        return ""
    attempt_before = attempt_folder.with_name(f"attempt_{attempt - 1}")
    for note in sorted(attempt_before.glob("*/error.json")):
        reason = _read_reason(note)
        if ended_on_purpose(reason):
            return reason
    return ""


def _read_reason(note: Path) -> str:
    """Return the reason that `note_failure` has stored; "" if the file is not whole."""
    try:
        return str(json.loads(read_whole(note))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
