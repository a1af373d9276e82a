"""Textbook formulas of schedules (`kinds.py`), a reference for simulated and measured schedules.

p ranks, m micro-batches, v stages (chunks) a rank; F, I, W: time of a forward, an input gradient
and a weight gradient of all of a rank's stages. The formulas hold for equal stages, free transfers
and enough micro-batches (`builders.py`).
"""

from collections.abc import Callable
from typing import NamedTuple


class FormulaSizes(NamedTuple):
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
    value: Callable[[FormulaSizes], float]
