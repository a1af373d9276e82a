"""Norms over the features, always computed in the plan's `sensitive` dtype.

Their weights are whole on every tp rank. Under sequence parallelism each rank normalises its own part of the
sequence, so each rank's gradient is a share.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.layout import Part
from parallel.context import Context
from parallel.layers import parameter


class RMSNorm(nn.Module):
    """x [..., hidden] / root mean square * weight, in the dtype of x."""

    def __init__(self, context: Context, hidden: int, *, name: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.sensitive = eps, context.plan.sensitive
        self.weight = vector(context, f"{name}.weight", hidden, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.rms_norm(x.to(self.sensitive), self.weight.shape, self.weight.to(self.sensitive), self.eps)
        return wide.to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias over the last dim, in the dtype of x."""

    def __init__(self, context: Context, hidden: int, *, name: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.sensitive = eps, context.plan.sensitive
        self.weight = vector(context, f"{name}.weight", hidden, 1.0)
        self.bias = vector(context, f"{name}.bias", hidden, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(self.sensitive), self.bias.to(self.sensitive)
        return F.layer_norm(x.to(self.sensitive), weight.shape, weight, bias, self.eps).to(x.dtype)


def vector(context: Context, name: str, hidden: int, value: float) -> nn.Parameter:
    """A parameter [hidden] that every tp rank holds, filled with `value`."""
    return parameter(context, [Part.cut(name, (hidden,), None, context.tp)], 0.0, context.cut_sequence, mean=value)
