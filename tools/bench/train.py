"""Speed and memory of whole training steps, on random tokens.

The workload, unless told otherwise, is a Llama-style decoder of 34 million parameters: hidden 512,
8 layers, 8 heads, feed-forward 1376, vocabulary 8192, untied, sequences of 512; a step is 8
micro-batches of 2 samples over all replicas, 8192 tokens, AdamW, clipping at 1. Each rank uses one
thread. Heads are 64 wide, but there are four at least; a gated feed-forward has 8/3 of hidden
rounded up to 32s, any other four times hidden; with --experts each expert is so wide.

What is not asked for here is as in a run file that does not say it, and what does not fit is
refused in its words.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.step_report import StepObserver, StepReport
from megaprec.precision.plan import DTYPES
from models.engine import Engine, Share, build_stages
from models.sentinel import Sentinel
from parallel.activation_checkpoint import MODULES
from parallel.mesh import make_mesh, world
from parallel.pipeline.builders import KINDS
from tools.bench.products import Products
from tools.config.checks import make_rule
from tools.config.run_file import RunConfig, load_run
from tools.console.toml import toml
from tools.training.allocator import keep_freed_memory
from tools.training.compiling import compile_leaves
from tools.training.launch import start_ranks
from tools.training.throughput import Throughput

VOCAB = 8192
LAYOUT_KEYS = (  # of [parallel], which are options of the same names
    "tensor",
    "pipeline",
    "data",
    "context",
    "context_by",
    "expert",
    "sequence",
    "overlap",
    "schedule",
    "chunks",
    "recompute",
)


def add_parser(subparsers: Any) -> None:
    """Add `train` to the measurements."""
    parser = subparsers.add_parser(
        "train", help="tokens a second of training steps", description=__doc__
    )
    add_options(parser)
    parser.add_argument(
        "--profile", action="store_true", help="print rank 0's operators by time, of one step more"
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="time the matrix products of a step alone: no step can be faster",
    )
    parser.set_defaults(run=main)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, the layout and the number of steps as options."""
    _add_layout(parser)
    _add_sizes(parser)
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="(default: bf16)")
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="optimizer.name (default: adamw)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="per rank (default: 1)")
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="steps that are not counted (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, metavar="N", help="steps that are (default: 6)"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=0.0,
        metavar="T",
        help="peak of a rank's device, for MFU (log.peak_tflops)",
    )
    parser.add_argument(
        "--sentinel",
        action="store_true",
        help="check every step as train.sentinel = 1 does, to measure what it costs",
    )
    parser.add_argument(
        "--compile",
        choices=("off", "leaves", "block"),
        default="off",
        help="train.compile (default: off)",
    )
    parser.add_argument(
        "--canonical",
        type=int,
        default=0,
        metavar="V",
        help=(
            "sums in one order in every layout, of V pieces (train.canonical_shards); 0, the "
            "default: fast sums"
        ),
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the keys of [parallel] as options."""
    parser.add_argument("--tensor", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline", type=int, default=1, metavar="N")
    parser.add_argument("--data", type=int, default=1, metavar="N")
    parser.add_argument(
        "--context", type=int, default=1, metavar="N", help="ranks over which sequences are cut"
    )
    parser.add_argument(
        "--context-by", choices=("ring", "gather"), default="ring", help="(default: ring)"
    )
    parser.add_argument(
        "--expert", type=int, default=1, metavar="N", help="ranks over which experts are spread"
    )
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
    parser.add_argument(
        "--overlap", action="store_true", help="gradients and weights travel during the passes"
    )
    parser.add_argument("--schedule", choices=KINDS, default="1f1b", help="(default: 1f1b)")
    parser.add_argument(
        "--chunks",
        type=int,
        default=0,
        metavar="N",
        help="stages on each rank; 0, the default: interleaved and zb-v 2",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="none",
        help="activations that are made again in the backward pass (default: none)",
    )
    parser.add_argument(
        "--recompute-modules",
        nargs="+",
        choices=MODULES,
        default=[],
        help="if selective (default: attention)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=("llama", "gpt2"), default="llama", help="(default: llama)"
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        metavar="N",
        help="of a layer, 2 for each token (default: 0)",
    )
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="of a sequence (default: 512)"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=2, metavar="N", help="sequences (default: 2)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="N",
        help="of a step, over all replicas (default: 8)",
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench train`: start the ranks, or be one of them. Raises UserError."""
    config = run_of(args)
    if config.world_size > 1 and "RANK" not in os.environ:
        return start_ranks(
            [sys.executable, "-m", "tools.bench", *sys.argv[1:]], config.world_size, args.threads
        )
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    with world():
        measure(args, config, make_mesh(args.pipeline, args.data, args.tensor, cp=args.context))
    return 0


def measure(args: argparse.Namespace, config: RunConfig, mesh: dist.DeviceMesh) -> None:
    """Take the steps; rank 0 prints the record. Collective over the mesh."""
    bench = Bench(config, mesh)
    for _ in range(args.warmup):
        bench.step()
    seconds = [bench.step() for _ in range(args.steps)]
    record = {**_settings(args, config), **bench.record(seconds)}
    if args.limit:
        record |= bench.limit(seconds)
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)
    if args.profile:
        bench.profile()


def run_of(args: argparse.Namespace) -> RunConfig:
    """Return the run that is measured. Raises UserError with all problems."""
    return load_run(None, [f"{key}={toml(value)}" for key, value in _keys(args)])


def _keys(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Return the options as keys of a run file."""
    yield "model.family", args.model
    yield "model.vocab", VOCAB
    yield "model.layers", args.layers
    yield "model.hidden", args.hidden
    yield "model.heads", max(4, args.hidden // 64)
    if args.model == "llama":
        # 8/3 of hidden, rounded up to 32s
        yield "model.ffn", -(-8 * args.hidden // (3 * 32)) * 32
    else:
        yield "model.ffn", 4 * args.hidden
    yield "model.tied", False
    if args.experts:
        yield "model.experts", args.experts
    for name in LAYOUT_KEYS:
        yield f"parallel.{name}", getattr(args, name)
    if args.recompute_modules:
        yield "parallel.recompute_modules", args.recompute_modules
    yield "precision.compute", args.precision
    yield "optimizer.name", args.optimizer
    yield "train.global_batch", args.micro_batch * args.microbatches
    yield "train.micro_batch", args.micro_batch
    yield "train.steps", args.warmup + args.steps
    yield "train.seq_length", args.tokens
    yield "train.sentinel", int(args.sentinel)
    yield "train.compile", args.compile
    if args.canonical:
        yield "train.numerics", "canonical"
        yield "train.canonical_shards", args.canonical
        yield "train.threads", args.threads
    yield "log.peak_tflops", args.peak_tflops


def _settings(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """Return the options and the settings that follow from them."""
    actions = ("run", "profile", "limit")
    settings = {name: value for name, value in vars(args).items() if name not in actions}
    settings["chunks"] = len(config.schedule.rank_of_stage) // args.pipeline
    settings["recompute_modules"] = [*config.parallel.recompute_modules]
    return settings | {"torch": torch.__version__}


class Updates(StepObserver):
    """Notes the seconds of CPU time of each update on this rank, from the decision of all ranks to
    the report."""

    def __init__(self) -> None:
        self.cpu = list[float]()
        self._start = 0.0

    def decided(self, buffers: Sequence[Buffer], scale: torch.Tensor, found: torch.Tensor) -> None:
        self._start = time.process_time()

    def outcome(self, report: StepReport) -> None:
        self.cpu.append(time.process_time() - self._start)


@dataclass
class Bench:
    """A run's engine on random tokens, and its steps timed."""

    config: RunConfig
    mesh: dist.DeviceMesh
    updates: Updates = field(default_factory=Updates)

    def __post_init__(self) -> None:
        config = self.config
        train = self.config.train
        options = replace(
            config.engine_options, leaves=compile_leaves(config, config.model, self.mesh)
        )
        parts = build_stages(config.model, config.plan, self.mesh, config.schedule, options)
        optimizer = parts.make_optimizer(rule=make_rule(config.optimizer))
        self.engine = Engine(parts, optimizer, [self.updates])
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCAB, (train.global_batch, train.seq_length + 1), generator=random)
        self.parts = ids.chunk(config.parallel.data)
        self.sentinel = Sentinel(self.engine, exact=True) if train.sentinel else None
        # cpu: seconds of CPU time of this process, by step
        self.number = 0
        self.cpu = list[float]()

    def share(self, replica: int) -> Share:
        """Return the samples of a data-parallel rank."""
        samples = self.parts[replica]
        return Share(samples[:, :-1], samples[:, 1:], first=replica * len(samples))

    def step(self) -> float:
        """Take one step and return its seconds, between two barriers."""
        dist.barrier()
        start = time.perf_counter()
        before = time.process_time()
        with self.sentinel.checking(self.number, self.share) if self.sentinel else nullcontext():
            self.engine.step(self.share(self.engine.dp.rank), 3e-4, self.number)
        dist.barrier()
        self.cpu.append(time.process_time() - before)
        self.number += 1
        return time.perf_counter() - start

    def record(self, seconds: list[float]) -> dict[str, Any]:
        """Return medians and extremes, and the peak resident memory of every rank."""
        rss = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        rss[dist.get_rank()] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        median = statistics.median(seconds)
        tokens_per_s = self.config.tokens_per_step / median
        throughput = Throughput.of(self.config, self.config.model, self.engine.device)
        speed = throughput.fields(tokens_per_s)
        return {
            "tokens_per_s": round(tokens_per_s, 1),
            **{name: round(value, 4) for name, value in speed.items()},
            "step_s": round(median, 3),
            "fastest_s": round(min(seconds), 3),
            "slowest_s": round(max(seconds), 3),
            "cpu_s": round(statistics.median(self.cpu[-len(seconds) :]), 3),
            "update_cpu_s": round(statistics.median(self.updates.cpu[-len(seconds) :]), 4),
            "peak_rss_mb": [round(mb) for mb in self.engine.optimizer.world.sum_(rss).tolist()],
        }

    def limit(self, seconds: list[float]) -> dict[str, float]:
        """Return tokens per second of the products of a step alone, on the slowest rank, and the
        step's share of it."""
        with Products() as products:
            self.step()
        dist.barrier()
        seconds_alone = products.seconds()
        cpu_alone = products.seconds(time.process_time)
        alone = torch.tensor([seconds_alone, cpu_alone], dtype=torch.float64)
        slowest, cpu = self.engine.optimizer.world.max_(alone).tolist()
        return {
            "products_s": round(slowest, 3),
            "products_cpu_s": round(cpu, 3),
            "limit_tokens_per_s": round(self.config.tokens_per_step / slowest, 1),
            "of_limit": round(slowest / statistics.median(seconds), 3),
            # without the step that recorded the products
            "of_limit_cpu": round(cpu / statistics.median(self.cpu[-len(seconds) - 1 : -1]), 3),
        }

    def profile(self) -> None:
        """Print the self time of rank 0's operators in one step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.step()
        if dist.get_rank() == 0:
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
