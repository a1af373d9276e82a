"""Checks of the numbers that a caller gives the optimizer: settings, the rates of each step, and a
saved state's.

A NaN compares as false with everything, so that a setting of NaN would pass as one that is off;
text and True would fail late, or count as 1.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from megaprec.kinds import is_number, quoted
from megaprec.precision.plan import LossScaling

CLAIMED = "_has_optimizer"  # attribute of a rule


_SCALER_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")


def require_settings(
    *, clip: float, norm: float, bucket: int, zero_size: int, seed: int, **rates: float | None
) -> None:
    """Raise UserError, naming all that are wrong, for settings that are not numbers or out of their
    range."""
    rules = {
        f"{name} = {value!r}: must be a whole number from 0 on": _is_count(value)
        for name, value in {"bucket": bucket, "zero_size": zero_size}.items()
    }
    is_seed = is_number(seed, whole=True)
    is_order = (is_number(norm) and norm >= 1) or norm == math.inf
    rules[f"seed = {seed!r}: must be a whole number"] = is_seed
    rules[f"norm = {norm!r}: must be 2, inf or another number of at least 1"] = is_order
    rules |= _rule_of_clip(clip)
    _require_all(rules)
    # a learning rate may be left out, because each step can have its own
    given = {name: rate for name, rate in rates.items() if rate is not None or name != "lr"}
    require_rates(**given)  # type: ignore[arg-type]


def require_clip(clip: float) -> None:
    """Raise UserError for a largest norm that someone has set to none. NaN would make every weight
    NaN."""
    _require_all(_rule_of_clip(clip))


def _require_all(rules: Mapping[str, bool]) -> None:
    """Raise UserError with the lines whose rule does not hold."""
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise UserError(*broken)


def _rule_of_clip(clip: float) -> dict[str, bool]:
    holds = (is_number(clip) and clip >= 0) or clip == math.inf
    return {
        f"clip = {clip!r}: must be a number from 0 on, the largest norm; 0 for no clipping": holds
    }


def _is_rate(value: Any) -> bool:
    return is_number(value) and value >= 0


def require_rates(**rates: float) -> None:
    """Raise UserError for a learning rate or a weight decay that is not a finite number from 0
    on."""
    problems = [
        f"{name} = {rate!r}: must be a finite number from 0 on, an int or a float"
        for name, rate in rates.items()
        if not _is_rate(rate)
    ]
    if problems:
        raise UserError(*problems)


def claim_rule(rule: Any) -> Any:
    """Return a rule, marked as that of one optimizer. Raises UserError if it is another's, whose
    numbers it may hold.

    A frozen dataclass holds nothing that a step changes.
    """
    if getattr(getattr(type(rule), "__dataclass_params__", None), "frozen", False):
        return rule
    if getattr(rule, CLAIMED, False):
        raise UserError.of("optimizer.rule_shared", kind=type(rule).__name__)
    with suppress(AttributeError):  # of a class with slots
        setattr(rule, CLAIMED, True)
    return rule


def require_loss(loss: Tensor | None, any_shape: bool) -> None:
    """Raise UserError for a loss that is not one real number in a tensor. any_shape: one for each
    micro-batch."""
    if loss is None:
        return
    if not isinstance(loss, Tensor):
        described = repr(loss)
    elif loss.is_complex() or not (any_shape or loss.numel() == 1):
        described = f"of shape {list(loss.shape)}, {loss.dtype}"
    else:
        return
    raise UserError.of("optimizer.loss_not_scalar", described=described)


def require_scaled(was_read: bool, scaling: LossScaling) -> None:
    """Raise UserError if no loss can have been multiplied by a dynamic scale. was_read: True if the
    scale was ever read."""
    if not was_read and scaling.kind == "dynamic":
        raise UserError.of("optimizer.scale_never_read")


def require_saved(numbers: Mapping[str, Any], keys: Sequence[str] = ("steps", "scaler")) -> None:
    """Raise UserError, naming all that are wrong, for numbers of a saved state that no optimizer
    has saved.

    keys: those that a state must have.
    """
    if not isinstance(numbers, Mapping):
        raise UserError.of("optimizer.state_not_dict", kind=type(numbers).__name__)
    missing_keys = [key for key in keys if key not in numbers]
    if missing_keys:
        raise UserError.of("optimizer.state_incomplete", missing_keys=" and no ".join(missing_keys))
    # values can be looked into only where all parts are of their kinds
    if wrong_kinds := _kind_problems(numbers):
        raise UserError(*(f"the state is not one of an optimizer: {line}" for line in wrong_kinds))
    problems: list[str] = []
    if not _is_count(numbers["steps"]):
        problems.append(f"steps = {numbers['steps']!r}: must be a whole number from 0 on")
    problems += _scaler_problems(numbers["scaler"])
    for group in numbers.get("param_groups", ()):
        problems += [
            f"{key} = {group[key]!r} of param_groups: must be a number from 0 on"
            for key in ("lr", "weight_decay")
            if key in group and not _is_rate(group[key])
        ]
    if problems:
        raise UserError(*(f"the state is not one of an optimizer: {line}" for line in problems))


def _kind_problems(numbers: Mapping[str, Any]) -> list[str]:
    """Return a line for each part of a saved state that is no dict, list or tensor, as it must
    be."""
    problems: list[str] = []
    tables = {name: numbers[name] for name in ("scaler", "tensors") if name in numbers}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            problems.append(f"{name} = {quoted(table)}: must be a dict")
    tensors = tables.get("tensors", {})
    if isinstance(tensors, Mapping):
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                problems.append(f"tensors: {name} = {quoted(value)}: must be a tensor")
    groups = numbers.get("param_groups", ())
    is_list = isinstance(groups, list | tuple)
    if not is_list or not all(isinstance(group, Mapping) for group in groups):
        problems.append(f"param_groups = {quoted(groups)}: must be a list of dicts")
    return problems


def require_count(counted_tokens: Tensor | float | None) -> None:
    """Raise UserError for a number of tokens that is not one real number, or that is below 0; NaN
    is not known."""
    if counted_tokens is None:
        return
    if isinstance(counted_tokens, Tensor):
        is_real = not counted_tokens.is_complex() and counted_tokens.dtype != torch.bool
        fits = counted_tokens.numel() == 1 and is_real
        description = f"of shape {list(counted_tokens.shape)}, {counted_tokens.dtype}"
    else:
        is_unknown = isinstance(counted_tokens, float) and math.isnan(counted_tokens)
        fits = is_unknown or (is_number(counted_tokens) and counted_tokens >= 0)
        description = f"= {counted_tokens!r}"
    if not fits:
        raise UserError.of("optimizer.counted_tokens", description=description)


def _scaler_problems(scaler: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the saved state of a scaler; that of a constant one is empty."""
    if not scaler:
        return []
    problems = [
        f"the scaler of the state has no {name}" for name in _SCALER_KEYS if name not in scaler
    ]
    problems += [
        f"{name} = {value!r} of the scaler: must be a number"
        for name, value in scaler.items()
        if not is_number(value)
    ]
    scale: Any = scaler.get("scale")
    if is_number(scale) and scale <= 0:
        problems.append(f"scale = {scale!r}: must be above 0")
    return problems


def _is_count(value: object) -> bool:
    """Return True for a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
