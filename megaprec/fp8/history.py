"""Delayed scaling: the scales of many tensors, computed together from the amaxes of earlier steps.

A tensor is scaled before its own amax is known, by the amaxes of earlier steps; its own amax is
recorded for later steps. One bank holds all tensors of a pipeline stage, one column each, so that
the ranks that share them need a single all-reduce, whatever the order in which their modules ran.

A step is what Transformer Engine calls an outermost autocast: the history advances once after it,
regardless of the number of micro-batches. Evaluation and recomputation record nothing. With the
recipe's `history = "te"` each pass of a micro-batch counts as a step, and a non-finite amax stays
in the window; while it is there, the scale does not change.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaprec.fp8.formats import limit
from megaprec.fp8.scaling import scale_of
from megaprec.precision.fp8_recipe import FP8Recipe


class AmaxHistory:
    """Scales and past amaxes of n tensors. All of its tensors are changed in place.

    scale: float32 [n], 1 at first. history: float32 [length, n], oldest first, 0 for steps that
        have not happened yet.
    step_amax: float32 [n], the amaxes of this step so far. overflowed: bool [n], True for
        tensors that were inf or NaN in the previous step. Only `scale` and `history` need to be
        saved.
    """

    def __init__(
        self,
        recipe: FP8Recipe,
        formats: Sequence[torch.dtype],
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the history. formats: of each tensor's codes, from `format_of`."""
        count = len(formats)
        self.recipe = recipe
        self.scale = torch.ones(count, device=device)
        self.history = torch.zeros(recipe.history_length, count, device=device)
        self.step_amax = torch.zeros(count, device=device)
        self.overflowed = torch.zeros(count, dtype=torch.bool, device=device)
        limits = [limit(dtype) for dtype in formats]  # the largest number of each format
        self._largest = torch.tensor(limits, device=device)

    def record(self, column: int, amax: Tensor) -> None:
        """Record the amax, float32 of one element, of a tensor in one of the step's
        micro-batches."""
        largest = torch.maximum(self.step_amax[column], amax.squeeze())
        self.step_amax[column] = largest

    def roll(self, reduce_max: Callable[[Tensor], None]) -> None:
        """End a step: advance the history and compute the scales of the next one.

        reduce_max: reduces a float32 [n] to its maximum over the ranks that share these tensors, in
        place. A tensor that did not run on any rank, or that was all zeros, neither advances nor
        changes its scale. Nor does a non-finite one, which `overflowed` then marks; but with
        `history = "te"` its history advances.
        """
        # NaN becomes inf: an all-reduced maximum may drop a NaN
        self.step_amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        reduce_max(self.step_amax)
        self.overflowed.copy_(self.step_amax.isinf())
        # which tensors advance; selected on the device, so that the host waits for no number
        advances = self.step_amax > 0
        if self.recipe.history == "step":
            advances &= ~self.overflowed
        # without the oldest step
        advanced = torch.cat([self.history[1:], self.step_amax[None]])
        history = torch.where(advances, advanced, self.history)
        self.history.copy_(history)
        amax = self._history_amax()
        new_scale = self._compute_scale(amax)
        scale = torch.where(advances, new_scale, self.scale)
        self.scale.copy_(scale)
        self.step_amax.zero_()

    def _compute_scale(self, amax: Tensor) -> Tensor:
        """Return the scales [n] for amaxes [n], by the recipe's function or formula."""
        recipe = self.recipe
        if recipe.scale_algo is not None:
            return recipe.scale_algo(amax, self.scale, self._largest, recipe)
        # the margin leaves powers of two of room for amaxes that grow
        largest = self._largest * 2.0**-recipe.margin
        return scale_of(amax, largest, self.scale, recipe.power_2_scales)

    def _history_amax(self) -> Tensor:
        """Return the amax [n] of each history that determines its scale."""
        amax_algo = self.recipe.amax_algo
        if callable(amax_algo):
            return amax_algo(self.history)
        if amax_algo == "max":
            return self.history.amax(0)
        return self.history[-1]
