"""Limits of a step's loss and gradient norm: a step above one of them is skipped on every rank.

Limits are numbers that a caller has before the step, the same on every rank. They are compared with
the numbers of the consensus, before anything changes and without a wait of the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StepLimits(NamedTuple):
    """The largest loss and gradient norm of a step that is applied; inf: no limit.

    loss: mean over the step's tokens that count, in nats.
    norm: of the gradients before clipping, without the loss scale.
    """

    loss: float = math.inf
    norm: float = math.inf

    @property
    def has_any(self) -> bool:
        """Return True if there is a limit."""
        return math.isfinite(self.loss) or math.isfinite(self.norm)

    def exceeded_by(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return bool [], True if one of the numbers is above its limit.

        loss, norm: float64 [].
        """
        return (loss > self.loss) | (norm > self.norm)

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the limits, float64 [] each; none if there is no limit."""
        if self == NO_LIMITS:
            return ()
        # filled on the device: a copy would make the host wait
        return tuple(torch.full((), limit, dtype=torch.float64, device=device) for limit in self)


NO_LIMITS = StepLimits()
