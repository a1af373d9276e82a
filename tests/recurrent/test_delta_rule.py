"""The gated delta rule in chunks is the recurrence, forward and backward, and so is the convolution
before it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.recurrent import delta_rule
from models.recurrent.decays import Decays
from models.recurrent.delta_rule import DeltaInputs, chunked, recurrent
from models.recurrent.short_convolution import short_convolution

CLOSE = 1e-12  # of the largest element
Rule = Callable[[DeltaInputs, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Drawn:
    """Sizes of what tokens bring, and how wide the decays and strengths are spread."""

    samples: int
    heads: int
    length: int
    key_dim: int
    value_dim: int
    chunk: int
    spread: float
    documents: float
    seed: int

    def inputs(self) -> tuple[DeltaInputs, Tensor]:
        """What tokens bring, and a state before them."""
        dice = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=dice, dtype=torch.float64)

        of_heads = (self.samples, self.heads, self.length)
        begins = torch.rand(self.samples, self.length, generator=dice) < self.documents
        inputs = DeltaInputs(
            query=F.normalize(normal(*of_heads, self.key_dim), dim=-1),
            key=F.normalize(normal(*of_heads, self.key_dim), dim=-1),
            value=normal(*of_heads, self.value_dim),
            # decays and strengths near 0 and near 1
            log_decay=-(self.spread * normal(*of_heads)).exp(),
            strength=(self.spread * normal(*of_heads)).sigmoid(),
            begins=begins if self.documents else None,
        )
        return inputs, normal(self.samples, self.heads, self.key_dim, self.value_dim)


DRAWN = st.builds(
    Drawn,
    samples=st.integers(1, 2),
    heads=st.integers(1, 3),
    length=st.integers(1, 40),
    key_dim=st.integers(1, 7),
    value_dim=st.integers(1, 7),
    chunk=st.integers(1, 17),
    spread=st.sampled_from((0.1, 1.0, 5.0)),
    documents=st.sampled_from((0.0, 0.1, 0.5)),
    seed=st.integers(0, 2**31),
)
ODD = Drawn(2, 3, 37, 6, 5, 8, 3.0, 0.1, 7)


def results(rule: Rule, inputs: DeltaInputs, state: Tensor) -> Iterator[Tensor]:
    """Outputs, the last state, and the gradients of all that a rule reads, of a lively loss."""
    names = ("query", "key", "value", "log_decay", "strength")
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
    before = state.detach().requires_grad_()
    outputs, last = rule(replace(inputs, **leaves), before)
    yield outputs.detach()
    yield last.detach()
    dice = torch.Generator().manual_seed(3)
    loss = torch.zeros((), dtype=torch.float64)
    for made in (outputs, last):
        loss = loss + (made * torch.randn(made.shape, generator=dice, dtype=made.dtype)).sum()
    yield from torch.autograd.grad(loss, [*leaves.values(), before])


def assert_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        distance = (ours - plain).abs().max()
        assert distance <= CLOSE * max(1.0, plain.abs().max().item()), (number, distance)


@settings(max_examples=20)
@given(DRAWN)
def test_chunks_compute_the_recurrence_and_its_gradients(drawn: Drawn) -> None:
    assert_chunks_are_the_recurrence(drawn)


@pytest.mark.slow
@settings(max_examples=400)
@given(DRAWN)
def test_many_chunks_compute_the_recurrence_and_its_gradients(drawn: Drawn) -> None:
    assert_chunks_are_the_recurrence(drawn)


def assert_chunks_are_the_recurrence(drawn: Drawn) -> None:
    inputs, state = drawn.inputs()

    def in_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(inputs, state, drawn.chunk)

    found = [*results(in_chunks, inputs, state)]
    assert_alike(found, [*results(recurrent, inputs, state)])


def test_a_decay_of_zero_and_one_is_exact() -> None:
    inputs, state = replace(ODD, documents=0.0).inputs()
    log_decay = inputs.log_decay.clone()
    log_decay[:, :, 3::5] = -torch.inf
    log_decay[:, :, 1::5] = 0.0
    inputs = replace(inputs, log_decay=log_decay)
    found = [*results(partial(chunked, chunk=8), inputs, state)]
    expected = [*results(recurrent, inputs, state)]
    assert all(values.isfinite().all() for values in found)
    assert_alike(found, expected)


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_two_parts_with_the_state_between_are_the_whole(rule: Any) -> None:
    inputs, state = ODD.inputs()
    whole, last = rule(inputs, state)
    cut = 17
    first = parts_of(inputs, slice(cut))
    second = parts_of(inputs, slice(cut, None))
    begun, between = rule(first, state)
    ended, end = rule(second, between)
    assert_alike([torch.cat((begun, ended), 2), end], [whole, last])


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_a_document_computes_what_it_does_alone(rule: Any) -> None:
    inputs, state = replace(ODD, samples=1, documents=0.0).inputs()
    starts = [0, 5, 6, 22, ODD.length]
    begins = torch.zeros(1, ODD.length, dtype=torch.bool)
    begins[0, starts[:-1]] = True
    packed, last = rule(replace(inputs, begins=begins), state)
    alone = [rule(parts_of(inputs, slice(start, stop)), None) for start, stop in pairwise(starts)]
    outputs = torch.cat([one for one, _ in alone], 2)
    assert_alike([packed, last], [outputs, alone[-1][1]])


def parts_of(inputs: DeltaInputs, tokens: slice) -> DeltaInputs:
    begins = None if inputs.begins is None else inputs.begins[:, tokens]
    return DeltaInputs(
        query=inputs.query[:, :, tokens],
        key=inputs.key[:, :, tokens],
        value=inputs.value[:, :, tokens],
        log_decay=inputs.log_decay[:, :, tokens],
        strength=inputs.strength[:, :, tokens],
        begins=begins,
    )


def test_single_precision_is_close_for_strong_decays_before_weak_ones() -> None:
    """Differences of sums from the beginning of a chunk would lose the weak ones."""
    inputs, state = replace(ODD, length=64, documents=0.0).inputs()
    log_decay = inputs.log_decay.clone().fill_(-1e-3)
    log_decay[:, :, :8] = -1e4
    exact, _ = recurrent(replace(inputs, log_decay=log_decay), state)
    narrow = {name: getattr(inputs, name).float() for name in ("query", "key", "value", "strength")}
    found, _ = chunked(DeltaInputs(log_decay=log_decay.float(), **narrow), state.float())
    assert (found.double() - exact).abs().max() < 1e-5 * exact.abs().max()


class LateDecays(Decays):
    """The decay of a token is that of the one before it."""

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> Decays:
        late = F.pad(log_decay, (1, 0))[..., :-1]
        return Decays.of(late, begins, chunk)


class WithoutState(Decays):
    """What a chunk leaves does not reach the next one."""

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> Decays:
        decays = Decays.of(log_decay, begins, chunk)
        return replace(decays, from_before=torch.zeros_like(decays.from_before))


@pytest.mark.parametrize("fault", [LateDecays, WithoutState])
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, state = ODD.inputs()
    monkeypatch.setattr(delta_rule, "Decays", fault)
    found = [*results(partial(chunked, chunk=8), inputs, state)]
    with pytest.raises(AssertionError):
        assert_alike(found, [*results(recurrent, inputs, state)])


@settings(max_examples=15)
@given(DRAWN, st.integers(1, 6))
def test_the_convolution_is_that_of_torch_document_by_document(drawn: Drawn, kernel: int) -> None:
    dice = torch.Generator().manual_seed(drawn.seed)
    features = 4
    length = drawn.length
    x = torch.randn(length, 1, features, generator=dice, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(features, kernel, generator=dice, dtype=torch.float64, requires_grad=True)
    begins = torch.rand(1, length, generator=dice) < drawn.documents
    starts = [0, *(begins[0, 1:].nonzero().flatten() + 1).tolist()]
    found = short_convolution(x, weight, begins=begins if drawn.documents else None)
    alone = [
        convolved_by_torch(x[start:stop], weight) for start, stop in pairwise([*starts, length])
    ]
    expected = torch.cat(alone)
    grad = torch.randn(expected.shape, generator=dice, dtype=torch.float64)
    ours = torch.autograd.grad((found * grad).sum(), (x, weight))
    theirs = torch.autograd.grad((expected * grad).sum(), (x, weight))
    assert_alike([found, *ours], [expected, *theirs])


def convolved_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    features, kernel = weight.shape
    padded = F.pad(x.permute(1, 2, 0), (kernel - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=features).permute(2, 0, 1)


def test_a_convolution_goes_on_from_the_tokens_before() -> None:
    x = torch.randn(9, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = short_convolution(x, weight)
    assert_alike([short_convolution(x[5:], weight, x[2:5])], [whole[5:]])
