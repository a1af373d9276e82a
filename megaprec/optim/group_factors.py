"""Factors of learning rate and weight decay for each parameter, by patterns of logical names.

    Group("*.bias", lr=2.0)                   twice the learning rate for biases
    Group("embedding.*", weight_decay=0.0)    an embedding that does not decay

Both are factors of the optimizer's own values. The first group that matches a logical tensor
applies; a factor that it leaves out keeps its default: biases, norms and all other tensors with
fewer than two dims do not decay. Groups belong to the run and not to a checkpoint, which stores
state by logical name: a resumed run may have other groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

from torch import nn

from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from megaprec.kinds import is_number
from megaprec.optim.flat_buffer import Buffer


@dataclass(frozen=True)
class Group:
    """Factors for the logical tensors that match a pattern.

    pattern: of logical names, with `fnmatch`'s wildcards.
    lr, weight_decay: factors; None for the default.
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise UserError.of("optimizer.group_pattern", pattern=self.pattern)
        for name, factor in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if factor is not None and not (is_number(factor) and factor >= 0):
                raise UserError.of(
                    "optimizer.group_factor", name=name, factor=factor, pattern=self.pattern
                )


class Factors(NamedTuple):
    """Factors of learning rate and weight decay."""

    lr: float
    weight_decay: float


UNSCALED = Factors(1.0, 1.0)  # of a tensor that the optimizer's own values apply to


@dataclass(frozen=True)
class Slice:
    """Elements [first, last) of a buffer's own slice, and the factors that they share."""

    first: int
    last: int
    factors: Factors


def factors(part: Part, groups: Sequence[Group]) -> Factors:
    """Return the factors of learning rate and weight decay for a logical tensor."""
    # biases, norms and other vectors do not decay
    default_decay = 1.0 if len(part.shape) >= 2 else 0.0
    for group in groups:
        if fnmatchcase(part.name, group.pattern):
            return Factors(
                lr=1.0 if group.lr is None else group.lr,
                weight_decay=default_decay if group.weight_decay is None else group.weight_decay,
            )
    return Factors(1.0, default_decay)


def by_factors(parameters: Sequence[nn.Parameter], groups: Sequence[Group]) -> list[nn.Parameter]:
    """Return the parameters, those with equal factors side by side, so that a buffer has few
    slices."""
    with_factors: dict[tuple[Factors, ...], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        of_parts = tuple(factors(part, groups) for part in layout_of(parameter).parts)
        with_factors[of_parts].append(parameter)
    return list(chain.from_iterable(with_factors.values()))


def slices(buffer: Buffer, groups: Sequence[Group]) -> Iterator[Slice]:
    """Yield this rank's slice of the buffer, cut where the factors change.

    Padding belongs to the slice before it, because it holds only zeros.
    """
    # spans of equal factors in the whole buffer: the first element, and the factors
    spans: list[tuple[int, Factors]] = []
    for piece in buffer.pieces:
        if piece.start == piece.stop:
            continue
        of_piece = factors(piece.part, groups)
        if not spans or spans[-1][1] != of_piece:
            spans.append((piece.start, of_piece))
    ends = [start for start, _ in spans[1:]] + [buffer.size]
    # strict=False: a buffer may hold only padding
    for (start, of_span), end in zip(spans, ends, strict=False):
        first = max(start, buffer.first)
        last = min(end, buffer.last)
        if first < last:
            yield Slice(first - buffer.first, last - buffer.first, of_span)
