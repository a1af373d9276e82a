"""The distance of predictions from measured speeds, of runs that had no part in the fit of the
constants.

The numbers are those that `python -m tests.planning.fit` prints as held out (docs/planning.md);
`tests/planning/test_backtest.py` compares them.
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
            f"half of {self.runs} held-out runs are within {self.median:.0%}, nine in ten within "
            f"{self.most:.0%}"
        )


# from the data sheet alone
PLAIN = Accuracy(0.049, 0.330, 184)
# with a factor from a run of another model with the same software
MEASURED = Accuracy(0.040, 0.219, 164)
