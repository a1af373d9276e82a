"""Bytes that NCCL keeps on the GPU of a rank for the groups of ranks that it sends to.

NCCL connects a group to a peer when they first exchange something, and keeps buffers for each
channel of the connection, whatever the size of the messages. By its source (2.28, `p2pSendSetup`
and `p2pRecvSetup` in transport/p2p.cc, `computeBuffSizes` in init.cc) the receiving end has the
buffers of three protocols, 4 MiB (NCCL_BUFFSIZE) + 4.7 MiB + 0.5 MiB, and the sending end a
header, both rounded up to 2 MiB. Messages that leave the host go through a pool of the group
(`sharedNetBuffersInit` in transport/net.cc).

    sums, gathers, scatters    a ring: each rank receives from one peer and sends to one other
    messages, all-to-all       all channels to each peer that is sent to, or received from

The numbers of channels are those of H100s over NVLink. Not counted are trees and NVLink SHARP,
which NCCL may take besides rings for small or large sums, and memory of the context itself. No GPU
has measured any of this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallel.pipeline.communicators import channels_of
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig

HOST = 8  # GPUs
MIB = 1 << 20
RECEIVING = 10 * MIB  # a channel, at the end that receives
SENDING = 2 * MIB  # a channel, at the end that sends
RING_CHANNELS = 24
PEER_CHANNELS = 32
POOL = PEER_CHANNELS * 16 * (MIB // 8)  # of each direction: 16 steps of 128 KiB


@dataclass(frozen=True)
class Communicator:
    """A group of ranks as one of them uses it.

    size: its ranks.
    has_ring: sums, gathers or scatters run in it.
    sources, destinations: ranks from which this one receives messages, and to which it sends some.
    far: how many of the sources, and how many of the destinations, are on other hosts.
    """

    size: int
    has_ring: bool = False
    sources: int = 0
    destinations: int = 0
    far: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of its buffers on this rank's GPU."""
        ring = 0
        if self.has_ring:
            ring = RING_CHANNELS * (RECEIVING + SENDING)
        near_sources = max(0, self.sources - self.far)
        near_destinations = max(0, self.destinations - self.far)
        bytes_of_channel = RECEIVING * near_sources + SENDING * near_destinations
        peers = PEER_CHANNELS * bytes_of_channel
        # messages that leave the host have a pool for each direction
        pools = 0
        if self.far and self.sources:
            pools += POOL
        if self.far and self.destinations:
            pools += POOL
        return ring + peers + pools


def communicator_bytes(config: RunConfig, rank_of_stage: Sequence[int], rank: int) -> int:
    """Return the bytes of all communicators of a pipeline rank. rank_of_stage: the pipeline rank
    that has each stage."""
    communicators = communicators_of(config, rank_of_stage, rank)
    return sum(communicator.nbytes for communicator in communicators)


def communicators_of(
    config: RunConfig, rank_of_stage: Sequence[int], rank: int
) -> Iterator[Communicator]:
    """Yield the groups that a pipeline rank uses in a step. A group of one rank is none."""
    for communicator in (*_of_axes(config), *_of_experts(config)):
        if communicator.size > 1:
            yield communicator
    yield from _of_pipeline(config, rank_of_stage, rank)


def _of_axes(config: RunConfig) -> Iterator[Communicator]:
    """Yield the groups of the world, of tensor, context and pipeline ranks and of replicas."""
    parallel = config.parallel
    context = Communicator(parallel.context, has_ring=True)
    if config.engine_options.ring and parallel.context > 1:
        leaves_host = parallel.tensor * parallel.context > HOST
        context = Communicator(parallel.context, sources=1, destinations=1, far=int(leaves_host))
    tensor = Communicator(parallel.tensor, has_ring=True)
    pipeline = Communicator(parallel.pipeline, has_ring=True)
    axes = [pipeline]
    # replicas over one axis have the group of that axis
    if parallel.context == 1:
        axes.append(Communicator(parallel.data, has_ring=True))
    elif parallel.data == 1:
        context = replace(context, has_ring=True)
    axes += [context, tensor]
    whole = Communicator(config.world_size, has_ring=True)
    # Muon exchanges matrices over all ranks of a stage. If these lie along one axis, that axis has
    # their group; otherwise `_of_stage` has it.
    is_stage_one_axis = _axes_of_stage(config) == 1
    for axis in axes:
        used = axis
        if _exchanges_matrices(config) and axis is not pipeline and is_stage_one_axis:
            used = _all_to_all(axis, inner=1)
        if axis.size < config.world_size:
            yield used
        elif axis.size > 1:
            # an axis of all ranks has the group of the world
            whole = replace(used, has_ring=True)
    yield whole
    if parallel.context > 1 and parallel.data > 1:
        yield Communicator(parallel.copies, has_ring=True)
    yield from _of_sharers(config)
    yield from _of_stage(config)


def _exchanges_matrices(config: RunConfig) -> bool:
    """Return True if the optimizer sends matrices to the ranks that own them."""
    return config.optimizer.name == "muon"


def _axes_of_stage(config: RunConfig) -> int:
    """Return along how many axes a stage has several ranks."""
    parallel = config.parallel
    return sum(size > 1 for size in (parallel.data, parallel.context, parallel.tensor))


def _all_to_all(communicator: Communicator, inner: int) -> Communicator:
    """Return the group with messages of each rank to each other one, where neighbours in it are
    `inner` ranks apart."""
    others = communicator.size - 1
    on_host = max(1, HOST // inner)  # ranks of the group that one host has
    far = max(0, communicator.size - on_host)
    return replace(communicator, sources=others, destinations=others, far=far)


def _of_sharers(config: RunConfig) -> Iterator[Communicator]:
    """Yield the group of replicas that share one state, if it is another than that of all."""
    parallel = config.parallel
    sharers = parallel.zero_size or parallel.copies
    if parallel.zero and (sharers < parallel.copies or parallel.shards_weights):
        yield Communicator(sharers, has_ring=True)


def _of_stage(config: RunConfig) -> Iterator[Communicator]:
    """Yield the groups of all ranks of a stage: for amaxes of FP8, and for Muon."""
    parallel = config.parallel
    axes = _axes_of_stage(config)
    size = parallel.copies * parallel.tensor
    recipe = config.plan.fp8
    if recipe is not None and recipe.scales.keeps_history and recipe.reduce_amax:
        has_own_group = axes > 1 or recipe.history == "te"
        if has_own_group:
            yield Communicator(size, has_ring=True)
    if _exchanges_matrices(config) and axes > 1:
        yield _all_to_all(Communicator(size, has_ring=True), inner=1)


def _of_experts(config: RunConfig) -> Iterator[Communicator]:
    """Yield the groups of experts that are spread over ranks."""
    parallel = config.parallel
    slices = expert_slices(parallel)
    if parallel.expert == 1 and slices == parallel.tensor:
        return
    yield _all_to_all(Communicator(parallel.expert), inner=slices)
    if slices != parallel.tensor:
        yield Communicator(slices, has_ring=True)
    # the ranks of a stage that have the same experts
    ranks_of_stage = parallel.copies * parallel.tensor
    replicas = ranks_of_stage // (parallel.expert * slices)
    yield Communicator(replicas, has_ring=True)


def _of_pipeline(
    config: RunConfig, rank_of_stage: Sequence[int], rank: int
) -> Iterator[Communicator]:
    """Yield the groups of pairs: one for each channel between pipeline ranks, and that of a tied
    embedding."""
    far = int(config.world_size > HOST)
    for channel in channels_of(rank_of_stage):
        if channel.source == rank:
            yield Communicator(2, destinations=1, far=far)
        if channel.destination == rank:
            yield Communicator(2, sources=1, far=far)
    # by some schedules the first and the last stage are on one rank
    ends = {rank_of_stage[0], rank_of_stage[-1]}
    shares_embedding = config.model.tied or config.model.mtp_layers > 0
    if shares_embedding and len(ends) > 1 and rank in ends:
        yield Communicator(2, has_ring=True)
