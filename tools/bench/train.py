"""Speed and memory of whole training steps, on random tokens.

The workload is a run: WORKLOAD, with the keys of the command line in place of its own, such as
parallel.tensor=2. It is a Llama-style decoder of 34 million parameters: hidden 512, 8 layers, 8
heads, feed-forward 1376, vocabulary 8192, untied, sequences of 512; a step is 8 micro-batches of 2
samples over all replicas, 8192 tokens, AdamW, clipping at 1. On a CPU each rank uses one thread,
unless train.threads is given. All else is what a run without these keys takes. What does not fit is
refused as in a run file.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megaprec.comm.axis import device_of
from megaprec.optim.decision.step_report import StepObserver, StepReport
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.gemm import fp32_sums
from megaprec.precision.tf32 import tf32
from megaprec.resources import peak_memory
from models.attention.backends import gpu_kernels
from models.engine.engine import Engine, build_stages
from models.engine.passes import Share
from models.engine.sentinel import Sentinel
from parallel.mesh import make_mesh
from tools.analysis.planning.fp8_timing import synchronize
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import plan_run
from tools.bench.kernels import kernels_of
from tools.bench.measurement import (
    add_device,
    add_integers,
    print_profile,
    print_record,
    require_gpu,
    rounded_median,
    run_on_ranks,
)
from tools.config.run_file import RunConfig, load_run
from tools.journal.kernel_table import kernel_record
from tools.training.compiling import compile_leaves
from tools.training.step_records import Throughput
from tools.training.trainer import optimizer_options

SUBJECT = "tokens a second of training steps"
LEARNING_RATE = 3e-4
WORKLOAD = (
    'model.family="llama"',
    "model.layers=8",
    "model.hidden=512",
    "model.heads=8",
    "model.ffn=1376",
    "model.vocab=8192",
    "model.tied=false",
    'precision.compute="bf16"',
    "train.global_batch=16",
    "train.micro_batch=2",
    "train.seq_length=512",
)
ON_A_CPU = ("train.threads=1",)  # a GPU's host draws the weights with all its cores
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm")
FUSED_ATTENTION = "_scaled_dot_product"  # how the names of its operators begin
REPEATS = 8  # of each product, after one that warms up


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_run(parser)
    add_device(parser, default="cpu")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="take one step more: print rank 0's operators by time; on a GPU its kernels and idle "
        "time, as JSON",
    )
    parser.add_argument(
        "--limit",
        action="store_true",
        help="time the matrix products of a step alone: no step can be faster",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the keys of the run and the numbers of its steps as arguments."""
    parser.add_argument(
        "keys",
        nargs="*",
        default=[],
        metavar="table.key=value",
        help="keys of a run file that differ from the workload",
    )
    add_integers(
        parser, {"warmup": (2, "steps that are not counted"), "steps": (6, "steps that are")}
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench train`. Raises UserError."""
    require_gpu(args.device)
    config = run_of(args).on_device(args.device)

    def measure_here() -> None:
        with settings_of_run(config, args.device):
            measure(args, config, mesh_of(config, args.device))

    return run_on_ranks(measure_here, config.world_size, config.train.threads, args.device)


@contextmanager
def settings_of_run(config: RunConfig, device: str) -> Iterator[None]:
    """Fix the process's settings of kernels and products, as a run does."""
    kernels = gpu_kernels(device, config.train.deterministic)
    with kernels, tf32(config.plan.tf32), fp32_sums():
        yield


def run_of(args: argparse.Namespace) -> RunConfig:
    """Return the run that is measured. Raises UserError with all problems."""
    steps = args.warmup + args.steps
    of_device = ON_A_CPU if getattr(args, "device", "cpu") == "cpu" else ()
    return load_run(None, [*WORKLOAD, *of_device, f"train.steps={steps}", *args.keys])


def mesh_of(config: RunConfig, device: str = "cpu") -> dist.DeviceMesh:
    """Return the mesh of the run's ranks. Collective over the world."""
    parallel = config.parallel
    return make_mesh(parallel.pipeline, parallel.data, parallel.tensor, device, parallel.context)


def measure(args: argparse.Namespace, config: RunConfig, mesh: dist.DeviceMesh) -> None:
    """Take the steps; rank 0 prints the record. Collective over the mesh."""
    bench = Bench(config, mesh)
    for _ in range(args.warmup):
        bench.step()
    seconds = [bench.step() for _ in range(args.steps)]
    record = {"keys": args.keys, "warmup": args.warmup, "steps": args.steps}
    record |= {"torch": torch.__version__, **bench.record(seconds)}
    if args.limit:
        # on all ranks: it takes one more step
        record |= bench.limit_by_products(seconds)
    if dist.get_rank() == 0:
        print_record(record)
    if args.profile and bench.engine.device.type == "cuda":
        # on every rank: a step waits for the others
        kernels = kernel_record(kernels_of(bench.step, bench.engine.device))
        if dist.get_rank() == 0:
            print_record({"profile": kernels})
    elif args.profile:
        print_profile(bench.step)


class UpdateTimes(StepObserver):
    """Notes the seconds of CPU time of each update on this rank, from the decision of all ranks to
    the report.
    """

    def __init__(self) -> None:
        self.cpu_seconds = list[float]()
        self._start = 0.0

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        self._start = time.process_time()

    def outcome(self, report: StepReport) -> None:
        self.cpu_seconds.append(time.process_time() - self._start)


class Bench:
    """A run's engine on random tokens, and its steps timed."""

    def __init__(self, config: RunConfig, mesh: dist.DeviceMesh) -> None:
        train = config.train
        self.config = config
        self.update_times = UpdateTimes()
        leaves = compile_leaves(config, config.model, mesh)
        options = replace(config.engine_options, leaves=leaves)
        stages = build_stages(config.model, config.plan, mesh, config.schedule, options)
        optimizer = stages.make_optimizer(**optimizer_options(config, device_of(mesh)))
        self.engine = Engine(stages, optimizer, [self.update_times])
        # The same tokens in every layout and process.
        generator = torch.Generator().manual_seed(0)
        rows = (train.global_batch, train.seq_length + 1)
        token_ids = torch.randint(0, config.model.vocab, rows, generator=generator)
        self.shares = token_ids.chunk(config.parallel.data)
        self.sentinel = Sentinel(self.engine, exact=True) if train.sentinel else None
        self.steps_taken = 0
        self.cpu_seconds = list[float]()  # of this process, by step

    def share(self, replica: int) -> Share:
        """Return the samples of a data-parallel rank."""
        samples = self.shares[replica]
        # contiguous, as a run's are: they travel to a GPU from pinned memory
        tokens = samples[:, :-1].contiguous()
        targets = samples[:, 1:].contiguous()
        return Share(tokens, targets, first=replica * len(samples))

    def step(self) -> float:
        """Take one step and return its seconds, between two barriers."""
        number = self.steps_taken
        checking = self.sentinel.checking(number, self.share) if self.sentinel else nullcontext()
        # ranks begin together, and a step ends with the last of them
        dist.barrier()
        start = time.perf_counter()
        cpu_start = time.process_time()
        with checking:
            self.engine.step(self.share(self.engine.dp.rank), LEARNING_RATE, number)
        synchronize(self.engine.device)
        dist.barrier()
        self.cpu_seconds.append(time.process_time() - cpu_start)
        self.steps_taken += 1
        return time.perf_counter() - start

    def record(self, seconds: list[float]) -> dict[str, Any]:
        """Return the record of the newest steps, of which `seconds` are the times: their speed,
        medians and extremes, and the peak resident memory of every rank. Collective over the
        world."""
        # over NCCL, tensors of the CPU cannot be summed
        device = self.engine.device
        memory_mb = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
        memory_mb[dist.get_rank()] = peak_memory() / 2**20
        memory_mb = self.engine.optimizer.world.sum_(memory_mb)
        tokens_per_s = self.config.tokens_per_step / statistics.median(seconds)
        throughput = Throughput.of(self.config, self.config.model, self.engine.device)
        throughput_fields = throughput.fields(tokens_per_s, self.config.train.seq_length)
        # the newest: steps that warmed up come before
        cpu_seconds = self.cpu_seconds[-len(seconds) :]
        update_cpu_seconds = self.update_times.cpu_seconds[-len(seconds) :]
        on_gpu = self._gpu_record() if self.engine.device.type == "cuda" else {}
        return {
            "tokens_per_s": round(tokens_per_s, 1),
            **{name: round(value, 4) for name, value in throughput_fields.items()},
            "step_s": rounded_median(seconds),
            "fastest_s": round(min(seconds), 3),
            "slowest_s": round(max(seconds), 3),
            "cpu_s": rounded_median(cpu_seconds),
            "update_cpu_s": rounded_median(update_cpu_seconds, 4),
            "peak_rss_mb": [round(megabytes) for megabytes in memory_mb.tolist()],
            **on_gpu,
        }

    def _gpu_record(self) -> dict[str, Any]:
        """Return what a measurement on a GPU says besides: its peak of memory in GiB on this rank
        and that of the fullest rank by plan, the kernels of attention, and what is compiled and
        was missed."""
        leaves = self.engine.leaves
        planned = plan_run(self.config, MemoryModel("cuda"), None)
        # torch's allocator does not give out what NCCL keeps
        nccl_bytes = planned.ranks[planned.fullest].communicators
        with torch.device("cuda"):
            attention = self.config.attention_kernels(self.config.model)
        return {
            "gpu": torch.cuda.get_device_name(),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "planned_gib": round((planned.total - nccl_bytes) / 2**30, 2),
            "attention": attention,
            "compiled": leaves.names,
            "uncompiled_calls": dict(leaves.misses),
        }

    def limit_by_products(self, seconds: list[float]) -> dict[str, float]:
        """Return tokens per second of the products of a step alone, on the slowest rank, and the
        step's share of it. Takes one more step. Collective.
        """
        with Products(self.engine.device) as products:
            self.step()
        # the ranks repeat their products at the same time
        dist.barrier()
        seconds_alone = products.seconds()
        cpu_alone = products.seconds(time.process_time)
        # Ranks wait for each other in a step: the slowest decides.
        alone = torch.tensor(
            [seconds_alone, cpu_alone], dtype=torch.float64, device=self.engine.device
        )
        slowest, slowest_cpu = self.engine.optimizer.world.max_(alone).tolist()
        # without the step that recorded the products
        cpu_seconds = self.cpu_seconds[-len(seconds) - 1 : -1]
        return {
            "products_s": round(slowest, 3),
            "products_cpu_s": round(slowest_cpu, 3),
            "limit_tokens_per_s": round(self.config.tokens_per_step / slowest, 1),
            "of_limit": round(slowest / statistics.median(seconds), 3),
            "of_limit_cpu": round(slowest_cpu / statistics.median(cpu_seconds), 3),
        }


@dataclass(frozen=True)
class Operand:
    """A tensor's shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the form of a tensor; any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def make(self) -> Tensor:
        """Return random numbers of this form."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            return empty.normal_()
        return empty.zero_()  # codes of FP8, and integers


class Products(TorchDispatchMode):
    """The products of a step, timed alone: the speed that it would have if it did nothing else.

    While it is active it counts each matrix product and fused attention by operator and operands.
    Then each of them is repeated with random numbers, with nothing between, and the medians are
    summed. All ranks do so at the same time, for they share the machine's memory and caches in
    training too.

    device: of the step. The host waits until it has finished what is timed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counts = Counter[str]()  # by operator and arguments, as text
        self._device = device
        self._calls: dict[str, tuple[Callable[..., object], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, as torch asks for each one; count it if it is a product."""
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name.startswith(FUSED_ATTENTION):
            # Shapes in place of tensors: what a step has computed can be freed.
            operands = tree_map(Operand.of, (args, kwargs or {}))
            call = f"{func} {operands}"
            self.counts[call] += 1
            self._calls[call] = (func, operands)
        return func(*args, **(kwargs or {}))

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the seconds of all recorded products, each alone, by this clock."""
        total = 0.0
        for call, count in self.counts.items():
            # Made here, one call at a time: the operands of all together may not fit.
            function, operands = self._calls[call]
            args, kwargs = tree_map(_make_operand, operands)
            total += count * self._time_call(partial(function, *args, **kwargs), clock)
        return total

    def _time_call(self, call: Callable[[], object], clock: Callable[[], float]) -> float:
        """Return the seconds of a call, after one that warms up: on a CPU the median of REPEATS,
        on a GPU the mean of as many that are queued one after the other."""
        call()
        if self._device.type != "cpu":
            # as in a step, a GPU has the next call when it has finished one
            synchronize(self._device)
            start = clock()
            for _ in range(REPEATS):
                call()
            synchronize(self._device)
            return (clock() - start) / REPEATS
        times = list[float]()
        for _ in range(REPEATS):
            start = clock()
            call()
            times.append(clock() - start)
        return statistics.median(times)


def _make_operand(value: Any) -> Any:
    return value.make() if isinstance(value, Operand) else value
