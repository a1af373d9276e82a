"""Speed and memory of whole training steps, on random tokens.

The workload is a Llama-style decoder of 34 million parameters: hidden 512, 8 layers, 8 heads, feed-forward 1376,
vocabulary 8192, untied, sequences of 512; a step is 8 micro-batches of 2 samples over all replicas, 8192 tokens,
AdamW, clipping at 1. Each rank uses one thread unless told otherwise.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megaprec.plan import DTYPES, plan
from models.config import ModelConfig
from models.engine import Engine, Share
from parallel.kinds import KINDS, schedule
from parallel.mesh import make_mesh, world
from tools.allocator import keep_freed_memory
from tools.launch import start_ranks

MICRO_BATCH, MICROBATCHES, LENGTH = 2, 8, 512
MODEL: dict[str, Any] = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 8192, "max_positions": LENGTH, "tied": False}
FFN = {"llama": 1376, "gpt2": 2048}


def add_parser(subparsers: Any) -> None:
    """Adds `train`."""
    parser = subparsers.add_parser("train", help="tokens a second of training steps", description=__doc__)
    parser.add_argument("--tensor", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline", type=int, default=1, metavar="N")
    parser.add_argument("--data", type=int, default=1, metavar="N")
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
    parser.add_argument("--schedule", choices=KINDS, default="1f1b")
    parser.add_argument("--model", choices=FFN, default="llama")
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="per rank (default: 1)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps that are not counted (default: 2)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps that are (default: 6)")
    parser.add_argument("--profile", action="store_true", help="print rank 0's operators by time, of one step more")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs `python -m tools.bench train`: starts the ranks, or is one."""
    if MICROBATCHES % args.data:
        print(
            f"--data {args.data} does not divide the {MICROBATCHES} micro-batches of a step: use 1, 2, 4 or 8",
            file=sys.stderr,
        )
        return 2
    ranks = args.tensor * args.pipeline * args.data
    if ranks > 1 and "RANK" not in os.environ:
        return start_ranks([sys.executable, "-m", "tools.bench", *sys.argv[1:]], ranks, args.threads)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    with world():
        mesh = make_mesh(args.pipeline, args.data, args.tensor)
        bench = _Bench(args, mesh)
        seconds = [bench.step() for _ in range(args.warmup + args.steps)][args.warmup :]
        record = {**_settings(args), **bench.record(seconds)}
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
        if args.profile:
            bench.profile()
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("run", "profile")} | {"torch": torch.__version__}


@dataclass
class _Bench:
    args: argparse.Namespace
    mesh: dist.DeviceMesh

    def __post_init__(self) -> None:
        args = self.args
        own = MICROBATCHES // args.data
        self.engine = Engine(
            ModelConfig(family=args.model, ffn=FFN[args.model], **MODEL),
            plan(args.precision),
            self.mesh,
            schedule(args.schedule, args.pipeline, own),
            micro_batch=MICRO_BATCH,
            seq_length=LENGTH,
            sequence=args.sequence,
        )
        first = self.engine.dp.rank * own * MICRO_BATCH
        ids = torch.randint(
            0, MODEL["vocab"], (MICROBATCHES * MICRO_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
        )
        ids = ids[first : first + own * MICRO_BATCH]
        self.share = Share(ids[:, :-1], ids[:, 1:])
        self.number = 0

    def step(self) -> float:
        """Seconds of one step, between two barriers."""
        dist.barrier()
        start = time.perf_counter()
        self.engine.step(self.share, 3e-4, self.number)
        dist.barrier()
        self.number += 1
        return time.perf_counter() - start

    def record(self, seconds: list[float]) -> dict[str, Any]:
        """Medians and extremes; resident memory of every rank at its peak."""
        rss = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        rss[dist.get_rank()] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        median = statistics.median(seconds)
        return {
            "tokens_per_s": round(MICROBATCHES * MICRO_BATCH * LENGTH / median, 1),
            "step_s": round(median, 3),
            "fastest_s": round(min(seconds), 3),
            "slowest_s": round(max(seconds), 3),
            "peak_rss_mb": [round(mb) for mb in self.engine.optimizer.world.sum_(rss).tolist()],
        }

    def profile(self) -> None:
        """Self time of rank 0's operators in one step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.step()
        if dist.get_rank() == 0:
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
