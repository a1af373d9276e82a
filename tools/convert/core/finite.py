"""NaN and infinity among the numbers of a model: counted as tensors pass, told by name, and alike
in copies.

A conversion leaves them as they are, since a damaged model may be worth a look, but not without a
word.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tools.convert.core.tensors import torch_name

MOST_NAMED = 5  # tensors that are told by name, so that the notes of a damaged model stay readable


class NotFinite:
    """The counts of numbers that are NaN or infinite, by key."""

    def __init__(self) -> None:
        # Of a tensor's numbers: how many are not finite, and how many there are.
        self.counts: dict[str, tuple[int, int]] = {}

    def seen(self, tensor_key: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the pieces of a tensor as they are, and count what is not finite in them."""
        bad_count = 0
        total = 0
        for piece in pieces:
            bad_count += not_finite(piece)
            total += piece.numel()
            yield piece
        if bad_count:
            self.counts[tensor_key] = bad_count, total

    def lines(self, casts: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> list[str]:
        """Return a line for each of the first tensors with such numbers. casts: key, dtype before
        and dtype after."""
        by_key: dict[str, str] = {}
        for tensor_key, (bad_count, total) in self.counts.items():
            by_key[tensor_key] = (
                f"{tensor_key} has {bad_count:,} of {total:,} numbers that are NaN or infinite"
            )
        for tensor_key, before, after in casts:
            # The cast itself may have made infinities: FP16 ends at 65,504.
            if tensor_key in by_key and before != after:
                by_key[tensor_key] += f", as {torch_name(after)}; it was {torch_name(before)}"
        lines = list(by_key.values())
        unnamed = len(lines) - MOST_NAMED
        if unnamed > 0:
            lines = lines[:MOST_NAMED]
            lines.append(f"... and {unnamed} more tensors with such numbers")
        return lines


def same_values(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have one dtype and the same numbers, NaN where the other has NaN:
    copies of a damaged tensor are copies."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if torch.equal(first, second):
        return True
    if not first.is_floating_point():
        return False  # integers have no NaN
    if first.dtype.itemsize == 1:
        # of FP8 torch compares only whole tensors: here the bits are, of NaNs too
        return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    both_nan = first.isnan() & second.isnan()
    return bool(((first == second) | both_nan).all())


def not_finite(values: Tensor) -> int:
    """Return how many numbers are NaN or infinite.

    A sum is finite only if all of its addends are, and takes a tenth of the time, so numbers are
    looked at one by one only where the sum is not (or has overflowed).
    """
    if not values.is_floating_point() or values.sum().isfinite():
        return 0
    is_bad = ~values.isfinite()
    return int(is_bad.sum())
