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


def require_settings(
    *, clip: float, norm: float, bucket: int, zero_size: int, seed: int, **rates: float | None
) -> None:
    """Raise UserError, naming all that are wrong, for settings that are not numbers or out of their
    range."""
    whole = {"bucket": bucket, "zero_size": zero_size}
    rules = {
        f"{name} = {value!r}: must be a whole number from 0 on": _counts(value)
        for name, value in whole.items()
    }
    rules |= {
        f"seed = {seed!r}: must be a whole number": is_number(seed, whole=True),
        f"norm = {norm!r}: must be 2, inf or another number of at least 1": (
            (is_number(norm) and norm >= 1) or norm == math.inf
        ),
    }
    rules |= _rule_of_clip(clip)
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise UserError(*broken)
    require_rates(
        **{name: rate for name, rate in rates.items() if rate is not None or name != "lr"}
    )  # type: ignore[arg-type]


def require_clip(clip: float) -> None:
    """Raise UserError for a largest norm that someone has set to none. NaN would make every weight
    NaN."""
    if broken := [rule for rule, holds in _rule_of_clip(clip).items() if not holds]:
        raise UserError(*broken)


def _rule_of_clip(clip: float) -> dict[str, bool]:
    holds = (is_number(clip) and clip >= 0) or clip == math.inf
    return {
        f"clip = {clip!r}: must be a number from 0 on, the largest norm; 0 for no clipping": holds
    }


def require_rates(**rates: float) -> None:
    """Raise UserError for a learning rate or a weight decay that is not a finite number from 0
    on."""
    if wrong := [
        f"{name} = {rate!r}" for name, rate in rates.items() if not (is_number(rate) and rate >= 0)
    ]:
        raise UserError(
            *(f"{said}: must be a finite number from 0 on, an int or a float" for said in wrong)
        )


def claimed(rule: Any) -> Any:
    """Return a rule, marked as that of one optimizer. Raises UserError if it is another's, whose
    numbers it may hold.

    A frozen dataclass holds nothing that a step changes.
    """
    if getattr(getattr(type(rule), "__dataclass_params__", None), "frozen", False):
        return rule
    if getattr(rule, CLAIMED, False):
        raise UserError(
            f"rule = {type(rule).__name__}: it belongs to another optimizer, whose steps it "
            "counts: make one for each, "
            "rule(name, options)"
        )
    with suppress(AttributeError):
        setattr(rule, CLAIMED, True)
    return rule


def require_loss(loss: Tensor | None, any_shape: bool) -> None:
    """Raise UserError for a loss that is not one real number in a tensor. any_shape: one for each
    micro-batch."""
    if loss is None:
        return
    is_real = isinstance(loss, Tensor) and not loss.is_complex()
    if not is_real or not (any_shape or loss.numel() == 1):
        if isinstance(loss, Tensor):
            said = f"of shape {list(loss.shape)}, {loss.dtype}"
        else:
            said = repr(loss)
        raise UserError(
            f"loss {said}: step takes a real tensor of one element, the detached loss of this "
            "rank; take the mean of "
            "several, as for backward"
        )


def require_scaled(read: bool, scaling: LossScaling) -> None:
    """Raise UserError if no loss can have been multiplied by a dynamic scale. read: True if the
    scale was ever read."""
    if not read and scaling.kind == "dynamic":
        raise UserError(
            "optimizer.scale was never read, so no loss was multiplied by it, and gradients "
            "would be divided by it all "
            "the same: call (loss * optimizer.scale).backward(); nothing was changed"
        )


def require_saved(numbers: Mapping[str, Any], keys: Sequence[str] = ("steps", "scaler")) -> None:
    """Raise UserError, naming all that are wrong, for numbers of a saved state that no optimizer
    has saved.

    keys: those that a state must have.
    """
    if not isinstance(numbers, Mapping):
        raise UserError(
            f"this is not an optimizer state but a {type(numbers).__name__}: give what "
            "state_dict returned"
        )
    if lacking := [key for key in keys if key not in numbers]:
        raise UserError(f"this is not an optimizer state: it has no {' and no '.join(lacking)}")
    if wrong := _wrong_kinds(numbers):
        raise UserError(*(f"the state is not one of an optimizer: {line}" for line in wrong))
    if _counts(numbers["steps"]):
        wrong = []
    else:
        wrong = [f"steps = {numbers['steps']!r}: must be a whole number from 0 on"]
    kept: Mapping[str, Any] = numbers["scaler"]
    if kept:  # that of a constant scaler is empty
        lacking = [
            name for name in ("scale", "growth_tracker", "hysteresis_tracker") if name not in kept
        ]
        wrong += [f"the scaler of the state has no {name}" for name in lacking]
    wrong += [
        f"{name} = {value!r} of the scaler: must be a number"
        for name, value in kept.items()
        if not is_number(value)
    ]
    wrong += (
        [f"scale = {kept['scale']!r}: must be above 0"]
        if is_number(kept.get("scale")) and kept["scale"] <= 0
        else []
    )
    for group in numbers.get("param_groups", ()):
        rates = {key: group[key] for key in ("lr", "weight_decay") if key in group}
        wrong += [
            f"{key} = {rate!r} of param_groups: must be a number from 0 on"
            for key, rate in rates.items()
            if not (is_number(rate) and rate >= 0)
        ]
    if wrong:
        raise UserError(*(f"the state is not one of an optimizer: {line}" for line in wrong))


def _wrong_kinds(numbers: Mapping[str, Any]) -> list[str]:
    """Return a line for each part of a saved state that is no dict, list or tensor, as it must
    be."""
    wrong = []
    tables = {name: numbers[name] for name in ("scaler", "tensors") if name in numbers}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            wrong.append(f"{name} = {quoted(table)}: must be a dict")
    tensors = tables.get("tensors", {})
    if isinstance(tensors, Mapping):
        others = {name: value for name, value in tensors.items() if not isinstance(value, Tensor)}
        wrong += [
            f"tensors: {name} = {quoted(value)}: must be a tensor" for name, value in others.items()
        ]
    groups = numbers.get("param_groups", ())
    listed = isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping) for group in groups
    )
    if not listed:
        wrong.append(f"param_groups = {quoted(groups)}: must be a list of dicts")
    return wrong


def require_count(counted_tokens: Tensor | float | None) -> None:
    """Raise UserError for a number of tokens that is not one real number, or that is below 0; NaN
    is not known."""
    if counted_tokens is None:
        return
    given = counted_tokens
    if isinstance(given, Tensor):
        fits = given.numel() == 1 and not given.is_complex() and given.dtype != torch.bool
        said = f"of shape {list(given.shape)}, {given.dtype}"
    else:
        is_unknown = isinstance(given, float) and math.isnan(given)
        fits = is_unknown or (is_number(given) and given >= 0)
        said = f"= {given!r}"
    if not fits:
        raise UserError(
            f"counted_tokens {said}: must be a number from 0 on or a tensor of one, the "
            "tokens of the whole batch that "
            "count in the loss"
        )


def _counts(value: object) -> bool:
    """Return True for a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
