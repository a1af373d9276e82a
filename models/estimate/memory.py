"""The activation memory of a stage for one micro-batch, measured by running the stage on tensors
without storage.

The stage is built and run for real (forward, loss and both halves of the backward pass) on tensors
which have shapes and dtypes but no storage (`models.estimate.storage`). Live bytes are counted when
operators create tensors and when the last reference to a tensor is dropped. The result has the
bytes that stay between the instructions of a schedule, and the extra bytes that an instruction
needs while it runs, recomputed activations included. Weight gradients are allocated elsewhere and
are not counted.

A stage whose layers are all alike is run with few of them and with one more; each further layer
adds the difference. The router is taken to send as many tokens to each expert: what experts keep
does not depend on it, for no token is dropped, but the largest expert's share of an instruction's
peak does.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megaprec.comm.axis import Axis
from megaprec.fp8.state import FP8State
from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.estimate.storage import Alive, Alone, Device, lone_experts, without_storage
from models.mtp import Ahead, look_ahead
from models.packing import WHOLE, Packing
from models.stages import Cut, Stage
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.leaves import PLAIN, Leaves
from parallel.pipeline.instructions import Instruction, Op
from parallel.weight_grad_queue import Work

FEW = (2, 8, 32)  # layers of the smaller of two stages from which a deeper one is computed


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch on one rank.

    activations: kept from the forward to the backward, or to its first half.
    put_off: kept between the halves of a split backward: the inputs of products and the gradients
        of their outputs.
    forward, backward, input, weight: the peak that a forward, a whole backward, or its input or
        weight half adds to the memory in use before it.
    buffers: kept for good from the first pass on, for all micro-batches: rotary tables, FP8 casts
        of weights.
    """

    activations: int
    put_off: int
    forward: int
    backward: int
    input: int
    weight: int
    buffers: int = 0

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
    device: Device = "cpu",
    cp: int = 1,
    ring: bool = True,
) -> list[Kept]:
    """Return the bytes that each stage keeps on each of `tp` x `cp` ranks. The vocabulary must be
    known.

    sequence: activations between blocks are sharded along the sequence. cp: the ranks that share
    each sequence. ring: as in `models.context_attention`. device: with "cpu" the operators are
    those that this machine's processor would run; with "cuda" attention is torch's fused kernel for
    GPUs.
    """
    memory = StageMemory(
        config, plan, seq_length, micro_batch, tp, sequence, recompute, device, cp=cp, ring=ring
    )
    return [memory.kept(cut) for cut in cuts]


@dataclass(frozen=True)
class StageMemory:
    """The bytes that stages of any cut keep of a micro-batch; stages that are alike are run once.

    Fields are the arguments of `kept_bytes`.

    halves: False if backward passes are never computed in halves; `put_off`, `input` and `weight`
        are then 0.
    expert, expert_tensor: the ranks over which experts are spread, and their slices, as for
        `Engine`.
    packed: documents have positions of their own.
    leaves: may note the calls of leaves.
    """

    config: ModelConfig
    plan: PrecisionPlan
    seq_length: int
    micro_batch: int
    tp: int = 1
    sequence: bool = False
    recompute: Recompute = KEEP
    device: Device = "cpu"
    halves: bool = True
    expert: int = 1
    expert_tensor: int = 0
    cp: int = 1
    ring: bool = True
    packed: bool = False
    leaves: Leaves = PLAIN
    _known: dict[tuple[object, ...], Kept] = field(default_factory=dict, repr=False, compare=False)

    def kept(self, cut: Cut) -> Kept:
        """Return what a stage keeps: if its layers are equal, what a stage of few of them does, and
        as much more for each further one as one more adds.
        """
        layers = len(cut.layers)
        equal = len(set(self._kinds(cut))) == 1
        for count in (count for count in FEW if equal and count + 1 < layers):
            few, more = (
                self._walked(replace(cut, layers=cut.layers[:some])) for some in (count, count + 1)
            )
            if _steady(few, more):
                pairs = (
                    (part.name, getattr(few, part.name), getattr(more, part.name))
                    for part in fields(Kept)
                )
                return Kept(
                    **{
                        name: least + (layers - count) * (next_ - least)
                        for name, least, next_ in pairs
                    }
                )
        return self._walked(cut)

    def _kinds(self, cut: Cut) -> tuple[object, ...]:
        """Return the kind of each layer; layers of one kind keep as much."""
        whole = self.recompute.whole(len(cut.layers))
        names = by_name(self.plan)
        kinds = ((m, self.config.of_layer(m)) for m in cut.layers)
        return tuple(
            (n < whole, kind.window, kind.experts, names and m) for n, (m, kind) in enumerate(kinds)
        )

    def _walked(self, cut: Cut) -> Kept:
        """Return what a stage keeps, by running it."""
        if (alike := (cut.first, cut.last, self._kinds(cut))) in self._known:
            return self._known[alike]
        # keeps as many, and runs without values
        recipe = self.plan.fp8 and replace(self.plan.fp8, backend="torch")
        narrow = self.plan.masters if recipe and recipe.parameters else self.plan.parameters
        axis = Alone("tp", 0, self.tp)
        held = replace(self.plan, masters=narrow, fp8=recipe)
        with without_storage(self.device):
            fp8 = FP8State(
                recipe, self.config.layers, axis, device="meta" if self.device == "cuda" else "cpu"
            )
            experts = lone_experts(self.tp, self.expert, self.expert_tensor)
            context = Context(
                held,
                axis,
                self.sequence,
                recompute=self.recompute,
                fp8=fp8,
                experts=experts,
                cp=Alone("cp", 0, self.cp),
                ring=self.ring,
                leaves=self.leaves,
            )
            # a pass begins when all products are registered
            stage = Stage(self.config.undrawn, context, cut)
            with fp8.autocast():
                kept = _kept(stage, self)
        self._known[alike] = kept
        return kept


def by_name(plan: PrecisionPlan) -> bool:
    """Return True if the plan may treat one layer in another way than the next."""
    fp8 = plan.fp8
    return bool(plan.keep_fp32 or (fp8 and (fp8.first_layers or fp8.last_layers or fp8.wide)))


def _steady(few: Kept, more: Kept) -> bool:
    """Return True if peaks grow by as much with each further layer.

    A peak is the largest of several sums of which each grows with the number of layers at its own
    rate. It is steady once it grows as fast as what layers leave behind.
    """
    grows = more.activations - few.activations
    put_off = more.put_off - few.put_off
    halves = more.input - few.input == max(0, put_off - grows)
    return more.forward - few.forward == grows and (halves or not more.input)


def message_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    seq_length: int,
    micro_batch: int,
    tp: int = 1,
    sequence: bool = False,
    cp: int = 1,
) -> int:
    """Return the size of the message that one stage sends to the next for one micro-batch."""
    return (
        seq_length
        // (cp * (tp if sequence else 1))
        * micro_batch
        * config.hidden
        * plan.pipeline.itemsize
    )


def _kept(stage: Stage, memory: StageMemory) -> Kept:
    seq_length = memory.seq_length // memory.cp
    micro_batch = memory.micro_batch
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=stage.context.plan.gradients)  # type: ignore[attr-defined]
    with torch.no_grad(), Alive() as alive:
        # allocates the buffers that are kept for good
        stage(_input(stage, seq_length, micro_batch))
        buffers = alive.now
    if memory.packed:
        packing = Packing(positions=torch.zeros(micro_batch, seq_length, dtype=torch.int64))
    else:
        packing = WHOLE
    whole = _passes(stage, seq_length, micro_batch, packing, split=False)
    split = _passes(stage, seq_length, micro_batch, packing, split=True) if memory.halves else whole
    return replace(split, backward=whole.backward, buffers=buffers)


def _passes(stage: Stage, seq_length: int, micro_batch: int, packing: Packing, split: bool) -> Kept:
    """Run a micro-batch as the executor does. split: the backward pass in halves; `backward` is
    then 0."""
    deferred = stage.context.deferred
    with Alive() as alive:
        x = _input(stage, seq_length, micro_batch)
        y = _output(stage, x, seq_length, packing)
        edge = get_gradient_edge(y)
        shape = y.shape
        dtype = y.dtype
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
    if split:
        return Kept(activations, put_off, forward, 0, most, weight)
    return Kept(activations, 0, forward, most, 0, 0)


def _input(stage: Stage, seq_length: int, micro_batch: int) -> Tensor:
    """Return token ids, or an activation such as the stage before sends."""
    if stage.cut.first:
        return torch.zeros(seq_length, micro_batch, dtype=torch.int64)
    context = stage.context
    shape = (
        seq_length // (context.tp.size if context.cut_sequence else 1),
        micro_batch,
        stage.config.hidden,
    )
    return torch.zeros(shape, dtype=context.plan.pipeline, requires_grad=True)


def _output(stage: Stage, x: Tensor, seq_length: int, packing: Packing) -> Tensor:
    """Return the activation for the next stage, or the loss."""
    plan = stage.context.plan
    place = MicrobatchInfo(0, torch.arange(x.shape[1]), torch.ones(()))  # as in training
    if stage.cut.last and stage.config.mtp_layers:
        ahead = _ahead(stage, seq_length, x.shape[1])
    else:
        ahead = None
    y = stage(x if stage.cut.first else x.to(plan.residual), place, packing, ahead)
    if not stage.cut.last:
        return y.to(plan.pipeline)
    return stage.losses(y, torch.zeros(seq_length, x.shape[1], dtype=torch.int64)).sum()


def _ahead(stage: Stage, seq_length: int, micro_batch: int) -> Ahead:
    """Return what modules of multi-token prediction read and predict of one micro-batch."""
    ids = torch.zeros(micro_batch, seq_length * stage.context.cp.size, dtype=torch.int64)
    cp = stage.context.cp
    alone = Axis("dp")
    made = look_ahead(
        ids, ids, None, None, stage.config.mtp_layers, torch.ones(()), cp, alone, divides=True
    )
    return made.of(slice(None))
