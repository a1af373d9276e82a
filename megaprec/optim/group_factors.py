"""Which learning rate and weight decay each parameter gets, by patterns of logical names.

    Group("*.bias", lr=2.0)                   twice the learning rate for biases
    Group("embedding.*", weight_decay=0.0)    an embedding that does not decay

Both are factors of the optimizer's own values. The first group that matches a logical tensor decides; what it leaves
open is as for all others: biases, norms and whatever else has fewer than two dims do not decay. Groups belong to the
run, not to a checkpoint, which keeps state by logical name: other groups may be given when a run is taken up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from torch import nn

from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer


@dataclass(frozen=True)
class Group:
    """pattern: of logical names, with `fnmatch`'s wildcards. lr, weight_decay: factors; None as for all others."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name, factor in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if factor is not None and not 0 <= factor < inf:
                raise UserError(f'optimizer.groups: {name} = {factor} of pattern "{self.pattern}" must be 0 or more')


@dataclass(frozen=True)
class Slice:
    """Elements [first, last) of a buffer's own slice, and the factors that they share."""

    first: int
    last: int
    lr: float
    weight_decay: float


Factors = tuple[float, float]  # of learning rate and weight decay


def factors(part: Part, groups: Sequence[Group]) -> Factors:
    """What the learning rate and the weight decay of a logical tensor are multiplied by."""
    usual = 1.0 if len(part.shape) >= 2 else 0.0
    for group in groups:
        if fnmatchcase(part.name, group.pattern):
            decay = usual if group.weight_decay is None else group.weight_decay
            return 1.0 if group.lr is None else group.lr, decay
    return 1.0, usual


def by_factors(parameters: Sequence[nn.Parameter], groups: Sequence[Group]) -> list[nn.Parameter]:
    """Those with equal factors side by side, so that a buffer is cut into few slices; otherwise in their order."""
    kinds: dict[tuple[Factors, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(tuple(factors(part, groups) for part in layout_of(parameter).parts), []).append(parameter)
    return [parameter for alike in kinds.values() for parameter in alike]


def slices(buffer: Buffer, groups: Sequence[Group]) -> Iterator[Slice]:
    """The own slice cut where the factors change. Padding goes with what lies before it: it holds only zeros."""
    pieces = [(piece.start, factors(piece.part, groups)) for piece in buffer.pieces if piece.start < piece.stop]
    borders = [n for n in range(len(pieces)) if n == 0 or pieces[n][1] != pieces[n - 1][1]]
    for border, following in zip(borders, [*borders[1:], None], strict=False):  # a rank may hold nothing but padding
        first = max(pieces[border][0], buffer.first)
        last = min(buffer.size if following is None else pieces[following][0], buffer.last)
        if first < last:
            yield Slice(first - buffer.first, last - buffer.first, *pieces[border][1])
