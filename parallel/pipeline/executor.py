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
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaprec.diagnose.position import Position
from megaprec.errors import UserError
from parallel.pipeline.instructions import (
    RECEIVES,
    Instruction,
    Message,
    MessageType,
    Op,
)
from parallel.pipeline.p2p import P2P
from parallel.pipeline.schedules import last_weight_gradients, picture
from parallel.weight_grad_queue import WeightGradQueue, Work, carry_out


class StageHooks(Protocol):
    """The computations of a rank's stages, which an executor calls in the order of its program.

    A subclass must define `forward`, and `reduce` if its programs have REDUCE.
    """

    def forward(
        self,
        stage: int,
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor:
        """Run one micro-batch through one stage.

        received: the activation of the stage before, with the shape and dtype of the executor's
            links; None for stage 0.
        Returns the activation to send on (same shape and dtype), or on the last stage the scalar
        loss to back-propagate, already scaled.
        """
        ...

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of `stage` over dp; they are final."""
        raise AssertionError(f"the program says R{stage}, but no `reduce` was given")

    def expect(self, stage: int, is_last: bool) -> None:
        """Prepare for the gradients of `stage`: the backward pass that begins now completes those
        of a micro-batch.

        is_last: it completes those of the step.
        Called only for stages whose program has REDUCE, and for no half of a split backward.
        """

    def after(self, instruction: Instruction, /) -> None:
        """Do what follows an instruction, at its place in the program."""


class PassObserver:
    """A base class that does nothing before and after each instruction; override what is of
    interest."""

    def before(self, executor: "Executor", instruction: Instruction) -> None:
        """Observe that an instruction begins."""

    def after(self, executor: "Executor", instruction: Instruction) -> None:
        """Observe what an instruction has done, before `StageHooks.after`."""


class Executor:
    """Runs `program`, the instructions of pipeline rank `links.axis.rank` in a schedule.

    hooks: the computations of this rank's stages.
    observers: called before and after each instruction, in this order.
    deferred: the queue that the stages' layers were given (`Context.deferred`). Layers without a
        queue compute all gradients in the first half of a split backward, which is correct but
        gains no time.
    position: told of each instruction before it begins.
    posts: the index in `program` before which each receive is posted if not `links.posts_early`, as
        `posting.posts` returns them; a receive that it does not name is posted where its message is
        needed.

    Gradients accumulate where autograd puts them. Under `torch.no_grad()` nothing is kept for a
    backward, so a program of forwards alone (`schedules.forward_only`) evaluates; `forward` then
    collects the results.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        links: P2P,
        hooks: StageHooks,
        *,
        observers: Sequence[PassObserver] = (),
        deferred: WeightGradQueue | None = None,
        position: Position | None = None,
        posts: Mapping[Instruction, int] | None = None,
    ) -> None:
        self.program = program
        self.links = links
        self._observers = observers
        self._hooks = hooks
        self._posts: Mapping[Instruction, int] = posts or {}
        self._completing = _completing_passes(program)
        self._reduced_stages = {
            instruction.stage for instruction in program if instruction.op is Op.REDUCE
        }
        self._position = position or Position()
        self._mail: dict[Message, Tensor] = {}
        # the next two by stage and micro-batch
        self._inputs_and_edges: dict[
            tuple[int, int], tuple[Tensor | None, GradientEdge | None]
        ] = {}
        self._weight_work: dict[tuple[int, int], Work] = {}
        self._deferred = deferred or WeightGradQueue()
        # receives that have not finished, of which the first may be posted
        self._receives_to_come: deque[Instruction] = deque()
        self._next_is_posted = False
        self._handlers: dict[Op, Callable[[Instruction], None]] = {
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

        An exception becomes one that names the instruction and the rank, with the original as its
        cause: a UserError stays a UserError, all others become RuntimeError.
        """
        self._receives_to_come = deque(
            instruction for instruction in self.program if instruction.op in RECEIVES
        )
        for index, instruction in enumerate(self.program):
            for observer in self._observers:
                observer.before(self, instruction)
            self._position.note_action(instruction)
            try:
                self._post_next(index)
                # its name in a profile
                with torch.profiler.record_function(str(instruction)):
                    self._handlers[instruction.op](instruction)
            except UserError as error:
                # the user's problems stay readable; a picture of the program would hide them
                where = f"{instruction} on pipeline rank {self.links.axis.rank}"
                raise UserError(
                    *(problem.within(f"{where}: ") for problem in error.problems)
                ) from error
            except Exception as error:
                raise RuntimeError(self._describe_failure(index, error)) from error
            for observer in self._observers:
                observer.after(self, instruction)
            self._hooks.after(instruction)
        self._finish()

    def abandon(self) -> None:
        """Discard the results of the instructions so far, so that the program can start again: a
        loop of a user's own does so after an error (`parallel.pipeline.loop`)."""
        self._mail.clear()
        self._inputs_and_edges.clear()
        self._weight_work.clear()

    def find_message(self, message: Message) -> Tensor | None:
        """Return a message between its arrival, or its computation, and its use; None at any other
        time."""
        return self._mail.get(message)

    def _finish(self) -> None:
        """Wait for all sends, and assert that no message, graph or work of weight gradients is
        left."""
        self._position.note_action("end of the passes")
        self.links.finish()
        left_over = [*self._mail, *self._inputs_and_edges, *self._weight_work]
        assert not left_over, f"left over: messages, graphs or weight gradients of {left_over}"

    def _forward(self, instruction: Instruction) -> None:
        """Run a forward: take the activation from the mail, put the output there, and keep what the
        backward pass needs."""
        # in evaluation there is no backward pass for which anything would be kept
        trains = torch.is_grad_enabled()
        _, stage, microbatch = instruction
        received = None
        if stage > 0:
            message = Message(MessageType.ACTIVATION, stage - 1, microbatch)
            # a leaf of this stage's graph: its gradient goes back to the stage before
            received = self._mail.pop(message).requires_grad_(trains)
        output = self._hooks.forward(stage, microbatch, received)
        if trains:
            # The edge leads into the graph without keeping the output, whose memory the next stage
            # may release. There is none if nothing in a first stage is trained.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._inputs_and_edges[stage, microbatch] = received, edge
        if stage < self.links.stages - 1:
            activation = Message(MessageType.ACTIVATION, stage, microbatch)
            # detached: the next stage on this rank has a graph of its own, as on another rank
            self._mail[activation] = output.detach()
        elif trains:
            gradient = Message(MessageType.GRADIENT, stage, microbatch)
            self._mail[gradient] = _gradient_of_loss(output)

    def _backward(self, instruction: Instruction) -> None:
        """Run a backward pass from the gradient of the output, which is in the mail, and put the
        gradient of the input there. Gradients of weights go where autograd and the layers put
        them."""
        op, stage, microbatch = instruction
        if op is Op.BACKWARD and stage in self._reduced_stages:
            self._hooks.expect(stage, instruction in self._completing)
        received, output_edge = self._inputs_and_edges.pop((stage, microbatch))
        gradient = self._mail.pop(Message(MessageType.GRADIENT, stage, microbatch))
        if output_edge is not None:
            torch.autograd.backward((output_edge,), (gradient,))
        if received is not None:
            assert received.grad is not None, (
                f"the output of stage {stage} does not depend on what it received"
            )
            input_gradient = Message(MessageType.GRADIENT, stage - 1, microbatch)
            self._mail[input_gradient] = received.grad

    def _backward_input(self, instruction: Instruction) -> None:
        """Run the first half of a split backward, and keep the work of the second."""
        # layers put the products of weight gradients into the queue instead of computing them
        with self._deferred.collect() as work:
            self._backward(instruction)
        self._weight_work[instruction.stage, instruction.microbatch] = work

    @torch.no_grad()
    def _backward_weight(self, instruction: Instruction) -> None:
        work = self._weight_work.pop((instruction.stage, instruction.microbatch))
        carry_out(work)

    def _reduce(self, instruction: Instruction) -> None:
        # `schedules.complete` has put it behind the last weight gradient of the stage
        self._hooks.reduce(instruction.stage)

    def _send(self, instruction: Instruction) -> None:
        self.links.send(instruction, self._mail.pop(_message(instruction)))

    def _receive(self, instruction: Instruction) -> None:
        self._mail[_message(instruction)] = self.links.receive(instruction)
        self._receives_to_come.popleft()
        self._next_is_posted = False

    def _post_next(self, index: int) -> None:
        """Post the next receive, unless it is posted, if it may be posted before instruction number
        `index`.

        If `links.posts_early`, that is when the receive before it has finished, not when its
        message is needed, so one message travels while the stages compute.
        """
        # one receive is under way at a time
        if self._next_is_posted or not self._receives_to_come:
            return
        next_receive = self._receives_to_come[0]
        never = len(self.program)
        may_be_posted = self._posts.get(next_receive, never) <= index
        if self.links.posts_early or may_be_posted:
            self.links.post_recv(next_receive)
            self._next_is_posted = True

    def _describe_failure(self, index: int, error: Exception) -> str:
        """Return the message for an error of instruction number `index`: the error, and a picture
        of that instruction and those around it."""
        rank = self.links.axis.rank
        where = picture({rank: self.program}, {rank: index}, {rank: "failed here"})
        return (
            f"{self.program[index]} failed on pipeline rank {rank}: {type(error).__name__}: "
            f"{error}\n{where}"
        )


def _completing_passes(program: Sequence[Instruction]) -> set[Instruction]:
    """Return the last backward pass of each stage that the program reduces, if it is a whole one:
    after such a pass the gradients of the stage are complete."""
    last_of_stage = last_weight_gradients(program)
    completing: set[Instruction] = set()
    for instruction in program:
        # The weight half of a split backward runs outside autograd, where no hook tells when a
        # gradient is final.
        if instruction.op is Op.REDUCE and last_of_stage[instruction.stage].op is Op.BACKWARD:
            completing.add(last_of_stage[instruction.stage])
    return completing


def _message(instruction: Instruction) -> Message:
    message = Message.of(instruction)
    assert message is not None, f"{instruction} transfers nothing"
    return message


def _gradient_of_loss(loss: Tensor) -> Tensor:
    if loss.dim():
        raise ValueError(f"the last stage must return a scalar loss, not {list(loss.shape)}")
    return torch.ones_like(loss)
