"""The sharding of a parameter, as one frozen value that is attached to the parameter.

A model has *logical tensors*: named, unpadded, the same for every layout. A rank's `Parameter`
consists of slices of logical tensors, stacked along dim 0 (query, key and value share one weight so
that they share one matrix product). A `Layout` lists these slices. It is the only source of this
fact for initial weights, norms and zero counts, ZeRO shards, checkpoints, converters and parity
checks.

Four facts cannot be seen from a parameter's shape and are stated in its layout: several tp ranks
may have the same slice (`copies`), the gradient on each copy may be a partial gradient (`partial`),
several pipeline ranks may have the same parameter (`tied`), and a parameter may be updated from
counts in place of a gradient (`balancing`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.errors import UserError


@dataclass(frozen=True)
class Growth:
    """Growth of a matrix over that of the base model of muP (`megaprec.optim.rules.width`), as
    factors of its numbers of features.

    inputs: of the features that one output sums over.
    outputs: of the features that it makes.
    scale: how many times as large the values are, because the model multiplies by less or more
        behind them than the rules say.
    """

    inputs: float = 1.0
    outputs: float = 1.0
    scale: float = 1.0


AS_BASE = Growth()


@dataclass(frozen=True)
class Part:
    """The slice of one logical tensor on a tp rank.

    name, shape: of the logical tensor, without padding.
    dim: the dim that is sharded over tp; None if every tp rank has the whole tensor.
    shards: number of different slices; tp / shards neighbouring ranks have the same slice.
    shard: index of this slice.
    copies: number of tp ranks that have this slice.
    copy: index of this rank among them; the rank with copy 0 counts the slice in norms and writes
        it to checkpoints.
    growth: of the logical tensor, under muP.
    heads: of a matrix, the heads that it projects to, whose rows lie one head after the other, as
        many for each. 1: one head, or features that belong to none.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    shards: int = 1
    shard: int = 0
    copies: int = 1
    copy: int = 0
    growth: Growth = field(default=AS_BASE, compare=False)
    heads: int = field(default=1, compare=False)

    @staticmethod
    def cut(
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        tp: Axis,
        shards: int | None = None,
        heads: int = 1,
    ) -> "Part":
        """Return the slice of rank `tp.rank`.

        shards: if smaller than tp.size, neighbouring ranks have the same slice (fewer key/value
            heads than ranks).
        heads: of the logical tensor.
        """
        shards = 1 if dim is None else (shards or tp.size)
        if tp.size % shards:
            raise ValueError(
                f"{name}: {shards} slices cannot be shared out evenly among {tp.size} "
                "tensor-parallel ranks"
            )
        copies = tp.size // shards
        return Part(
            name,
            shape,
            dim,
            shards,
            tp.rank // copies,
            copies,
            tp.rank % copies,
            heads=heads,
        )

    @property
    def rank(self) -> int:
        """Return the tensor-parallel rank that has this slice, or the virtual one."""
        return self.shard * self.copies + self.copy

    @property
    def padded(self) -> tuple[int, ...]:
        """Return the shape of the slice with padding, the same for every shard."""
        if self.dim is None:
            return self.shape
        return self._with_length(-(-self.shape[self.dim] // self.shards))  # rounded up

    @property
    def start(self) -> int:
        """Return the index along `dim` at which the slice begins."""
        if self.dim is None:
            return 0
        start = self.shard * self.padded[self.dim]
        return min(start, self.shape[self.dim])  # the last shards may have nothing but padding

    @property
    def local(self) -> tuple[int, ...]:
        """Return the shape of the slice without padding; only the last shards are shorter than
        `padded`."""
        if self.dim is None:
            return self.shape
        remaining = self.shape[self.dim] - self.start
        return self._with_length(min(self.padded[self.dim], remaining))

    @property
    def has_inner_padding(self) -> bool:
        """Return True if some slice has padding that is not behind all of its elements: slices are
        read as runs of elements."""
        if self.dim is None:
            return False
        has_padding = self.shape[self.dim] % self.shards > 0
        return has_padding and prod(self.shape[: self.dim]) > 1

    def take(self, whole: Tensor) -> Tensor:
        """Return this slice of the logical tensor `whole` (a view)."""
        if self.dim is None:
            return whole
        return whole.narrow(self.dim, self.start, self.local[self.dim])

    def _with_length(self, length: int) -> tuple[int, ...]:
        """Return the shape with `length` along the sharded dim."""
        assert self.dim is not None
        before = self.shape[: self.dim]
        after = self.shape[self.dim + 1 :]
        return (*before, length, *after)


@dataclass(frozen=True)
class Layout:
    """The slices of logical tensors that make up a parameter.

    parts: slices stacked along dim 0 in this order, each with its padding.
    partial: each copy has a partial gradient; the sum over tp is the gradient.
    tied: the pipeline ranks that have the same parameter, ascending. Their gradients are summed,
        and the first of them counts and writes the parameter. Empty if only one pipeline rank has
        it. A rank that is there twice has two copies, with a gradient each.
    again: True for the second copy of such a rank.
    balancing: the update speed of a parameter that balances loads: what accumulates as its gradient
        are counts, which no loss scale, norm or learning rate concerns
        (`megaprec.optim.rules.load_balance`). None for all other parameters.
    expert: True if other ranks of the stage hold other experts in its place: its slices and
        replicas are then those of `ExpertAxes`, and each of these replicas has a whole gradient of
        its own rows.
    together: the name of the group whose parameters lie in one buffer on a GPU, in their order:
        those of all experts of a layer, which a product then takes as one tensor. Empty: none.
    std, mean: of the initial values, mean + std * normal (`megaprec.comm.random`).
    """

    parts: tuple[Part, ...]
    partial: bool = False
    tied: tuple[int, ...] = ()
    again: bool = False
    balancing: float | None = None
    expert: bool = False
    together: str = ""
    std: float = field(default=0.0, compare=False)
    mean: float = field(default=0.0, compare=False)

    def holder(self, pp_rank: int) -> int:
        """Return the index of this copy among those of all pipeline ranks."""
        holders = self.tied or (pp_rank,)
        return holders.index(pp_rank) + self.again

    def counts(self, pp_rank: int) -> bool:
        """Return True if this pipeline rank counts the parameter in norms and writes it to
        checkpoints."""
        return self.holder(pp_rank) == 0

    def spans(self) -> Iterator[tuple[Part, int, int]]:
        """Yield (part, start, stop) of each part: its elements in the flattened parameter.

        Padding follows the elements of a part and is left out.
        """
        start = 0
        for part in self.parts:
            yield part, start, start + prod(part.local)
            start += prod(part.padded)


def attach(parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Attach `layout` to `parameter` and return the parameter. Raises ValueError if the shapes
    disagree, if heads do not divide the rows, or if padding would lie between elements."""
    for part in layout.parts:
        if part.has_inner_padding:
            raise ValueError(
                f"{part.name}: dim {part.dim} of {part.shape} does not divide by its {part.shards} "
                "slices: only those of the first dim may be of different lengths"
            )
        if part.heads > 1 and part.shape[0] % part.heads:
            raise ValueError(
                f"{part.name}: {part.shape[0]} rows cannot be shared out evenly among "
                f"{part.heads} heads"
            )
    expected: tuple[int, ...] = ()
    if parameter.dim():  # parts are stacked along dim 0
        num_rows = sum(part.padded[0] for part in layout.parts)
        expected = (num_rows, *layout.parts[0].padded[1:])
    if tuple(parameter.shape) != expected:
        raise ValueError(
            f"{layout.parts[0].name}: the parameter is {tuple(parameter.shape)}, its layout says "
            f"{expected}"
        )
    parameter.megaprec_layout = layout  # type: ignore[attr-defined]
    return parameter


def layout_of(parameter: nn.Parameter) -> Layout:
    """Return the layout of `parameter`. Raises ValueError if none is attached."""
    layout = getattr(parameter, "megaprec_layout", None)
    if layout is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no layout: give it one with "
            "megaprec.comm.layout.attach_whole(model), or a part of a parallel layer with "
            "megaprec.comm.layout.attach"
        )
    return layout


def has_layout(parameter: nn.Parameter) -> bool:
    """Return True if a layout is attached to `parameter`."""
    return getattr(parameter, "megaprec_layout", None) is not None


def attach_whole(
    module: nn.Module,
    tp: Axis | None = None,
    prefix: str = "",
) -> None:
    """Attach the layout "replicated on every rank of `tp`" to every parameter of `module` that has
    no layout.

    prefix: the beginning of each parameter's logical name, which its path in the module follows.
        Pipeline stages need different prefixes, because logical names must be unique in the whole
        model.
    Raises UserError for a parameter of a lazy module, which has no shape before the first forward
    pass.
    """
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise UserError.of("comm.lazy_module", name=name)
    for name, parameter in module.named_parameters():
        # a parallel layer has attached its own
        if not has_layout(parameter):
            shape = tuple(parameter.shape)
            part = Part.cut(prefix + name, shape, None, tp or Axis("tp"))
            attach(parameter, Layout((part,)))


def trained_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter that requires a gradient once, in order of registration, with its path
    in the first part that contains it."""
    # a tied parameter occurs several times
    seen: set[nn.Parameter] = set()
    for module in parts:
        for path, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield path, parameter


def parameters_of(parts: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield every parameter that requires a gradient once, in order of registration."""
    return (parameter for _, parameter in trained_parameters(parts))
