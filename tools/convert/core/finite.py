"""NaN and infinity among the numbers of a model: counted as tensors pass, told by name, and alike
in copies.

A conversion leaves them as they are, since a damaged model may be worth a look, but not without a
word.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

MOST = 5  # tensors that are told by name


class NotFinite:
    """The counts of numbers that are NaN or infinite, by key."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}  # of the numbers of a tensor: those, and all

    def seen(self, key: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Pass the pieces of a tensor through, and count in them."""
        wrong = every = 0
        for piece in pieces:
            wrong = wrong + not_finite(piece)
            every = every + piece.numel()
            yield piece
        if wrong:
            self.counts[key] = wrong, every

    def lines(self, casts: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> list[str]:
        """Return a line for each of the first tensors with such numbers. casts: key, dtype before
        and dtype after."""
        changed = {key: (before, after) for key, before, after in casts if before != after}
        said = [
            (
                f"{key} has {wrong:,} of {every:,} numbers that are NaN or "
                f"infinite{_cast(changed.get(key))}"
            )
            for key, (wrong, every) in self.counts.items()
        ]
        if len(said) > MOST:
            more = [f"... and {len(said) - MOST} more tensors with such numbers"]
        else:
            more = []
        return said[:MOST] + more


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have one dtype and the same numbers, NaN where the other has NaN:
    copies of a damaged tensor are copies."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    wide = one.is_floating_point() and one.dtype.itemsize > 1
    return wide and bool(((one == other) | (one.isnan() & other.isnan())).all())


def not_finite(values: Tensor) -> int:
    """Return how many numbers are NaN or infinite.

    A sum is finite only if all of its addends are, and takes a tenth of the time, so numbers are
    looked at one by one only where the sum is not (or has overflowed).
    """
    if not values.is_floating_point() or values.sum().isfinite():
        return 0
    return int((~values.isfinite()).sum())


def _cast(dtypes: tuple[torch.dtype, torch.dtype] | None) -> str:
    if dtypes is None:
        return ""
    before, after = (str(one).removeprefix("torch.") for one in dtypes)
    return f", as {after}; it was {before}"
