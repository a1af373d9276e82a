"""Factors of learning rate and weight decay for each parameter, by patterns of logical names.

    Group("*.bias", lr=2.0)                   twice the learning rate for biases
    Group("embedding.*", weight_decay=0.0)    an embedding that does not decay

Both are factors of the optimizer's own values. The first group that matches a logical tensor
applies; a factor that it leaves out keeps its default: biases, norms and all other tensors with
fewer than two dims do not decay. Groups belong to the run and not to a checkpoint, which stores
state by logical name: a resumed run may have other groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megaprec.comm.layout import Part, layout_of
from megaprec.errors import UserError
from megaprec.kinds import is_number
from megaprec.optim.flat_buffer import Buffer


@dataclass(frozen=True)
class Group:
    """Factors for the logical tensors that match a pattern.

    pattern: of logical names, with `fnmatch`'s wildcards. lr, weight_decay: factors; None for the
        default.
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise UserError(
                f"optimizer.groups: pattern = {self.pattern!r:.60}: must be text, a pattern "
                "of logical names"
            )
        for name, factor in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if factor is not None and not (is_number(factor) and factor >= 0):
                raise UserError(
                    f'optimizer.groups: {name} = {factor} of pattern "{self.pattern}" must be '
                    "0 or more"
                )


@dataclass(frozen=True)
class Slice:
    """Elements [first, last) of a buffer's own slice, and the factors that they share."""

    first: int
    last: int
    lr: float
    weight_decay: float


Factors = tuple[float, float]  # factors of learning rate and weight decay


def factors(part: Part, groups: Sequence[Group]) -> Factors:
    """Return the factors of learning rate and weight decay for a logical tensor."""
    usual = 1.0 if len(part.shape) >= 2 else 0.0
    for group in groups:
        if fnmatchcase(part.name, group.pattern):
            decay = usual if group.weight_decay is None else group.weight_decay
            return 1.0 if group.lr is None else group.lr, decay
    return 1.0, usual


def by_factors(parameters: Sequence[nn.Parameter], groups: Sequence[Group]) -> list[nn.Parameter]:
    """Return the parameters, those with equal factors side by side, so that a buffer has few
    slices."""
    kinds: dict[tuple[Factors, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(
            tuple(factors(part, groups) for part in layout_of(parameter).parts), []
        ).append(parameter)
    return [parameter for alike in kinds.values() for parameter in alike]


def slices(buffer: Buffer, groups: Sequence[Group]) -> Iterator[Slice]:
    """Yield this rank's slice of the buffer, cut where the factors change.

    Padding belongs to the slice before it, because it holds only zeros.
    """
    pieces = [
        (piece.start, factors(piece.part, groups))
        for piece in buffer.pieces
        if piece.start < piece.stop
    ]
    borders = [n for n in range(len(pieces)) if n == 0 or pieces[n][1] != pieces[n - 1][1]]
    for border, following in zip(
        borders, [*borders[1:], None], strict=False
    ):  # a rank may hold only padding
        first = max(pieces[border][0], buffer.first)
        last = min(buffer.size if following is None else pieces[following][0], buffer.last)
        if first < last:
            yield Slice(first - buffer.first, last - buffer.first, *pieces[border][1])
