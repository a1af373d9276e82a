"""The activation memory of a stage for one micro-batch, measured by running the stage on tensors without storage.

The stage is built and run for real (forward, loss and both halves of the backward pass) under torch's fake tensors,
which have shapes and dtypes but no storage and need no time. Live bytes are counted when operators create tensors and
when the last reference to a tensor is dropped. The result has the bytes that stay between the instructions of a
schedule, and the extra bytes that an instruction needs while it runs, recomputed activations included. Weight gradients
are allocated elsewhere and are not counted. The memory of experts depends on the number of tokens that are routed to
them, so it cannot be predicted for a model with experts.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaprec.comm.axis import Axis
from megaprec.fp8.state import FP8State
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.stages import Cut, Stage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.instructions import Instruction, Op
from parallel.weight_grad_queue import Work


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch on one rank.

    activations: kept from the forward to the backward, or to its first half.
    put_off: kept between the halves of a split backward: the inputs of products and the gradients of their outputs.
    forward, backward, input, weight: the peak that a forward, a whole backward, or its input or weight half adds to the
        memory in use before it.
    """

    activations: int
    put_off: int
    forward: int
    backward: int
    input: int
    weight: int

    def growth(self, i: Instruction) -> int:
        """Return the change of the memory in use after an instruction of this stage."""
        changes = {
            Op.FORWARD: self.activations,
            Op.BACKWARD: -self.activations,
            Op.BACKWARD_INPUT: self.put_off - self.activations,
            Op.BACKWARD_WEIGHT: -self.put_off,
        }
        return changes.get(i.op, 0)

    def within(self, i: Instruction) -> int:
        """Return the peak memory that an instruction adds while it runs."""
        most = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.input,
            Op.BACKWARD_WEIGHT: self.weight,
        }
        return most.get(i.op, 0)


def kept_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    seq_length: int,
    micro_batch: int,
    tp: int = 1,
    sequence: bool = False,
    recompute: Recompute = KEEP,
) -> list[Kept]:
    """Return the bytes that each stage keeps on each of `tp` ranks. The vocabulary must be known.

    sequence: activations between blocks are sharded along the sequence.
    """
    recipe = plan.fp8 and replace(plan.fp8, backend="torch")  # keeps as many bytes, and runs without real values
    axis, held = _Alone("tp", 0, tp), replace(plan, masters=plan.parameters, fp8=recipe)
    config = config.undrawn
    known: dict[tuple[int, bool, bool], Kept] = {}
    for cut in cuts:
        alike = len(cut.layers), cut.first, cut.last
        if alike not in known:
            fp8 = FP8State(recipe, config.layers, axis)
            context = Context(held, axis, sequence, recompute=recompute, fp8=fp8)
            with FakeTensorMode(), fp8.autocast():
                known[alike] = _kept(Stage(config, context, cut), seq_length, micro_batch)
    return [known[len(cut.layers), cut.first, cut.last] for cut in cuts]


def message_bytes(
    config: ModelConfig, plan: PrecisionPlan, seq_length: int, micro_batch: int, tp: int = 1, sequence: bool = False
) -> int:
    """Return the size of the message that one stage sends to the next for one micro-batch."""
    return seq_length // (tp if sequence else 1) * micro_batch * config.hidden * plan.pipeline.itemsize


class _Alone(Axis):
    """An axis without its other ranks: the results of its collectives have the right shapes and arbitrary values."""

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        return lambda: whole

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(tensor)  # as on a CPU: received from all ranks, then summed
        return lambda: received.unflatten(0, (self.size, -1)).sum(0)


class _Alive(TorchDispatchMode):
    """Counts the live bytes of tensors that are created inside. most: the peak since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known[place] = weakref.ref(storage, lambda _: self._forget(place, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _forget(self, place: int, size: int) -> None:
        del self._known[place]
        self.now -= size

    def begin(self) -> int:
        """Return the bytes that are live now, and restart the peak from there."""
        self.most = self.now
        return self.now


def _kept(stage: Stage, seq_length: int, micro_batch: int) -> Kept:
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=stage.context.plan.gradients)  # type: ignore[attr-defined]
    with torch.no_grad():
        stage(_input(stage, seq_length, micro_batch))  # allocates the buffers that are kept for good
    whole, halves = (_passes(stage, seq_length, micro_batch, split) for split in (False, True))
    return replace(halves, backward=whole.backward)


def _passes(stage: Stage, seq_length: int, micro_batch: int, split: bool) -> Kept:
    """Run a micro-batch as the executor does. split: the backward pass in halves; `backward` is then 0."""
    deferred = stage.context.deferred
    with _Alive() as alive:
        x = _input(stage, seq_length, micro_batch)
        y = _output(stage, x, seq_length)
        edge, shape, dtype = get_gradient_edge(y), y.shape, y.dtype
        forward = alive.most
        del y
        activations = alive.begin()
        with deferred.collect() if split else nullcontext(Work()) as work:
            torch.autograd.backward((edge,), (torch.ones(shape, dtype=dtype),))
        most = alive.most - activations
        del x, edge
        put_off = alive.begin()
        while work:
            work.popleft()()
    weight = alive.most - put_off
    return Kept(activations, put_off, forward, 0, most, weight) if split else Kept(activations, 0, forward, most, 0, 0)


def _input(stage: Stage, seq_length: int, micro_batch: int) -> Tensor:
    """Return token ids, or an activation such as the stage before sends."""
    if stage.cut.first:
        return torch.zeros(seq_length, micro_batch, dtype=torch.int64)
    context = stage.context
    shape = seq_length // (context.tp.size if context.cut_sequence else 1), micro_batch, stage.config.hidden
    return torch.zeros(shape, dtype=context.plan.pipeline, requires_grad=True)


def _output(stage: Stage, x: Tensor, seq_length: int) -> Tensor:
    """Return the activation for the next stage, or the loss."""
    plan = stage.context.plan
    place = MicrobatchInfo(0, torch.arange(x.shape[1]))  # as in training
    y = stage(x if stage.cut.first else x.to(plan.residual), place)
    if not stage.cut.last:
        return y.to(plan.pipeline)
    return stage.losses(y, torch.zeros(seq_length, x.shape[1], dtype=torch.int64)).sum()
