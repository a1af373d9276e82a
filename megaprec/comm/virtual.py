"""Virtual ranks: a tensor-parallel axis of fixed size, whatever the number of processes that share
it.

The sums of a model that is cut over the tensor axis depend on the cut. Under canonical numerics the
model is therefore always cut into the same number of virtual ranks, and each process holds `size /
processes` neighbouring ones. Every product has the same shapes on every number of processes, and
every sum over the virtual ranks is one binary tree:

    adjacent pairs are added, level by level, and an odd last one goes up unchanged:
    ((0 + 1) + (2 + 3)) + 4
    nodes are FP32, or float64 for float64 leaves, and the root is rounded to the dtype of the
    leaves once

A process that holds a power of two of the leaves holds a whole subtree: it adds its own leaves
first and exchanges one node. Any other process exchanges leaves. Maxima are exact in any order, and
a concatenation adds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.tree import add_by_tree
from megaprec.errors import UserError


@dataclass(frozen=True)
class VirtualAxis:
    """An axis of `size` virtual ranks over the processes of the axis `real`.

    Raises UserError unless the processes divide the virtual ranks. Each method takes one tensor of
    each virtual rank of this process, in their order, and is collective over `real`.
    """

    real: Axis
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.size % self.real.size:
            raise UserError.of(
                "comm.virtual_ranks_uneven",
                virtual_ranks=self.size,
                processes=self.real.size,
                axis=self.real.name,
            )

    @property
    def num_local(self) -> int:
        """Return the number of virtual ranks of this process."""
        return self.size // self.real.size

    @property
    def ranks(self) -> range:
        """Return the virtual ranks of this process."""
        first = self.num_local * self.real.rank
        return range(first, first + self.num_local)

    def sum(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the sum over all virtual ranks, rounded once to the dtype of the leaves."""
        nodes = self._nodes(leaves)
        if self.real.size > 1:
            # in the order of the virtual ranks
            nodes = list(self.real.gather(torch.stack(nodes)).unbind())
        return tree_sum(nodes).to(leaves[0].dtype)

    def scatter_sum(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return each virtual rank's chunk of the sum: [n, ...] of [size * n, ...]."""
        dtype = leaves[0].dtype
        if leaves[0].shape[0] % self.size:
            raise ValueError(
                f"{leaves[0].shape[0]} elements of dim 0 do not divide by the {self.size} virtual "
                "ranks"
            )
        # Each term of the sum, a leaf or a node of the tree, as a list of chunks: one for each
        # virtual rank of this process.
        if self.real.size == 1:
            chunks_of_terms = [leaf.chunk(self.size) for leaf in leaves]
        else:
            # for each own node: of that node of every process, what belongs to this process
            received: list[Sequence[Tensor]] = []
            for node in self._nodes(leaves):
                received.append(self.real.exchange(node).chunk(self.real.size))
            # process by process, which is the order of the virtual ranks
            nodes = chain.from_iterable(zip(*received, strict=True))
            chunks_of_terms = [node.chunk(self.num_local) for node in nodes]
        # the terms of one chunk at a time
        return [tree_sum(terms).to(dtype) for terms in zip(*chunks_of_terms, strict=True)]

    def max(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the elementwise maximum over all virtual ranks; a NaN on any of them gives NaN."""
        local_max = torch.stack([*leaves]).amax(0)
        return self.real.max_(local_max)

    def gather(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the concatenation over all virtual ranks along dim 0, in their order."""
        local = torch.cat([*leaves]) if len(leaves) > 1 else leaves[0]
        return self.real.gather(local)

    def _nodes(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return what this process contributes to a sum: the root of its subtree, or its leaves."""
        if len(leaves) != self.num_local:
            raise ValueError(
                f"{len(leaves)} tensors were given for the {self.num_local} virtual ranks of this "
                "process"
            )
        is_power_of_two = self.num_local & (self.num_local - 1) == 0
        # leaves of another number are no whole subtree
        if self.num_local == 1 or not is_power_of_two:
            return [leaf.contiguous() for leaf in leaves]
        return [tree_sum(leaves)]


def tree_sum(leaves: Sequence[Tensor]) -> Tensor:
    """Return the sum of the leaves by the binary tree of adjacent pairs, in FP32, or in float64 for
    float64 leaves."""
    wide = torch.promote_types(leaves[0].dtype, torch.float32)
    return add_by_tree([leaf.to(wide) for leaf in leaves])
