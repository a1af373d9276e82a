"""Initial weights that the ranks of an optimizer share out: each draws the slice of which it has
the masters, and the slices are all-gathered as after an update.

Random numbers are keyed by logical name and place, so the weights are the same bits as if each rank
drew all of its own. A rank of a large model then neither draws nor holds, in FP32 in the host's
memory, what its replicas draw.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megaprec.checkpoint.save_load import load_weights
from megaprec.comm.layout import Layout, Part, layout_of
from megaprec.comm.random import normal_range
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import PrecisionPlan


class InitialWeights:
    """A source of slices of initial weights, by the distributions that layouts state.

    stages: those of this rank.
    """

    def __init__(self, stages: Iterable[nn.Module], plan: PrecisionPlan, seed: int) -> None:
        self._plan = plan
        self._seed = seed
        self._layouts: dict[str, Layout] = {}
        for stage in stages:
            for parameter in stage.parameters():
                layout = layout_of(parameter)
                for part in layout.parts:
                    self._layouts[part.name] = layout

    def read_range(
        self,
        kind: str,
        part: Part,
        first: int,
        last: int,
    ) -> Tensor:
        """Return the initial values of the elements from `first` to before `last` of the flattened
        slice `part`, in the dtype of masters or of the weight, if that is wider.

        kind: of the values, always the weight; not read.
        """
        layout = self._layouts[part.name]
        weight_dtype = self._plan.param_dtype(part.name)
        masters = self._plan.masters
        dtype = weight_dtype if weight_dtype.itemsize > masters.itemsize else masters
        if not layout.std:
            return torch.full((last - first,), layout.mean, dtype=dtype)
        drawn = normal_range(part, first, last, self._seed, layout.std, dtype)
        return drawn.add_(layout.mean)


def draw_weights(stages: Iterable[nn.Module], optimizer: ParallelAMPOptimizer, seed: int) -> None:
    """Draw the initial weights of stages that were built blank. Collective over the world."""
    load_weights(InitialWeights(stages, optimizer.plan, seed), optimizer)
