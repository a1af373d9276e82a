"""The recurrence of Mamba-2 in chunks is that token by token, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.recurrent import state_space
from models.recurrent.state_space import StateSpaceInputs, chunked, recurrent
from tests.recurrent.test_delta_rule import LateDecays, WithoutState, assert_alike

Rule = Callable[[StateSpaceInputs, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Drawn:
    """Sizes of what tokens bring, and how wide the decays are spread."""

    samples: int
    groups: int
    group_size: int
    length: int
    state_dim: int
    value_dim: int
    chunk: int
    spread: float
    documents: float
    seed: int

    def inputs(self) -> tuple[StateSpaceInputs, Tensor]:
        """What tokens bring, and a state before them."""
        dice = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=dice, dtype=torch.float64)

        of_groups = (self.samples, self.groups, self.length, self.state_dim)
        of_heads = (self.samples, self.groups * self.group_size, self.length)
        begins = torch.rand(self.samples, self.length, generator=dice) < self.documents
        inputs = StateSpaceInputs(
            query=normal(*of_groups),
            key=normal(*of_groups),
            value=normal(*of_heads, self.value_dim),
            # decays near 0 and near 1
            step=(self.spread * normal(*of_heads)).exp(),
            rate=normal(of_heads[1]).exp(),
            begins=begins if self.documents else None,
        )
        return inputs, normal(*of_heads[:2], self.state_dim, self.value_dim)


DRAWN = st.builds(
    Drawn,
    samples=st.integers(1, 2),
    groups=st.integers(1, 3),
    group_size=st.integers(1, 3),
    length=st.integers(1, 40),
    state_dim=st.integers(1, 7),
    value_dim=st.integers(1, 7),
    chunk=st.integers(1, 17),
    spread=st.sampled_from((0.1, 1.0, 5.0)),
    documents=st.sampled_from((0.0, 0.1, 0.5)),
    seed=st.integers(0, 2**31),
)
ODD = Drawn(2, 2, 3, 37, 6, 5, 8, 3.0, 0.1, 7)


def results(rule: Rule, inputs: StateSpaceInputs, state: Tensor) -> Iterator[Tensor]:
    """Outputs, the last state, and the gradients of all that a rule reads, of a lively loss."""
    names = ("query", "key", "value", "step", "rate")
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


@settings(max_examples=20)
@given(DRAWN)
def test_chunks_compute_the_recurrence_and_its_gradients(drawn: Drawn) -> None:
    assert_chunks_are_the_recurrence(drawn)


@pytest.mark.slow
@settings(max_examples=300)
@given(DRAWN)
def test_many_chunks_compute_the_recurrence_and_its_gradients(drawn: Drawn) -> None:
    assert_chunks_are_the_recurrence(drawn)


def assert_chunks_are_the_recurrence(drawn: Drawn) -> None:
    inputs, state = drawn.inputs()
    found = [*results(partial(chunked, chunk=drawn.chunk), inputs, state)]
    assert_alike(found, [*results(recurrent, inputs, state)])


def test_the_state_is_a_decayed_sum_of_outer_products() -> None:
    """Written out as one matrix of tokens by tokens, without a state."""
    inputs, _ = replace(ODD, documents=0.0, spread=0.5).inputs()
    ages = (inputs.rate.unsqueeze(-1) * inputs.step).cumsum(-1)
    decay = (ages.unsqueeze(-2) - ages.unsqueeze(-1)).tril().exp().tril()
    scores = (inputs.query @ inputs.key.mT).repeat_interleave(3, 1)
    written = inputs.step.unsqueeze(-1) * inputs.value
    assert_alike([recurrent(inputs)[0]], [(scores * decay) @ written])


def test_a_decay_of_zero_and_one_is_exact() -> None:
    inputs, state = replace(ODD, documents=0.0).inputs()
    step = inputs.step.clone()
    step[:, :, 3::5] = 1e4
    step[:, :, 1::5] = 0.0
    inputs = replace(inputs, step=step, rate=torch.ones_like(inputs.rate))
    assert {0.0, 1.0} <= {*inputs.log_decay.exp().flatten().tolist()}
    found = [*results(partial(chunked, chunk=8), inputs, state)]
    assert all(values.isfinite().all() for values in found)
    assert_alike(found, [*results(recurrent, inputs, state)])


@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_two_parts_with_the_state_between_are_the_whole(rule: Any) -> None:
    inputs, state = ODD.inputs()
    whole, last = rule(inputs, state)
    begun, between = rule(parts_of(inputs, slice(17)), state)
    ended, end = rule(parts_of(inputs, slice(17, None)), between)
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


def parts_of(inputs: StateSpaceInputs, tokens: slice) -> StateSpaceInputs:
    begins = None if inputs.begins is None else inputs.begins[:, tokens]
    names = ("query", "key", "value", "step")
    parts = {name: getattr(inputs, name)[:, :, tokens] for name in names}
    return StateSpaceInputs(**parts, rate=inputs.rate, begins=begins)


@pytest.mark.parametrize("fault", [LateDecays, WithoutState])
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, state = ODD.inputs()
    monkeypatch.setattr(state_space, "Decays", fault)
    found: Sequence[Tensor] = [*results(partial(chunked, chunk=8), inputs, state)]
    with pytest.raises(AssertionError):
        assert_alike(found, [*results(recurrent, inputs, state)])
