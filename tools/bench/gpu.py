"""All that needs a GPU: the tests marked `gpu`, and training steps beside other systems; both go to
docs/gpu.md.

The stack is that of `python -m tools.bench fp8`: layers of Llama 3 8B, fewer of them. Systems are
measured one after the other, twice, each alone on the device, and medians are compared. Without a
GPU one line says so, the exit code is 2, and nothing is written. `--device cpu` tries the program
itself, with small sizes; its page says so.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from megaprec.errors import UserError
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.estimate.gpus import gpu_named
from parallel.mesh import make_mesh, world
from parallel.pipeline.builders import schedule
from tools.bench.gpu_page import page
from tools.bench.gpu_peers import LR, PEERS, Absent, Step, Work
from tools.commands.fp8_timing import synchronize

OURS = "megaprec"
PASSES = 2
WARMUP = 2
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def add_parser(subparsers: Any) -> None:
    """Add `gpu` to the measurements."""
    parser = subparsers.add_parser(
        "gpu", help="tests and benchmarks that need a GPU", description=__doc__
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program"
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=PAGE,
        metavar="FILE",
        help="page to write (default: docs/gpu.md)",
    )
    parser.add_argument(
        "--systems", nargs="+", choices=(OURS, *PEERS), default=[OURS, *PEERS], metavar="NAME"
    )
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    for name, default, meaning in SIZES:
        words = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.set_defaults(run=main)


SIZES = (
    ("layers", 8, "layers"),
    ("hidden", 4096, "width"),
    ("vocab", 8192, "vocabulary"),
    ("tokens", 4096, "of a sequence"),
    ("micro-batch", 2, "sequences"),
    ("microbatches", 2, "of a step"),
    ("rounds", 7, "timed steps"),
)


@dataclass
class Record:
    """The result of the program.

    rows: numbers by system, or why it was not measured.
    tests: outcomes by name.
    """

    machine: dict[str, str]
    work: Work
    rows: dict[str, dict[str, float] | str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench gpu`. Exit code 1: a test has failed, or megaprec was not
    measured."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError.of("bench.no_gpu")
    record = Record(machine(args.device), work_of(args))
    if not args.no_tests:
        record.tests = outcomes()
    with world(args.device):
        record.rows = measure_systems(record.work, args.systems, args.rounds)
    args.page.write_text(
        page(record.machine, record.work, record.rows, record.tests), encoding="utf-8"
    )
    print(f"written    {args.page}")
    failed = [name for name, outcome in record.tests.items() if outcome.startswith("failed")]
    print(*(f"failed     {name}" for name in failed), sep="\n", end="\n" if failed else "")
    return int(bool(failed) or isinstance(record.rows.get(OURS), str))


def machine(device: str) -> dict[str, str]:
    """Return what a reader must know of the machine and the software."""
    if device == "cpu":
        facts = {"device": "no GPU: the CPU, to try the program"}
    else:
        devices = torch.cuda.device_count()
        facts = {
            "device": f"{devices} x {torch.cuda.get_device_name()}",
            "CUDA": str(torch.version.cuda),
        }
    return facts | {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True
    )
    return done.stdout.strip() or "not known"


def work_of(args: argparse.Namespace) -> Work:
    """Return the work of a step."""
    heads = max(4, args.hidden // 128)
    return Work(
        layers=args.layers,
        hidden=args.hidden,
        heads=heads,
        kv_heads=max(2, heads // 4),
        ffn=args.hidden * 7 // 2,
        vocab=args.vocab,
        tokens=args.tokens,
        micro_batch=args.micro_batch,
        microbatches=args.microbatches,
        device=args.device,
    )


def outcomes() -> dict[str, str]:
    """Run the tests with the marker `gpu`; return the outcome of each: passed, failed: why, or
    skipped: why."""
    report = PAGE.parent.parent / ".pytest_cache" / "gpu.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
    subprocess.run(command, cwd=PAGE.parent.parent, check=False)
    if not report.is_file():
        raise UserError.of("bench.no_test_report", command=" ".join(command[1:]))
    return read_outcomes(report.read_text(encoding="utf-8"))


def read_outcomes(xml: str) -> dict[str, str]:
    """Return the outcome of each test of pytest's report."""
    by_test = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        by_test[name] = _read_outcome(case)
    return by_test


def _read_outcome(case: ElementTree.Element) -> str:
    """Return the outcome of one test case of pytest's report."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = "skipped" if child.tag == "skipped" else "failed"
            message = child.get("message", "").splitlines() or [""]
            return f"{kind}: {message[0]}"
    return "passed"


def model_of(work: Work) -> ModelConfig:
    """Return the model as megaprec has it."""
    return ModelConfig(
        family="llama",
        layers=work.layers,
        hidden=work.hidden,
        heads=work.heads,
        kv_heads=work.kv_heads,
        ffn=work.ffn,
        vocab=work.vocab,
        tied=False,
    )


def megaprec(work: Work) -> Step:
    """Return the step of megaprec on one rank."""
    engine = Engine.build(
        model_of(work),
        plan("bf16"),
        make_mesh(device=work.device),
        schedule("1f1b", 1, work.microbatches),
        EngineOptions(work.micro_batch, work.tokens),
    )
    batches = work.batches()
    tokens = torch.cat([tokens for tokens, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    share = Share(tokens, targets)
    numbers = count()
    return lambda: engine.step(share, LR, next(numbers))


def measure_systems(
    work: Work, systems: list[str], rounds: int
) -> dict[str, dict[str, float] | str]:
    """Return tokens a second, memory and MFU of each system, or why it was not measured. Passes
    alternate."""
    builders: dict[str, Callable[[Work], Step]] = {OURS: megaprec, **PEERS}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    gib = dict[str, float]()
    refused = dict[str, str]()
    for _ in range(PASSES):
        for name in systems:
            if name in refused:
                continue
            try:
                times, gib[name] = time_steps(builders[name], work, rounds)
                seconds[name] += times
            except Exception as error:
                # a system that cannot do the work here is a row that says why
                kind = "" if isinstance(error, Absent) else f"{type(error).__name__}: "
                refused[name] = f"{kind}{error}".splitlines()[0]
    rows: dict[str, dict[str, float] | str] = {}
    for name in systems:
        if name in refused:
            rows[name] = refused[name]
        else:
            rows[name] = {**speeds(work, statistics.median(seconds[name])), "gib": gib[name]}
    return rows


def time_steps(build: Callable[[Work], Step], work: Work, rounds: int) -> tuple[list[float], float]:
    """Build a system, take WARMUP steps, and return the seconds of `rounds` more and the peak of
    its memory in GiB."""
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = build(work)
    for _ in range(WARMUP):
        step()
    times = [_seconds(step, work.device) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated() if work.device == "cuda" else 0
    return times, peak / 2**30


def _seconds(step: Step, device: str) -> float:
    synchronize(torch.device(device))
    start = time.perf_counter()
    step()
    synchronize(torch.device(device))
    return time.perf_counter() - start


def speeds(work: Work, seconds: float) -> dict[str, float]:
    """Return tokens and TFLOP a second of a step, and MFU if the GPU's peak is known."""
    config = model_of(work)
    rate = work.micro_batch * work.microbatches * work.tokens / seconds
    flops = rate * 3 * config.flops_per_token(work.tokens)
    record = {"tokens_per_s": rate, "step_s": seconds, "tflops": flops / 1e12}
    gpu = gpu_named(torch.cuda.get_device_name()) if work.device == "cuda" else None
    if gpu is not None:
        record["mfu"] = flops / 1e12 / gpu.tflops(plan("bf16"))
    return record
