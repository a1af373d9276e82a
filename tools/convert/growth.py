"""Rows of embedding and output head for tokens that weights do not know (train.grow_vocabulary).

A new token is an id that the model of the run has and its first weights do not: an id beyond their
rows, or one that only the run's tokenizer has a token for, whose row was padding in the weights.
All other rows stay as they are, to the bit. What a new row is depends on the logical tensor alone,
so it is the same in every layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaprec.checkpoint.save_load import Weights
from megaprec.comm.layout import Part
from megaprec.errors import Problem
from megaprec.precision.plan import PrecisionPlan
from megaprec.text.tokenizer import Tokenizer
from tools.convert.core.slices import Slices

GROWN = ("embedding.weight", "head.weight")
"""Tensors with a row for each token; a tied head is the first."""
BLOCK = 1024  # rows that are added at once, a power of two


@dataclass(frozen=True)
class VocabularyGrowth:
    """Rows for new tokens.

    kind: of train.grow_vocabulary.
    rows: how many the weights have.
    known: bool [rows], True for rows of tokens that the weights know.
    new: bool [vocabulary of the run], True for rows that are made.
    """

    kind: Literal["mean", "zero", "random"]
    rows: int
    known: Tensor
    new: Tensor

    @classmethod
    def between(
        cls,
        kind: Literal["mean", "zero", "random"],
        rows: int,
        vocab: int,
        old: Tokenizer | None,
        new: Tokenizer | None,
    ) -> "VocabularyGrowth":
        """Return the growth from `rows` to `vocab` rows.

        old: the tokenizer of the weights; None if it is not known, and then each row is a token's.
        new: the tokenizer of the run, if it has one.
        """
        known = _ids_of(old, rows) if old else torch.ones(rows, dtype=torch.bool)
        # all rows beyond those of the weights are new
        is_new = torch.ones(vocab, dtype=torch.bool)
        is_new[:rows] = False
        # rows of padding become those of tokens only if the run has such tokens
        if new:
            is_new[:rows] = ~known & _ids_of(new, rows)
        return cls(kind, rows, known, is_new)

    def describe(self) -> str:
        """Return the new rows in words: how many, of which ids, and what they are."""
        ids = self.new.nonzero().flatten().tolist()
        first_id = ids[0]
        span = f"id {first_id}" if len(ids) == 1 else f"ids {first_id} to {ids[-1]}"
        num_known = int(self.known.sum())
        values = {
            "mean": f"the mean of the rows of {num_known:,} known tokens",
            "zero": "zero",
            "random": "drawn as initial weights are",
        }
        return f"{len(ids):,} rows for new tokens ({span}): {values[self.kind]}"


def _ids_of(tokenizer: Tokenizer, rows: int) -> Tensor:
    """Return bool [rows], True for ids that a token of the tokenizer has."""
    distinct_ids = set(tokenizer.vocabulary().values())
    ids = torch.tensor(sorted(distinct_ids))
    ids_with_row = ids[ids < rows]
    has_token = torch.zeros(rows, dtype=torch.bool)
    has_token[ids_with_row] = True
    return has_token


def moved_tokens(old: Tokenizer, new: Tokenizer) -> Iterator[Problem]:
    """Yield a problem unless each token of `old` has its id in `new` too."""
    old_ids = old.vocabulary()
    new_ids = new.vocabulary()
    moved: list[tuple[int, str]] = []
    for token, token_id in old_ids.items():
        if new_ids.get(token) != token_id:
            moved.append((token_id, token))
    if not moved:
        return
    # one stands for all: that of the lowest id
    token_id, token = min(moved)
    now = f"token {new_ids[token]}" if token in new_ids else "not there"
    yield Problem.of(
        "training.tokens_moved",
        tokenizer=new.path,
        weights_tokenizer=old.path,
        count=len(moved),
        tokens=len(old_ids),
        id=token_id,
        token=repr(token),
        now=now,
    )


class GrownWeights:
    """A source of slices of weights with rows for new tokens.

    slices: the weights. drawn: initial weights of the run's model, needed if rows are random.
    """

    def __init__(
        self, slices: Slices, growth: VocabularyGrowth, plan: PrecisionPlan, drawn: Weights | None
    ) -> None:
        self._slices = slices
        self._growth = growth
        self._plan = plan
        self._drawn = drawn
        self._means: dict[str, Tensor] = {}  # float64 [hidden], by name

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        """Return elements [first, last) of the flattened slice `part`, of rows that may be new in
        the dtype of masters."""
        if part.name not in GROWN:
            return self._slices.read_range(kind, part, first, last)
        _, hidden = part.shape
        # whole rows, of which what was not asked for is cut off
        first_row = first // hidden
        end_row = -(-last // hidden)  # rounded up
        # numbered in the logical tensor, of which the slice has the rows from `part.start` on
        rows = self._rows(part, part.start + first_row, part.start + end_row)
        elements = rows.reshape(-1)
        skipped = first_row * hidden
        return elements[first - skipped : last - skipped]

    def _rows(self, part: Part, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom) of a logical tensor that grows: [bottom - top, hidden], in the
        wider of the dtypes of masters and weights."""
        _, hidden = part.shape
        weight_dtype = self._plan.param_dtype(part.name)
        wider_dtype = max(self._plan.masters, weight_dtype, key=lambda dtype: dtype.itemsize)
        rows = torch.empty(bottom - top, hidden, dtype=wider_dtype)
        old_bottom = min(bottom, self._growth.rows)
        if top < old_bottom:
            num_old = old_bottom - top
            rows[:num_old] = self._old_rows(part, top, old_bottom)
        is_new = self._growth.new[top:bottom]
        if is_new.any():
            made = self._new_rows(part, top, bottom)
            rows[is_new] = made[is_new].to(wider_dtype)
        return rows

    def _old_rows(self, part: Part, top: int, bottom: int) -> Tensor:
        """Return rows [top, bottom) of a tensor as the weights have it, in their dtype."""
        _, hidden = part.shape
        whole = Part(part.name, (self._growth.rows, hidden))
        rows = self._slices.read_range("weight", whole, top * hidden, bottom * hidden)
        return rows.view(-1, hidden)

    def _new_rows(self, part: Part, top: int, bottom: int) -> Tensor:
        """Return [bottom - top, hidden]: what each of the rows [top, bottom) is if it is new."""
        _, hidden = part.shape
        if self._growth.kind == "random":
            assert self._drawn is not None
            whole = Part(part.name, part.shape)
            drawn = self._drawn.read_range("weight", whole, top * hidden, bottom * hidden)
            return drawn.view(-1, hidden)
        if self._growth.kind == "zero":
            return torch.zeros(bottom - top, hidden)
        if part.name not in self._means:
            self._means[part.name] = self._mean(part)
        mean = self._means[part.name]
        return mean.expand(bottom - top, hidden)

    def _mean(self, part: Part) -> Tensor:
        """Return float64 [hidden], the mean of the rows of known tokens.

        Each rank adds all rows of the tensor, in one order that no layout and no number of threads
        changes.
        """
        _, hidden = part.shape
        known = self._growth.known
        total = torch.zeros(hidden, dtype=torch.float64)
        for top in range(0, self._growth.rows, BLOCK):
            bottom = min(top + BLOCK, self._growth.rows)
            block = torch.zeros(BLOCK, hidden, dtype=torch.float64)
            filled = block[: bottom - top]
            filled.copy_(self._old_rows(part, top, bottom))
            is_padding = ~known[top:bottom]
            filled[is_padding] = 0
            # halves are added until one row is left
            while len(block) > 1:
                half = len(block) // 2
                block = block[:half] + block[half:]
            total += block[0]
        return total / known.sum()
