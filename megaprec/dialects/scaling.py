"""Keys of torch's gradient scaler, common to Colossal-AI's TORCH mode and FSDP: no minimal scale,
no hysteresis."""

from typing import Any

from pydantic import Field

from megaprec.dialects.reading import Keys
from megaprec.precision.plan import LossScaling

FLOOR = 2.0**-126  # the lowest scale that float32 can invert; the minimum if there is no other
CEILING = 2.0**127  # the highest scale; the maximum if there is no other


class GradScaler(Keys):
    """Keys of torch.amp.GradScaler and of FSDP's ShardedGradScaler."""

    init_scale: float = Field(default=2.0**16, ge=FLOOR, le=CEILING)
    growth_factor: float = Field(default=2.0, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    growth_interval: int = Field(default=2000, gt=0)
    enabled: bool = True


SCALER_KEYS = tuple(GradScaler.model_fields)


def cap(highest: float) -> float | None:
    """Return `highest` as LossScaling.maximum, where None means CEILING."""
    return None if highest == CEILING else highest


def torch_scaling(scaler: GradScaler) -> LossScaling:
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
        hysteresis=1,
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
