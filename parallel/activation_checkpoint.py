"""Activation checkpointing: which activations are recomputed in the backward pass instead of kept,
to save memory.

Either whole layers are recomputed, or the parts of every layer that are named.
`parallel.recomputation` does it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from parallel.recomputation import recomputed

RecomputedModule = Literal["attention", "activation", "norm"]
MODULES: tuple[RecomputedModule, ...] = get_args(RecomputedModule)
"""Parts of a layer that can be recomputed separately: everything between attention's two
projections, the activation function of a feed-forward or expert, and the norms before attention,
before the feed-forward and before the head."""


@dataclass(frozen=True)
class Recompute:
    """The activations that a stage recomputes in its backward pass.

    modules: members of MODULES; these parts are recomputed in every layer.
    fraction, layers: the number of a stage's first layers that are recomputed as a whole: `layers`
        if it is not 0, otherwise this fraction of the stage's layers, rounded down.
    """

    modules: tuple[RecomputedModule, ...] = ()
    fraction: float = 0.0
    layers: int = 0

    def count_whole_layers(self, layers: int) -> int:
        """Return how many of a stage's `layers` layers, from the first on, are recomputed as a
        whole."""
        # stages may have fewer layers than were asked for
        if self.layers:
            return min(self.layers, layers)
        return int(layers * self.fraction)

    def inside_layer(self, whole: bool) -> "Recompute":
        """Return the setting for the inside of one layer. whole: the layer is recomputed as a
        whole.

        Such a layer also recomputes its activation function from the product before it. That
        product is then the last operation that the layer recomputes, and the product after the
        activation function is not computed again.
        """
        if whole:
            return Recompute(("activation",))
        return Recompute(self.modules)

    def run_forward(
        self,
        module: RecomputedModule,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        then: Callable[[Tensor], Any] = lambda result: result,
    ) -> Any:
        """Return then(function(x)), as a forward pass does; the backward pass recomputes `function`
        if `module` is one of `modules`.

        then: the operation after `function`; if that is recomputed, the result between both is not
            kept either.
        """
        if module in self.modules:
            return recomputed(function, x, then)
        return then(function(x))


KEEP = Recompute()
"""No activation is recomputed."""
