"""The trace of one micro-batch through a rank's stages: activations, their gradients, messages,
parameter gradients.

The traced micro-batch is the first of a step. Its parameter gradients overwrite those of the step
before, so they can be read alone, before those of the next micro-batch are added.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.diagnose.bit_digest import digest
from megaprec.diagnose.border_trace import BACKWARD, FORWARD, BorderTrace, Entry
from megaprec.optim.main_grad import has_gradient
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import (
    INPUT_GRADIENTS,
    RECEIVES,
    WEIGHT_GRADIENTS,
    Instruction,
    Message,
    MessageType,
    Op,
    Program,
)

# The number of the traced micro-batch.
TRACED = 0


def message_name(number: int) -> str:
    """Return the name of message `number`: twice its lower stage, plus one for a gradient."""
    stage, back = divmod(number, 2)
    if back:
        return f"the gradient from stage {stage + 1} to stage {stage}"
    return f"the activation from stage {stage} to stage {stage + 1}"


class MicrobatchTrace:
    """Traces the first micro-batch while an executor runs `program`, or its instructions for this
    micro-batch alone.

    last: number of the model's last stage.
    alone: True if the micro-batch runs alone.
    in_flight: True if its backward pass already reduces gradients: they are then given to `look_at`
        before.
    messages: digests by message (a number, see `message_name`) and side, 0 as sent and 1 as
        received.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        last: int,
        program: Program,
        *,
        alone: bool,
        in_flight: bool,
    ) -> None:
        # Which forward pass of each stage is the traced one: other micro-batches may come first.
        if alone:
            passes = dict.fromkeys(stages, 0)
        else:
            passes = {stage: _forward_number(stage, program) for stage in stages}
        self._borders = BorderTrace(stages, passes)
        self._last = last
        self._in_flight = in_flight
        self._parameters = _traceable_parameters(stages, program)
        self._noted: set[nn.Parameter] = set()
        self.messages: dict[tuple[int, int], Tensor] = {}

    @property
    def entries(self) -> Sequence[Entry]:
        """Return the trace so far."""
        return self._borders.entries

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace within the context."""
        with self._borders.recording():
            yield

    def watch(self, executor: Executor) -> None:
        """Trace what `executor` is going to run."""
        next_hook = executor.after

        def after(instruction: Instruction) -> None:
            if instruction.microbatch == TRACED:
                self._trace_instruction(executor, instruction)
            elif instruction.op in INPUT_GRADIENTS:
                # What it adds to no longer holds the traced micro-batch alone.
                parameters = self._parameters.get(instruction.stage, ())
                self._noted.update(filter(has_gradient, parameters))
            if next_hook is not None:
                next_hook(instruction)

        executor.after = after

    def _trace_instruction(self, executor: Executor, instruction: Instruction) -> None:
        op = instruction.op
        stage = instruction.stage
        if op in RECEIVES:
            self._note_message(executor, Message.of(instruction), 1)
        if op is Op.FORWARD and stage < self._last:
            self._note_message(executor, Message(MessageType.ACTIVATION, stage, TRACED), 0)
        if op in INPUT_GRADIENTS and stage > 0:
            self._note_message(executor, Message(MessageType.GRADIENT, stage - 1, TRACED), 0)
        if op in INPUT_GRADIENTS | WEIGHT_GRADIENTS and not self._in_flight:
            self._note_gradients(stage)

    def _note_message(self, executor: Executor, message: Message | None, side: int) -> None:
        assert message is not None
        tensor = executor.held(message)
        if tensor is None:
            return
        is_gradient = message.kind is MessageType.GRADIENT
        number = 2 * message.stage + is_gradient
        self.messages[number, side] = digest(tensor)
        # An activation is sent by the lower stage and received by the upper one, a gradient the
        # other way round.
        is_received = side == 1
        stage = message.stage + (is_gradient != is_received)
        description = f"{message_name(number)}, as {('sent', 'received')[side]}"
        self._borders.note(BACKWARD if is_gradient else FORWARD, stage, description, tensor)

    def look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        """Trace the gradients of these parameters, which are complete on this rank and not reduced
        yet."""
        complete = set(parameters)
        for stage in self._parameters:
            self._note_gradients(stage, complete)

    def _note_gradients(self, stage: int, complete: Set[nn.Parameter] | None = None) -> None:
        """Trace gradients of a stage that were not traced yet. complete: only of these
        parameters."""
        for position, parameter in enumerate(self._parameters.get(stage, ())):
            if parameter in self._noted or not has_gradient(parameter):
                continue
            if complete is not None and parameter not in complete:
                continue
            # Each gradient is noted once: later it holds other micro-batches too.
            self._noted.add(parameter)
            names = [part.name for part in layout_of(parameter).parts]
            module = names[0].rpartition(".")[0]
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            self._borders.note(
                BACKWARD,
                stage,
                f"the gradient of {' and '.join(names)}",
                gradient,
                module,
                position,
            )


def _forward_number(stage: int, program: Program) -> int:
    """Return how many micro-batches pass a stage forward before the traced one."""
    microbatches = [
        instruction.microbatch
        for instruction in program
        if instruction.op is Op.FORWARD and instruction.stage == stage
    ]
    return microbatches.index(TRACED)


def _traceable_parameters(
    stages: Mapping[int, nn.Module], program: Program
) -> dict[int, list[nn.Parameter]]:
    """Return, by stage, the parameters whose gradients of the traced micro-batch can be read alone.

    These are not shared with another stage of the rank, and the traced micro-batch is the first
    that has a backward pass in the stage.
    """
    holders = Counter(p for stage in stages.values() for p in stage.parameters())  # by identity
    traceable = {}
    for number, stage in stages.items():
        first_backwards = (
            _first_of(INPUT_GRADIENTS, number, program),
            _first_of(WEIGHT_GRADIENTS, number, program),
        )
        if all(instruction.microbatch == TRACED for instruction in first_backwards):
            traceable[number] = [
                parameter
                for parameter in stage.parameters()
                if parameter.requires_grad and holders[parameter] == 1
            ]
    return traceable


def _first_of(ops: Set[Op], stage: int, program: Program) -> Instruction:
    """Return the first instruction of a stage that is one of `ops`."""
    return next(i for i in program if i.stage == stage and i.op in ops)
