"""`python -m tools.bench fp8`: every product of a Llama layer is timed, and steps of a stack."""

import json

import pytest
import torch

from tools.bench import __main__ as bench
from tools.bench import fp8
from tools.bench.llama_layers import Workload

SMALL = ["--hidden", "64", "--layers", "1", "--tokens", "16", "--micro-batch", "1", "--rounds", "1"]


def workload(*options: str) -> Workload:
    return Workload.of(bench.parser().parse_args(["fp8", *options]))


def test_without_a_gpu_the_benchmark_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["fp8"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU here")


@pytest.mark.slow
def test_the_benchmark_times_all_products_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fp8", "--device", "cpu", *SMALL, "--kinds", "current"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shapes = [record["shape"] for record in records[:4]]
    assert shapes == ["16 x 64 x 128", "16 x 64 x 64", "16 x 64 x 448", "16 x 224 x 64"]
    assert [record["precision"] for record in records[4:]] == ["bf16", "current"]
    flops = 3 * workload(*SMALL).model.flops_per_token(16)
    for record in records[4:]:
        expected = record["tokens_per_s"] * flops / 1e12
        assert record["tflops"] == pytest.approx(expected, rel=0.5, abs=1e-4)  # it is rounded


def test_the_benchmarks_layer_is_that_of_llama_3_8b() -> None:
    model = workload().model
    sizes = (model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn)
    assert sizes == (4096, 32, 8, 128, 14336)
    assert str(fp8.shapes(workload())["gate, up"]) == "8192 x 4096 x 28672"
