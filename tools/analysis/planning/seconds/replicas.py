"""The time that replicas communicate, and how much of it a step waits for.

With parallel.overlap gradients travel beside the backward pass of the last micro-batch, or of each
under ZeRO-2, and weights beside the first forward pass. A part of that traffic is exposed all the
same: the last bucket has no products beside it, and collectives and products share the memory and
the processors of a GPU.
"""

from math import ceil

from megaprec.optim.model_buffers import bucket_elements
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.links import Link
from tools.config.run_file import RunConfig


def replica_seconds(config: RunConfig, sent: float, elements: float, link: Link) -> float:
    """Return the time of the replicas' traffic by itself.

    sent: bytes of a rank in a step.
    elements: parameters of a rank.
    """
    parallel = config.parallel
    bucket = bucket_elements(parallel.bucket, parallel.copies)
    collectives = ceil(elements / bucket)
    if parallel.shards_gradients:
        collectives *= config.num_microbatches
    return sent / link.bandwidth + collectives * link.latency


def exposed_seconds(
    config: RunConfig, assumed: Assumptions, passes: float, traffic: float
) -> float:
    """Return how much a step waits for its replicas.

    passes: seconds of the step's passes.
    traffic: seconds of the replicas' traffic by itself.
    """
    parallel = config.parallel
    if not parallel.overlaps(assumed.device):
        return traffic
    beside = passes if parallel.shards_gradients else passes / config.num_microbatches
    return max(assumed.exposed * traffic, traffic - beside)
