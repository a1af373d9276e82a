"""The statistics and the update of gradients in one pass over memory each, where torch's compiler
makes one kernel of their operators.

A GPU's update by operators reads and writes 46 bytes for each BF16 parameter: norm and zeros read
the gradients, the fused kernel writes them back unscaled, and the weights are copied from their
masters. One pass for the statistics and one for the update move 34: gradients are read twice,
masters and both moments are read and written, weights are written.

The functions here are leaves: they have a compiled form for certain lengths only, and are called
through a `CallLeaf`. So slices are cut into runs of these lengths. What is left of a slice is
padded for the update, so that all elements go through the same code and no result depends on the
slice that an element is in.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaprec.leaf_calls import CallLeaf
from megaprec.optim.rules.update_rules import AdamW, Step, UpdateRule
from megaprec.optim.state.update_tile import Tile

LENGTHS = (1 << 24, 1 << 22, 1 << 20)
"""Elements of the runs that have compiled forms, longest first."""


def runs(start: int, stop: int, longest: int = LENGTHS[0]) -> Iterator[tuple[int, int]]:
    """Yield elements [start, stop) in runs of LENGTHS of at most `longest` elements, and a shorter
    one for the rest."""
    for length in LENGTHS:
        while length <= longest and stop - start >= length:
            yield start, start + length
            start += length
    if start < stop:
        yield start, stop


def squares_and_zeros(values: Tensor) -> Tensor:
    """Return float64 [2]: the sum of squares of a flat tensor, and its number of zeros."""
    squares = values.double().square().sum()
    num_zeros = (values == 0).sum()
    return torch.stack((squares, num_zeros.double()))


def adamw_(
    weights: Tensor | None,
    grads: Tensor,
    masters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, ...]:
    """Update masters and moments of flat tensors [n] in place, and round the masters to `weights`.

    weights: None if the masters are the weights. numbers, skip: as in `AdamWNumbers`.
    """
    dtype = masters.dtype
    # a divisor may be too large for FP32: what is beyond it divides once more, and is 1 otherwise
    largest = torch.finfo(dtype).max
    further = (numbers[0] / largest).clamp(min=1).to(dtype)
    divisor, decay, rate, root = numbers.clamp(max=largest).to(dtype).unbind()
    gradient = grads.to(dtype) / divisor / further
    average = exp_avg + (gradient - exp_avg) * (1 - betas[0])
    squares = exp_avg_sq + (gradient * gradient - exp_avg_sq) * (1 - betas[1])
    # never negative but on trial, with random numbers
    magnitude = squares.clamp(min=0).sqrt()
    updated = masters * decay - rate * average / (magnitude / root + eps)
    is_applied = skip == 0
    exp_avg.copy_(torch.where(is_applied, average, exp_avg))
    exp_avg_sq.copy_(torch.where(is_applied, squares, exp_avg_sq))
    masters.copy_(torch.where(is_applied, updated, masters))
    if weights is None:
        return exp_avg, exp_avg_sq, masters
    weights.copy_(masters)
    return exp_avg, exp_avg_sq, masters, weights


class AdamWNumbers(NamedTuple):
    """The numbers of a step that all elements of a group share.

    numbers: float64 [4], the divisor of the gradients, the factor of weight decay, the rate over
        the correction of the first moment, and the root of the correction of the second.
    skip: int32 [], 1 if nothing may change, else 0.
    """

    numbers: Tensor
    skip: Tensor


def adamw_numbers(rule: AdamW, step: Step) -> AdamWNumbers:
    """Return the numbers of a step for all elements of a group."""
    steps = step.steps.double()
    corrections = [1 - beta**steps for beta in rule.betas]
    decay = torch.full_like(steps, 1 - step.lr * step.weight_decay)
    numbers = (
        step.divisor.double(),
        decay,
        step.lr / corrections[0],
        corrections[1].sqrt(),
    )
    return AdamWNumbers(torch.stack(numbers), step.skip.int())


def has_one_pass(tile: Tile, rule: UpdateRule) -> bool:
    """Return True if a rule has a leaf that updates all that is stored for a tile.

    Numbers that are rounded stochastically, masters in 16 bits, and those that are in two parts
    have none.
    """
    if type(rule) is not AdamW or tile.masters is None or not tile.nearest:
        return False
    return all(values.itemsize >= 4 for values in (tile.masters, *dict(tile.moments).values()))


def update_in_one_pass(
    call: CallLeaf,
    tile: Tile,
    rule: UpdateRule,
    numbers: AdamWNumbers,
    otherwise: Callable[[], None],
) -> None:
    """Update a tile for which `has_one_pass` is True. otherwise: does so without compiled code."""
    assert isinstance(rule, AdamW) and tile.masters is not None
    weights = tile.weights
    # of FP8 weights, or of the same dtype as masters
    is_master = (
        weights.data_ptr() == tile.masters.data_ptr() and weights.dtype == tile.masters.dtype
    )
    (_, exp_avg), (_, exp_avg_sq) = tile.moments
    stored = [tile.grads, tile.masters, exp_avg, exp_avg_sq]
    if not is_master:
        stored.append(weights)
    length = len(tile.grads)
    padded = stored
    if length not in LENGTHS:
        missing = min(each for each in LENGTHS if each >= length) - length
        padded = [torch.nn.functional.pad(values, (0, missing)) for values in stored]
    is_compiled = True

    def uncompiled(*_: Any) -> None:
        nonlocal is_compiled
        is_compiled = False
        otherwise()

    call(
        adamw_,
        None if is_master else padded[-1],
        *padded[:4],
        *numbers,
        rule.betas,
        rule.eps,
        otherwise=uncompiled,
    )
    if is_compiled and padded is not stored:
        # all but the gradients, which are only read
        for values, updated in zip(stored[1:], padded[1:], strict=True):
            values.copy_(updated[:length])


def statistics_in_one_pass(
    call: CallLeaf,
    gradients: Sequence[Tensor],
    otherwise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return float64 [2]: sum of squares and number of zeros of flat tensors, of which there is
    one. otherwise: computes those of one run without compiled code, and of every rest."""
    measured: list[Tensor] = []
    for values in gradients:
        for start, stop in runs(0, len(values)):
            run = values[start:stop]
            # the rest of a slice may have any length: no form is compiled for it
            if len(run) in LENGTHS:
                measured.append(call(squares_and_zeros, run, otherwise=otherwise))
            else:
                measured.append(otherwise(run))
    return torch.stack(measured).sum(0)
