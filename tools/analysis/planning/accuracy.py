"""The distance of predictions from measured speeds, by the back-test of docs/planning.md.

The numbers are those of `python -m tests.planning.backtest`; `tests/planning/test_backtest.py`
compares them with its result.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Errors of predicted tokens a second.

    median: of half of all runs it is no larger.
    most: of nine runs in ten it is no larger.
    runs: how many were compared.
    """

    median: float
    most: float
    runs: int

    def describe(self) -> str:
        """Return the error in words."""
        return (
            f"half of {self.runs} published runs are within {self.median:.0%}, nine in ten within "
            f"{self.most:.0%}"
        )


# from the data sheet alone
PLAIN = Accuracy(0.145, 0.537, 184)
# with a factor from a run of another model with the same software
MEASURED = Accuracy(0.056, 0.208, 164)
