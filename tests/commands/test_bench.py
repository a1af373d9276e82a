"""`python -m tools.bench WHAT` measures what it is asked to and says so in one line of JSON; `fp8`
is in test_fp8_advice.py."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.optim.optimizer import ParallelAMPOptimizer
from parallel import recomputation
from tests.project.test_readme import ROOT
from tests.ranks import run_ranks
from tools.bench import __main__ as bench
from tools.bench import sums
from tools.bench.train import measure, run_of

TINY = [
    "train",
    "--layers",
    "2",
    "--hidden",
    "32",
    "--tokens",
    "8",
    "--micro-batch",
    "1",
    "--microbatches",
    "2",
]
TINY += ["--warmup", "1", "--steps", "3"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A measurement sets the number of threads of its process, which is that of all tests here."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def records(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert bench.main(argv) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_training_steps_are_timed_and_the_record_says_what_was_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (record,) = records(
        capsys, *TINY, "--precision", "fp32", "--recompute", "selective", "--peak-tflops", "0.5"
    )
    asked = {
        "tensor": 1,
        "pipeline": 1,
        "data": 1,
        "sequence": False,
        "schedule": "1f1b",
        "chunks": 1,
    }
    asked |= {"overlap": False, "context": 1, "context_by": "ring", "expert": 1, "experts": 0}
    asked |= {
        "model": "llama",
        "layers": 2,
        "hidden": 32,
        "tokens": 8,
        "micro_batch": 1,
        "microbatches": 2,
    }
    asked |= {
        "recompute": "selective",
        "recompute_modules": ["attention"],
        "precision": "fp32",
        "optimizer": "adamw",
        "threads": 1,
    }
    asked |= {
        "warmup": 1,
        "steps": 3,
        "sentinel": False,
        "canonical": 0,
        "compile": "off",
        "peak_tflops": 0.5,
        "torch": torch.__version__,
    }
    measured = [
        "tokens_per_s",
        "tflops",
        "mfu",
        "step_s",
        "fastest_s",
        "slowest_s",
        "cpu_s",
        "update_cpu_s",
        "peak_rss_mb",
    ]
    assert record == asked | {name: record[name] for name in measured}
    assert 0 < record["fastest_s"] <= record["step_s"] <= record["slowest_s"]
    # of rounded seconds
    assert record["tokens_per_s"] == pytest.approx(2 * 8 / record["step_s"], rel=0.2)
    (peak,) = record["peak_rss_mb"]
    assert peak > 50


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ([], 0),
        (["--recompute", "selective"], 2),
        (["--recompute", "selective", "--recompute-modules", "activation", "norm"], 2 * 3 + 1),
        (["--recompute", "full"], 2 * 2),  # a layer, and within it the activation function
    ],
)
def test_what_is_to_be_made_again_is(
    capsys: pytest.CaptureFixture[str], options: list[str], calls: int
) -> None:
    """By calls of a micro-batch, of two layers."""
    made: list[Any] = []
    again = recomputation._Call._recompute

    def noted(call: Any) -> None:
        made.append(call)
        again(call)

    with patch.object(recomputation._Call, "_recompute", noted):
        records(capsys, *TINY, *options)
    assert len(made) == (1 + 3) * 2 * calls


STAGES = [
    *TINY,
    "--pipeline",
    "2",
    "--schedule",
    "interleaved",
    "--chunks",
    "2",
    "--layers",
    "4",
    "--model",
    "gpt2",
]
"""Four of a layer each on two ranks."""


def measured(mesh: DeviceMesh) -> str:
    args = bench.parser().parse_args(STAGES)
    with redirect_stdout(StringIO()) as said:
        measure(args, run_of(args), mesh)
    return said.getvalue()


def require_two_ranks(record: dict[str, Any]) -> None:
    assert (record["pipeline"], record["schedule"], record["chunks"], record["model"]) == (
        2,
        "interleaved",
        2,
        "gpt2",
    )
    assert len(record["peak_rss_mb"]) == 2 and min(record["peak_rss_mb"]) > 50


def test_all_ranks_are_measured_and_the_first_one_tells() -> None:
    first, second = run_ranks(measured, {"pp": 2})
    require_two_ranks(json.loads(first))
    assert not second


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_ranks_are_started() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *STAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    require_two_ranks(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--chunks", "2"], "parallel.chunks 2: 1f1b has one chunk a rank, not 2"),
        (
            ["--data", "3"],
            "train.global_batch 2 is not a multiple of train.micro_batch 1 x parallel.data 3",
        ),
        (["--pipeline", "3"], "parallel.pipeline 3 is more than model.layers 2"),
        (["--recompute", "full", "--recompute-modules", "norm"], "remove one of them"),
    ],
)
def test_what_does_not_fit_is_told_as_of_a_run(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert bench.main([*TINY, *options]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out


TIMES = ["bare_ms", "ours_ms", "naive_ms", "foreach_ms"]
RATIOS = ["ours_over_bare", "naive_over_ours", "foreach_over_ours"]


def test_the_optimizers_step_is_timed_with_several_buckets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    buckets: list[int] = []
    begin = ParallelAMPOptimizer.__init__

    def noted(optimizer: ParallelAMPOptimizer, *arguments: Any, **options: Any) -> None:
        begin(optimizer, *arguments, **options)
        buckets.append(len(optimizer.all_buffers()))

    size = 128**2
    with patch.object(ParallelAMPOptimizer, "__init__", noted):
        options = ["--matrices", "2", "--width", "128", "--rounds", "1", "--bucket", str(size)]
        (record,) = records(capsys, "optimizer", *options)
    assert buckets == [2]
    assert [record[name] for name in ("parameters", "bucket", "device", "threads")] == [
        2 * size,
        size,
        "cpu",
        1,
    ]
    assert set(record) == {
        "parameters",
        "bucket",
        "device",
        "threads",
        "torch",
        "extra_memory",
        *TIMES,
        *RATIOS,
    }
    assert all(record[name] > 0 and math.isfinite(record[name]) for name in (*TIMES, *RATIOS))
    for name in RATIOS:
        over, under = name.split("_over_")
        quotient = record[f"{over}_ms"] / record[f"{under}_ms"]
        assert record[name] == pytest.approx(quotient, rel=0.05, abs=0.01)  # of rounded numbers


@pytest.mark.parametrize("page", ["performance.md", "fp8.md"])
def test_every_measurement_that_a_page_names_can_be_asked_for(page: str) -> None:
    commands = re.findall(
        r"^ *python -m tools\.bench ([^#>\n]*)", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    assert commands
    for command in commands:
        args = bench.parser().parse_args(command.replace("$way", "full").split())
        if command.startswith("train"):
            run_of(args)


def sums_of_a_rank(mesh: DeviceMesh) -> dict[str, Any]:
    return sums.measure(Axis.of(mesh, "tp"), 12, 3)


def test_sums_are_timed_each_way() -> None:
    for record in run_ranks(sums_of_a_rank, {"tp": 2}):
        assert {key: record.pop(key) for key in sums.LEAST} == {
            "ranks": 2,
            "numbers": 12,
            "rounds": 3,
        }
        assert set(record) == {"sum_ms", "direct_ms", "ring_ms"}
        assert all(time > 0 for time in record.values())


def test_both_ways_of_a_sum_are_sums() -> None:
    for found in run_ranks(sums_each_way, {"tp": 4}):
        assert found == {"sum": 10.0, "direct": 10.0, "ring": 10.0}


def sums_each_way(mesh: DeviceMesh) -> dict[str, float]:
    axis = Axis.of(mesh, "tp")
    given = {name: torch.full((3,), 1.0 + axis.rank) for name in sums.WAYS}
    for name, way in sums.WAYS.items():
        way(axis, given[name])
    return {name: values.unique().item() for name, values in given.items()}


def test_a_sum_over_one_rank_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["sums", "--ranks", "1", "--rounds", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--ranks: must be at least 2",
        "--rounds: must be at least 1",
    ]
