"""Samples: the token stream cut into training examples.

Sample `i` is the tokens [i * seq, i * seq + seq + 1) of the stream: `seq` inputs and, one further, their `seq`
targets. Neighbours share one token, the last target of one being the first input of the next, so every token but
the first is a target exactly once an epoch.

A run consumes positions 0, 1, 2, …, over epochs without end; position → sample is `order`'s pure function. A rank
asks for the positions that are its own, and what it gets depends on nothing else.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megaprec.data.indexed import IndexedDataset
from megaprec.data.order import order
from megaprec.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """Training examples, ready for a model.

    tokens, targets: int64 [count, seq]; ids: int64 [count], each sample's number in the whole stream, the same in
    every epoch and layout; mask: float32 [count, seq], 1 where the target counts in the loss, or None where all do.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor | None


class Samples:
    """The samples [first, first + count) of a data set (by default all that fit), in an order set by `seed`.

    `mask_after`: a token id, usually eos, after which nothing can be predicted because another document begins:
    targets that follow it are left out of the loss (Megatron's eod_mask_loss).
    `UserError` if there is no sample at all.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        seed: int,
        shuffle: bool,
        first: int = 0,
        count: int | None = None,
        mask_after: int | None = None,
    ) -> None:
        self._count = count_samples(dataset, seq_length) - first if count is None else count
        if self._count < 1:
            raise _too_short(dataset, seq_length, first + 1)
        self._dataset, self._seq_length, self._first = dataset, seq_length, first
        self._seed, self._shuffle, self._mask_after = seed, shuffle, mask_after

    def __len__(self) -> int:
        """Samples in one epoch."""
        return self._count

    def batch(self, position: int, count: int) -> Batch:
        """The samples at positions [position, position + count) of the run, which goes on over epochs."""
        positions = np.arange(position, position + count, dtype=np.int64)
        ids = self._first + order(positions, self._count, self._seed, self._shuffle)
        seq = self._seq_length
        rows = np.empty((count, seq + 1), dtype=np.int64)
        for row, sample in zip(rows, ids, strict=True):
            row[:] = self._dataset.tokens(int(sample) * seq, seq + 1)
        text = torch.from_numpy(rows)
        tokens = text[:, :-1].contiguous()
        mask = None if self._mask_after is None else (tokens != self._mask_after).float()
        return Batch(tokens, text[:, 1:].contiguous(), torch.from_numpy(ids), mask)


def split(
    dataset: IndexedDataset,
    seq_length: int,
    held_out: float,
    seed: int,
    shuffle: bool = True,
    mask_after: int | None = None,
) -> tuple[Samples, Samples | None]:
    """Samples to train on, and the last `held_out` fraction of the stream to evaluate on, in file order.

    At least one sample is held out, unless the fraction is 0: then the second is None. No token is a target in
    both. `UserError` if the fraction is outside [0, 1) or the text too short for a sample of each.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"a held-out fraction of {held_out} is not possible; it is at least 0 and below 1")
    total = count_samples(dataset, seq_length)
    held = max(1, round(total * held_out)) if held_out else 0
    if total < min(held, 1) + 1:
        raise _too_short(dataset, seq_length, min(held, 1) + 1)
    train = max(1, total - held)
    samples = Samples(dataset, seq_length, seed, shuffle, 0, train, mask_after)
    return samples, Samples(dataset, seq_length, seed, False, train, total - train, mask_after) if held else None


def count_samples(dataset: IndexedDataset, seq_length: int) -> int:
    """Samples that fit into the stream; the last target needs one token more."""
    return max(0, dataset.num_tokens - 1) // seq_length


def _too_short(dataset: IndexedDataset, seq_length: int, samples: int) -> UserError:
    return UserError(
        f"{dataset.prefix} has {dataset.num_tokens} tokens, but {samples} sample(s) of sequence length {seq_length} "
        f"need {samples * seq_length + 1}; give more text or a shorter sequence"
    )
