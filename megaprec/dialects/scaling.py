"""Loss scales that several systems have: torch's gradient scaler, and Megatron's with hysteresis.

torch's, of Colossal-AI's TORCH mode and of FSDP, has no minimal scale and no hysteresis.
"""

from typing import Annotated, Any

from pydantic import Field

from megaprec.dialects.reading import Keys, Reading
from megaprec.precision.plan import LossScaling

# the limits of a scale that has no others: the powers of two that megaprec's scalers take, which
# float32 can hold and invert
FLOOR = 2.0**-126
CEILING = 2.0**127
LossScale = Annotated[float, Field(ge=FLOOR, le=CEILING)]
"""The type of keys that are a loss scale or a limit of one."""


class TorchGradScaler(Keys):
    """Keys of torch.amp.GradScaler and of FSDP's ShardedGradScaler."""

    init_scale: LossScale = 2.0**16
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=2000, gt=0)
    enabled: bool = True


TORCH_SCALER_KEYS = tuple(TorchGradScaler.model_fields)
# Colossal-AI's names of the settings of Megatron's scaler
HYSTERESIS_SCALER_KEYS = (
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
)


def hysteresis_scaling(scaler: Any, floor: float, ceiling: float) -> LossScaling:
    """Return the LossScaling of Megatron's scaler.

    scaler: a table with HYSTERESIS_SCALER_KEYS. floor, ceiling: its limits, which the table may
        leave out.
    """
    return LossScaling(
        "dynamic",
        initial=scaler.initial_scale,
        minimum=floor,
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
        hysteresis=scaler.hysteresis,
        maximum=cap(ceiling),
    )


def refuse_outside(
    reading: Reading, key: str, initial: float, floor: float, ceiling: float
) -> None:
    """Record a problem unless the first scale, the value of `key`, lies between its limits."""
    if not floor <= initial <= ceiling:
        why = f"must lie between min_scale {floor:g} and max_scale {ceiling:g}"
        reading.refuse(key, initial, why)


def cap(highest: float) -> float | None:
    """Return `highest` as LossScaling.maximum, where None means CEILING."""
    return None if highest == CEILING else highest


def torch_scaling(scaler: TorchGradScaler) -> LossScaling:
    """Return the LossScaling of a scaler with these keys."""
    if not scaler.enabled:
        return LossScaling()
    return LossScaling(
        "dynamic",
        initial=scaler.init_scale,
        minimum=FLOOR,
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
        hysteresis=1,  # the first overflow lowers the scale
    )


def express_torch_scaling(scaling: LossScaling) -> dict[str, Any]:
    """Return the nearest keys of GradScaler."""
    if scaling.kind == "none":
        return {"enabled": False}
    return {
        "init_scale": scaling.initial,
        "growth_factor": scaling.growth_factor,
        "backoff_factor": scaling.backoff_factor,
        "growth_interval": scaling.growth_interval,
    }
