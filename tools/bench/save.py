"""The time that a save takes from training: of a copy of the state, of the training loop's part of
a save in the background, and of a save between steps.

The run is that of `train`. Steps without a save and steps with one under way are timed in turn.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaprec.checkpoint.host_copies import PinnedAhead, block_sizes
from megaprec.checkpoint.keeping import Keep
from megaprec.checkpoint.saving import Saving
from megaprec.checkpoint.snapshot import copied_bytes, take_snapshot
from megaprec.errors import UserError
from tools.bench.measurement import (
    add_device,
    print_record,
    require_gpu,
    rounded_median,
    run_on_ranks,
)
from tools.bench.train import Bench, add_run, mesh_of, run_of, settings_of_run

SUBJECT = "time that a save takes from training"
ROUNDS = 3  # of each measurement; medians are printed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_run(parser)
    add_device(parser, default="cpu")
    parser.add_argument(
        "--folder", default="", metavar="DIR", help="where to save; none: a temporary folder"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench save`. Raises UserError."""
    require_gpu(args.device)
    config = run_of(args).on_device(args.device)
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    elif config.world_size > 1:
        raise UserError.of("bench.folder_missing")

    def measure() -> None:
        settings = settings_of_run(config, args.device)
        with settings, tempfile.TemporaryDirectory(dir=args.folder or None) as temporary:
            folder = Path(args.folder or temporary)
            bench = Bench(config, mesh_of(config, args.device))
            pinned = _time_pinning(bench, args.warmup)
            # the first round copies into the memory that was just pinned
            first = _time_round(bench, folder / "measured")
            rounds = [first, *(_time_round(bench, folder / "measured") for _ in range(ROUNDS - 1))]
            if dist.get_rank() == 0:
                firsts = {f"first_{name}_s": round(first[name], 4) for name in ("copy", "stall")}
                print_record(_record(rounds) | firsts | pinned)

    return run_on_ranks(measure, config.world_size, config.train.threads, args.device)


def _time_pinning(bench: Bench, warmup: int) -> dict[str, float]:
    """Take `warmup` steps, and one more while a thread pins the memory of the first save, as in a
    run. Return the seconds of that step, and those until all was pinned, on a GPU."""
    for _ in range(warmup):
        bench.step()
    start = time.perf_counter()
    with PinnedAhead(block_sizes(copied_bytes(bench.engine.optimizer))) as ahead:
        step_seconds = bench.step()
        ahead.join()
        pinning_seconds = time.perf_counter() - start
    return {"step_beside_pinning_s": round(step_seconds, 4), "pinning_s": round(pinning_seconds, 4)}


def _time_round(bench: Bench, folder: Path) -> dict[str, Any]:
    """Return the seconds of one step, of a copy of the state, of what a save in the background
    takes from the loop ("stall"), of the steps beside it, and of a save between steps; "mb" is the
    size of this rank's state."""
    optimizer = bench.engine.optimizer
    step_seconds = bench.step()
    start = time.perf_counter()
    snapshot = take_snapshot(optimizer, copy=True)
    snapshot.wait()
    copy_seconds = time.perf_counter() - start
    num_bytes = 0
    for tensors in snapshot.files.values():
        num_bytes += sum(values.nbytes for values in tensors.values())
    # Its memory is free again before the save makes its own copy.
    del snapshot
    dist.barrier()
    start = time.perf_counter()
    saving = Saving(folder, bench.steps_taken, optimizer, {}, keep=Keep(1), background=True)
    stall_seconds = time.perf_counter() - start
    steps_beside = list[float]()
    while True:
        dist.barrier()  # ranks whose steps differ wait for each other with or without a save
        start = time.perf_counter()
        outcome = saving.poll()
        stall_seconds += time.perf_counter() - start
        # all ranks agree in `poll` that the save is done, so all leave here
        if outcome is not None:
            break
        # The save is under way meanwhile.
        steps_beside.append(bench.step())
    dist.barrier()
    start = time.perf_counter()
    Saving(folder, bench.steps_taken + 1, optimizer, {}, keep=Keep(1)).finish()
    return {
        "mb": num_bytes / 1e6,
        "step": step_seconds,
        "copy": copy_seconds,
        "stall": stall_seconds,
        "beside": steps_beside,
        "between": time.perf_counter() - start,
    }


def _record(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of rank 0, in seconds."""
    record: dict[str, Any] = {"mb_of_rank_0": round(rounds[0]["mb"], 1)}
    for name in ("step", "copy", "stall", "between"):
        record[f"{name}_s"] = rounded_median([times[name] for times in rounds], 4)
    beside = list[float]()
    for times in rounds:
        beside += times["beside"]
    record["step_beside_s"] = rounded_median(beside, 4) if beside else 0.0
    record["steps_beside"] = len(beside)
    return record
