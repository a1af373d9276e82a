"""The time that replicas communicate, and how much of it a step waits for.

With parallel.overlap gradients travel beside the backward pass of the last micro-batch, or of each
under ZeRO-2, and weights beside the first forward pass, or beside all passes under ZeRO-3. A part
of that traffic is exposed anyway: the last bucket has no products beside it, and collectives and
products share the memory and the processors of a GPU.
"""

from math import ceil

from megaprec.optim.model_buffers import bucket_elements
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.seconds.links import Link
from tools.analysis.planning.seconds.traffic import layer_gathers
from tools.config.run_file import RunConfig


def replica_seconds(config: RunConfig, sent: float, elements: float, link: Link) -> float:
    """Return the time of the replicas' traffic by itself.

    sent: bytes of a rank in a step.
    elements: parameters of a rank.
    """
    return sent / link.bandwidth + _num_collectives(config, elements) * link.latency


def _num_collectives(config: RunConfig, elements: float) -> float:
    """Return the number of collectives of a rank in a step: of gradients, and under ZeRO-3 of
    weights, whose buckets are layers."""
    parallel = config.parallel
    microbatches = config.num_microbatches
    if parallel.shards_weights:
        layers = config.model.layers / parallel.pipeline
        # an embedding and a head have gathers too
        gathers = layers * layer_gathers(config) + 2 * microbatches
        return gathers + (layers + 2) * microbatches
    reductions = ceil(elements / bucket_elements(parallel.bucket, parallel.copies))
    return reductions * microbatches if parallel.shards_gradients else reductions


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
    # gradients are reduced in each micro-batch if they are sharded, otherwise in the last one alone
    seconds_beside = passes if parallel.shards_gradients else passes / config.num_microbatches
    return max(assumed.exposed * traffic, traffic - seconds_beside)
