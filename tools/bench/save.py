"""The time that a save takes from training: of a copy of the state, of the training loop's part of
a save in the background, and of a save between steps.

The model and the layout are those of `train`. Steps without a save and steps with one under way are
timed in turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaprec.checkpoint.keeping import Keep
from megaprec.checkpoint.saving import Saving
from megaprec.checkpoint.snapshot import take_snapshot
from megaprec.errors import UserError
from parallel.mesh import make_mesh, world
from tools.bench import train
from tools.training.allocator import keep_freed_memory
from tools.training.launch import start_ranks

ROUNDS = 3


def add_parser(subparsers: Any) -> None:
    """Add `save` to the measurements."""
    parser = subparsers.add_parser(
        "save", help="time that a save takes from training", description=__doc__
    )
    train.add_options(parser)
    parser.add_argument(
        "--folder", default="", metavar="DIR", help="where to save (default: a temporary folder)"
    )
    parser.set_defaults(run=main, profile=False)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench save`: start the ranks, or be one of them. Raises UserError."""
    config = train.run_of(args)
    if args.folder:
        Path(args.folder).mkdir(parents=True, exist_ok=True)
    if config.world_size > 1 and not dist.is_torchelastic_launched():
        if not args.folder:
            raise UserError.of("bench.folder_missing")
        return start_ranks(
            [sys.executable, "-m", "tools.bench", *sys.argv[1:]], config.world_size, args.threads
        )
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    with world(), tempfile.TemporaryDirectory(dir=args.folder or None) as temporary:
        folder = Path(args.folder or temporary)
        bench = train.Bench(config, make_mesh(args.pipeline, args.data, args.tensor))
        for _ in range(args.warmup):
            bench.step()
        rounds = [_round(bench, folder / "measured") for _ in range(ROUNDS)]
        if dist.get_rank() == 0:
            print(json.dumps(_record(rounds)), flush=True)
    return 0


def _round(bench: train.Bench, folder: Path) -> dict[str, Any]:
    """Time one step, a copy, a save in the background with its steps, and a save between steps."""
    optimizer = bench.engine.optimizer
    step = bench.step()
    start = time.perf_counter()
    snapshot = take_snapshot(optimizer, copy=True)
    copy = time.perf_counter() - start
    size = 0
    for tensors in snapshot.files.values():
        size += sum(values.nbytes for values in tensors.values())
    del snapshot
    dist.barrier()
    start = time.perf_counter()
    saving = Saving(folder, bench.number, optimizer, {}, keep=Keep(1), background=True)
    stall = time.perf_counter() - start
    steps_beside = list[float]()
    while True:
        dist.barrier()  # ranks whose steps differ wait for each other with or without a save
        start = time.perf_counter()
        outcome = saving.poll()
        stall += time.perf_counter() - start
        if outcome is not None:
            break
        steps_beside.append(bench.step())
    dist.barrier()
    start = time.perf_counter()
    Saving(folder, bench.number + 1, optimizer, {}, keep=Keep(1)).finish()
    between = time.perf_counter() - start
    return {
        "mb": size / 1e6,
        "step": step,
        "copy": copy,
        "stall": stall,
        "beside": steps_beside,
        "between": between,
    }


def _record(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of rank 0, in seconds."""
    record: dict[str, Any] = {"mb_of_rank_0": round(rounds[0]["mb"], 1)}
    for key in ("step", "copy", "stall", "between"):
        record[f"{key}_s"] = round(statistics.median(times[key] for times in rounds), 4)
    beside = [seconds for times in rounds for seconds in times["beside"]]
    record["step_beside_s"] = round(statistics.median(beside), 4) if beside else 0.0
    record["steps_beside"] = len(beside)
    return record
