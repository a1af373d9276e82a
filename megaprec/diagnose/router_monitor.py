"""Monitor of routers, which names a layer whose router has collapsed: it sends nearly all tokens to
the same few experts, and the others learn nothing.

The rule is about `RouterReport.used_experts`, which is the experts of a token, k, if all tokens go
to the same k of E experts, and E if all experts have the same load. A router has collapsed if for
STEPS applied steps in a row

    used experts  <  k + (E - k) / 10

A router that is drawn at random is far above this bound, and so is one that prefers some experts,
or always takes one of several. Skipped steps count neither way. A layer is named once, and again
only if a step above the bound came in between. A run that resumes begins to count anew.
"""

from megaprec.optim.decision.step_report import RouterReport, StepReport

STEPS = 20
LEAST_SHARE = 0.1  # of the experts beyond those of one token


class RouterMonitor:
    """Follows the routers of a run's steps; the state is the same on every rank.

    experts: of a layer. per_token: the number that each token is sent to.
    """

    def __init__(self, experts: int, per_token: int) -> None:
        self.bound = per_token + LEAST_SHARE * (experts - per_token)
        # by layer, the applied steps in a row below the bound
        self._in_a_row: dict[int, int] = {}

    def note(self, report: StepReport) -> list[RouterReport]:
        """Record the next step, and return the routers that have collapsed with it."""
        if not report.changed:
            return []
        collapsed: list[RouterReport] = []
        for router in report.routers:
            is_below = router.used_experts < self.bound
            in_a_row = self._in_a_row.get(router.layer, 0) + 1 if is_below else 0
            self._in_a_row[router.layer] = in_a_row
            if in_a_row == STEPS:
                collapsed.append(router)
        return collapsed
