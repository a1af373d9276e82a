"""Textbook formulas for each kind of schedule, as a reference for simulated and measured schedules.

p ranks, m micro-batches, v stages (chunks) a rank; F, I, W: time of a forward, an input gradient
and a weight gradient of all of a rank's stages. The formulas hold for equal stages, free transfers
and enough micro-batches (`builders.py`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sizes(NamedTuple):
    """The variables of the formulas."""

    p: int
    m: int
    v: int = 1
    F: float = 1.0
    I: float = 1.0  # noqa: E741  # the usual symbol
    W: float = 1.0

    @property
    def work(self) -> float:
        """Return the time that a rank computes."""
        return self.m * (self.F + self.I + self.W)


class Formula(NamedTuple):
    """A formula as text and as a function."""

    text: str
    value: Callable[[Sizes], float]


class Textbook(NamedTuple):
    """The textbook properties of a kind of schedule.

    bubble: the longest wait of a rank between its first and last instruction, over the time it
        computes.
    held: the largest number of micro-batches whose activations, of all its stages, a rank holds.
    """

    bubble: Formula
    held: Formula


# of schedules that fill the pipeline once and drain it once
_FULL = Formula("(p - 1) / m", lambda s: (s.p - 1) / s.m)
_DEPTH = Formula("p", lambda s: min(s.p, s.m))

TEXTBOOK: Mapping[str, Textbook] = {
    "gpipe": Textbook(_FULL, Formula("m", lambda s: s.m)),
    "1f1b": Textbook(_FULL, _DEPTH),
    "interleaved": Textbook(
        Formula("(p - 1) / (v m)", lambda s: (s.p - 1) / (s.v * s.m)),
        Formula("p + (p - 1) / v", lambda s: min(s.p + (s.p - 1) / s.v, s.m)),
    ),
    "zb-h1": Textbook(
        Formula(
            "(p - 1)(F + I - W) / (m (F + I + W))", lambda s: (s.p - 1) * (s.F + s.I - s.W) / s.work
        ),
        _DEPTH,
    ),
    "zb-h2": Textbook(
        Formula(
            "(p - 1)(F + I - 2 W) / (m (F + I + W))",
            lambda s: (s.p - 1) * max(0, s.F + s.I - 2 * s.W) / s.work,
        ),
        Formula("2 p - 1", lambda s: min(2 * s.p - 1, s.m)),
    ),
    "zb-v": Textbook(Formula("0", lambda s: 0.0), _DEPTH),
}
