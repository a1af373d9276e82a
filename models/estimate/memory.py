"""The activation memory of a stage for one micro-batch, measured on tensors without storage.

The stage is built and run for real (forward, loss and both halves of the backward pass) on tensors
which have shapes and dtypes but no storage (`models.estimate.storage`). Live bytes are counted when
operators create tensors and when the last reference to a tensor is dropped. The result has the
bytes that stay between the instructions of a schedule, and the extra bytes that an instruction
needs while it runs, recomputed activations included. Weight gradients are allocated elsewhere and
are not counted.

A stage whose last layers are alike is run with few of them and with one more; each further layer
adds the difference. Of a stage with layers of several kinds in turn the last ones are run, with
one of each kind among them; each layer before them adds what one of its kind adds.

The router is taken to send as many tokens to each expert: what experts keep does not depend on it,
for no token is dropped, but the largest expert's share of an instruction's peak does.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megaprec.comm.axis import Axis
from megaprec.fp8.state import FP8State
from megaprec.optim.model_buffers import buckets
from megaprec.precision.plan import PrecisionPlan
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.mtp import MTPBatch, make_mtp_batch
from models.decoder.stages import Cut, Stage
from models.engine.options import EngineOptions
from models.estimate.storage import (
    Device,
    LiveMemory,
    SimulatedAxis,
    simulated_experts,
    without_storage,
)
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.pipeline.instructions import Instruction, Op
from parallel.weight_grad_queue import Work, carry_out

# Layers before the last one of each kind, if there are so many, are not run.
FEWEST_EARLIER = 4
# Layers of the smaller of two stages from which a deeper one is computed: tried in turn, until
# one more layer adds the same to every peak.
SAMPLED_DEPTHS = (2, 8, 32)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch on one rank.

    activations: kept from the forward to the backward, or to its first half.
    deferred_bytes: kept between the halves of a split backward: the inputs of products and the
        gradients of their outputs.
    forward, backward, input, weight: the peak that a forward, a whole backward, or its input or
        weight half adds to the memory in use before it.
    buffers: kept for good from the first pass on, for all micro-batches: rotary tables, FP8 casts
        of weights.
    """

    activations: int
    deferred_bytes: int
    forward: int
    backward: int
    input: int
    weight: int
    buffers: int = 0

    def growth_after(self, instruction: Instruction) -> int:
        """Return the change of the memory in use after an instruction of this stage."""
        changes = {
            Op.FORWARD: self.activations,
            Op.BACKWARD: -self.activations,
            Op.BACKWARD_INPUT: self.deferred_bytes - self.activations,
            Op.BACKWARD_WEIGHT: -self.deferred_bytes,
        }
        # Messages are counted by `message_bytes`.
        return changes.get(instruction.op, 0)

    def peak_of(self, instruction: Instruction) -> int:
        """Return the peak memory that an instruction adds while it runs."""
        peaks = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.input,
            Op.BACKWARD_WEIGHT: self.weight,
        }
        return peaks.get(instruction.op, 0)


@dataclass(frozen=True)
class StageMemory:
    """The bytes that stages of any cut keep of a micro-batch; stages that are alike are run once.

    config: the model, with the size of its vocabulary.
    options: how the stages are computed. `layers`, `seed` and `canonical_shards` have no effect.
        With `blank` stages are built sooner, and keep the same bytes. `leaves` may note the calls
        of leaves, which are those of a step only without `blank`: blank weights have other strides.
    tp: tensor-parallel ranks.
    cp: ranks that share each sequence.
    tp_rank, cp_rank: the one that is run. All keep as many bytes, but calls of leaves name what is
        the rank's own, as the first word of its part of the vocabulary.
    device: with "cpu" the operators are those that this machine's processor would run; with "cuda"
        attention is torch's fused kernel for GPUs.
    halves: False if backward passes are never computed in halves; `deferred_bytes`, `input` and
        `weight` are then 0.
    packed: documents have positions of their own.
    keeps_casts: False if FP8 casts of weights do not outlive their use, as under ZeRO-3.
    """

    config: ModelConfig
    plan: PrecisionPlan
    options: EngineOptions
    tp: int = 1
    cp: int = 1
    tp_rank: int = 0
    cp_rank: int = 0
    device: Device = "cpu"
    halves: bool = True
    packed: bool = False
    keeps_casts: bool = True
    _measured: dict[tuple[object, ...], ActivationBytes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def activation_bytes(self, cut: Cut) -> ActivationBytes:
        """Return what a stage keeps, and the peaks of its instructions.

        If many of its last layers are equal, that is what a stage with few of them keeps, and as
        much more for each further layer as one more adds; of layers of several kinds in turn what
        the last ones keep, and as much more for each layer before them as one of its kind adds.
        """
        kinds = self._layer_kinds(cut)
        num_others = len(kinds) - _count_equal_last(kinds)
        for count in SAMPLED_DEPTHS:
            shorter = replace(cut, layers=cut.layers[: num_others + count])
            longer = replace(cut, layers=cut.layers[: num_others + count + 1])
            if len(longer.layers) >= len(kinds):
                break
            # what is recomputed may depend on the number of layers
            if self._layer_kinds(longer) != kinds[: len(longer.layers)]:
                break
            fewer = self._run(shorter)
            one_more = self._run(longer)
            if _grows_steadily(fewer, one_more):
                return _extrapolate(fewer, one_more, len(kinds) - len(shorter.layers))
        return self._with_earlier_layers(cut, kinds) or self._run(cut)

    def _with_earlier_layers(self, cut: Cut, kinds: Sequence[object]) -> ActivationBytes | None:
        """Return what a stage keeps, computed from its last layers: those from the first one on
        that is the last layer of its kind. None if that would save little, or would not be exact.

        These layers are run. Each layer before them adds what one more of its kind adds.
        All peaks are in the last layers: whatever a layer needs, most is kept where the last one of
        its kind runs, forward and in a whole backward pass. That does not hold for the input half
        of a split backward pass: there some kinds of layers put off more than they free.
        """
        if self.halves:
            return None
        last_of_kind = {kind: position for position, kind in enumerate(kinds)}
        start = min(last_of_kind.values())
        last_layers = replace(cut, layers=cut.layers[start:])
        # what is recomputed may depend on the number of layers
        is_alike = self._layer_kinds(last_layers) == kinds[start:]
        if start < FEWEST_EARLIER or not is_alike:
            return None
        kept = self._run(last_layers)
        for kind, count in Counter(kinds[:start]).items():
            # a middle stage of the last layer of this kind and the layer before it, and one of the
            # latter alone: they differ by what a layer of this kind adds
            position = last_of_kind[kind]
            pair = Cut(1, cut.layers[position - 1 : position + 1], first=False, last=False)
            before = replace(pair, layers=pair.layers[:1])
            if self._layer_kinds(pair) != tuple(kinds[position - 1 : position + 1]):
                return None
            kept = _with_further(kept, self._run(before), self._run(pair), count)
        return kept

    def _layer_kinds(self, cut: Cut) -> tuple[object, ...]:
        """Return the kind of each layer; layers of one kind keep as much."""
        recomputed_layers = self.options.recompute.count_whole_layers(len(cut.layers))
        names_layers = names_single_layers(self.plan)
        kinds: list[object] = []
        for position, layer in enumerate(cut.layers):
            config = self.config.of_layer(layer)
            is_recomputed = position < recomputed_layers
            # where a plan names layers, each may be a kind of its own
            own_number = layer if names_layers else None
            branches = (config.mixer, config.hybrid_pattern, config.experts)
            kinds.append((is_recomputed, config.window, branches, own_number))
        return tuple(kinds)

    def _run(self, cut: Cut) -> ActivationBytes:
        """Return what a stage keeps, by running it; the result of an equal stage if one was run
        before."""
        key = (cut.first, cut.last, self._layer_kinds(cut))
        if key not in self._measured:
            with without_storage(self.device):
                context = self._context()
                # FP8's pass begins when all products are registered: after the stage is built
                stage = Stage(self.config.with_zero_weights, context, cut)
                with context.fp8.autocast():
                    self._measured[key] = _measure(stage, self)
        return self._measured[key]

    def _context(self) -> Context:
        """Return the context of layers on one of the ranks, without the others."""
        options = self.options
        # torch's casts keep as many bytes as others, and run without values.
        recipe = self.plan.fp8 and replace(self.plan.fp8, backend="torch")
        masters = self.plan.masters if recipe and recipe.parameters else self.plan.parameters
        tp = SimulatedAxis("tp", self.tp_rank, self.tp)
        device = "meta" if self.device == "cuda" else "cpu"
        fp8 = FP8State(recipe, self.config.layers, tp, device=device)
        fp8.keeps_casts = self.keeps_casts
        return Context(
            # a pass computes with weights, whatever the masters are made of
            replace(self.plan, masters=masters, remainders=False, fp8=recipe),
            tp,
            options.sequence,
            recompute=options.recompute,
            fp8=fp8,
            experts=simulated_experts(self.tp, options.expert, options.expert_tensor),
            cp=SimulatedAxis("cp", self.cp_rank, self.cp),
            ring=options.ring,
            leaves=options.leaves,
            blank=options.blank,
        )


def _count_equal_last(kinds: Sequence[object]) -> int:
    """Return how many of the last layers are of one kind."""
    equal_last = takewhile(lambda kind: kind == kinds[-1], reversed(kinds))
    return len(list(equal_last))


def names_single_layers(plan: PrecisionPlan) -> bool:
    """Return True if the plan may treat one layer in another way than the next."""
    fp8 = plan.fp8
    if plan.keep_fp32:
        return True
    return fp8 is not None and bool(fp8.first_layers or fp8.last_layers or fp8.wide)


def _grows_steadily(fewer: ActivationBytes, one_more: ActivationBytes) -> bool:
    """Return True if each further layer will add the same to every peak.

    A peak is the largest of several sums, each of which grows with the number of layers at its own
    rate. Its growth is steady once it equals that of what layers leave behind.
    fewer, one_more: what a stage keeps, and what it keeps with one more layer.
    """
    growth = one_more.activations - fewer.activations
    deferred_growth = one_more.deferred_bytes - fewer.deferred_bytes
    forward_is_steady = one_more.forward - fewer.forward == growth
    input_growth = one_more.input - fewer.input
    input_is_steady = input_growth == max(0, deferred_growth - growth) or not one_more.input
    return forward_is_steady and input_is_steady


def _extrapolate(
    fewer: ActivationBytes,
    one_more: ActivationBytes,
    further: int,
) -> ActivationBytes:
    """Return what a stage keeps with `further` layers more than the stage of `fewer` has.

    one_more: what it keeps with one layer more.
    """
    extrapolated: dict[str, int] = {}
    for byte_field in fields(ActivationBytes):
        base = getattr(fewer, byte_field.name)
        bytes_of_layer = getattr(one_more, byte_field.name) - base
        extrapolated[byte_field.name] = base + further * bytes_of_layer
    return ActivationBytes(**extrapolated)


def _with_further(
    kept: ActivationBytes, before: ActivationBytes, pair: ActivationBytes, count: int
) -> ActivationBytes:
    """Return what a stage of whole backward passes keeps with `count` layers more at its beginning.

    before, pair: what a stage with one layer keeps, and one with such a layer behind that.
    """
    growth = count * (pair.activations - before.activations)
    return replace(
        kept,
        activations=kept.activations + growth,
        forward=kept.forward + growth,
        buffers=kept.buffers + count * (pair.buffers - before.buffers),
    )


def message_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    options: EngineOptions,
    tp: int = 1,
    cp: int = 1,
) -> int:
    """Return the size of the message that one stage sends to the next for one micro-batch."""
    # The sequence is cut over cp, and under sequence parallelism over tp too.
    sequence_ranks = cp * (tp if options.sequence else 1)
    local_length = options.seq_length // sequence_ranks
    return local_length * options.micro_batch * config.hidden * plan.pipeline.itemsize


def _measure(stage: Stage, memory: StageMemory) -> ActivationBytes:
    """Return what `stage` keeps of a micro-batch, and the peaks of its instructions, by running its
    passes. memory: the settings of the run."""
    seq_length = memory.options.seq_length // memory.cp
    micro_batch = memory.options.micro_batch
    lay_out(stage)
    with torch.no_grad(), LiveMemory() as live:
        # the first pass allocates what is kept for good
        stage(_make_input(stage, seq_length, micro_batch))
        buffers = live.now
    if memory.packed:
        packing = Packing(positions=torch.zeros(micro_batch, seq_length, dtype=torch.int64))
    else:
        packing = UNPACKED
    # separate runs: a whole backward pass frees what the first half of a split one keeps
    whole = _run_passes(stage, seq_length, micro_batch, packing, split=False)
    if not memory.halves:
        return replace(whole, buffers=buffers)
    split = _run_passes(stage, seq_length, micro_batch, packing, split=True)
    return replace(split, backward=whole.backward, buffers=buffers)


def lay_out(stage: Stage) -> None:
    """Give the parameters main gradients, and memory as the optimizer does: on a GPU the weights of
    the experts of a layer lie one after the other, because one product reads them all."""
    plan = stage.context.plan
    parameters = [*stage.parameters()]
    # A bucket of one element is full with one parameter, or with all that lie together. Tensors of
    # a simulated GPU are on the meta device, those of a simulated CPU are not.
    for bucket in buckets(parameters, plan, size=1, whole_groups=parameters[0].is_meta):
        sizes = [parameter.numel() for parameter in bucket]
        weights = torch.empty(sum(sizes), dtype=bucket[0].dtype)
        gradients = torch.zeros(sum(sizes), dtype=plan.gradients)
        slices = zip(bucket, weights.split(sizes), gradients.split(sizes), strict=True)
        for parameter, weight, gradient in slices:
            if len(bucket) > 1:
                parameter.data = weight.view(parameter.shape)
            parameter.main_grad = gradient.view(parameter.shape)  # type: ignore[attr-defined]


def _run_passes(
    stage: Stage,
    seq_length: int,
    micro_batch: int,
    packing: Packing,
    split: bool,
) -> ActivationBytes:
    """Return the bytes of a micro-batch, by running its passes as the executor does.

    split: the backward pass is in halves, and `backward` of the result is 0; otherwise
        `deferred_bytes`, `input` and `weight` are 0.
    """
    deferred = stage.context.deferred
    with LiveMemory() as live:
        x = _make_input(stage, seq_length, micro_batch)
        output = _compute_output(stage, x, seq_length, packing)
        edge = get_gradient_edge(output)
        shape = output.shape
        dtype = output.dtype
        forward = live.peak
        # The executor keeps the edge of the graph, not the output.
        del output
        activations = live.begin()
        # of a whole backward pass the products of weight gradients run at once, as in the executor
        collecting = deferred.collect() if split else nullcontext(Work())
        with collecting as work:
            torch.autograd.backward((edge,), (torch.ones(shape, dtype=dtype),))
        # Of a split backward this is the input half alone.
        backward = live.peak - activations
        del x, edge
        deferred_bytes = live.begin()
        carry_out(work)
    weight = live.peak - deferred_bytes
    if split:
        return ActivationBytes(activations, deferred_bytes, forward, 0, backward, weight)
    return ActivationBytes(activations, 0, forward, backward, 0, 0)


def _make_input(
    stage: Stage,
    seq_length: int,
    micro_batch: int,
) -> Tensor:
    """Return token ids, or an activation such as the stage before sends."""
    if stage.cut.first:
        return torch.zeros(seq_length, micro_batch, dtype=torch.int64)
    context = stage.context
    shape = (seq_length // context.sequence_ranks, micro_batch, stage.config.hidden)
    return torch.zeros(shape, dtype=context.plan.pipeline, requires_grad=True)


def _compute_output(
    stage: Stage,
    x: Tensor,
    seq_length: int,
    packing: Packing,
) -> Tensor:
    """Return the activation for the next stage, or of the last stage the loss, []."""
    plan = stage.context.plan
    micro_batch = x.shape[1]
    # without it the stage would run as in evaluation
    microbatch_info = MicrobatchInfo(0, torch.arange(micro_batch), torch.ones(()))
    mtp_batch = None
    if stage.cut.last and stage.config.mtp_layers:
        mtp_batch = _mtp_batch(stage, seq_length, micro_batch)
    stage_input = x if stage.cut.first else x.to(plan.residual)
    output = stage(stage_input, microbatch_info, packing, mtp_batch)
    if not stage.cut.last:
        return output.to(plan.pipeline)
    targets = torch.zeros(seq_length, micro_batch, dtype=torch.int64)
    return stage.losses(output, targets).sum()


def _mtp_batch(
    stage: Stage,
    seq_length: int,
    micro_batch: int,
) -> MTPBatch:
    """Return what modules of multi-token prediction read and predict of one micro-batch."""
    cp = stage.context.cp
    ids = torch.zeros(micro_batch, seq_length * cp.size, dtype=torch.int64)
    mtp_batch = make_mtp_batch(
        tokens=ids,
        targets=ids,
        mask=None,
        documents=None,
        modules=stage.config.mtp_layers,
        scale=torch.ones(()),
        cp=cp,
        dp=Axis("dp"),
        divides=True,
    )
    return mtp_batch.of_samples(slice(None))
