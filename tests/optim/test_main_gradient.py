"""Gradients of a step have nothing of the step before, though nobody clears them in between."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm import main_grad
from megaprec.comm.layout import attach_whole
from megaprec.optim import grad_sync
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.gemm import add_product_
from megaprec.precision.plan import LossScaling, plan
from models.engine.engine import Engine
from parallel.linear import Widen
from tests.layouts import Recording, Run, batches, make_engine, share_of
from tests.refusals import raises

NAN = float("nan")
SMALL = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 32, "vocab": 37}
LLAMA: dict[str, Any] = {**SMALL, "family": "llama", "kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {**SMALL, "family": "gpt2"},
    "gpt_neox": {**SMALL, "family": "gpt_neox", "rotary_fraction": 0.5},
    "mixtral": {**LLAMA, "family": "mixtral", "experts": 8, "experts_per_token": 1},
}
NUMBERS: dict[str, dict[str, Any]] = {
    "fp64": {"compute": "fp64"},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16", "scaling": LossScaling("constant", 64.0)},
    "bf16 throughout": {"compute": "bf16", "changes": {"gradients": "bf16"}},
    "fp8": {"compute": "bf16", "changes": {"fp8": FP8Recipe("current", pad=True)}},
}


def engine_of(run: Run) -> tuple[Engine, Recording]:
    engine = make_engine(None, run)
    assert isinstance(engine.optimizer, Recording)
    return engine, engine.optimizer


@pytest.mark.cases(3, sample=1)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=list(NUMBERS))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_lies_among_the_gradients_before_a_step_is_of_no_matter(
    family: str, numbers: dict[str, Any]
) -> None:
    seen = []
    for spoilt in (True, False):
        run = Run(FAMILIES[family], **numbers, steps=2)
        engine, optimizer = engine_of(run)
        for number, batch in enumerate(batches(run)):
            if spoilt:
                spoil(optimizer)
            assert engine.step(share_of(None, batch), run.lr, number).outcome == "applied"
        seen.append([fragment for step in optimizer.seen for fragment in step])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one.values, other.values), one.name


def spoil(optimizer: ParallelAMPOptimizer) -> None:
    for parameter in (p for buffer in optimizer.all_buffers() for p in buffer.parameters):
        parameter.main_grad.fill_(NAN)  # type: ignore[attr-defined]


class Choosing(nn.Module):
    """Only one of two weights is used in a step; one of them by autograd twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))

    def forward(self, which: int) -> Tensor:
        weight = (self.first, self.second)[which]
        return (3 * weight).sum() + (4 * weight).sum()


def test_what_no_gradient_came_for_counts_as_zero_and_what_came_twice_is_added() -> None:
    model = Choosing()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), clip=0.0)
    for which in (0, 1, 1, 0):
        for _ in range(2):  # micro-batches
            model(which).backward()
        report = optimizer.step(1e-3)
        assert report.outcome == "applied" and report.num_zeros == 6
        assert report.grad_norm == pytest.approx(14 * 6**0.5)


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16, torch.float16])
def test_a_first_product_is_written_over_what_is_there(
    total: torch.dtype, factors: torch.dtype
) -> None:
    a, b = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(factors)
        for shape in ((5, 7), (7, 3))
    )
    over = torch.full((5, 3), NAN, dtype=total)
    added = torch.zeros(5, 3, dtype=total)
    add_product_(over, a, b, first=True)
    add_product_(added, a, b)
    assert torch.equal(over, added)
    nothing = torch.full((5, 3), NAN, dtype=total)
    add_product_(nothing, a[:, :0], b[:0], first=True)  # as of an expert that no token came to
    assert not nothing.count_nonzero()


def test_it_is_noticed_if_the_last_steps_gradients_are_added_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main_grad, "_forget", lambda slot: None)
    with pytest.raises(AssertionError):
        test_what_lies_among_the_gradients_before_a_step_is_of_no_matter("llama", NUMBERS["bf16"])


def test_it_is_noticed_if_what_no_gradient_came_for_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grad_sync, "zero_missing_grads", lambda parameters: None)
    with pytest.raises(AssertionError):
        test_what_no_gradient_came_for_counts_as_zero_and_what_came_twice_is_added()


class Widened(nn.Module):
    """A layer that adds its gradient to the main gradient by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ Widen.apply(self.weight, torch.float64).T


@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(2, 3).double(), Widened], ids=["of torch", "of ours"]
)
def test_gradients_from_two_threads_are_refused_also_by_the_step_that_would_lose_one(
    layer: Callable[[], nn.Module],
) -> None:
    model = layer()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp64"), lr=0.1)

    def backward() -> None:
        model(torch.ones(4, 2, dtype=torch.float64)).sum().backward()

    with ThreadPoolExecutor(1) as other:
        other.submit(backward).result()
        with raises("optimizer.backward_from_threads"):
            backward()
        with raises("optimizer.backward_from_threads"):
            optimizer.step()
        optimizer.zero_grad()
        other.submit(backward).result()
        assert optimizer.step().outcome == "applied"
        backward()
        assert optimizer.step().outcome == "applied", "each step may have a thread of its own"
    for _ in range(2):
        with ThreadPoolExecutor(1) as ended:
            ended.submit(backward).result()
    assert optimizer.step().outcome == "applied", "what has ended cannot write at the same time"
