"""The time of the optimizer's update, which reads and writes every number of its state once."""

from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.config.run_file import RunConfig
from tools.config.sharding import sharding_of

MOMENTS = 2  # of Adam; other rules have fewer or more, and the update is a small part of a step


def update_seconds(config: RunConfig, elements: float, assumed: Assumptions) -> float:
    """Return the time of the update. elements: parameters on the fullest rank."""
    plan = config.plan
    wide_bytes = plan.masters.itemsize
    # masters and moments are read and written, gradients are read twice, for their norm and for the
    # update, and weights are written
    updated_bytes = 2 * (1 + MOMENTS) * wide_bytes
    updated_bytes += 2 * plan.gradients.itemsize + plan.parameters.itemsize
    updated_elements = elements / sharding_of(config).zero
    # gradients are set to zero before the first micro-batch
    zeroed_bytes = plan.gradients.itemsize
    nbytes = updated_elements * updated_bytes + elements * zeroed_bytes
    on_device = nbytes / (assumed.bandwidth * 1e9)
    # tiles arrive and leave while others are updated
    return max(on_device, travel_seconds(config, updated_elements, assumed))


def travel_seconds(config: RunConfig, share: float, assumed: Assumptions) -> float:
    """Return the time in which a rank's state comes from host memory, and goes back at the same
    time; 0 if it lies on the device. share: elements whose state a rank has."""
    if config.optimizer.offload == "none":
        return 0.0
    arriving = _state_bytes(config, MOMENTS)
    if config.optimizer.ema:
        # the average follows the masters, which come a second time
        arriving += _state_bytes(config, 0) + config.plan.average.itemsize
    return share * arriving / (assumed.host * 1e9)


def _state_bytes(config: RunConfig, moments: int) -> int:
    """Return the bytes of an element's masters and moments: what a rank holds of the element less
    with `offload` than without."""
    _, whole = config.plan.bytes_per_parameter(moments, shards_weights=True)
    _, without = config.plan.bytes_per_parameter(moments, shards_weights=True, offload=True)
    return whole - without
