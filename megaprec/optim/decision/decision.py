"""The values that the parts of one step are given: what it was asked for, and what was decided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaprec.optim.decision.consensus import StepNumbers
from megaprec.optim.decision.step_limits import StepLimits
from megaprec.optim.rules.param_groups import NO_FACTORS, Factors, Rates
from megaprec.optim.rules.update_rules import UpdateRule


@dataclass(frozen=True)
class StepSettings:
    """The settings of one step, the same on every rank.

    rates, rules: by the factors of a group; a scheduler may have changed both there.
    limits: of loss and gradient norm.
    lines: the settings in words, which ranks compare, and show if they differ.
    """

    rates: Mapping[Factors, Rates]
    rules: Mapping[Factors, UpdateRule]
    limits: StepLimits
    lines: Sequence[str]

    @property
    def lr(self) -> float:
        """Return the learning rate, without any group's factor."""
        return self.rates[NO_FACTORS].lr


@dataclass(frozen=True)
class StepDecision:
    """The decision of all ranks on one step, in tensors on the device, which no host waits for.

    numbers: that ranks have exchanged.
    scale: float32 [], by which the loss was multiplied.
    norm: float64 [], of the gradients, without the loss scale.
    is_spike: bool [], whether loss or norm is above a limit.
    skip: float32 [], 1 if the step changes nothing.
    """

    numbers: StepNumbers
    scale: Tensor
    norm: Tensor
    is_spike: Tensor
    skip: Tensor
