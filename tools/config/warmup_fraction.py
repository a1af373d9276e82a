"""A warm-up that is given as a fraction of the schedule, as other trainers' `warmup_ratio`."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from megaprec.errors import Problem
from tools.config.tables.table import MAX_STEPS
from tools.console.toml import Setting

KEY = "lr.warmup"
# of a step: a product such as 0.07 * 100 is 7.000000000000001
ROUNDING = 6


def take_warmup_fraction(settings: dict[str, Setting]) -> Iterator[str]:
    """Put the whole number that a fraction means in its place; yield a problem if the run file
    does not say how long the schedule is."""
    setting = settings.get(KEY)
    if setting is None or not isinstance(setting.value, float):
        return
    if not 0 < setting.value < 1:
        # one line about it is enough
        del settings[KEY]
        yield Problem.of("config.warmup_no_fraction", value=setting.value, origin=setting.origin)
        return
    length = _schedule_length(settings)
    if length is None:
        # one line about it is enough
        del settings[KEY]
        yield Problem.of("config.warmup_fraction", value=setting.value, origin=setting.origin)
        return
    warmup = ceil(round(setting.value * length, ROUNDING))
    settings[KEY] = Setting(warmup, setting.origin)


def _schedule_length(settings: Mapping[str, Setting]) -> int | None:
    """Return the length of the schedule in its unit; None if the run file does not say it."""
    length = _whole(settings, "lr.length")
    if length is not None:
        return length
    steps = _whole(settings, "train.steps")
    if steps is None or _value(settings, "lr.unit") != "samples":
        return steps
    batch = _whole(settings, "train.global_batch")
    # with batches that change, the samples are not a product
    if batch is None or _value(settings, "train.batch_schedule"):
        return None
    return steps * batch


def _value(settings: Mapping[str, Setting], key: str) -> Any:
    return settings[key].value if key in settings else None


def _whole(settings: Mapping[str, Setting], key: str) -> int | None:
    """Return the value of a key if it is a length."""
    value = _value(settings, key)
    is_length = isinstance(value, int) and 0 < value <= MAX_STEPS
    return value if is_length else None
