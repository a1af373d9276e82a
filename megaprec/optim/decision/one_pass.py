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
    """Update masters and moments of flat tensors [n] by AdamW, in place, and round the masters to
    `weights`. Return all tensors that were changed.

    weights: None if the masters are the weights.
    numbers, skip: as in `AdamWNumbers`.
    betas, eps: AdamW's.
    """
    dtype = masters.dtype
    # The divisor may be too large for FP32. Then gradients are divided by FP32's largest number
    # and by how many times as large the divisor is, which is 1 otherwise.
    largest = torch.finfo(dtype).max
    further_divisor = (numbers[0] / largest).clamp(min=1).to(dtype)
    divisor, decay, rate, root = numbers.clamp(max=largest).to(dtype).unbind()
    gradient = grads.to(dtype) / divisor / further_divisor
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

    numbers: float64 [4]. In this order: the divisor of the gradients; 1 - rate * decay, by which
        weights are multiplied; the rate, divided by the bias correction 1 - beta1**steps; the root
        of the bias correction 1 - beta2**steps.
    skip: int32 [], 1 if nothing may change, else 0.
    """

    numbers: Tensor
    skip: Tensor


def adamw_numbers(rule: AdamW, step: Step) -> AdamWNumbers:
    """Return the numbers of a step for all elements of a group."""
    steps = step.steps.double()
    first_correction, second_correction = [1 - beta**steps for beta in rule.betas]
    decay = torch.full_like(steps, 1 - step.lr * step.weight_decay)
    numbers = (
        step.divisor.double(),
        decay,
        step.lr / first_correction,
        second_correction.sqrt(),
    )
    return AdamWNumbers(torch.stack(numbers), step.skip.int())


def has_one_pass(tile: Tile, rule: UpdateRule) -> bool:
    """Return True if `adamw_` can update a tile by this rule.

    It cannot round stochastically, nor update masters or moments in 16 bits, nor masters that are
    stored as weights with remainders.
    """
    if type(rule) is not AdamW or tile.masters is None or not tile.nearest:
        return False
    moments = [values for _, values in tile.moments]
    return all(values.itemsize >= 4 for values in (tile.masters, *moments))


def update_in_one_pass(
    call: CallLeaf,
    tile: Tile,
    rule: UpdateRule,
    numbers: AdamWNumbers,
    otherwise: Callable[[], None],
) -> None:
    """Update a tile for which `has_one_pass` is True.

    call: calls the leaf `adamw_` in its compiled form.
    numbers: of the step, for the tile's group.
    otherwise: updates the tile operator by operator; called if there is no compiled form.
    """
    assert isinstance(rule, AdamW) and tile.masters is not None
    weights = tile.weights
    # the masters of FP8 weights stand in their place, and those of the same dtype are the weights
    are_weights_masters = (
        weights.data_ptr() == tile.masters.data_ptr() and weights.dtype == tile.masters.dtype
    )
    (_, exp_avg), (_, exp_avg_sq) = tile.moments
    stored = [tile.grads, tile.masters, exp_avg, exp_avg_sq]
    if not are_weights_masters:
        stored.append(weights)
    length = len(tile.grads)
    # the shortest length that is compiled, with room for the tile
    arguments = stored
    if length not in LENGTHS:
        compiled_length = min(each for each in LENGTHS if each >= length)
        padding = (0, compiled_length - length)
        arguments = [torch.nn.functional.pad(values, padding) for values in stored]
    is_compiled = True

    def uncompiled(*_: Any) -> None:
        nonlocal is_compiled
        is_compiled = False
        otherwise()

    call(
        adamw_,
        None if are_weights_masters else arguments[-1],
        *arguments[:4],
        *numbers,
        rule.betas,
        rule.eps,
        otherwise=uncompiled,
    )
    if is_compiled and arguments is not stored:
        # all but the gradients, which are only read
        for values, updated in zip(stored[1:], arguments[1:], strict=True):
            values.copy_(updated[:length])


def statistics_in_one_pass(
    call: CallLeaf,
    gradients: Sequence[Tensor],
    otherwise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return float64 [2]: sum of squares and number of zeros of all elements of flat tensors.

    gradients: at least one tensor with an element.
    otherwise: returns float64 [2] for one run, without compiled code.
    """
    measured: list[Tensor] = []  # float64 [2] of each run
    for values in gradients:
        for start, stop in runs(0, len(values)):
            run = values[start:stop]
            # the rest of a slice may have any length: no form is compiled for it
            if len(run) in LENGTHS:
                measured.append(call(squares_and_zeros, run, otherwise=otherwise))
            else:
                measured.append(otherwise(run))
    return torch.stack(measured).sum(0)
