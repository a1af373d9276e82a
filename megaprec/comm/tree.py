"""Sums by a fixed binary tree: adjacent pairs, level by level, whatever the number of ranks.

The sum over ranks is the upper part of the tree over all terms, if each rank has added its own
terms by the lower part and their number is a power of two. So the bits of the sum do not depend on
the number of ranks.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from megaprec.comm.axis import Axis


def add_by_tree(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the terms by the tree; an odd last term goes up a level unchanged."""
    level = list(terms)
    while len(level) > 1:
        lefts = level[::2]
        rights = level[1::2]
        # strict=False: an odd last term has no right one
        pairs = [left + right for left, right in zip(lefts, rights, strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def start_tree_scatter_sum_(axis: Axis, flat: Tensor) -> Callable[[], None]:
    """Start a reduce-scatter over `axis` by the tree, in place; the returned function waits for it.

    As by `Axis.start_scatter_sum_`, only this rank's chunk of `flat` is then defined.
    """
    # one rank has the sum already
    if axis.group is None:
        return lambda: None
    finish_exchange = axis.start_exchange(flat)

    def finish() -> None:
        terms = finish_exchange().chunk(axis.size)
        axis.chunk(flat).copy_(add_by_tree(terms))

    return finish


def start_tree_sum_(axis: Axis, flat: Tensor) -> Callable[[], None]:
    """Start an all-reduce over `axis` by the tree, in place; the returned function waits for it.

    Each rank adds the terms of its chunk, and the sums are then all-gathered.
    """
    finish_chunk = start_tree_scatter_sum_(axis, flat)

    def finish_and_gather() -> None:
        finish_chunk()
        axis.start_gather_(flat)()

    return finish_and_gather
