"""Loss scaling: multiply the loss so that half-precision gradients neither vanish nor overflow.

The scale searches for the largest value that does not overflow. Every overflow uses up one of
`hysteresis` tolerated ones; when none is left the scale falls by `backoff_factor` and goes on
falling with every further overflow. After `growth_interval` good steps in a row it grows by
`growth_factor`, and only then (with the refill rule "growth", which is what Megatron-LM does) are
the tolerated overflows refilled. The rule "good_step" refills them after every good step, so that
only consecutive overflows count.

All state is tensors on the device of the gradients; an update never waits for the host. A caller
that divides by the scale must read it *before* `update`, so that it divides by the scale that
multiplied the loss.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from megaprec.errors import Problem, UserError
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.precision.plan import LossScaling

# powers of two that float32 can hold and invert
_SMALLEST = 2.0**-126
_LARGEST = 2.0**127


class GradScaler(Protocol):
    """The interface of a scaler that the optimizer uses. `scale` is a float32 tensor of shape
    []."""

    @property
    def scale(self) -> Tensor: ...
    def update(self, found_inf: Tensor) -> None: ...
    def tensors(self) -> tuple[Tensor, ...]: ...
    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, float]) -> None: ...


class ConstantGradScaler:
    """A loss scale that never changes; the optimizer still skips steps with a non-finite
    gradient."""

    def __init__(self, scale: float = 1.0, device: torch.device | str = "cpu") -> None:
        if not _SMALLEST <= scale <= _LARGEST:
            raise UserError.of("optimizer.loss_scale_range", scale=scale)
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, found_inf: Tensor) -> None:
        pass

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.scale,)

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the constant scale: the state of a dynamic scaler in a checkpoint does not apply to
        it."""


class DynamicGradScaler:
    """A loss scale that falls after overflows and grows after good steps.

    Raises UserError unless 2**-126 <= minimum <= initial <= maximum <= 2**127, growth_factor > 1,
    0 < backoff_factor < 1 and growth_interval, hysteresis >= 1. Without a maximum the scale may
    reach 2**127.
    """

    def __init__(self, scaling: LossScaling, device: torch.device | str = "cpu") -> None:
        problems = list(_problems(scaling))
        if problems:
            raise UserError(*problems)
        self.scaling = scaling
        self.scale = torch.tensor(scaling.initial, dtype=torch.float32, device=device)
        # good steps in a row
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # overflows that are still tolerated
        self.hysteresis_tracker = torch.full(
            (), scaling.hysteresis, dtype=torch.int32, device=device
        )

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step. found_inf: [] or [1], non-zero if any gradient on any rank
        was not finite."""
        scaling = self.scaling
        overflowed = found_inf.reshape(()) != 0
        one_less = self.hysteresis_tracker - 1
        tolerated = torch.where(overflowed, one_less, self.hysteresis_tracker)
        one_more = self.growth_tracker + 1
        good_steps = torch.where(overflowed, 0, one_more)
        # ">=", not "==": after a resume with a shorter interval the tracker may already exceed it.
        grows = good_steps >= scaling.growth_interval
        larger = self.scale * scaling.growth_factor
        larger = larger.clamp(max=_maximum(scaling))
        smaller = self.scale * scaling.backoff_factor
        smaller = smaller.clamp(min=scaling.minimum)
        after_good_step = torch.where(grows, larger, self.scale)
        # once none is left, every further overflow lowers the scale
        falls = overflowed & (tolerated <= 0)
        scale = torch.where(falls, smaller, after_good_step)
        self.scale.copy_(scale)
        refills = grows if scaling.hysteresis_refill == "growth" else ~overflowed
        refilled = torch.where(refills, scaling.hysteresis, tolerated)
        self.hysteresis_tracker.copy_(refilled)
        # the interval begins anew after a growth
        counted = torch.where(grows, 0, good_steps)
        self.growth_tracker.copy_(counted)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all of the state, which must be equal on all ranks."""
        return self.scale, self.growth_tracker, self.hysteresis_tracker

    def state_dict(self) -> dict[str, float]:
        """Return the three numbers of Megatron's scaler, as plain numbers."""
        return {
            "scale": self.scale.item(),
            "growth_tracker": self.growth_tracker.item(),
            "hysteresis_tracker": self.hysteresis_tracker.item(),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved search; nothing changes if `state` is the empty one of a constant scaler."""
        if state:
            # the limits may be others than those of the run that saved it
            scale = max(state["scale"], self.scaling.minimum)
            scale = min(scale, _maximum(self.scaling))
            self.scale.fill_(scale)
            good_steps = int(state["growth_tracker"])
            self.growth_tracker.fill_(good_steps)
            tolerated = int(state["hysteresis_tracker"])
            self.hysteresis_tracker.fill_(tolerated)


def disagreement(scaler: GradScaler, steps: int, rate: float, limits: StepLimits) -> str:
    """Return a line with this rank's numbers, which those of another rank contradict."""
    scale = scaler.state_dict() or "a constant scale"
    here = f"{scale}, {steps} steps, learning rate {rate:g}"
    if limits != NO_LIMITS:
        here += f", limits {limits.loss:.17g} of the loss and {limits.norm:.17g} of the norm"
    return (
        "ranks disagree about the loss scaler, the number of steps, the learning rate or the "
        f"limits of the step; here: {here}"
    )


def make_scaler(scaling: LossScaling, device: torch.device | str = "cpu") -> GradScaler:
    """Return the scaler that a plan asks for; "none" is a constant scale of one."""
    if scaling.kind == "none":
        return ConstantGradScaler(1.0, device)
    if scaling.kind == "constant":
        return ConstantGradScaler(scaling.initial, device)
    return DynamicGradScaler(scaling, device)


def _maximum(scaling: LossScaling) -> float:
    """Return the largest scale that the settings allow."""
    return _LARGEST if scaling.maximum is None else scaling.maximum


def _problems(scaling: LossScaling) -> Iterator[Problem]:
    """Yield a problem for each setting of a dynamic scale that is out of its range."""
    maximum = _maximum(scaling)
    if not _SMALLEST <= scaling.minimum <= scaling.initial <= maximum <= _LARGEST:
        yield Problem.of(
            "optimizer.scaler_range",
            initial=scaling.initial,
            minimum=scaling.minimum,
            maximum=maximum,
        )
    if not scaling.growth_factor > 1:
        yield Problem.of("optimizer.scaler_growth", growth_factor=scaling.growth_factor)
    if not 0 < scaling.backoff_factor < 1:
        yield Problem.of("optimizer.scaler_backoff", backoff_factor=scaling.backoff_factor)
    if not scaling.growth_interval >= 1:
        yield Problem.of("optimizer.scaler_interval", growth_interval=scaling.growth_interval)
    if not scaling.hysteresis >= 1:
        yield Problem.of("optimizer.scaler_hysteresis", hysteresis=scaling.hysteresis)
