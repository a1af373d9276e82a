"""Delayed scaling: the scales of many tensors at once, from the largest magnitudes of steps past.

A tensor is scaled before its amax is known, with what earlier steps have shown; meanwhile its amax is recorded for
later ones. One bank holds all tensors of a pipeline stage, a column each, so that the ranks that share them agree in a
single collective, whatever the order in which their modules ran.

A step is what Transformer Engine calls an outermost autocast: however many micro-batches it has, the history advances
once, after it. Whoever evaluates or recomputes does not record. By the recipe's `history = "te"` a pass of a
micro-batch is a step, and an amax that is not finite stays in the window, of which no scale is made while it does.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaprec.fp8.formats import limit
from megaprec.fp8.scaling import scale_of
from megaprec.precision.fp8_recipe import FP8Recipe


class AmaxHistory:
    """Scales and past amaxes of n tensors. All that it keeps is changed in place.

    scale: float32 [n], 1 at first. history: float32 [length, n], oldest first, 0 where there was no step yet.
    now: float32 [n], the largest magnitudes of this step so far. overflowed: bool [n], which were inf or NaN in the
    step before. `scale` and `history` are all that has to be saved.
    """

    def __init__(self, recipe: FP8Recipe, formats: Sequence[torch.dtype], device: torch.device | str = "cpu") -> None:
        """formats: of each tensor's codes, as `format_of` says."""
        n = len(formats)
        self.recipe = recipe
        self.scale = torch.ones(n, device=device)
        self.history = torch.zeros(recipe.history_length, n, device=device)
        self.now = torch.zeros(n, device=device)
        self.overflowed = torch.zeros(n, dtype=torch.bool, device=device)
        self._largest = torch.tensor([limit(dtype) for dtype in formats], device=device)

    def record(self, i: int, amax: Tensor) -> None:
        """Notes the largest magnitude, float32 of one element, of tensor `i` in one of the step's micro-batches."""
        self.now[i] = torch.maximum(self.now[i], amax.squeeze())

    def roll(self, agree: Callable[[Tensor], None]) -> None:
        """Ends a step: the history advances and the scales for the next one are made.

        agree: takes the largest of a float32 [n] over the ranks that share these tensors, in place. A tensor that did
        not run on any rank, or that was all zeros, neither advances nor changes its scale; nor does one that was not
        finite, which `overflowed` then says, but in Transformer Engine's way it advances.
        """
        self.now.nan_to_num_(torch.inf, torch.inf)  # a maximum over ranks need not keep a NaN
        agree(self.now)
        self.overflowed.copy_(self.now.isinf())
        moves = self.now > 0
        if self.recipe.history == "step":
            moves &= ~self.overflowed
        self.history.copy_(torch.where(moves, torch.cat([self.history[1:], self.now[None]]), self.history))
        scale = self._scale(self._amax())
        self.scale.copy_(torch.where(moves, scale, self.scale))
        self.now.zero_()

    def _scale(self, amax: Tensor) -> Tensor:
        recipe = self.recipe
        if recipe.scale_algo is not None:
            return recipe.scale_algo(amax, self.scale, self._largest, recipe)
        return scale_of(amax, self._largest * 2.0**-recipe.margin, self.scale, recipe.power_2_scales)

    def _amax(self) -> Tensor:
        algo = self.recipe.amax_algo
        if callable(algo):
            return algo(self.history)
        return self.history.amax(0) if algo == "max" else self.history[-1]
