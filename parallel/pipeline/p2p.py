"""How tensors travel between pipeline ranks.

A send returns at once, for two ranks that both send before they receive must not wait for each other. Until
the other side has it the tensor must live and its memory must not be reused, so it is kept, with its work (which
may hold it too, but does not promise to), until the work is over. Of one channel at most `sends` are kept: one more
waits for the oldest, which bounds memory (gloo has no way to ask whether a send is over). Over gloo a receive can be
begun before its message is needed (`expect`), so that the message travels while the rank computes.

A message must be known for what it is, not by when it comes: two ranks exchange activations and gradients of
many micro-batches. Gloo matches by tag, so one process group serves. NCCL has no tags and matches by order, so
each channel (source, destination, kind) has a communicator of its own; `simulate.check` proves for exactly
these that nothing hangs.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from parallel.pipeline.instructions import SENDS_UNDER_WAY, Channel, Instruction, Message, MessageType

Match = Literal["tag", "order"]
CPU = torch.device("cpu")
Pending = deque[tuple[dist.Work, Tensor]]


@dataclass(frozen=True)
class P2P:
    """This rank's ways to the other ranks of the pipeline axis; made by `P2P.open`.

    shape, dtype, device: of every activation and gradient between stages. `dataclasses.replace(links,
    shape=...)` carries another shape over the same communicators, as evaluation may need. sends: under way on one
    channel at most; `simulate.sends_under_way` says what a schedule needs.
    """

    axis: Axis
    rank_of_stage: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    match: Match
    groups: Mapping[Channel, dist.ProcessGroup]
    sends: int = SENDS_UNDER_WAY
    pending: dict[Channel, Pending] = field(default_factory=lambda: defaultdict(deque), init=False)
    expected: dict[tuple[Channel, int], Pending] = field(default_factory=lambda: defaultdict(deque), init=False)

    @staticmethod
    def open(
        axis: Axis,
        rank_of_stage: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = CPU,
        match: Match | None = None,
        sends: int = SENDS_UNDER_WAY,
    ) -> "P2P":
        """Collective over the world: every rank calls this with the pipeline axis that it is on.

        match: how receives find their sends; unless given, by tag on gloo and by order elsewhere.
        """
        groups: Mapping[Channel, dist.ProcessGroup] = {}
        if axis.group is not None:
            match = match or ("tag" if dist.get_backend(axis.group) == "gloo" else "order")
            channels = _channels(rank_of_stage)
            groups = dict.fromkeys(channels, axis.group)
            if match == "order":
                groups = _communicators(axis.group, channels, device)
        return P2P(axis, tuple(rank_of_stage), tuple(shape), dtype, device, match or "tag", groups, sends)

    @property
    def stages(self) -> int:
        """How many stages the whole pipeline has."""
        return len(self.rank_of_stage)

    @property
    def early(self) -> bool:
        """Whether a receive may be begun long before its message is sent.

        NCCL waits for a message in a kernel. While one runs, CUDA may hold the host when it launches another kernel for
        the first time or frees memory (CUDA C++ Programming Guide, "Lazy Loading"): if the message then depends on what
        the host has still to launch, nothing ever moves again.
        """
        return self.match == "tag"

    def send(self, i: Instruction, tensor: Tensor) -> None:
        """Sends `tensor` ([shape], dtype) as instruction `i` says and returns before it is received.

        The caller may drop the tensor but must not write to it. Raises UserError for another shape or dtype,
        which the receiver could not notice.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise UserError(
                f"{i} would send {list(tensor.shape)} {tensor.dtype}, but the stages were said to exchange "
                f"{list(self.shape)} {self.dtype}"
            )
        channel, tag = self._route(i)
        pending = self.pending[channel]
        while pending and (len(pending) >= self.sends or pending[0][0].is_completed()):
            pending[0][0].wait()
            pending.popleft()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self.groups[channel], dst=self._world_rank(channel.destination), tag=tag)
        assert work is not None, "this rank is no member of its own channel"
        pending.append((work, tensor))

    def post_recv(self, i: Instruction) -> None:
        """Begins to receive the message that instruction `i` names; `receive` is to follow, for each channel in the
        order of these calls."""
        channel, tag = self._route(i)
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(tensor, group=self.groups[channel], src=self._world_rank(channel.source), tag=tag)
        assert work is not None, "this rank is no member of its own channel"
        self.expected[channel, tag].append((work, tensor))

    def receive(self, i: Instruction) -> Tensor:
        """A fresh tensor ([shape], dtype) with the message that instruction `i` names; waits for it."""
        begun = self.expected[self._route(i)]
        if not begun:
            self.post_recv(i)
        work, tensor = begun.popleft()
        work.wait()
        return tensor

    def finish(self) -> None:
        """Waits until every send is received, and lets go of the tensors."""
        for pending in self.pending.values():
            while pending:
                pending[0][0].wait()
                pending.popleft()

    def _route(self, i: Instruction) -> tuple[Channel, int]:
        message = Message.of(i)
        assert message is not None, f"{i} transfers nothing"
        # The kind need not be in it: it is given by the direction. From 1 on, for tag 0 is that of whoever sends
        # without tags in this group (megaprec/comm/gloo.py).
        tag = 1 + message.microbatch * self.stages + message.stage
        return Channel.of(message, self.rank_of_stage), tag if self.match == "tag" else 0

    def _world_rank(self, rank: int) -> int:
        assert self.axis.group is not None
        return dist.get_global_rank(self.axis.group, rank)


def _channels(rank_of_stage: Sequence[int]) -> list[Channel]:
    messages = [Message(kind, stage, 0) for kind in MessageType for stage in range(len(rank_of_stage) - 1)]
    channels = {Channel.of(message, rank_of_stage) for message in messages}
    return sorted(c for c in channels if c.source != c.destination)


def _communicators(
    group: dist.ProcessGroup, channels: Sequence[Channel], device: torch.device
) -> dict[Channel, dist.ProcessGroup]:
    """One communicator for each channel that begins or ends at this rank. Collective over the world.

    Every rank makes the groups of every pipeline, in the same order, as `new_group` asks for. Its
    `use_local_synchronization` would spare the others, but names a group by how many groups a rank has: a
    middle stage has more than its neighbours and would wait for ever.
    """
    mine = dist.get_process_group_ranks(group)
    groups = {}
    for pipeline in _pipelines(mine, device):
        for channel in channels:
            source, destination = pipeline[channel.source], pipeline[channel.destination]
            made = dist.new_group([source, destination], backend=dist.get_backend(group))
            if isinstance(made, dist.ProcessGroup) and dist.get_rank() in (source, destination):
                _connect(made, source, destination, device)
                groups[channel] = made
    return groups


def _pipelines(mine: Sequence[int], device: torch.device) -> list[list[int]]:
    """The ranks of every pipeline of the world, [pipelines, pp], in the same order everywhere."""
    world = Axis("world", dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return world.gather(torch.tensor([mine], device=device)).unique(dim=0).tolist()


def _connect(group: dist.ProcessGroup, source: int, destination: int, device: torch.device) -> None:
    """The first transfer, made now: in it NCCL connects both ends, which makes even a send wait for its receive."""
    greeting = torch.zeros(1, device=device)
    if dist.get_rank() == source:
        dist.send(greeting, group=group, dst=destination)
    else:
        dist.recv(greeting, group=group, src=source)
