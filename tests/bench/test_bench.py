"""`python -m tools.bench WHAT` measures what it is asked to and says so in one line of JSON."""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import Problem
from megaprec.optim.optimizer import ParallelAMPOptimizer
from models.engine.engine import RankStages
from parallel import recomputation
from parallel.leaves import LeafCall, Leaves
from parallel.mesh import world
from tests.project.test_readme import ROOT
from tests.ranks import run_ranks
from tests.refusals import sentence
from tools.bench import __main__ as bench
from tools.bench import optimizer, sums
from tools.bench.train import measure, mesh_of, run_of
from tools.config.run_file import RunConfig
from tools.training.compiling import leaf_calls

TINY = ["train", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn=96"]
TINY += ["train.seq_length=8", "train.micro_batch=1", "train.global_batch=2"]
STEPS = ["--warmup", "1", "--steps", "3"]


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
    keys = ["precision.compute=fp32", "parallel.recompute=selective", "log.peak_tflops=0.5"]
    (record,) = records(capsys, *TINY, *keys, *STEPS)
    asked = {"keys": [*TINY[1:], *keys], "warmup": 1, "steps": 3, "torch": torch.__version__}
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
        (["parallel.recompute=selective"], 2),
        (
            ["parallel.recompute=selective", 'parallel.recompute_modules=["activation", "norm"]'],
            2 * 3 + 1,
        ),
        (["parallel.recompute=full"], 2 * 2),  # a layer, and within it the activation function
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
        records(capsys, *TINY, *options, *STEPS)
    assert len(made) == (1 + 3) * 2 * calls


STAGES = [*TINY, "model.family=gpt2", "model.layers=4", "parallel.pipeline=2"]
STAGES += ["parallel.schedule=interleaved", "parallel.chunks=2", *STEPS]
"""Four of a layer each on two ranks."""


def measured(mesh: DeviceMesh) -> str:
    args = bench.parser().parse_args(STAGES)
    with redirect_stdout(StringIO()) as said:
        measure(args, run_of(args), mesh)
    return said.getvalue()


def require_two_ranks(record: dict[str, Any]) -> None:
    assert "parallel.pipeline=2" in record["keys"]
    assert len(record["peak_rss_mb"]) == 2 and min(record["peak_rss_mb"]) > 50


@pytest.mark.slow
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
        (
            ["parallel.chunks=2"],
            sentence("pipeline.other_chunks", kind="parallel.chunks 2: 1f1b", needed=1, chunks=2),
        ),
        (
            ["parallel.data=3"],
            sentence("config.global_batch", global_batch=2, micro_batch=1, data=3),
        ),
        (
            ["parallel.pipeline=3"],
            sentence("config.too_many_stages", pipeline="parallel.pipeline 3", layers=2),
        ),
        (
            ["parallel.recompute=full", 'parallel.recompute_modules=["norm"]'],
            sentence("config.recompute_modules"),
        ),
    ],
)
def test_what_does_not_fit_is_told_as_of_a_run(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert bench.main([*TINY, *options]) == 2
    said = capsys.readouterr()
    assert re.search(says, said.err) and not said.out


TIMES = ["bare_ms", "ours_ms", "naive_ms", "foreach_ms"]
RATIOS = ["ours_over_bare", "naive_over_ours", "foreach_over_ours"]


def test_the_optimizers_step_is_timed_with_several_buckets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    buckets: list[int] = []
    begin = ParallelAMPOptimizer.__init__

    def noted(made: ParallelAMPOptimizer, *arguments: Any, **options: Any) -> None:
        begin(made, *arguments, **options)
        buckets.append(len(made.all_buffers()))

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


def test_the_optimizers_step_on_a_gpu_is_the_one_of_a_run_whose_update_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[LeafCall] = []

    def stand_in(calls: list[LeafCall]) -> tuple[dict[LeafCall, Any], dict[str, str]]:
        tried.extend(calls)
        return {call: partial(call_itself, call) for call in calls}, {}

    monkeypatch.setattr(optimizer, "try_calls", stand_in)
    assert optimizer.compiled_update("cpu") is None and not tried
    on_gpu = optimizer.compiled_update("cuda")
    assert on_gpu is not None and on_gpu.names == "adamw, squares and zeros"
    assert {*tried} <= {*leaf_calls(run_of_a_gpu(), run_of_a_gpu().model, None, CUDA)}
    # the same forms, on the device that is here
    leaves = Leaves({call.on("cpu"): partial(call_itself, call.on("cpu")) for call in tried})
    timed = optimizer.ours(1, 1100, leaves=leaves)
    timed.prepare()
    with patch.object(ParallelAMPOptimizer, "_update_tile", side_effect=AssertionError):
        timed.step()
    assert not leaves.misses


CUDA = torch.device("cuda")


def call_itself(call: LeafCall, *tensors: torch.Tensor) -> Any:
    return call.run(tensors)


def run_of_a_gpu() -> RunConfig:
    args = bench.parser().parse_args([*TINY, "--device=cuda"])
    return run_of(args).on_device("cuda")


@pytest.mark.slow
def test_recurrences_are_measured_beside_those_of_transformers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = records(capsys, "recurrent", "--tokens", "70", "--rounds", "1")
    recurrences = ["delta rule", "delta rule by row", "state space"]
    assert [record["recurrence"] for record in found] == recurrences
    for record in found:
        for form in ("chunks", "tokens", "transformers"):
            assert record[f"{form}_ms"] > 0 and math.isfinite(record[f"{form}_mb"])


@pytest.mark.parametrize("page", ["performance.md", "fp8.md", "parallelism.md"])
def test_every_measurement_that_a_page_names_can_be_asked_for(page: str) -> None:
    commands = re.findall(
        r"^ *python -m tools\.bench ([^#>\n]*)", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    assert commands
    for command in commands:
        args = bench.parser().parse_args(shlex.split(command.replace("$way", "full")))
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
        Problem.of("bench.too_small", name="ranks", least=2),
        Problem.of("bench.too_small", name="rounds", least=1),
    ]


def test_the_optimizer_of_the_steps_is_that_of_the_keys() -> None:
    args = bench.parser().parse_args([*TINY, "optimizer.clip=0", "parallel.zero=false"])
    config = run_of(args)
    with (
        patch.object(RankStages, "make_optimizer", side_effect=StopIteration) as made,
        pytest.raises(StopIteration),
        world(),
    ):
        measure(args, config, mesh_of(config))
    (settings,) = (call.kwargs for call in made.call_args_list)
    assert (settings["clip"], settings["zero_size"]) == (0.0, 1)
