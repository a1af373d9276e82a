"""Point-to-point transfers of tensors between pipeline ranks.

A send returns at once, because two ranks that both send before they receive must not wait for each
other. The tensor must stay alive and its memory must not be reused until the other side has
received it. The tensor is therefore kept, with its work object (which may hold the tensor too, but
does not promise to), until the work has finished. At most `sends` sends are kept per channel: one
more waits for the oldest, which bounds memory (gloo cannot tell whether a send has finished). Over
gloo a receive can be posted before its message is needed (`post_recv`), so that the message travels
while the rank computes.

Tensor-parallel ranks hold the same activation unless it is cut along the sequence. Where messages
match by order, as over NCCL, each of them then sends its share of the message only, and the
receivers all-gather the shares over tp, whose ranks share a host.

A message must be matched by its identity, not by its time of arrival: two ranks exchange
activations and gradients of many micro-batches. Gloo matches by tag, so one process group suffices.
NCCL has no tags and matches by order, so each channel (source, destination, type) has its own
communicator; `verify.check` proves for exactly these communicators that no transfer deadlocks.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.waiting import wait_for
from megaprec.errors import UserError
from parallel.pipeline.communicators import channels_of, communicators
from parallel.pipeline.instructions import SENDS_UNDER_WAY, Channel, Instruction, Message

Match = Literal["tag", "order"]
CPU = torch.device("cpu")
Transfers = deque[tuple[dist.Work, Tensor]]
"""Transfers under way, the oldest first, with the tensors that they read or write."""


@dataclass(frozen=True)
class P2P:
    """The connections of this rank to the other ranks of the pipeline axis; made by `P2P.open`.

    shape, dtype, device: those of every activation and gradient between stages.
        `dataclasses.replace(links, shape=...)` transfers another shape over the same communicators,
        as evaluation may need.
    match: receives find their sends by tag, or by the order of the messages of a channel.
    groups: the process group by which the messages of each channel travel.
    shared: ranks that hold the same messages, so that each transfers its share of every message;
        with one rank messages are transferred whole.
    sends: the largest number of unfinished sends per channel; `simulation.sends_under_way` computes
        it for a schedule.
    pending: the unfinished sends of each channel.
    expected: the receives that were posted, by channel and tag.
    """

    axis: Axis
    rank_of_stage: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    match: Match
    groups: Mapping[Channel, dist.ProcessGroup]
    sends: int = SENDS_UNDER_WAY
    shared: Axis = Axis("tp")
    pending: dict[Channel, Transfers] = field(
        default_factory=lambda: defaultdict(deque), init=False
    )
    expected: dict[tuple[Channel, int], Transfers] = field(
        default_factory=lambda: defaultdict(deque), init=False
    )

    @staticmethod
    def open(
        axis: Axis,
        rank_of_stage: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = CPU,
        match: Match | None = None,
        sends: int = SENDS_UNDER_WAY,
        shared: Axis | None = None,
    ) -> "P2P":
        """Open the connections of this rank. Collective over the world: every rank passes its own
        pipeline axis.

        match: the way in which receives find their sends; None: by tag on gloo, by order on other
            backends.
        shared: ranks that hold the same messages, if there are any; ignored where messages match by
            tag.
        """
        groups: Mapping[Channel, dist.ProcessGroup] = {}
        # one rank alone has no group and sends nothing
        if axis.group is not None:
            if match is None:
                match = "tag" if dist.get_backend(axis.group) == "gloo" else "order"
            channels = channels_of(rank_of_stage)
            groups = dict.fromkeys(channels, axis.group)
            if match == "order":
                groups = communicators(axis, channels, device)
        sharing_ranks = Axis("tp")  # an axis of one rank: messages are transferred whole
        if shared is not None and match == "order":
            sharing_ranks = shared
        return P2P(
            axis=axis,
            rank_of_stage=tuple(rank_of_stage),
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            match=match or "tag",
            groups=groups,
            sends=sends,
            shared=sharing_ranks,
        )

    @property
    def stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return len(self.rank_of_stage)

    @property
    def sends_shares(self) -> bool:
        """Return True if a rank transfers its share of a message only."""
        # a message that does not divide is sent whole by each rank
        return self.shared.size > 1 and math.prod(self.shape) % self.shared.size == 0

    @property
    def posts_early(self) -> bool:
        """Return True if a receive may be posted long before its message is sent.

        NCCL waits for a message in a kernel. While that kernel runs, CUDA may block the host when
        it launches another kernel for the first time or frees memory (CUDA C++ Programming Guide,
        "Lazy Loading"). If the message depends on work that the host has yet to launch, the ranks
        deadlock.
        """
        return self.match == "tag"

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        """Send `tensor` ([shape], dtype) as the message of `instruction`, and return before it is
        received.

        The caller may drop the tensor but must not write to it. Raises UserError for another shape
        or dtype, because the receiver could not notice.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise UserError.of(
                "pipeline.activation_differs",
                instruction=instruction,
                shape=list(tensor.shape),
                dtype=tensor.dtype,
                expected_shape=list(self.shape),
                expected_dtype=self.dtype,
            )
        channel, tag = self._route(instruction)
        pending = self.pending[channel]
        # release tensors that have arrived; wait for the oldest if too many are under way
        while pending:
            oldest, _ = pending[0]
            if len(pending) < self.sends and not oldest.is_completed():
                break
            wait_for(oldest)
            # after the wait: until then the message is read from the tensor
            pending.popleft()
        # a view may be strided, which a transfer cannot be
        tensor = tensor.detach().contiguous()
        # the ranks of `shared` hold the same message: each sends its share of it
        if self.sends_shares:
            tensor = self.shared.chunk(tensor.view(-1))
        work = dist.isend(
            tensor, group=self.groups[channel], dst=self._world_rank(channel.destination), tag=tag
        )
        assert work is not None, "this rank is no member of its own channel"
        pending.append((work, tensor))

    def post_recv(self, instruction: Instruction) -> None:
        """Start to receive the message of `instruction`; `receive` must follow, per channel in the
        order of these calls."""
        channel, tag = self._route(instruction)
        shape = self.shape
        if self.sends_shares:
            shape = (math.prod(self.shape) // self.shared.size,)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(
            tensor, group=self.groups[channel], src=self._world_rank(channel.source), tag=tag
        )
        assert work is not None, "this rank is no member of its own channel"
        self.expected[channel, tag].append((work, tensor))

    def receive(self, instruction: Instruction) -> Tensor:
        """Wait for the message of `instruction` and return it as a new tensor ([shape], dtype).

        Collective over `shared`.
        """
        expected = self.expected[self._route(instruction)]
        if not expected:
            self.post_recv(instruction)
        work, tensor = expected.popleft()
        wait_for(work)
        if self.sends_shares:
            return self.shared.gather(tensor).view(self.shape)
        return tensor

    def finish(self) -> None:
        """Wait until every send is received, and release the tensors."""
        for pending in self.pending.values():
            while pending:
                oldest, _ = pending[0]
                wait_for(oldest)
                pending.popleft()

    def _route(self, instruction: Instruction) -> tuple[Channel, int]:
        """Return the channel and the tag of the message of `instruction`; the tag is 0 where
        messages match by order."""
        message = Message.of(instruction)
        assert message is not None, f"{instruction} transfers nothing"
        channel = Channel.of(message, self.rank_of_stage)
        if self.match == "order":
            return channel, 0
        # The direction implies the message type, so the tag omits it. Tags start at 1, because tag
        # 0 belongs to transfers without tags in this group (megaprec/comm/gloo.py).
        return channel, 1 + message.microbatch * self.stages + message.stage

    def _world_rank(self, rank: int) -> int:
        """Return the rank in the world of a pipeline rank."""
        assert self.axis.group is not None
        return dist.get_global_rank(self.axis.group, rank)
