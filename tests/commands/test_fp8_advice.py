"""`megaprec fp8-advice`: every product is listed with its own numbers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megaprec.fp8.quantize import quantize_both
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from tests.refusals import shows
from tools.analysis.planning.fp8_timing import (
    Shape,
    Times,
    both_with_amax,
    form_to_compile,
    linear_times,
)
from tools.cli import main
from tools.commands import fp8_advice
from tools.config.run_file import RunConfig, load_run

RUN = """
[model]
layers = 3
hidden = 64
heads = 4
kv_heads = 2
ffn = 160
vocab = 512
[data]
source = "python"
vocab_size = 512
[precision]
compute = "bf16"
[train]
steps = 1
global_batch = 4
micro_batch = 2
seq_length = 40
"""


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def listed(config: RunConfig, kind: Kind = "current") -> dict[str, tuple[str, int, str]]:
    found = fp8_advice.products(config, config.model, FP8Recipe(kind))
    return {one.name: (str(one.shape), one.count, one.why_wide) for one in found}


def test_every_kind_of_product_is_listed_as_a_tensor_rank_makes_it(run_file: Path) -> None:
    assert listed(load_run(run_file, ["parallel.tensor=2"])) == {
        "layers.*.attention.query.weight": ("80 x 64 x 64", 3, ""),  # 32 + 16 + 16 rows
        "layers.*.attention.output.weight": ("80 x 32 x 64", 3, ""),
        "layers.*.mlp.gate.weight": ("80 x 64 x 160", 3, ""),
        "layers.*.mlp.down.weight": ("80 x 80 x 64", 3, ""),
    }


def test_experts_share_the_tokens(run_file: Path) -> None:
    found = listed(
        load_run(run_file, ["model.family=mixtral", "model.experts=4", "model.experts_per_token=2"])
    )
    assert found["layers.*.mlp.experts.*.down.weight"] == ("40 x 160 x 64", 12, "")


def test_the_shares_are_of_all_flops_of_the_model(run_file: Path) -> None:
    config = load_run(run_file)
    found = fp8_advice.products(config, config.model, FP8Recipe("current"))
    flops = sum(one.flops for one in found) + fp8_advice.never_fp8_flops(config, config.model)
    assert flops == 80 * config.model.flops_per_token(40)


def test_weights_that_fp8_does_not_take_are_named_with_the_dim(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fp8-advice", str(run_file), "fp8.kind=blockwise"]) == 0
    said = capsys.readouterr().out
    assert (
        "layers.*.mlp.down.weight: 64 outputs (dim 0) are no multiple of 128 and 160 inputs (dim 1)"
        in said
    )
    assert main(["fp8-advice", str(run_file), "fp8.kind=current", "train.seq_length=41"]) == 0
    assert "82 tokens are not a multiple of 16" in capsys.readouterr().out


def test_without_a_gpu_the_published_numbers_decide_and_are_named(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["fp8-advice", str(run_file)]) == 0
    said = capsys.readouterr().out
    assert "1024 x 2048 x 1024 0.80, 4096 x 8192 x 16384 1.39 (torchao" in said
    assert "an assumption: fp8.kind is none" in said
    assert said.count("loses") >= 4


def test_estimates_meet_the_published_numbers_and_stay_between_them() -> None:
    (small, low), (large, high) = fp8_advice.PUBLISHED
    assert (fp8_advice.estimate(small), fp8_advice.estimate(large)) == (low, pytest.approx(high))
    assert fp8_advice.estimate(Shape(1, 1, 1)) == low
    assert fp8_advice.estimate(Shape(10**5, 10**5, 10**5)) == high
    between = [
        fp8_advice.estimate(Shape(tokens, 4096, 4096)) for tokens in (256, 1024, 4096, 16384)
    ]
    assert between == sorted(between)
    assert low < between[0] < 1 < between[-1] < high


def test_the_gain_of_all_counts_what_fp8_does_not_reach() -> None:
    shape = Shape(8, 16, 32)
    fast, wide = (
        fp8_advice.Product("a", shape, 1, why, gain) for why, gain in (("", 2.0), ("because", 1.0))
    )
    assert fp8_advice.speedup([fast], 0.0) == 2.0
    assert fp8_advice.speedup([fast, wide], 2 * shape.flops) == pytest.approx(4 / 3.5)
    assert [fp8_advice.verdict(one) for one in (fast, wide)] == ["gains", "wide"]


def test_a_weight_is_cast_once_for_all_micro_batches() -> None:
    times = Times(wide=6.0, products=2.0, casts=1.0, weight=4.0)
    assert (times.gain(1), times.gain(4)) == (6 / 7, 1.5)


@pytest.mark.parametrize("kind", ["delayed", "blockwise"])
def test_products_can_be_timed_on_a_cpu(kind: Kind) -> None:
    times = linear_times(Shape(32, 48, 64), FP8Recipe(kind), torch.bfloat16, torch.device("cpu"))
    assert min(times.wide, times.products, times.casts, times.weight) > 0


def test_bad_input_is_one_line(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["nowhere.toml"], "nowhere.toml"),
        ([str(run_file), "fp8.kind=fp6"], "fp8.kind"),
        ([str(run_file), "fp8.history_length=0"], "fp8.history_length"),
    ):
        assert main(["fp8-advice", *arguments]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert len(told.splitlines()) == 1
    if not torch.cuda.is_available():
        assert main(["fp8-advice", str(run_file), "--device", "cuda"]) == 2
        assert shows(capsys.readouterr().err, "command.no_cuda")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_casts_are_traced_whole_and_change_no_bit_when_compiled(kind: Kind) -> None:
    """Without a code generator: what is shown is that torch.compile sees one graph that does the
    same, the amax for later scales included."""
    whole = partial(both_with_amax, leaves=form_to_compile)
    traced = torch.compile(whole, backend="aot_eager", fullgraph=True)
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor(3.0) if kind == "delayed" else None
    for role in ("input", "gradient"):
        made, amaxes = traced(x, FP8Recipe(kind), role, scale)
        told = quantize_both(x, FP8Recipe(kind), role, scale)
        assert [amax.item() for amax in amaxes] == [x.abs().max().item()] * (kind == "delayed")
        for a, b in zip(made, told, strict=True):
            assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
            assert torch.equal(a.inverse, b.inverse)
