"""The executor, which runs one rank's program of a pipeline schedule.

It knows no kind of schedule: it runs each instruction in order. A tensor that passes from one stage
to the next is a message, which stays in `_mail` until an instruction takes it: a send moves it to
another rank, a receive adds one, and the next stage on the same rank finds it there. The last stage
leaves the gradient of the loss, one, for itself.

Between its forward and its backward a stage keeps its input and the edge of the autograd graph at
its output, not the output itself, which the next stage holds. Between the halves of a split
backward it keeps the work that its layers deferred (`weight_grad_queue.py`): for each product its
input and the gradient of its output. The gradients of biases, norms and embeddings are cheap and
are computed in the first half.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from parallel.pipeline.instructions import (
    RECEIVES,
    WEIGHT_GRADIENTS,
    Instruction,
    Message,
    MessageType,
    Op,
)
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import picture
from parallel.pipeline.simulation import Span
from parallel.weight_grad_queue import WeightGradQueue, Work

Forward = Callable[[int, int, Tensor | None], Tensor]
OfStage = Callable[[int], None]
After = Callable[[Instruction], None]


class Executor:
    """Runs `program`, the instructions of pipeline rank `links.axis.rank` in a schedule.

    forward(stage, microbatch, received): `received` is the activation of the stage before, with the
        shape and dtype of `links`; None for stage 0. Returns the activation to send on (same shape
        and dtype), or on the last stage the scalar loss to back-propagate, already scaled.
    reduce(stage): called when the gradients of `stage` are final. Required only if the program has
    REDUCE. complete(stage): if given, called before the backward pass that completes the gradients
    of `stage`, provided that
        the program then has REDUCE; a split backward has no such pass.
    spans: if given, receives the time span of each instruction, in seconds of this process's clock.
        The executor then synchronizes a GPU after each instruction; otherwise the spans would be
        launch times.
    deferred: the queue that the stages' layers were given (`Context.deferred`). Layers without a
        queue compute all gradients in the first half of a split backward, which is correct but
        gains no time.
    after(instruction): if given, called after each instruction, at its place in the program.
    position: if given, told of each instruction before it begins.
    posts: the places of `program` before which receives are posted if not `links.early`, as
        `posting.posts` returns them; a receive that it does not name is posted where its message is
        needed.

    Gradients accumulate where autograd puts them. Under `torch.no_grad()` nothing is kept for a
    backward, so a program of forwards alone (`instructions.forward_only`) evaluates; `forward` then
    collects the results.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        links: P2P,
        forward: Forward,
        reduce: OfStage | None = None,
        spans: list[Span] | None = None,
        deferred: WeightGradQueue | None = None,
        after: After | None = None,
        complete: OfStage | None = None,
        position: Position | None = None,
        posts: Mapping[Instruction, int] | None = None,
    ) -> None:
        self._posts_of_run = posts or {}
        self.program = program
        self.links = links
        self.spans = spans
        self.after = after
        self._stage_forward = forward
        self._stage_reduce = reduce
        self._stage_complete = complete or (lambda stage: None)
        self._completing = _completing(program)
        self._position = position or Position()
        self._mail: dict[Message, Tensor] = {}
        self._begun: dict[
            tuple[int, int], tuple[Tensor | None, GradientEdge]
        ] = {}  # by stage and micro-batch
        self._deferred = deferred or WeightGradQueue()
        self._put_off: dict[tuple[int, int], Work] = {}  # by stage and micro-batch
        # receives that have not finished, of which the first may be posted
        self._coming: deque[Instruction] = deque()
        self._posted = False
        self._posts: Mapping[Instruction, int] = {}
        self._carry_out: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.REDUCE: self._reduce,
            Op.SEND_ACTIVATION: self._send,
            Op.SEND_GRADIENT: self._send,
            Op.RECV_ACTIVATION: self._receive,
            Op.RECV_GRADIENT: self._receive,
        }

    def run(self) -> None:
        """Run one step or one evaluation: every instruction, in order, over the pipeline axis of
        `links`.

        Raises RuntimeError, or UserError if that was raised, chained to the original exception,
        that names the instruction and the rank.
        """
        self._posts = self._posts_of_run
        self.carry_out(0, len(self.program))
        self.finish()

    def carry_out(self, first: int, last: int) -> None:
        """Run the part [first, last) of the program.

        If `links.early`, each receive is posted when the receive before it has finished, not when
        its message is needed, so one message travels while the stages compute. Otherwise `run`
        posts it where `posts` says.
        """
        self._coming = deque(i for i in self.program[first:last] if i.op in RECEIVES)
        for at, i in enumerate(self.program[first:last], first):
            start = perf_counter()
            self._position.at(i)
            try:
                self._post_next(at)
                with torch.profiler.record_function(str(i)):
                    self._carry_out[i.op](i)
            except UserError as error:
                where = f"{i} on pipeline rank {self.links.axis.rank}"
                raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from error
            except Exception as error:
                raise RuntimeError(self._failure(at, error)) from error
            if self.spans is not None:
                _await(self.links.device)
                self.spans.append(Span(self.links.axis.rank, i, start, perf_counter()))
            if self.after is not None:
                self.after(i)

    def abandon(self, unread: Sequence[Instruction]) -> None:
        """Discard the results of the instructions so far, so that the program can start again.

        unread: the receives of messages that other ranks have sent in the meantime.
        """
        self._mail.clear()
        self._begun.clear()
        self._put_off.clear()
        for i in unread:
            self.links.receive(i)

    def held(self, message: Message) -> Tensor | None:
        """Return a message between its arrival, or its computation, and its use; None at any other
        time."""
        return self._mail.get(message)

    def finish(self) -> None:
        """Wait for all sends, and assert that no message, graph or weight gradient is left."""
        self._position.at("end of the passes")
        self.links.finish()
        left = [*self._mail, *self._begun, *self._put_off]
        assert not left, f"left over: messages, graphs or weight gradients of {left}"

    def _forward(self, i: Instruction) -> None:
        learns = torch.is_grad_enabled()
        received = None
        if i.stage > 0:
            received = self._mail.pop(
                Message(MessageType.ACTIVATION, i.stage - 1, i.microbatch)
            ).requires_grad_(learns)
        output = self._stage_forward(i.stage, i.microbatch, received)
        if learns:
            self._begun[i.stage, i.microbatch] = received, get_gradient_edge(output)
        if i.stage < self.links.stages - 1:
            self._mail[Message(MessageType.ACTIVATION, i.stage, i.microbatch)] = output.detach()
        elif learns:
            self._mail[Message(MessageType.GRADIENT, i.stage, i.microbatch)] = _gradient_of_loss(
                output
            )

    def _backward(self, i: Instruction) -> None:
        if i in self._completing:
            self._stage_complete(i.stage)
        received, output = self._begun.pop((i.stage, i.microbatch))
        gradient = self._mail.pop(Message(MessageType.GRADIENT, i.stage, i.microbatch))
        torch.autograd.backward((output,), (gradient,))
        if received is not None:
            assert received.grad is not None, (
                f"the output of stage {i.stage} does not depend on what it received"
            )
            self._mail[Message(MessageType.GRADIENT, i.stage - 1, i.microbatch)] = received.grad

    def _backward_input(self, i: Instruction) -> None:
        with self._deferred.collect() as work:
            self._backward(i)
        self._put_off[i.stage, i.microbatch] = work

    @torch.no_grad()
    def _backward_weight(self, i: Instruction) -> None:
        work = self._put_off.pop((i.stage, i.microbatch))
        while work:
            work.popleft()()

    def _reduce(self, i: Instruction) -> None:
        assert self._stage_reduce is not None, f"the program says {i}, but no `reduce` was given"
        self._stage_reduce(i.stage)

    def _send(self, i: Instruction) -> None:
        self.links.send(i, self._mail.pop(_message(i)))

    def _receive(self, i: Instruction) -> None:
        self._mail[_message(i)] = self.links.receive(i)
        self._coming.popleft()
        self._posted = False

    def _post_next(self, at: int) -> None:
        """Post the next receive, unless it is posted, if it may be posted before instruction number
        `at`."""
        if self._posted or not self._coming:
            return
        following = self._coming[0]
        if self.links.early or self._posts.get(following, len(self.program)) <= at:
            self.links.post_recv(following)
            self._posted = True

    def _failure(self, at: int, error: Exception) -> str:
        rank = self.links.axis.rank
        where = picture({rank: self.program}, {rank: at}, {rank: "failed here"})
        return (
            f"{self.program[at]} failed on pipeline rank {rank}: {type(error).__name__}: "
            f"{error}\n{where}"
        )


def _completing(program: Sequence[Instruction]) -> set[Instruction]:
    """Return the last backward pass of each reduced stage, if that pass also computes the weight
    gradients."""
    last = {i.stage: i for i in program if i.op in WEIGHT_GRADIENTS}
    return {last[i.stage] for i in program if i.op is Op.REDUCE and last[i.stage].op is Op.BACKWARD}


def _await(device: torch.device) -> None:
    """Wait until the device has finished the computation it was given.

    Messages in flight are not waited for, because they may depend on later work.
    """
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _message(i: Instruction) -> Message:
    message = Message.of(i)
    assert message is not None, f"{i} transfers nothing"
    return message


def _gradient_of_loss(loss: Tensor) -> Tensor:
    if loss.dim():
        raise ValueError(f"the last stage must return a scalar loss, not {list(loss.shape)}")
    return torch.ones_like(loss)
