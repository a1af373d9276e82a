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
from megaprec.comm.main_grad import has_gradient
from megaprec.comm.tensor_digests import digest
from megaprec.diagnose.module_trace import BACKWARD, FORWARD, DigestTrace, TraceEntry
from parallel.pipeline.executor import Executor, PassObserver
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

TRACED_MICROBATCH = 0  # the number of the traced micro-batch
# sides of a message
SENT = 0
RECEIVED = 1
SIDES = ("sent", "received")


def message_name(number: int) -> str:
    """Return in words the message of this number, which is twice its lower stage, plus one for a
    gradient."""
    stage, is_gradient = divmod(number, 2)
    if is_gradient:
        return f"the gradient from stage {stage + 1} to stage {stage}"
    return f"the activation from stage {stage} to stage {stage + 1}"


class MicrobatchTrace(PassObserver):
    """Traces the first micro-batch while an executor runs `program`, or its instructions for this
    micro-batch alone.

    last_stage: number of the model's last stage.
    alone: True if the micro-batch runs alone.
    reduces_in_backward: True if its backward pass already reduces gradients: they are then given to
        `look_at` before.
    messages: digests by message (a number, see `message_name`) and side, SENT or RECEIVED.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        last_stage: int,
        program: Program,
        *,
        alone: bool,
        reduces_in_backward: bool,
    ) -> None:
        # by stage: how many forwards come before that of the traced micro-batch
        turns: dict[int, int] = {}
        for stage in stages:
            forward_order = [
                instruction.microbatch
                for instruction in program
                if instruction.op is Op.FORWARD and instruction.stage == stage
            ]
            turns[stage] = 0 if alone else forward_order.index(TRACED_MICROBATCH)
        self._borders = DigestTrace(stages, turns)
        self._last_stage = last_stage
        self._reduces_in_backward = reduces_in_backward
        self._parameters = _readable_parameters(stages, program)
        self._noted: set[nn.Parameter] = set()
        self.messages: dict[tuple[int, int], Tensor] = {}

    @property
    def entries(self) -> Sequence[TraceEntry]:
        """Return the trace so far."""
        return self._borders.entries

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace within the context."""
        with self._borders.recording():
            yield

    def after(self, executor: Executor, instruction: Instruction) -> None:
        """Trace what an instruction has received and computed, if it is for the traced
        micro-batch."""
        if instruction.microbatch == TRACED_MICROBATCH:
            self._look(executor, instruction)
        elif instruction.op in INPUT_GRADIENTS:
            # The gradients that it adds to are no longer those of the traced micro-batch alone:
            # they count as noted, so that they are not read.
            parameters = self._parameters.get(instruction.stage, ())
            self._noted.update(filter(has_gradient, parameters))

    def _look(self, executor: Executor, instruction: Instruction) -> None:
        """Trace what an instruction for the traced micro-batch has received and computed."""
        op = instruction.op
        stage = instruction.stage
        if op in RECEIVES:
            self._note_message(executor, Message.of(instruction), RECEIVED)
        if op is Op.FORWARD and stage < self._last_stage:
            activation = Message(MessageType.ACTIVATION, stage, TRACED_MICROBATCH)
            self._note_message(executor, activation, SENT)
        if op in INPUT_GRADIENTS and stage > 0:
            gradient = Message(MessageType.GRADIENT, stage - 1, TRACED_MICROBATCH)
            self._note_message(executor, gradient, SENT)
        if op in INPUT_GRADIENTS | WEIGHT_GRADIENTS and not self._reduces_in_backward:
            self._note_gradients(stage)

    def _note_message(
        self,
        executor: Executor,
        message: Message | None,
        side: int,
    ) -> None:
        """Note a message that this rank holds. side: SENT or RECEIVED."""
        assert message is not None
        tensor = executor.find_message(message)
        if tensor is None:
            return
        is_gradient = message.kind is MessageType.GRADIENT
        number = 2 * message.stage + (1 if is_gradient else 0)
        self.messages[number, side] = digest(tensor)
        # The stage on this rank: an activation comes from the lower one and goes to the upper one,
        # a gradient the other way round.
        lower = message.stage
        sender = lower + 1 if is_gradient else lower
        receiver = lower if is_gradient else lower + 1
        stage = sender if side == SENT else receiver
        direction = BACKWARD if is_gradient else FORWARD
        name = f"{message_name(number)}, as {SIDES[side]}"
        self._borders.note(direction, stage, name, tensor)

    def look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        """Trace the gradients of these parameters, which are complete on this rank and not reduced
        yet."""
        complete = set(parameters)
        for stage in self._parameters:
            self._note_gradients(stage, complete)

    def _note_gradients(self, stage: int, among: Set[nn.Parameter] | None = None) -> None:
        """Note the gradients of a stage that are computed and were not noted yet. among: of these
        parameters only; None: of all."""
        for position, parameter in enumerate(self._parameters.get(stage, ())):
            if parameter in self._noted or (among is not None and parameter not in among):
                continue
            # not computed yet
            if not has_gradient(parameter):
                continue
            self._noted.add(parameter)
            parts = layout_of(parameter).parts
            description = f"the gradient of {' and '.join(part.name for part in parts)}"
            module, _, _ = parts[0].name.rpartition(".")
            main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            self._borders.note(BACKWARD, stage, description, main_grad, module, position)


def _readable_parameters(
    stages: Mapping[int, nn.Module], program: Program
) -> dict[int, list[nn.Parameter]]:
    """Return, by stage, the parameters whose gradients of the traced micro-batch can be read alone.

    These are not shared with another stage of the rank, and the traced micro-batch is the first
    that has a backward pass in the stage. Other stages are left out.
    """
    uses: Counter[nn.Parameter] = Counter()  # the number of stages that have each parameter
    for stage in stages.values():
        uses.update(stage.parameters())
    readable: dict[int, list[nn.Parameter]] = {}
    for number, stage in stages.items():
        of_stage = [instruction for instruction in program if instruction.stage == number]
        input_order = [
            instruction.microbatch for instruction in of_stage if instruction.op in INPUT_GRADIENTS
        ]
        weight_order = [
            instruction.microbatch for instruction in of_stage if instruction.op in WEIGHT_GRADIENTS
        ]
        if input_order[0] == weight_order[0] == TRACED_MICROBATCH:
            readable[number] = [
                parameter
                for parameter in stage.parameters()
                if parameter.requires_grad and uses[parameter] == 1
            ]
    return readable
