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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import torch

from megaprec.errors import UserError
from parallel.mesh import world
from tools.bench.gpu_page import page
from tools.bench.gpu_peers import PEERS, Absent
from tools.bench.llama_layers import Workload, add_workload, megaprec_step
from tools.bench.measurement import Step, seconds_of

SUBJECT = "tests and benchmarks that need a GPU"
OURS = "megaprec"
PASSES = 2  # over all systems
WARMUP = 2  # steps of a system before its clock starts
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_workload(parser)
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="page to write")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=(OURS, *PEERS),
        default=[OURS, *PEERS],
        metavar="NAME",
        help="that are measured",
    )
    parser.add_argument("--no-tests", action="store_true", help="measure only")


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench gpu`.

    Exit code 1: a test has failed, or megaprec was not measured. Raises UserError without a GPU.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError.of("bench.no_gpu")
    workload = Workload.of(args)
    outcomes = {} if args.no_tests else run_tests()
    with world(args.device):
        rows = measure_systems(workload, args.systems, args.rounds)
    text = page(describe_machine(args.device), workload, rows, outcomes)
    args.page.write_text(text, encoding="utf-8")
    print(f"written    {args.page}")
    failed = [name for name, outcome in outcomes.items() if outcome.startswith("failed")]
    for name in failed:
        print(f"failed     {name}")
    return int(bool(failed) or isinstance(rows.get(OURS), str))


def describe_machine(device: str) -> dict[str, str]:
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
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PAGE.parent, capture_output=True, text=True
    )
    # git prints nothing where there is no clone
    return git.stdout.strip() or "not known"


def run_tests() -> dict[str, str]:
    """Run the tests with the marker `gpu`; return the outcome of each: passed, failed: why, or
    skipped: why."""
    # pytest's own folder, which git ignores
    report = PAGE.parent.parent / ".pytest_cache" / "gpu.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
    # pytest's exit code is 1 if a test fails, which the report says, too.
    subprocess.run(command, cwd=PAGE.parent.parent, check=False)
    if not report.is_file():
        raise UserError.of("bench.no_test_report", command=" ".join(command[1:]))
    return read_outcomes(report.read_text(encoding="utf-8"))


def read_outcomes(xml: str) -> dict[str, str]:
    """Return the outcome of each test of pytest's report."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        # pytest writes a file as it would be imported: tests.gpu.test_kernels
        file = case.get("classname", "").replace(".", "/")
        outcomes[f"{file}.py::{case.get('name')}"] = _read_outcome(case)
    return outcomes


def _read_outcome(case: ElementTree.Element) -> str:
    """Return the outcome of one test case of pytest's report."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            # an error of a fixture is a failure too
            outcome = "skipped" if child.tag == "skipped" else "failed"
            message_lines = child.get("message", "").splitlines() or [""]
            return f"{outcome}: {message_lines[0]}"
    return "passed"


def measure_systems(
    workload: Workload, systems: list[str], rounds: int
) -> dict[str, dict[str, float] | str]:
    """Return tokens a second, memory and MFU of each system, or why it was not measured. Passes
    alternate."""
    builders: dict[str, Callable[[Workload], Step]] = {OURS: megaprec_step, **PEERS}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    peak_gib = dict[str, float]()
    refused = dict[str, str]()
    # Each system twice, so that a change of the machine meanwhile is seen by all.
    for _ in range(PASSES):
        for name in systems:
            if name in refused:
                continue
            try:
                times, peak_gib[name] = time_steps(builders[name], workload, rounds)
                seconds[name] += times
            except Exception as error:
                # a system that cannot do the work here is a row that says why
                prefix = "" if isinstance(error, Absent) else f"{type(error).__name__}: "
                refused[name] = f"{prefix}{error}".splitlines()[0]
    rows: dict[str, dict[str, float] | str] = {}
    for name in systems:
        if name in refused:
            rows[name] = refused[name]
            continue
        speed = workload.speed(statistics.median(seconds[name]))
        rows[name] = {**speed, "gib": peak_gib[name]}
    return rows


def time_steps(
    build: Callable[[Workload], Step], workload: Workload, rounds: int
) -> tuple[list[float], float]:
    """Build a system, take WARMUP steps, and return the seconds of `rounds` more and the peak of
    its memory in GiB."""
    # Memory of the system that was measured before must not count.
    gc.collect()
    if workload.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = build(workload)
    for _ in range(WARMUP):
        step()
    device = torch.device(workload.device)
    times = [seconds_of(step, device) for _ in range(rounds)]
    peak = torch.cuda.max_memory_allocated() if workload.device == "cuda" else 0
    return times, peak / 2**30
