"""The sum of gradients over micro-batches by a fixed tree, so that its bits do not depend on the
layout.

The G micro-batches of a global batch are the leaves of one tree, and each data-parallel rank has a
run of them:

    running sums   over G / D neighbouring micro-batches, where D is the largest power of two that
                   divides G
    the tree       over the D running sums: adjacent pairs, level by level

If the number of dp ranks is a power of two, it divides D, and the gradient of a rank is one node of
the tree. The sum over dp is the rest of the tree (`megaprec.comm.tree`). With pipeline schedules
the micro-batches may end in any order.

The gradient of a micro-batch overwrites `main_grad`. At the end of the micro-batch it is added to
the node that waits for it, or is set aside. So log2(D / dp) more gradients are kept, and one more
where G / D is above one. A parameter without a gradient in a micro-batch (an expert without tokens)
adds nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.comm.main_grad import (
    accumulate_autograd_grad,
    forget_gradient,
    has_gradient,
    mark_gradient,
)
from megaprec.errors import Problem, UserError
from megaprec.optim.decision.numerics import RunningSums
from megaprec.optim.state.flat_buffer import Buffer


class _Node(NamedTuple):
    """The sum over micro-batches up to `stop` - 1; None if none of them had a value."""

    stop: int
    values: Tensor | None


class MicrobatchTree:
    """The tree over one rank's `count` micro-batches for one tensor, in which their values arrive
    one by one."""

    def __init__(self, arriving: Tensor) -> None:
        self.arriving = arriving
        self._spare: list[Tensor] = []  # memory of sums that were added to others
        self.begin(0)

    def begin(self, count: int) -> None:
        """Begin a new sum over `count` micro-batches."""
        self.count = count
        self.run_length = _run_length(count)
        self.ended: set[int] = set()
        self._waiting: dict[int, _Node] = {}  # by first micro-batch

    def end(self, microbatch: int, has_value: bool) -> bool:
        """Add what has arrived, if anything has. Return True if `arriving` now has the sum of all.

        After the last micro-batch False means that none had a value.
        """
        # `values` is the sum over micro-batches [start, stop)
        start = microbatch
        stop = microbatch + 1
        values = self.arriving if has_value else None
        self.ended.add(microbatch)
        # upwards in the tree, until a sum is missing that must be added first
        while stop - start < self.count:
            sibling_start, sibling_stop = self._sibling(start, stop)
            sibling = self._waiting.get(sibling_start)
            if sibling is None or sibling.stop != sibling_stop:
                self._waiting[start] = _Node(stop, self._set_aside(values))
                return False
            del self._waiting[sibling_start]
            values = self._add(sibling.values, values)
            start = min(start, sibling_start)
            stop = max(stop, sibling_stop)
        if values is not None and values is not self.arriving:
            self.arriving.copy_(values)
            self._spare.append(values)
        return values is not None

    def _sibling(self, start: int, stop: int) -> tuple[int, int]:
        """Return the run of micro-batches whose sum is to be added to that of [start, stop)."""
        length = stop - start
        if length >= self.run_length:  # in the tree: the other node of the pair
            is_left = start // length % 2 == 0
            return (stop, stop + length) if is_left else (start - length, start)
        # in a running sum: the next micro-batch, or for a micro-batch all that are before it
        run_start = start - start % self.run_length
        return (stop, stop + 1) if start == run_start else (run_start, start)

    def _set_aside(self, values: Tensor | None) -> Tensor | None:
        """Return the values in a memory that the next micro-batch does not overwrite."""
        if values is not self.arriving:
            return values
        copy = self._spare.pop() if self._spare else torch.empty_like(self.arriving)
        return copy.copy_(self.arriving)

    def _add(self, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        """Return the sum, in the memory of `second`; that of `first` becomes spare."""
        if first is None:
            return second
        if second is None:
            return first
        second.add_(first)
        self._spare.append(first)
        return second

    def num_bytes(self) -> int:
        """Return the memory of the sums that were ever set aside together, in bytes."""
        num_bytes = sum(values.nbytes for values in self._spare)
        for node in self._waiting.values():
            if node.values is not None:
                num_bytes += node.values.nbytes
        return num_bytes


def num_waiting_sums(count: int) -> int:
    """Return how many more gradients are kept while `count` micro-batches are added in their
    order."""
    length = _run_length(count)
    num_runs = count // length  # a power of two: the leaves of the tree
    depth = num_runs.bit_length() - 1
    running_sums = 1 if length > 1 else 0
    return depth + running_sums


def _run_length(count: int) -> int:
    """Return the length of a running sum: the largest odd divisor."""
    power_of_two = count & -count  # the largest one that divides the count
    return count // power_of_two if count else 1


class MicrobatchSums(RunningSums):
    """The sums of the gradients of all parameters over the micro-batches of a step.

    chunks: the buffers of each model chunk.
    """

    def __init__(self, chunks: Sequence[Sequence[Buffer]]) -> None:
        self._chunks: list[list[nn.Parameter]] = []
        for chunk in chunks:
            parameters = chain.from_iterable(buffer.parameters for buffer in chunk)
            self._chunks.append(list(parameters))
        self._trees = {
            parameter: MicrobatchTree(parameter.main_grad)  # type: ignore[attr-defined]
            for parameter in chain.from_iterable(self._chunks)
        }
        self._complete: set[nn.Parameter] = set()  # parameters whose sum is final
        self.count = 0  # micro-batches of a rank in this step; 0: not known yet

    def end(self, microbatch: int, count: int, chunk: int, complete: bool) -> None:
        """Take the gradients of a micro-batch in a chunk, out of `count` on this rank.

        complete: False if further gradients of the micro-batch follow for other parameters. Raises
        UserError for numbers that contradict those of the step so far, and for a parameter that has
        gradients on both sides of an incomplete end.
        """
        self._require_consistent(microbatch, count)
        self._take_gradients(self._incomplete(self._chunks[chunk]), microbatch, complete)

    def finish(self, parameters: Sequence[nn.Parameter], in_backward: bool) -> None:
        """Complete the sums of these parameters, whose gradients are final; the sums are then in
        `main_grad`.

        in_backward: True within the backward pass of the last micro-batch, whose end has not been
        announced. Raises UserError if the end of a micro-batch is missing.
        """
        for parameter in parameters:
            accumulate_autograd_grad(parameter)
        incomplete = self._incomplete(parameters)
        if in_backward and incomplete:
            self.count = self.count or 1  # no end was announced: the step has one micro-batch
            microbatches = set(range(self.count))
            missing = set[int]()
            for parameter in incomplete:
                missing |= microbatches - self._trees[parameter].ended
            if len(missing) == 1:  # the micro-batch whose backward pass is under way
                self._take_gradients(incomplete, missing.pop(), True)
        for parameter in self._incomplete(incomplete):
            num_ended = len(self._trees[parameter].ended)
            # a parameter without any gradient in the step has no sum
            if num_ended or has_gradient(parameter):
                raise UserError(_unannounced(parameter, num_ended, self.count))

    def _incomplete(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter in parameters if parameter not in self._complete]

    def forget(self) -> None:
        """Discard all sums, to begin a new step."""
        self.count = 0
        self._complete.clear()
        for tree in self._trees.values():
            tree.begin(0)

    def num_bytes(self) -> int:
        """Return the memory of the sums that were set aside, in bytes."""
        return sum(tree.num_bytes() for tree in self._trees.values())

    def _require_consistent(self, microbatch: int, count: int) -> None:
        """Note the number of micro-batches. Raise UserError if it contradicts those of the step so
        far."""
        if not 0 <= microbatch < count:
            raise UserError.of(
                "optimizer.microbatch_number", microbatch=microbatch, count=count, last=count - 1
            )
        if self.count and count != self.count:
            raise UserError.of("optimizer.microbatch_end", count=self.count, announced=count)
        self.count = count

    def _take_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        microbatch: int,
        complete: bool,
    ) -> None:
        """Add the gradients of a micro-batch to the sums of these parameters."""
        for parameter in parameters:
            accumulate_autograd_grad(parameter)
        for parameter in parameters:
            has_value = has_gradient(parameter)
            if not complete and not has_value:
                continue  # it may get one in the second pass of the micro-batch
            tree = self._trees[parameter]
            if not tree.ended:  # the first micro-batch of the step for this parameter
                tree.begin(self.count)
            if microbatch in tree.ended:
                if has_value:
                    raise UserError.of(
                        "optimizer.canonical_two_gradients",
                        name=layout_of(parameter).parts[0].name,
                        microbatch=microbatch,
                    )
                continue
            has_sum = tree.end(microbatch, has_value)
            if has_sum:
                mark_gradient(parameter)
            else:  # the next gradient overwrites what was set aside
                forget_gradient(parameter)
            if len(tree.ended) == self.count:
                self._complete.add(parameter)


def _unannounced(parameter: nn.Parameter, ended: int, count: int) -> Problem:
    """Return the problem of a sum of which only `ended` of `count` micro-batches were announced."""
    ends = f"the ends of {ended} of {count} micro-batches" if count else "no end of a micro-batch"
    name = layout_of(parameter).parts[0].name
    return Problem.of("optimizer.canonical_unannounced", name=name, ends=ends)
