"""The time of the optimizer's update, which reads and writes every number of its state once."""

from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.run_file import RunConfig
from tools.config.sharding import sharding_of

MOMENTS = 2  # of Adam; other rules have fewer or more, and the update is a small part of a step


def update_seconds(config: RunConfig, elements: float, assumed: Assumptions) -> float:
    """Return the time of the update. elements: parameters on the fullest rank."""
    plan = config.plan
    wide = plan.masters.itemsize
    # masters and moments are read and written, gradients are read twice, for their norm and for the
    # update, and weights are written
    of_share = 2 * (1 + MOMENTS) * wide + 2 * plan.gradients.itemsize + plan.parameters.itemsize
    share = elements / sharding_of(config).zero
    # gradients are set to zero before the first micro-batch
    of_all = plan.gradients.itemsize
    return (share * of_share + elements * of_all) / (assumed.bandwidth * 1e9)
