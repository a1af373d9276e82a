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

TRACED_MICROBATCH = 0  # the number of the traced micro-batch


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
        turns: dict[int, int] = {}
        for stage in stages:
            order = [i.microbatch for i in program if i.op is Op.FORWARD and i.stage == stage]
            turns[stage] = 0 if alone else order.index(TRACED_MICROBATCH)
        self._borders = DigestTrace(stages, turns)
        self._last = last
        self._in_flight = in_flight
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

    def watch(self, executor: Executor) -> None:
        """Trace what `executor` is going to run."""

        def look(i: Instruction) -> None:
            if i.microbatch == TRACED_MICROBATCH:
                self._look(executor, i)
            elif i.op in INPUT_GRADIENTS:
                # what it adds to no longer holds the traced micro-batch alone
                parameters = self._parameters.get(i.stage, ())
                self._noted.update(filter(has_gradient, parameters))

        executor.observer = look

    def _look(self, executor: Executor, i: Instruction) -> None:
        if i.op in RECEIVES:
            self._note_message(executor, Message.of(i), 1)
        if i.op is Op.FORWARD and i.stage < self._last:
            self._note_message(
                executor, Message(MessageType.ACTIVATION, i.stage, TRACED_MICROBATCH), 0
            )
        if i.op in INPUT_GRADIENTS and i.stage > 0:
            self._note_message(
                executor, Message(MessageType.GRADIENT, i.stage - 1, TRACED_MICROBATCH), 0
            )
        if i.op in INPUT_GRADIENTS | WEIGHT_GRADIENTS and not self._in_flight:
            self._note_gradients(i.stage)

    def _note_message(self, executor: Executor, message: Message | None, side: int) -> None:
        """Note a message that this rank holds. side: 0 as sent, 1 as received."""
        assert message is not None
        tensor = executor.find_message(message)
        if tensor is None:
            return
        is_gradient = message.kind is MessageType.GRADIENT
        number = 2 * message.stage + is_gradient
        self.messages[number, side] = digest(tensor)
        # the stage on this rank: an activation comes from the lower one, a gradient from the upper
        stage = message.stage + (is_gradient != bool(side))
        name = f"{message_name(number)}, as {('sent', 'received')[side]}"
        self._borders.note(BACKWARD if is_gradient else FORWARD, stage, name, tensor)

    def look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        """Trace the gradients of these parameters, which are complete on this rank and not reduced
        yet."""
        complete = set(parameters)
        for stage in self._parameters:
            self._note_gradients(stage, complete)

    def _note_gradients(self, stage: int, among: Set[nn.Parameter] | None = None) -> None:
        """Note the gradients of a stage that have come and were not noted yet. among: of these
        parameters only; None: of all."""
        for position, parameter in enumerate(self._parameters.get(stage, ())):
            if parameter in self._noted or (among is not None and parameter not in among):
                continue
            if has_gradient(parameter):
                self._noted.add(parameter)
                parts = layout_of(parameter).parts
                name = " and ".join(part.name for part in parts)
                module = parts[0].name.rpartition(".")[0]
                main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
                self._borders.note(
                    BACKWARD, stage, f"the gradient of {name}", main, module, position
                )


def _readable_parameters(
    stages: Mapping[int, nn.Module], program: Program
) -> dict[int, list[nn.Parameter]]:
    """Return, by stage, the parameters whose gradients of the traced micro-batch can be read alone.

    These are not shared with another stage of the rank, and the traced micro-batch is the first
    that has a backward pass in the stage.
    """
    # by identity
    uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    readable = {}
    for number, stage in stages.items():
        instructions = [i for i in program if i.stage == number]
        first_input = next(i for i in instructions if i.op in INPUT_GRADIENTS)
        first_weight = next(i for i in instructions if i.op in WEIGHT_GRADIENTS)
        if first_input.microbatch == first_weight.microbatch == TRACED_MICROBATCH:
            trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
            readable[number] = [parameter for parameter in trained if uses[parameter] == 1]
    return readable
