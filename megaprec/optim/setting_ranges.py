"""Ranges of the numbers that an optimizer is given: settings, rates of a step, and a saved state's.

A number out of its range would train wrongly without any error. NaN compares as false with
everything, so that it would pass as a setting that is off. True would count as 1, and a text "no"
as true.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megaprec.errors import Problem, UserError
from megaprec.kinds import is_number
from megaprec.precision.plan import LossScaling


def require_settings(
    *,
    clip: float,
    norm: float,
    bucket: int,
    zero_size: int,
    keep_layers: int,
    keep_bytes: int,
    seed: int,
    lr: float | None,
    weight_decay: float,
    ema: float,
    **switches: bool | None,
) -> None:
    """Raise UserError, naming all that are wrong, for settings that are out of their range.

    switches: settings that are True or False; None where a switch is left open.
    """
    problems: list[Problem] = []
    counts = {
        "bucket": bucket,
        "zero_size": zero_size,
        "keep_layers": keep_layers,
        "keep_bytes": keep_bytes,
    }
    for name, count in counts.items():
        if not _is_count(count):
            problems.append(Problem.of("optimizer.count_range", name=name, value=count))
    if not is_number(seed, whole=True):
        problems.append(Problem.of("optimizer.seed", seed=seed))
    problems += _norm_problems(norm)
    problems += _clip_problems(clip)
    problems += _ema_problems(ema)
    for name, switch in switches.items():
        if not isinstance(switch, bool | None):
            problems.append(Problem.of("optimizer.switch", name=name, value=switch))
    # a learning rate may be left out, because each step can have its own
    rates = (
        {"weight_decay": weight_decay} if lr is None else {"lr": lr, "weight_decay": weight_decay}
    )
    problems += _rate_problems(rates)
    if problems:
        raise UserError(*problems)


def require_offload(offload: object) -> None:
    """Raise UserError for an argument that is no memory, such as True or "cpu"."""
    if offload is not None and not callable(getattr(offload, "visit", None)):
        raise UserError.of("optimizer.offload_kind", value=offload)


def require_clip(clip: float) -> None:
    """Raise UserError for a largest norm that a loop has set to none. NaN would make every weight
    NaN."""
    problems = _clip_problems(clip)
    if problems:
        raise UserError(*problems)


def require_rates(**rates: float) -> None:
    """Raise UserError for a learning rate or a weight decay that is not a finite number from 0
    on."""
    problems = _rate_problems(rates)
    if problems:
        raise UserError(*problems)


def _norm_problems(norm: float) -> list[Problem]:
    if (is_number(norm) and norm >= 1) or norm == math.inf:
        return []
    return [Problem.of("optimizer.norm_range", norm=norm)]


def _ema_problems(ema: float) -> list[Problem]:
    if is_number(ema) and 0 <= ema < 1:
        return []
    return [Problem.of("optimizer.ema_range", ema=ema)]


def _clip_problems(clip: float) -> list[Problem]:
    if (is_number(clip) and clip >= 0) or clip == math.inf:
        return []
    return [Problem.of("optimizer.clip_range", clip=clip)]


def _rate_problems(rates: Mapping[str, float]) -> list[Problem]:
    return [
        Problem.of("optimizer.rate_range", name=name, rate=rate)
        for name, rate in rates.items()
        if not (is_number(rate) and rate >= 0)
    ]


def _is_count(value: object) -> bool:
    """Return True for a whole number from 0 on."""
    return isinstance(value, int) and is_number(value, whole=True) and value >= 0


def require_scaled(was_read: bool, scaling: LossScaling) -> None:
    """Raise UserError if no loss can have been multiplied by a dynamic scale. was_read: True if the
    scale was ever read."""
    if not was_read and scaling.kind == "dynamic":
        raise UserError.of("optimizer.scale_never_read")


def require_count(counted_tokens: Tensor | float | None) -> None:
    """Raise UserError for a number of tokens below 0, by which the step would be skipped.

    That of a tensor is not looked at, because the host would wait for the device.
    """
    if counted_tokens is None or isinstance(counted_tokens, Tensor):
        return
    if counted_tokens < 0:
        raise UserError.of("optimizer.counted_tokens", description=f"= {counted_tokens!r}")


def require_saved(numbers: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise UserError, naming all that are wrong, for numbers that no optimizer has saved.

    keys: those that the state must have.
    """
    # before anything is loaded
    missing_keys = [key for key in keys if key not in numbers]
    if missing_keys:
        raise UserError.of("optimizer.state_incomplete", missing_keys=" and no ".join(missing_keys))
    problems: list[Problem] = []
    steps = numbers["steps"]
    if not _is_count(steps):
        problems.append(Problem.of("optimizer.state_steps", steps=steps))
    # a constant scaler saves nothing
    scale = numbers["scaler"].get("scale", 1.0)
    if not 0 < scale < math.inf:
        problems.append(Problem.of("optimizer.state_scale", scale=scale))
    if problems:
        raise UserError(*problems)
