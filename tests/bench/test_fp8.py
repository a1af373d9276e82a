"""`python -m tools.bench fp8`: every product of a Llama layer is timed, and steps of a stack."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megaprec.precision.fp8_recipe import Kind
from parallel.mesh import world
from tools.bench import __main__ as bench
from tools.bench import fp8
from tools.bench.llama_layers import Workload
from tools.config.run_file import RunConfig, load_run

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


@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_the_steps_are_those_of_a_run_with_defaults(kind: Kind) -> None:
    """An engine without compiled leaves is what no run on a GPU takes."""
    made = list[RunConfig]()

    def noted(config: RunConfig, mesh: object) -> SimpleNamespace:
        made.append(config)
        return SimpleNamespace(step=lambda: None)

    small = workload("--device=cpu", *SMALL)
    with patch.object(fp8, "Bench", noted), world():
        assert len([*fp8._step_records(small, [kind], 1)]) == 2
    plain, quantized = made
    assert plain.plan.fp8 is None and quantized.plan.fp8 is not None
    assert quantized.compile_mode("cuda") == plain.compile_mode("cuda") == "block"
    usual = load_run(None, [*small.keys, "train.steps=1", 'precision.compute="bf16"'])
    assert plain == usual.on_device("cpu")


def test_the_benchmarks_layer_is_that_of_llama_3_8b() -> None:
    model = workload().model
    sizes = (model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn)
    assert sizes == (4096, 32, 8, 128, 14336)
    assert str(fp8.shapes(workload())["gate, up"]) == "8192 x 4096 x 28672"
