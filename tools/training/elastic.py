"""Training with as many ranks as there are, if `parallel.elastic` is set.

A launcher that restarts ranks on the hosts that are left, such as torchrun with `--nnodes=1:2`,
gives them a world of another size than [parallel] needs. The ranks then take the largest layout
that fits (`tools.config.layouts`), and the given one as soon as a restart finds enough of them.
Checkpoints load into every layout, and the global batch and the order of its samples stay, so the
run goes on as if nothing had happened.

Ranks that the layout has no place for are spares: they wait, so that their launcher keeps their
host in the run, and end when the run does. They are the last ranks of the world.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from pydantic import ValidationError

from megaprec.errors import UserError
from tools.config.layouts import (
    AXES,
    FittingLayout,
    check_world,
    in_words,
    largest_fitting,
    layout_problems,
)
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel
from tools.console.units import counted
from tools.convert.train_state import open_newest_checkpoint
from tools.journal.journal import rewind
from tools.training.launch import under_torchrun
from tools.training.restarts import newest_step, reason_to_end, restart_event

# key of the store; the number of a spare is added when that spare has seen it
OVER_KEY = "the run is over"
ENDED_KEY = "why the ranks of this host ended"  # key of the store, with the rank
RELEASE_TIME = timedelta(seconds=10)  # how long rank 0 waits for the spares to see the end
STORE_TIME = timedelta(minutes=10)  # how long a spare waits for the store to answer
POLL_SECONDS = 0.5  # between two looks of a spare


def require_fresh_store(config: RunConfig) -> None:
    """Raise UserError if torchrun would restart the ranks over the store of those before.

    Its keys name the addresses of ranks that are gone.
    """
    restarts = config.parallel.elastic or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and under_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError.of("training.shared_store")


def in_this_world(config: RunConfig) -> RunConfig:
    """Return the run in the layout that this world trains.

    WORLD_SIZE becomes the number of ranks that train.

    A run file that names no axis of the layout has a replica on each rank. Raises UserError if the
    world has another size than the layout and parallel.elastic is false, or if none fits.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
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

    With parallel.elastic ranks that the global batch has no part for are spares. Raises UserError
    without.
    """
    sizes = range(ranks, 0, -1) if config.parallel.elastic else (ranks,)
    layouts = [config.parallel.model_copy(update={"data": size}) for size in sizes]
    parallel = next((layout for layout in layouts if not layout_problems(config, layout)), None)
    if parallel is None:
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
    """Return the given and the fitting layout in words.

    With the keys that do not fit and the number of spares.
    """
    before = in_words(config.parallel)
    now = in_words(fitting.parallel)
    parts = [now if now == before else f"{before} -> {now}"]
    parts += [f"without parallel.{key}" for key in fitting.left_out]
    spares = ranks - fitting.ranks
    if spares:
        parts.append(counted(spares, "spare"))
    return ", ".join(parts)


def is_spare(config: RunConfig) -> bool:
    """Return True if the layout of `in_this_world` has no place for this rank."""
    return int(os.environ.get("RANK", "0")) >= config.world_size


def stand_by() -> None:
    """Wait as a spare until rank 0 says that the run is over.

    Raises torch's errors if its store is lost.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
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
    """Tell rank 0 why ranks of this host ended on purpose before torchrun restarted them.

    "" if they did not.
    """
    if under_torchrun():
        store.set(f"{ENDED_KEY} {dist.get_rank()}", reason_to_end())


def require_no_ended_ranks(store: dist.Store) -> None:
    """Raise UserError if ranks of any host ended on purpose before torchrun restarted them.

    For rank 0.
    """
    if not under_torchrun():
        return
    for rank in range(dist.get_world_size()):
        reason = store.get(f"{ENDED_KEY} {rank}").decode()
        if reason:
            raise UserError.of("training.restarted_on_purpose", reason=reason)


def record_restart(config: RunConfig) -> None:
    """Print and record that torchrun has started the ranks again, or in another layout.

    For rank 0, which resumes.
    """
    if not under_torchrun():
        return
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    before = _saved_layout(config)
    now = in_words(config.parallel)
    reasons = list[str]()
    if count:
        reasons.append(
            f"torchrun has started the ranks again, {count} of {max_restarts} restarts are used"
        )
    if config.parallel.elastic and before and before != now:
        reasons.append(f"{before} -> {now}")
    if not reasons:
        return

    step = newest_step(config)
    reason = "; ".join(reasons)
    origin = f"from the checkpoint of step {step}" if step else "from the start"
    print(f"restart    {reason}: training goes on {origin}")
    event = restart_event(step, config.world_size, reason, None)
    rewind(Path(config.train.folder), step, event)


def _saved_layout(config: RunConfig) -> str:
    """Return the axes of the newest checkpoint in words.

    Empty if there is none, or it does not say.
    """
    store = open_newest_checkpoint(config.checkpoint_folder)
    layout = store.index.get("layout") if store else None
    if not layout:
        return ""
    try:
        return in_words(Parallel.model_validate(layout))
    except ValidationError:  # of a version with other keys
        return ""
