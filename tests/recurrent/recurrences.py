"""Recurrences, their inputs drawn at random, and what is compared of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from models.recurrent import delta_rule, state_space
from models.recurrent.decays import Decays
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.row_decays import RowDecays
from models.recurrent.state_space import StateSpaceInputs

CLOSE = 1e-12  # of the largest element
Inputs = Any
Rule = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DrawnDelta:
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
    by_row: bool = False  # each row of a state has a decay of its own

    def inputs(self) -> tuple[DeltaInputs, Tensor]:
        """What tokens bring, and a state before them."""
        dice = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=dice, dtype=torch.float64)

        of_heads = (self.samples, self.heads, self.length)
        begins = torch.rand(self.samples, self.length, generator=dice) < self.documents
        of_decays = (*of_heads, self.key_dim) if self.by_row else of_heads
        inputs = DeltaInputs(
            query=F.normalize(normal(*of_heads, self.key_dim), dim=-1),
            key=F.normalize(normal(*of_heads, self.key_dim), dim=-1),
            value=normal(*of_heads, self.value_dim),
            # decays and strengths near 0 and near 1
            log_decay=-(self.spread * normal(*of_decays)).exp(),
            strength=(self.spread * normal(*of_heads)).sigmoid(),
            begins=begins if self.documents else None,
        )
        return inputs, normal(self.samples, self.heads, self.key_dim, self.value_dim)


DELTAS = st.builds(
    DrawnDelta,
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
ODD_DELTA = DrawnDelta(2, 3, 37, 6, 5, 8, 3.0, 0.1, 7)
BY_ROW = st.builds(
    replace,
    DELTAS,
    chunk=st.sampled_from((1, 2, 4, 8, 16, 32)),
    by_row=st.just(True),
)
ODD_BY_ROW = replace(ODD_DELTA, by_row=True)


@dataclass(frozen=True)
class DrawnStateSpace:
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


STATE_SPACES = st.builds(
    DrawnStateSpace,
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
ODD_STATE_SPACE = DrawnStateSpace(2, 2, 3, 37, 6, 5, 8, 3.0, 0.1, 7)


@dataclass(frozen=True)
class Recurrence:
    """A recurrence, token by token and in chunks.

    module: has both, as `recurrent` and `chunked`.
    drawn, odd: sizes drawn at random, and some that are odd.
    decays: the name of its class of decays in the module.
    of_tokens, of_heads: names of inputs that each token has, and of those that a head has.
    """

    module: ModuleType
    drawn: st.SearchStrategy[Any]
    odd: Any
    decays: str
    of_tokens: tuple[str, ...]
    of_heads: tuple[str, ...] = ()

    def results(self, rule: Rule, inputs: Inputs, state: Tensor) -> Iterator[Tensor]:
        """Outputs, the last state, and the gradients of all that a rule reads, of a lively loss."""
        names = (*self.of_tokens, *self.of_heads)
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

    def part(self, inputs: Inputs, tokens: slice) -> Inputs:
        """The inputs of some tokens."""
        parts = {name: getattr(inputs, name)[:, :, tokens] for name in self.of_tokens}
        begins = None if inputs.begins is None else inputs.begins[:, tokens]
        return replace(inputs, **parts, begins=begins)


OF_DELTA_RULE = ("query", "key", "value", "log_decay", "strength")
RECURRENCES = {
    "delta rule": Recurrence(delta_rule, DELTAS, ODD_DELTA, "Decays", OF_DELTA_RULE),
    "delta rule by row": Recurrence(delta_rule, BY_ROW, ODD_BY_ROW, "RowDecays", OF_DELTA_RULE),
    "state space": Recurrence(
        state_space,
        STATE_SPACES,
        ODD_STATE_SPACE,
        "Decays",
        ("query", "key", "value", "step"),
        ("rate",),
    ),
}


def assert_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        distance = (ours - plain).abs().max()
        assert distance <= CLOSE * max(1.0, plain.abs().max().item()), (number, distance)


class LateDecays(Decays):
    """The decay of a token is that of the one before it."""

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> Any:
        by_row = log_decay.dim() > 3
        late = log_decay.roll(1, 2)
        late[:, :, 0] = 0
        return (RowDecays if by_row else Decays).of(late, begins, chunk)


class WithoutState(Decays):
    """What a chunk leaves does not reach the next one."""

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> Any:
        by_row = log_decay.dim() > 3
        decays = (RowDecays if by_row else Decays).of(log_decay, begins, chunk)
        return replace(decays, from_before=torch.zeros_like(decays.from_before))
