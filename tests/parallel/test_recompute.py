"""What is made again in the backward pass has the bits that it had, so nothing but memory and time
changes."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from megaprec.precision.plan import LossScaling
from parallel import recomputation
from parallel.activation_checkpoint import KEEP, MODULES, Recompute
from parallel.recomputation import recomputed
from tests.layouts import Result, Run, train_all
from tests.runs import steps, train, write_run
from tools.config.run_file import load_run

SIZES: dict[str, Any] = {
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "ffn": 24,
    "vocab": 101,
    "max_positions": 10,
}
DROPOUT: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2, **SIZES},
    "gpt2": {"family": "gpt2", **DROPOUT, **SIZES},
    "gpt_neox": {"family": "gpt_neox", **SIZES, "hidden": 32},
    "mixtral": {"family": "mixtral", "experts": 4, "router_z_loss": 0.1, **SIZES},
    "olmo3": {"family": "olmo3", "kv_heads": 2, **SIZES},
    "gemma3": {"family": "gemma3", "kv_heads": 2, **SIZES},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 5, "value_dim": 3},
        **SIZES,
    },
    "qwen3": {"family": "qwen3", "kv_heads": 2, "tied": True, **SIZES},
    "gemma2": {"family": "gemma2", "kv_heads": 2, **SIZES},
    "gpt_oss": {
        "family": "gpt_oss",
        "kv_heads": 2,
        "experts": 4,
        "window": 4,
        "window_layers": [0],
        **SIZES,
    },
}
WAYS = [
    *(Recompute((module,)) for module in MODULES),
    Recompute(MODULES),
    Recompute(fraction=1.0),
    Recompute(fraction=0.5),
    Recompute(layers=1),
]


def require_same(runs: list[Run], results: list[Result]) -> None:
    """Every run as the first one."""
    first = results[0]
    assert any(first.grads)
    for run, result in zip(runs[1:], results[1:], strict=True):
        assert str(result.reports) == str(first.reports), run.recompute
        for ours, theirs in zip(result.grads, first.grads, strict=True):
            different = [name for name, grad in theirs.items() if not torch.equal(ours[name], grad)]
            assert not different, f"{run.recompute}: gradients of {different} differ"


def runs(
    family: str, compute: str = "bf16", ways: list[Recompute] = WAYS, **options: Any
) -> list[Run]:
    return [
        Run(FAMILIES[family], compute, steps=1, recompute=way, **options) for way in (KEEP, *ways)
    ]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("family", "compute"), [*((f, "bf16") for f in FAMILIES), ("gpt2", "fp32"), ("mixtral", "fp64")]
)
def test_gradients_are_bitwise_the_same_whatever_is_made_again(family: str, compute: str) -> None:
    all_runs = runs(family, compute)
    require_same(all_runs, train_all(all_runs))


SOME = [Recompute(MODULES), Recompute(fraction=1.0)]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequence", "cut sequence"])
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama"])
def test_so_they_are_on_tensor_parallel_ranks(family: str, sequence: bool) -> None:
    all_runs = runs(family, ways=SOME, sequence=sequence)
    require_same(all_runs, train_all(all_runs, tp=2))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_so_they_are_under_every_schedule(kind: str) -> None:
    """With weight gradients put off, tied heads, a cut sequence and what a stage keeps in another
    precision."""
    groups = [
        runs(family, ways=SOME, kind=kind, micro_batch=2, sequence=True)
        for family in ("gpt2", "mixtral")
    ]
    results = train_all([run for group in groups for run in group], tp=2, pp=2)
    for n, group in enumerate(groups):
        require_same(group, results[n * len(group) : (n + 1) * len(group)])


@pytest.mark.slow
def test_steps_that_overflow_are_skipped_and_traced_to_the_same_samples() -> None:
    scaled = LossScaling("dynamic", initial=2.0**12, hysteresis=1)
    all_runs = [
        Run(FAMILIES["gpt2"], "fp16", scaled, steps=4, recompute=way, plant=(0, 2, float("inf")))
        for way in (KEEP, *SOME)
    ]
    results = train_all(all_runs, pp=2)
    assert [report.changed for report in results[0].reports].count(False) >= 1
    require_same(all_runs, results)


@pytest.mark.slow
def test_a_layer_that_is_made_again_once_adds_its_losses_once() -> None:
    """Against the same model without its router's losses: their part of the gradient is there, and
    not twice."""
    model = {**FAMILIES["mixtral"], "router_aux_loss": 0.0, "router_z_loss": 0.0}
    with_losses = runs("mixtral", "fp64", [Recompute(fraction=1.0)])
    without = [
        Run(model, "fp64", steps=1, recompute=way) for way in (KEEP, Recompute(fraction=1.0))
    ]
    kept, again, plain, plain_again = (
        result.grads[0] for result in train_all([*with_losses, *without])
    )
    name = "layers.0.mlp.router.weight"
    part = kept[name] - plain[name]
    assert part.abs().max() > 1e-6
    assert torch.equal(part, again[name] - plain_again[name])


class Counted(nn.Module):
    """How often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.weight).sin() * x


def test_a_function_is_called_again_once_and_not_in_evaluation() -> None:
    inner = Counted()
    after = nn.Linear(4, 4)
    x = torch.ones(3, 4, requires_grad=True)
    recomputed(inner, x, after).sum().backward()
    assert inner.calls == 2
    with torch.no_grad():
        recomputed(inner, x, after)
    assert inner.calls == 3
    recomputed(inner, torch.ones(3, 4))
    assert inner.calls == 4


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_call_holds_goes_with_its_graph(nested: bool) -> None:
    inner = Counted()
    after = nn.Linear(4, 4)
    calls: list[ref[Any]] = []
    begin = recomputation._Call.__init__

    def noted(call: Any, *arguments: Any) -> None:
        calls.append(ref(call))
        begin(call, *arguments)

    with patch.object(recomputation._Call, "__init__", noted):
        gc.disable()
        try:
            for backward in (True, False):
                x = torch.ones(3, 4, requires_grad=True)
                if nested:
                    y = recomputed(lambda x: recomputed(inner, x, after), x)
                else:
                    y = recomputed(inner, x, after)
                assert any(call() for call in calls)
                if backward:
                    y.sum().backward()
                del y
                assert not any(call() for call in calls), "kept for ever"
        finally:
            gc.enable()


def test_a_function_that_does_not_do_the_same_again_is_found_out() -> None:
    times = []

    def fickle(x: Tensor) -> Tensor:
        times.append(1)
        return x.sin() if len(times) > 1 else x.sin().exp() * x

    y = recomputed(fickle, torch.ones(3, requires_grad=True))
    with pytest.raises(AssertionError, match="not the same computation"):
        y.sum().backward()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("recompute"))


@pytest.mark.slow
def test_a_run_file_decides_what_is_made_again(run_file: Path, tmp_path: Path) -> None:
    short = ["train.steps=2", "checkpoint.every=0", "precision.compute=bf16"]
    train(run_file, *short, f"train.folder={tmp_path / 'kept'}")
    made = []
    again = recomputation._Call._recompute

    def noted(call: Any) -> None:
        made.append(call)
        again(call)

    with patch.object(recomputation._Call, "_recompute", noted):
        train(run_file, *short, f"train.folder={tmp_path / 'again'}", "parallel.recompute=full")
    assert made, "nothing was made again"
    assert steps(tmp_path / "kept") == steps(tmp_path / "again")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], KEEP),
        (["parallel.recompute=selective"], Recompute(("attention",))),
        (
            ["parallel.recompute=selective", 'parallel.recompute_modules=["norm", "attention"]'],
            None,
        ),
        (["parallel.recompute=full"], Recompute(fraction=1.0)),
        (["parallel.recompute=full", "parallel.recompute_fraction=0.25"], Recompute(fraction=0.25)),
        (["parallel.recompute=full", "parallel.recompute_layers=1"], Recompute(layers=1)),
    ],
)
def test_keys_of_a_run_file_say_what_is_made_again(
    run_file: Path, overrides: list[str], expected: Recompute
) -> None:
    assert load_run(run_file, overrides).recompute == (expected or Recompute(("norm", "attention")))


@pytest.mark.parametrize(
    ("way", "whole"),
    [(WAYS[4], 5), (WAYS[5], 2), (WAYS[6], 1), (Recompute(layers=9), 5), (KEEP, 0)],
)
def test_the_first_layers_of_a_stage_are_made_again(way: Recompute, whole: int) -> None:
    assert way.count_whole_layers(5) == whole


def test_the_transpose_of_a_result_is_not_taken_for_the_result() -> None:
    def gradient(how: Callable[..., Tensor]) -> Tensor:
        x = torch.arange(9.0, dtype=torch.float64).view(3, 3).requires_grad_()
        how(lambda x: (x / 9).exp().t(), x, then=lambda made: made.t().sin().sum()).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(recomputed), gradient(lambda function, x, then: then(function(x))))
