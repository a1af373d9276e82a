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
from tools.config.layouts import AXES, Fitting, check_world, in_words, largest_fitting, problems
from tools.config.run_file import RunConfig
from tools.config.settings import Parallel
from tools.console.units import counted
from tools.convert.train_state import newest
from tools.journal.journal import rewind
from tools.training.launch import under_torchrun
from tools.training.restarts import newest_step, reason_to_end, restart_event

# key of the store; a number of the spare is added when that spare has seen it
OVER = "the run is over"
ENDED = "why the ranks of this host ended"  # key of the store, with the rank
PARTING = timedelta(seconds=10)  # how long rank 0 waits for the spares to see it
PAUSE = 0.5  # seconds between two looks of a spare


def require_fresh_store(config: RunConfig) -> None:
    """Raise UserError if torchrun would restart the ranks over a store with the keys of the ranks
    before them."""
    restarts = config.parallel.elastic or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and under_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            "torchrun restarts ranks over a store that keeps the addresses of those that are "
            "gone: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, or "
            "without --max-restarts and parallel.elastic"
        )


def in_this_world(config: RunConfig) -> RunConfig:
    """Return the run in the layout that this world trains. WORLD_SIZE becomes the number of ranks
    that train.

    A run file that names no axis of the layout has a replica on each rank. Raises UserError if the
    world has another size than the layout and parallel.elastic is false, or if none fits.
    """
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if there > 1 and not any(config.given(f"parallel.{axis}") for axis in AXES):
        return _replicas(config, there)
    if there == config.world_size or not config.parallel.elastic:
        check_world(config, there)
        return config
    fitting = largest_fitting(config, there)
    if fitting is None:
        raise UserError(
            f"parallel.elastic = true, but no layout of {there} ranks or fewer passes the run "
            "file's checks"
        )
    if os.environ.get("RANK") == "0":
        said = f"{counted(there, 'rank')} {'is' if there == 1 else 'are'} there"
        print(f"elastic    {said}: {_change(config, fitting, there)}")
    os.environ["WORLD_SIZE"] = str(fitting.ranks)
    return config.with_parallel(fitting.parallel, f"parallel.elastic, {counted(there, 'rank')}")


def _replicas(config: RunConfig, ranks: int) -> RunConfig:
    """Return a run whose file names no axis of the layout with a replica on each rank, and say so.

    With parallel.elastic ranks that the global batch has no part for are spares. Raises UserError
    without.
    """
    sizes = range(ranks, 0, -1) if config.parallel.elastic else (ranks,)
    layouts = [config.parallel.model_copy(update={"data": size}) for size in sizes]
    parallel = next((layout for layout in layouts if not problems(config, layout)), None)
    if parallel is None:
        why = f"no layout is given, so each of the {ranks} ranks is a replica"
        raise UserError(*(f"{problem} ({why})" for problem in problems(config, layouts[0])))
    if os.environ.get("RANK") == "0":
        print(
            f"parallel   no layout is given: parallel.data = {parallel.data}, a replica on each "
            f"of {ranks} ranks"
        )
    os.environ["WORLD_SIZE"] = str(parallel.data)
    return config.with_parallel(parallel, f"{counted(ranks, 'rank')} in the world")


def _change(config: RunConfig, fitting: Fitting, there: int) -> str:
    """Return the given and the fitting layout in words, with the keys that do not fit and the
    number of spares."""
    was = in_words(config.parallel)
    now = in_words(fitting.parallel)
    parts = [
        now if now == was else f"{was} -> {now}",
        *(f"without parallel.{key}" for key in fitting.left_out),
    ]
    if spares := there - fitting.ranks:
        parts.append(counted(spares, "spare"))
    return ", ".join(parts)


def is_spare(config: RunConfig) -> bool:
    """Return True if the layout of `in_this_world` has no place for this rank."""
    return int(os.environ.get("RANK", "0")) >= config.world_size


def stand_by() -> None:
    """Wait as a spare until rank 0 says that the run is over. Raises torch's errors if its store is
    lost."""
    host, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    store = dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(minutes=10)
    )
    while not store.check([OVER]):
        time.sleep(PAUSE)
    store.set(f"{OVER} {rank}", "")


def release_spares(store: dist.Store, spares: Iterable[int]) -> None:
    """Tell the spares, ranks beyond those of the layout, that the run is over. For rank 0."""
    store.set(OVER, "")
    with suppress(dist.DistStoreError):
        store.wait([f"{OVER} {rank}" for rank in spares], PARTING)


def tell_ended(store: dist.Store) -> None:
    """Tell rank 0 why ranks of this host ended on purpose before torchrun restarted them, if they
    did."""
    if under_torchrun():
        store.set(f"{ENDED} {dist.get_rank()}", reason_to_end())


def require_wanted(store: dist.Store) -> None:
    """Raise UserError if ranks of any host ended on purpose before torchrun restarted them. For
    rank 0."""
    if under_torchrun():
        told = (store.get(f"{ENDED} {rank}").decode() for rank in range(dist.get_world_size()))
        if reason := next(filter(None, told), ""):
            raise UserError(
                "torchrun has restarted ranks that had ended on purpose, they do not train again: "
                f"{reason}"
            )


def record_restart(config: RunConfig) -> None:
    """Print and record that torchrun has started the ranks again, or in another layout. For rank 0,
    which resumes."""
    if not under_torchrun():
        return
    count, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    was = _saved_layout(config)
    now = in_words(config.parallel)
    changed = config.parallel.elastic and was and was != now
    if count:
        reasons = [f"torchrun has started the ranks again, {count} of {most} restarts are used"]
    else:
        reasons = []
    reasons += [f"{was} -> {now}"] if changed else []
    if reasons:
        step = newest_step(config)
        why = "; ".join(reasons)
        print(
            f"restart    {why}: training goes on "
            f"{f'from the checkpoint of step {step}' if step else 'from the start'}"
        )
        rewind(Path(config.train.folder), step, restart_event(step, config.world_size, why, None))


def _saved_layout(config: RunConfig) -> str:
    """Return the axes of the newest checkpoint in words; empty if there is none, or it does not
    say."""
    store = newest(config.checkpoint_folder)
    layout = store.index.get("layout") if store else None
    try:
        return in_words(Parallel.model_validate(layout)) if layout else ""
    except ValidationError:
        return ""
