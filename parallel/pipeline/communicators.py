"""The communicators between pipeline ranks: one for each channel where messages match by order, as
over NCCL."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megaprec.comm.axis import Axis
from megaprec.comm.groups import make_groups, pairings
from parallel.pipeline.instructions import Channel, Message, MessageType


def channels_of(rank_of_stage: Sequence[int]) -> list[Channel]:
    """Return the channels between different ranks of a pipeline, sorted. rank_of_stage: the rank of
    each stage."""
    channels: set[Channel] = set()
    for stage in range(len(rank_of_stage) - 1):
        for kind in MessageType:
            message = Message(kind, stage, microbatch=0)  # all micro-batches have one channel
            channels.add(Channel.of(message, rank_of_stage))
    # sorted: all ranks must make the communicators in the same order
    return sorted(channel for channel in channels if channel.source != channel.destination)


def communicators(
    axis: Axis,
    channels: Sequence[Channel],
    device: torch.device,
) -> dict[Channel, dist.ProcessGroup]:
    """Return a communicator for each channel that starts or ends at this rank. Collective over the
    world.

    axis: the pipeline axis. channels: all of a pipeline, the same on all ranks. One split of the
    world makes the communicators of several channels that have no rank in common, in all pipelines
    at once.
    """
    assert axis.group is not None
    if axis.rank_groups is None:
        raise ValueError(
            f"the axis {axis.name} was not made by Axis.of from a mesh, so its pipelines are "
            "not known"
        )
    groups = {}
    ends_of_channels = [(channel.source, channel.destination) for channel in channels]
    for numbers in pairings(ends_of_channels):
        # channels that have no rank in common
        disjoint = [channels[number] for number in numbers]
        # of each channel the pair of world ranks at its ends, in each pipeline: [pipelines, 2]
        pairs = [axis.rank_groups[:, [channel.source, channel.destination]] for channel in disjoint]
        group = make_groups(torch.cat(pairs), dist.get_backend(axis.group))
        for channel in disjoint:
            # this rank is in one of the pairs at most
            if axis.rank in (channel.source, channel.destination):
                _connect(group, channel, axis, device)
                groups[channel] = group
    return groups


def _connect(
    group: dist.ProcessGroup,
    channel: Channel,
    axis: Axis,
    device: torch.device,
) -> None:
    """Make the first transfer of a channel's communicator now, from its source to its destination.

    NCCL connects both ends in the first transfer, in which even a send waits for its receive.
    """
    assert axis.group is not None
    greeting = torch.zeros(1, device=device)
    # ranks of the world
    source = dist.get_global_rank(axis.group, channel.source)
    destination = dist.get_global_rank(axis.group, channel.destination)
    if axis.rank == channel.source:
        dist.send(greeting, group=group, dst=destination)
    else:
        dist.recv(greeting, group=group, src=source)
