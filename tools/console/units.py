"""Sizes, speeds, durations, scales and counts as people read them: 1.5 GiB, 312 TFLOP/s, 2.4 h,
2^16, 1 rank."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
FLOP_UNITS = ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP")
# with their seconds, the longest first
LONG_UNITS = (
    ("days", 86400.0),
    ("h", 3600.0),
    ("min", 60.0),
)


def size(amount: float) -> str:
    """Return a number of bytes: 17 B, 2.41 MiB, 13.6 GiB."""
    return _scaled(amount, 1024, SIZE_UNITS)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number of things: 1 rank, 2 ranks, 3 micro-batches (of "micro-batch" and "es")."""
    ending = "" if number == 1 else plural
    return f"{number:,} {noun}{ending}"


def enumerated(words: Sequence[str]) -> str:
    """Return "a, b and c"; "" without words."""
    *first_ones, last = words or [""]
    if not first_ones:
        return last
    return f"{', '.join(first_ones)} and {last}"


def first_of(names: Sequence[str], most: int) -> str:
    """Return all names, or of more than `most` the first ones and the number of the others."""
    if len(names) <= most:
        return enumerated(names)
    return enumerated([*names[:most], f"{len(names) - most:,} more"])


def flops(amount: float) -> str:
    """Return a number of floating-point operations: 3.21 MFLOP, 1.25 TFLOP."""
    return _scaled(amount, 1000, FLOP_UNITS)


def date_now() -> str:
    """Return the date and time, in UTC: 2026-11-27 10:15:00 UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """Return a time: 45.0 µs, 12.3 ms, 4.56 s, 7.80 min, 3.40 h, 12.0 days."""
    # from two of a unit on, for 1.2 h says less than 72 min
    for unit, length in LONG_UNITS:
        if seconds >= 2 * length:
            return f"{_short(seconds / length)} {unit}"
    if seconds >= 1:
        return f"{_short(seconds)} s"
    if 0 < seconds < 1e-4:
        return f"{_short(seconds * 1e6)} µs"
    return f"{_short(seconds * 1e3)} ms"


def loss_scale(scale: float) -> str:
    """Return a loss scale in short, powers of two as such: 2^32, 8, 1000."""
    # frexp's mantissa is in [0.5, 1): a half for powers of two. Small ones read better as they are.
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and scale > 8:
        return f"2^{exponent - 1}"
    return f"{scale:g}"


def _scaled(amount: float, base: int, units: tuple[str, ...]) -> str:
    """Return a number in the largest of the units, each `base` times the one before, that leaves a
    digit before the point."""
    unit_index = 0
    # three digits at most are shown: 999.5 is already 1,000
    while amount >= 999.5 and unit_index < len(units) - 1:
        amount /= base
        unit_index += 1
    if unit_index == 0:
        return f"{amount:.0f} {units[0]}"
    return f"{_short(amount)} {units[unit_index]}"


def _short(value: float) -> str:
    """Return a number in three digits; more if it is above 1,000."""
    # limits by the rounded number: 99.96 is shown as 100, not as 100.0
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
