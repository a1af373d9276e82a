"""Who holds which part of a parameter: one frozen value, attached to every parameter.

A model has *logical tensors*: named, unpadded, the same for every layout. What a rank holds is a `Parameter`
made of slices of logical tensors, stacked along dim 0 (query, key and value share one weight so that they
share one product). A `Layout` says which slices, and everything that must know who holds what reads it and
nothing else: initial weights, norms and zero counts, ZeRO slices, checkpoints, converters, parity.

Three facts cannot be seen from a parameter's shape and are stated here: a slice may be held by several tp
ranks (`copies`), each copy's gradient may be only a share of the whole (`partial`), and a whole parameter
may be held by several pipeline ranks (`tied`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from megaprec.comm.axis import Axis


@dataclass(frozen=True)
class Part:
    """The slice of one logical tensor that a tp rank holds.

    name, shape: of the logical tensor, without padding.
    dim: the dim that is cut over tp; None if every tp rank holds all of it.
    shards: number of different slices; each is held by tp / shards neighbouring ranks.
    shard: which of them this one is.
    copy: 0 on the one rank of those neighbours that counts and writes the slice.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    shards: int = 1
    shard: int = 0
    copies: int = 1
    copy: int = 0

    @staticmethod
    def cut(name: str, shape: tuple[int, ...], dim: int | None, tp: Axis, shards: int | None = None) -> "Part":
        """The slice of rank `tp.rank`. `shards` below tp.size lets neighbours share a slice (few key/value heads)."""
        shards = 1 if dim is None else (shards or tp.size)
        if tp.size % shards:
            raise ValueError(
                f"{name}: {shards} slices cannot be shared out evenly among {tp.size} tensor-parallel ranks"
            )
        copies = tp.size // shards
        return Part(name, shape, dim, shards, tp.rank // copies, copies, tp.rank % copies)

    @property
    def padded(self) -> tuple[int, ...]:
        """Shape of the slice with padding: every shard has the same."""
        return self._with_dim(-(-self.shape[self.dim] // self.shards)) if self.dim is not None else self.shape

    @property
    def start(self) -> int:
        """Where the slice begins along `dim`."""
        return 0 if self.dim is None else min(self.shard * self.padded[self.dim], self.shape[self.dim])

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the slice without padding; only the last shards are shorter than `padded`."""
        if self.dim is None:
            return self.shape
        return self._with_dim(min(self.padded[self.dim], self.shape[self.dim] - self.start))

    def take(self, whole: Tensor) -> Tensor:
        """This slice of the logical tensor `whole` (a view)."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.local[self.dim])

    def _with_dim(self, length: int) -> tuple[int, ...]:
        return tuple(length if d == self.dim else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class Layout:
    """What a parameter is made of.

    parts: stacked along dim 0 in this order, each with its padding.
    partial: the gradient on each copy is a share; their sum over tp is the gradient.
    tied: the pipeline ranks that hold the same parameter, ascending; their gradients are summed, the first counts.
        Empty if one rank alone holds it.
    """

    parts: tuple[Part, ...]
    partial: bool = False
    tied: tuple[int, ...] = ()

    def counts(self, pp_rank: int) -> bool:
        """Whether this pipeline rank is the one that counts and writes the parameter."""
        return not self.tied or self.tied[0] == pp_rank

    def spans(self) -> Iterator[tuple[Part, int, int]]:
        """(part, first, last + 1) as positions in the flattened parameter, padding left out."""
        first = 0
        for part in self.parts:
            yield part, first, first + prod(part.local)
            first += prod(part.padded)


def attach(parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Gives `parameter` its layout. Raises ValueError if the shapes disagree."""
    rows = sum(part.padded[0] for part in layout.parts) if parameter.dim() else 0
    expected = (rows, *layout.parts[0].padded[1:]) if parameter.dim() else ()
    if tuple(parameter.shape) != expected:
        raise ValueError(
            f"{layout.parts[0].name}: the parameter is {tuple(parameter.shape)}, its layout says {expected}"
        )
    parameter.megaprec_layout = layout  # type: ignore[attr-defined]
    return parameter


def layout_of(parameter: nn.Parameter) -> Layout:
    """The layout of `parameter`. Raises ValueError if it was given none."""
    layout = getattr(parameter, "megaprec_layout", None)
    if layout is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no layout: give it one with "
            "megaprec.comm.layout.attach_whole(model), or a part of a parallel layer with megaprec.comm.layout.attach"
        )
    return layout


def has_layout(parameter: nn.Parameter) -> bool:
    """Whether `parameter` was given one."""
    return getattr(parameter, "megaprec_layout", None) is not None


def attach_whole(module: nn.Module, tp: Axis | None = None, prefix: str = "") -> None:
    """Gives every parameter of an ordinary module the layout "all of it on every rank of `tp`", named by its path.

    prefix: goes before the path; pipeline stages need different ones, for names are unique in the whole model.
    """
    for name, parameter in module.named_parameters():
        if not has_layout(parameter):
            part = Part.cut(prefix + name, tuple(parameter.shape), None, tp or Axis("tp"))
            attach(parameter, Layout((part,)))


def parameters_of(parts: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Every trained parameter once, in order of registration."""
    seen: set[nn.Parameter] = set()
    for module in parts:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield parameter
