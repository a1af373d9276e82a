"""All that needs a GPU, one process after the other: what the machine can do, the tests of
tests/gpu, and training steps beside other systems. docs/gpu.md is written of it.

Each result is a line of JSON in a file, written at once, and a line on the screen. A call takes
what is not there yet of this device, the most telling first, and ends after --minutes; the next
call goes on. What has failed is not tried again before it is named: the last lines say how. Nothing
is downloaded. Without a GPU one line says so, the exit code is 2, and nothing is written.
`--device cpu` tries the program itself, with small sizes; its page says so.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from megaprec.errors import UserError
from tools.bench.gpu_page import with_results
from tools.bench.llama_layers import Workload
from tools.bench.measurement import add_device, require_gpu

SUBJECT = "tests and benchmarks that need a GPU"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
RECORDS = ROOT / "runs" / "gpu" / "gpu.jsonl"
LAWS = "tests/gpu"
# 8 layers of Llama 3 8B with an eighth of its vocabulary, or all of it
LAYERS_8B = Workload(
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32768,
    tokens=8192,
    micro_batch=1,
    microbatches=4,
    device="cuda",
)
WITH_HEAD = replace(LAYERS_8B, vocab=128256)
WHOLE_1B = Workload(
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocab=128256,
    tokens=8192,
    micro_batch=1,
    microbatches=4,
    device="cuda",
)
TRIAL = Workload(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=224,
    vocab=128,
    tokens=16,
    micro_batch=1,
    microbatches=2,
    device="cpu",
)
STEPS = ["--warmup=3", "--steps=5"]
LIMIT = 110.0  # seconds of a measurement, unless it says otherwise


@dataclass(frozen=True)
class Measurement:
    """One process. arguments: of `python -m tools.bench`; none: the tests of the file that is its
    name. seconds: its limit."""

    name: str
    arguments: tuple[str, ...] = ()
    seconds: float = LIMIT


def measurements(device: str) -> list[Measurement]:
    """Return all measurements, the most telling first."""
    on_gpu = device == "cuda"
    layers = LAYERS_8B if on_gpu else TRIAL
    with_head = WITH_HEAD if on_gpu else TRIAL
    small = WHOLE_1B if on_gpu else TRIAL
    experts = replace(layers, layers=2)
    # without Transformer Engine Megatron-core keeps the scores of all tokens
    short = replace(layers, tokens=2048, micro_batch=4) if on_gpu else TRIAL
    gather_sizes = () if on_gpu else ("--tokens=16", "--hidden=32", "--ffn=64", "--rounds=2")
    fewer_layers = replace(layers, layers=min(3, layers.layers))
    gpus = torch.cuda.device_count() if on_gpu else 2
    return [
        Measurement("machine", ("probe", f"--device={device}")),
        *_law_files(),
        _ours("megaprec, block", layers, "train.compile=block"),
        _peer("torch", layers),
        _peer("torchtitan-like", layers),
        _ours("megaprec, off", layers, "train.compile=off"),
        _ours("megaprec, block, again", layers, "train.compile=block"),
        _ours("megaprec, block, whole vocabulary", with_head, "train.compile=block"),
        _ours("megaprec, block, deterministic", layers, "train.deterministic=true"),
        _ours("megaprec, leaves", layers, "train.compile=leaves"),
        _ours("megaprec, block, FP8", layers, "train.compile=block", "fp8.kind=current"),
        _peer("torch, compiled", layers, seconds=180),
        _peer("Megatron-core", short, "Megatron-core, 2048 tokens"),
        _ours("megaprec, block, 2048 tokens", short, "train.compile=block"),
        _peer("Transformer Engine", layers),
        _ours("megaprec, off, whole vocabulary", with_head, "train.compile=off"),
        _ours("megaprec, block, Llama 3.2 1B", small, "train.compile=block"),
        _peer("torchtitan-like", small, "torchtitan-like, Llama 3.2 1B"),
        _ours(
            "megaprec, block, 8 experts",
            experts,
            "train.compile=block",
            "model.family=mixtral",
            "model.experts=8",
        ),
        _ours("megaprec, off, Muon", fewer_layers, "train.compile=off", "optimizer.name=muon"),
        Measurement("fused gathers", ("fused-gathers", f"--device={device}", *gather_sizes)),
        *(_over_tensor_ranks(layers) if gpus > 1 else ()),
        Measurement("FP8 products and steps", ("fp8", *fewer_layers.options), seconds=200),
        Measurement("optimizer", ("optimizer", f"--device={device}")),
    ]


def _law_files() -> Iterator[Measurement]:
    """Yield a measurement for each file of tests that need a GPU: one that hangs or dies takes no
    other with it."""
    for path in sorted((ROOT / LAWS).glob("test_*.py")):
        yield Measurement(f"{LAWS}/{path.name}", seconds=180)


def _ours(name: str, workload: Workload, *keys: str) -> Measurement:
    command = ("train", f"--device={workload.device}", *STEPS, *workload.keys, *keys)
    return Measurement(name, command)


def _over_tensor_ranks(workload: Workload) -> Iterator[Measurement]:
    """Yield steps over two tensor ranks, with their transfers apart from products and fused with
    them."""
    keys = ("train.compile=block", "parallel.tensor=2", "parallel.sequence=true")
    yield _ours("megaprec, block, tensor 2", workload, *keys)
    yield _ours("megaprec, block, tensor 2, fused", workload, *keys, "parallel.async_tensor=true")


def _peer(system: str, workload: Workload, name: str = "", seconds: float = LIMIT) -> Measurement:
    return Measurement(name or system, ("peer", system, *workload.options), seconds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_device(parser)
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="page to write")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, metavar="FILE", help="lines of JSON"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="after which no measurement begins"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="measurements, taken again"
    )


def main(args: argparse.Namespace) -> int:
    """Run `python -m tools.bench gpu`.

    Exit code 1: a test has failed, or a measurement of megaprec. Raises UserError without a GPU,
    and for a name that no measurement has.
    """
    require_gpu(args.device)
    end = time.monotonic() + 60 * args.minutes
    args.records.parent.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(args.device)
    device = machine["device"]
    records = read_records(args.records, device)
    remaining = to_take(measurements(args.device), records, args.only)
    while remaining and time.monotonic() + remaining[0].seconds < end:
        measurement = remaining.pop(0)
        print(f"measuring  {measurement.name}, at most {measurement.seconds:.0f} s", flush=True)
        start = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
        for record in take(measurement):
            labels = {"measurement": measurement.name, "at": start, "on": device}
            append(args.records, {**labels, **record})
            # pytest has told of its tests itself
            if "outcome" not in record:
                print(f"           {outline(record)}", flush=True)
    records = read_records(args.records, device)
    text = with_results(PAGE.read_text(encoding="utf-8"), machine, records)
    args.page.write_text(text, encoding="utf-8")
    print(f"written    {args.page}")
    if remaining:
        names = "; ".join(measurement.name for measurement in remaining)
        print(f"left       {names}: run it again, for {least_minutes(remaining)} minutes or longer")
    failed = list(describe_failures(records))
    for line in failed:
        print(f"failed     {line}")
    refused = sorted({record["measurement"] for record in records if _is_failure(record)})
    if refused:
        names = " ".join(f'"{name}"' for name in refused)
        print(f"again      python -m tools.bench gpu --only {names}")
    return int(bool(failed))


def outline(record: Mapping[str, Any]) -> str:
    """Return what a record says, in one line for the screen."""
    if "refused" in record:
        return f"refused: {record['refused']}"
    if "tokens_per_s" in record:
        return f"{record['tokens_per_s']:,.0f} tokens/s"
    return json.dumps(record)[:100]


def least_minutes(remaining: Sequence[Measurement]) -> int:
    """Return the whole minutes of a call in which the first of these can begin."""
    return math.floor(remaining[0].seconds / 60) + 1


def to_take(
    planned: Sequence[Measurement], records: Sequence[Mapping[str, Any]], only: Sequence[str]
) -> list[Measurement]:
    """Return the measurements that are named, or else those without a record. Raises UserError for
    a name that none has."""
    names = [measurement.name for measurement in planned]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError.of(
            "bench.unknown_measurement", names="; ".join(unknown), known="; ".join(names)
        )
    if only:
        return [measurement for measurement in planned if measurement.name in only]
    taken = {record["measurement"] for record in records}
    return [measurement for measurement in planned if measurement.name not in taken]


def take(measurement: Measurement) -> Iterator[dict[str, Any]]:
    """Run a measurement and yield its records; at least one, which says why there is no other."""
    if not measurement.arguments:
        yield from _run_laws(measurement.name, measurement.seconds)
        return
    command = [sys.executable, "-m", "tools.bench", *measurement.arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=measurement.seconds)
        reason = _last_line(errors) or "it printed no record"
    except subprocess.TimeoutExpired:
        process.kill()
        # what it had printed is read all the same
        output, _ = process.communicate()
        reason = f"not done after {measurement.seconds:.0f} s"
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    yield from records
    if process.returncode and not any("refused" in record for record in records):
        yield {"refused": reason}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _run_laws(file: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Run the tests of a file that need a GPU; yield the outcome of each."""
    report = RECORDS.with_name("laws.xml")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", file]
    reason = f"no report of a test: run python {' '.join(command[1:])}"
    try:
        # pytest's exit code is 1 if a test fails, which the report says, too
        subprocess.run(command, cwd=ROOT, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        reason = f"the tests were not done after {seconds:.0f} s"
    outcomes: dict[str, str] = {}
    if report.is_file():
        outcomes = read_outcomes(report.read_text(encoding="utf-8"))
    yield from ({"test": name, "outcome": outcome} for name, outcome in outcomes.items())
    if not outcomes:
        yield {"refused": reason}


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


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to the file, as one line."""
    # a machine that went away may have left half a line
    is_cut_off = path.is_file() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        if is_cut_off:
            file.write("\n")
        file.write(f"{json.dumps(record)}\n")


def read_records(path: Path, device: str) -> list[dict[str, Any]]:
    """Return the records of this device, of a measurement that was taken again the newest ones."""
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # a line that was cut off when the machine went away
        if line.endswith("}"):
            record = json.loads(line)
            # another card's numbers are none of this one's
            if record.get("on") == device:
                records.append(record)
    newest = {record["measurement"]: record["at"] for record in records}
    return [record for record in records if record["at"] == newest[record["measurement"]]]


def describe_failures(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each test that has failed, and for each measurement of megaprec that could
    not be taken."""
    for record in records:
        if str(record.get("outcome", "")).startswith("failed"):
            yield f"{record['test']} {record['outcome']}"
        elif _is_failure(record):
            yield f"{record['measurement']}: {record['refused']}"


def _is_failure(record: Mapping[str, Any]) -> bool:
    """Return True if a measurement of megaprec was refused. Others need what is not everywhere: a
    peer, or several GPUs."""
    return "refused" in record and record["measurement"].startswith(("megaprec", LAWS))


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
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    # git prints nothing where there is no clone
    return git.stdout.strip() or "not known"
