"""The sum of gradients over micro-batches by a fixed tree, so that its bits do not depend on the
layout.

The G micro-batches of a global batch are the leaves of one tree, and each data-parallel rank has a
run of them:

    running sums   over G / D neighbouring micro-batches, where D is the largest power of two that divides G
    the tree       over the D running sums: adjacent pairs, level by level

If the number of dp ranks is a power of two, it divides D, and the gradient of a rank is one node of
the tree. The sum over dp is the rest of the tree (`megaprec.comm.tree`). With pipeline schedules
the micro-batches may end in any order.

The gradient of a micro-batch overwrites `main_grad`. At the end of the micro-batch it is added to
the node that waits for it, or is set aside. So log2(D / dp) more gradients are kept, and one more
where G / D is above one. A parameter without a gradient in a micro-batch (an expert without tokens)
adds nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.main_grad import accumulate_autograd_grad, has_gradient, set_gradient


class MicrobatchTree:
    """The tree over one rank's `count` micro-batches for one tensor, in which their values arrive
    one by one."""

    def __init__(self, arriving: Tensor) -> None:
        self.arriving = arriving
        self._spare: list[Tensor] = []
        self.begin(0)

    def begin(self, count: int) -> None:
        """Begin a new sum over `count` micro-batches."""
        self.count = count
        self.run = _run(count)
        self.ended: set[int] = set()
        self._nodes: dict[
            int, tuple[int, Tensor | None]
        ] = {}  # by first micro-batch: last + 1 and sum

    def end(self, microbatch: int, given: bool) -> bool:
        """Add what has arrived, if anything is `given`. Return True if `arriving` now has the sum
        of all.

        After the last micro-batch False means that none had a value.
        """
        first = microbatch
        last = microbatch + 1
        values = self.arriving if given else None
        self.ended.add(microbatch)
        while last - first < self.count:
            start, stop = self._sibling(first, last)
            if start not in self._nodes or self._nodes[start][0] != stop:
                self._nodes[first] = last, self._set_aside(values)
                return False
            values = self._added(self._nodes.pop(start)[1], values)
            first = min(first, start)
            last = max(last, stop)
        if values is not None and values is not self.arriving:
            self._take_back(self.arriving.copy_(values), values)
        return values is not None

    def _sibling(self, first: int, last: int) -> tuple[int, int]:
        """Return the run of micro-batches whose sum is to be added to that of [first, last)."""
        length = last - first
        if length >= self.run:
            left = first // length % 2 == 0
            return (last, last + length) if left else (first - length, first)
        start = first - first % self.run
        return (last, last + 1) if first == start else (start, first)

    def _set_aside(self, values: Tensor | None) -> Tensor | None:
        if values is not self.arriving:
            return values
        kept = self._spare.pop() if self._spare else torch.empty_like(self.arriving)
        return kept.copy_(self.arriving)

    def _added(self, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        """Return the sum, in the memory of `other`; that of `one` becomes spare."""
        if one is None or other is None:
            return one if other is None else other
        return self._take_back(other.add_(one), one)

    def _take_back(self, result: Tensor, spare: Tensor) -> Tensor:
        self._spare.append(spare)
        return result

    def num_bytes(self) -> int:
        """Return the memory of the sums that were ever set aside together, in bytes."""
        waiting = (values for _, values in self._nodes.values() if values is not None)
        return sum(values.nbytes for values in (*self._spare, *waiting))


def sums_set_aside(count: int) -> int:
    """Return how many more gradients are kept while `count` micro-batches are added in their
    order."""
    return (count // _run(count)).bit_length() - 1 + (_run(count) > 1)


def _run(count: int) -> int:
    """Return the length of a running sum: the largest odd divisor."""
    return count // (count & -count) if count else 1


class MicrobatchSums:
    """The sums of the gradients of all parameters over the micro-batches of a step.

    chunks: the buffers of each model chunk.
    """

    def __init__(self, chunks: Sequence[Sequence[Buffer]]) -> None:
        self._parameters = [[p for buffer in chunk for p in buffer.parameters] for chunk in chunks]
        self._trees = {p: MicrobatchTree(p.main_grad) for chunk in self._parameters for p in chunk}  # type: ignore[attr-defined]
        self._whole: set[nn.Parameter] = set()  # parameters whose sum is final
        self.count = 0  # micro-batches of a rank in this step; 0: not known yet

    def end(self, microbatch: int, count: int, chunk: int, complete: bool) -> None:
        """Take the gradients of a micro-batch in a chunk, out of `count` on this rank.

        complete: False if further gradients of the micro-batch follow for other parameters. Raises
        UserError for numbers that contradict those of the step so far, and for a parameter that has
        gradients on both sides of an incomplete end.
        """
        self._expect(microbatch, count)
        parameters = [p for p in self._parameters[chunk] if p not in self._whole]
        self._take(parameters, microbatch, complete)

    def finish(self, parameters: Sequence[nn.Parameter], in_flight: bool) -> None:
        """Complete the sums of these parameters, whose gradients are final; the sums are then in
        `main_grad`.

        in_flight: True within the backward pass of the last micro-batch, whose end has not been
        announced. Raises UserError if the end of a micro-batch is missing.
        """
        for parameter in parameters:
            accumulate_autograd_grad(parameter)
        left = [p for p in parameters if p not in self._whole]
        if in_flight and left:
            self.count = self.count or 1
            missing = {n for p in left for n in range(self.count) if n not in self._trees[p].ended}
            if len(missing) == 1:
                self._take(left, missing.pop(), True)
        for parameter in left:
            if parameter not in self._whole and (
                self._trees[parameter].ended or has_gradient(parameter)
            ):
                raise UserError(
                    _unannounced(parameter, len(self._trees[parameter].ended), self.count)
                )

    def forget(self) -> None:
        """Discard all sums, to begin a new step."""
        self.count = 0
        self._whole.clear()
        for tree in self._trees.values():
            tree.begin(0)

    def num_bytes(self) -> int:
        """Return the memory of the sums that were set aside, in bytes."""
        return sum(tree.num_bytes() for tree in self._trees.values())

    def _expect(self, microbatch: int, count: int) -> None:
        if not 0 <= microbatch < count:
            raise UserError(
                f"micro-batch {microbatch} of {count}: micro-batches are numbered from 0 to "
                f"{count - 1}"
            )
        if self.count and count != self.count:
            raise UserError(
                f"a step of {self.count} micro-batches was told the end of one of {count}"
            )
        self.count = count

    def _take(self, parameters: Sequence[nn.Parameter], microbatch: int, complete: bool) -> None:
        for parameter in parameters:
            accumulate_autograd_grad(parameter)
        given = [p for p in parameters if has_gradient(p)]
        for parameter in parameters if complete else given:
            tree = self._trees[parameter]
            has = has_gradient(parameter)
            if not tree.ended:
                tree.begin(self.count)
            if microbatch in tree.ended:
                if has:
                    raise UserError(_twice(parameter, microbatch))
                continue
            set_gradient(parameter, tree.end(microbatch, has))
            if len(tree.ended) == self.count:
                self._whole.add(parameter)


def _unannounced(parameter: nn.Parameter, ended: int, count: int) -> str:
    told = f"the ends of {ended} of {count} micro-batches" if count else "no end of a micro-batch"
    return (
        f"canonical sums: {layout_of(parameter).parts[0].name} is to be summed over "
        "micro-batches, but the optimizer "
        f"was told {told}: call optimizer.end_microbatch(number, count) after each backward pass"
    )


def _twice(parameter: nn.Parameter, microbatch: int) -> str:
    return (
        f"canonical sums: {layout_of(parameter).parts[0].name} has two gradients in "
        f"micro-batch {microbatch}, whose "
        "order depends on the schedule: call optimizer.end_microbatch once for each "
        "micro-batch, and give weights that "
        "are used in two places a parameter for each"
    )
