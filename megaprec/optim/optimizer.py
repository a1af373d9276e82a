"""The parallel AMP optimizer: every step is applied on all ranks or on none.

One step, after the backward pass has accumulated gradients in the buffers:

    1. reduce      partial gradients are summed over tp, then all over dp, tied ones over their
                   pipeline ranks
    2. statistics  one read of this rank's slices; one all-reduce of a few numbers over the whole
                   mesh, so that every rank has the same loss, norm and zero count and takes the
                   same decision, in every precision
    3. update      one pass over this rank's slices. Unscaling and clipping are one division inside
                   it, and if the step is forbidden (`consensus.forbids`), weights, moments and
                   step count stay unchanged
    4. gather      the masters were rounded to the weights in 3; under ZeRO-1 the slices are now
                   all-gathered, while a moving average of the masters, if one is kept, follows them
    5. report      one wait of the host for a few numbers. Only if the step was not finite, applied
                   or not, the parameters that held non-finite gradients are named
    6. scaler      is updated; the divisor in 3 is the scale by which the loss was multiplied

`ParallelAMPOptimizer.step` calls a method for each: 1 `_complete_gradients`, 2 `_local_numbers`,
`_exchange` and `_decide`, 3 and 4 `_update`, 5 `_report`, 6 `_end_step`. What one finds out is a
value that the next ones are given.

Over dp, gradients are averaged if each rank's loss is the mean over its own samples, or summed if
it is the rank's share of a mean over all samples: `average` says which.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import parameters_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.errors import Problem, UserError
from megaprec.kinds import NamedArguments
from megaprec.leaf_calls import CallLeaf
from megaprec.optim.canonical.numerics import CanonicalNumerics
from megaprec.optim.decision.attribution import attribute_nonfinite
from megaprec.optim.decision.consensus import StepNumbers, digest, forbids, to_host
from megaprec.optim.decision.decision import StepDecision, StepSettings
from megaprec.optim.decision.numerics import Numerics
from megaprec.optim.decision.one_pass import (
    AdamWNumbers,
    adamw_numbers,
    has_one_pass,
    runs,
    update_in_one_pass,
)
from megaprec.optim.decision.scaler import disagreement, make_scaler
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import (
    NO_TOKENS,
    SPIKE,
    NonFiniteStep,
    Offender,
    Outcome,
    StepObserver,
    StepReport,
    loss_offender,
)
from megaprec.optim.grad_sync import GradReducer, ParamGatherer, in_forward_order
from megaprec.optim.guards.model_checks import (
    require_identifiable,
    require_same_plan,
    require_used_patterns,
)
from megaprec.optim.guards.rank_agreement import require_equal_on_all_ranks, require_same_weights
from megaprec.optim.guards.step_agreement import (
    explain_presence,
    require_loss_of_all_replicas,
    require_loss_of_one_stage,
    require_same_loss,
    require_same_replicated_grads,
    summarize_presence,
)
from megaprec.optim.layer_weights import LayerWeights
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.optim.names_elsewhere import OPTIMIZER
from megaprec.optim.ranks import Ranks
from megaprec.optim.rules.load_balance import LoadBalance
from megaprec.optim.rules.muon.matrix_updates import MatrixUpdates, require_muon_patterns
from megaprec.optim.rules.muon.rule import Muon, moments_of
from megaprec.optim.rules.param_groups import (
    Factors,
    FactorSpan,
    Group,
    cycled_options,
    describe_settings,
    factor_spans,
    load_groups,
    param_groups,
    require_unreplaced_groups,
    saved_groups,
    step_rates,
    step_rules,
)
from megaprec.optim.rules.update_rules import AdamW, Step, UpdateRule, claim_rule
from megaprec.optim.rules.width import require_width_rule, rule_at_width
from megaprec.optim.setting_ranges import (
    require_count,
    require_offload,
    require_saved,
    require_scaled,
    require_settings,
)
from megaprec.optim.state.flat_buffer import Buffer, GradReduction, Kept
from megaprec.optim.state.full_state import gather_tensors, load_tensors
from megaprec.optim.state.update_tile import StateMemory, Tile
from megaprec.optim.state.weight_average import WeightAverage
from megaprec.optim.torch_api import TorchOptimizerApi
from megaprec.optim.torch_wrappers import (
    averages,
    disable_ddp_sync,
    require_no_double_sharding,
)
from megaprec.precision.marks import keep_marked_in_fp32
from megaprec.precision.plan import PrecisionPlan

if TYPE_CHECKING:
    from megaprec.optim.rules.row_factors import RowFactors

_CLIP_EPSILON = 1e-6  # added to the norm, as in torch's clip_grad_norm_ and in Megatron-LM


class _SpanTiles(NamedTuple):
    """Elements of a buffer that share the numbers of a step, and the tiles that they are updated
    in."""

    span: FactorSpan
    tiles: list[Tile]


class _BufferSpans(NamedTuple):
    """A buffer that is updated element by element, cut where the factors of
    learning rate and weight decay change."""

    buffer: Buffer
    spans: list[_SpanTiles]


class ParallelAMPOptimizer(TorchOptimizerApi, NamedArguments):
    """An optimizer with loss scaling, clipping and exact statistics over a (pp, dp, tp) mesh.

    parts: the model chunks that this rank holds, in order. Their parameters carry layouts. Flat
        buffers take over their memory, on the mesh's device, or without a mesh on the parameters'
        device. A chunk may be wrapped in DistributedDataParallel, whose all-reduce is then switched
        off, or sharded by fully_shard (`megaprec.optim.torch_wrappers`).
    mesh: with some of the axes pp, dp, cp and tp, in this order; None for one process and for a
        model of fully_shard.
    lr: the learning rate, which torch's schedulers change in `param_groups`; None if each `step` is
        given its own.
    average: True if each dp rank's loss is the mean over its own samples, so that gradients are
        averaged over dp; False if it is the rank's share of a mean over all ranks' samples, so that
        they are summed. Required for several dp ranks, unless the model is wrapped in
        DistributedDataParallel or sharded by fully_shard: these average.
    virtual: the tensor-parallel axis, if the layouts are those of virtual ranks.
    experts: the ranks of experts that are spread over ranks, as for `parallel.Context`.
    rule: the update rule; AdamW with its defaults unless given. Each optimizer needs its own.
    groups: factors of learning rate and weight decay by logical name; biases and norms do not decay
        by default. They multiply the factors that muP gives the parameters of a model with
        `mup_base_hidden`.
    clip: the largest global norm of the gradients; 0 disables clipping.
    norm: its order, 2, inf or any p >= 1.
    zero_size: number of neighbouring dp ranks that share one copy of masters and moments (ZeRO-1):
        0 for all dp ranks, 1 for no sharding. It must divide the number of dp ranks.
    shard_gradients: these ranks share one copy of gradients too (ZeRO-2): each keeps the sum of
        its own slice. Gradients are reduced and freed in each backward pass that `expect` announces
        or, if none is announced, whole in `end_microbatch` or `step`. Not with `canonical`.
    shard_weights: these ranks share one copy of the weights too (ZeRO-3), and of the gradients: a
        layer's weights are whole only while it computes (`megaprec.optim.layer_weights`). Other
        code reads and writes weights inside `whole_weights`. Not with `canonical`.
    keep_layers: under `shard_weights`, the number of this rank's layers, its last ones, whose
        weights stay whole from their first pass in a step to the update.
    keep_bytes: keep as many layers as there is room for in so many bytes of whole weights, if these
        are more than `keep_layers`.
    overlap: the reduction over dp starts during the backward pass that `expect` announces, and
        weights are all-gathered during the next forward pass. Call `wait` before reading weights in
        between, and before discarding the optimizer: later collectives would be matched with those
        that were never waited for.
    bucket: elements of a reduction or an all-gather; the last parameter of a bucket may exceed this
        number. 0: 40 million, or a million for each dp rank if that is more.
    seed: of stochastic rounding.
    canonical: weights, moments, loss and norm have the same bits for every number of dp ranks, a
        power of two, for all zero sizes and pipelines. Call `end_microbatch` after each backward
        pass; average must be False.
    leaves: calls the statistics of gradients and AdamW's update in their compiled forms, which read
        and write memory once (`megaprec.optim.decision.one_pass`), as `parallel.leaves.Leaves`
        does; None: both run operator by operator. Not with `canonical`.
    ema: the decay of an exponential moving average of the weights, such as 0.999, which each
        applied step moves (`megaprec.optim.state.weight_average`). It is sharded as masters are and
        belongs to the saved state; `averaged_weights` computes with it. 0: none is kept.
    offload: `HostMemory`, in which masters, moments and the average lie, while the device updates
        them tile by tile (`megaprec.optim.state.host_memory`); None: they lie on the device.
    observers: called at each moment of a step; more may be added to the attribute of this name.

    Raises UserError for settings out of their range, for a model that no step could train right,
    and, on every rank, if ranks would train different models.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = OPTIMIZER

    # True: each step compares all weights with their masters, not only after a version has changed,
    # and steps 1, 2, 4, 8, ... compare what ranks must have in common
    checks_loop = True
    _num_attempted = 0  # steps that were tried

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PrecisionPlan,
        mesh: DeviceMesh | None = None,
        *,
        lr: float | None = None,
        average: bool | None = None,
        virtual: VirtualAxis | None = None,
        experts: ExpertAxes | None = None,
        rule: UpdateRule | None = None,
        weight_decay: float = 0.1,
        groups: Sequence[Group] = (),
        clip: float = 1.0,
        norm: float = 2.0,
        zero_size: int = 0,
        shard_gradients: bool = False,
        shard_weights: bool = False,
        keep_layers: int = 0,
        keep_bytes: int = 0,
        overlap: bool = False,
        bucket: int = 0,
        seed: int = 0,
        canonical: bool = False,
        leaves: CallLeaf | None = None,
        ema: float = 0.0,
        offload: StateMemory | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        _require_trainable(parts)
        rule = AdamW() if rule is None else rule
        groups = tuple(groups)  # read more than once
        _require_argument_kinds(plan, mesh, rule, groups)
        numbers = {
            "clip": clip,
            "norm": norm,
            "bucket": bucket,
            "zero_size": zero_size,
            "keep_layers": keep_layers,
            "keep_bytes": keep_bytes,
            "weight_decay": weight_decay,
            "seed": seed,
            "lr": lr,
            "ema": ema,
        }
        switches = {
            "average": average,
            "overlap": overlap,
            "canonical": canonical,
            "shard_gradients": shard_gradients,
            "shard_weights": shard_weights,
        }
        require_settings(**numbers, **switches)
        shard_gradients = shard_gradients or shard_weights
        _require_whole_gradients(shard_gradients, canonical)
        require_same_plan(parts, plan)
        self.observers = [*observers]
        self.stop = False  # any rank may set it, and all learn of it
        self.clip = clip
        self.weight_decay = weight_decay
        self.seed = seed
        self.ema = ema
        self.overlap = overlap
        ranks = Ranks.of(mesh, parts, experts)
        self._ranks = ranks
        self.pp = ranks.pp
        self.dp = ranks.dp  # with the ranks of cp: all that hold the same weights
        self.tp = ranks.tp
        self.world = ranks.world
        self.device = ranks.device
        require_offload(offload)
        if offload is not None:
            offload.open(ranks.device)

        # Checks of the model and of its agreement on all ranks, before anything is taken over.
        require_identifiable(parts, virtual.size if virtual else self.tp.size, experts)
        require_width_rule(rule, parts)
        rule = rule_at_width(rule, parts)
        self.rule: UpdateRule = rule
        self.average = averages(parts, self.dp, average)
        self.canonical = canonical
        patterns = [group.pattern for group in groups]
        require_used_patterns(parts, plan, patterns, self.world, self.device)
        plan, self.marked = keep_marked_in_fp32(parts, plan, self.world, self.device)
        self.plan = plan
        self._parts = parts
        require_muon_patterns(rule, parts, ranks)
        settings = {**numbers, **switches, "groups": groups, "rule": rule}
        require_equal_on_all_ranks(parts, ranks, plan, settings)
        # the sum over virtual ranks is that of `ModelBuffers.sum_tied_and_virtual`
        tp = Axis("tp") if virtual else self.tp
        self._numerics = CanonicalNumerics() if canonical else Numerics()
        self._leaves = None if canonical else leaves
        self._numerics.require_supported(parts, plan, self.dp, tp, self.average)

        self.scaler = make_scaler(plan.scaling, self.device)
        self._scale_read = False  # True once a loop has asked for the scale
        # number of applied steps, on the device: only it knows whether a step was applied
        self.applied_steps = torch.zeros((), dtype=torch.float32, device=self.device)
        cycled = cycled_options(rule)
        self._groups = param_groups(parameters_of(parts), groups, lr, weight_decay, cycled, rule)
        rate_defaults = {} if lr is None else {"lr": lr, **cycled}
        super().__init__(self._groups.values(), {"weight_decay": weight_decay, **rate_defaults})

        # From here on the optimizer takes over the parameters' memory and their gradients.
        disable_ddp_sync(parts)
        sharding = {"overlap": overlap, "zero_size": zero_size, "shard_gradients": shard_gradients}
        require_no_double_sharding(parts, sharding)
        self.shards = self.dp.subaxis(
            zero_size or self.dp.size,
            "zero",
            # gathers for layers run beside reductions
            separate_group=shard_weights,
        )
        self._model_buffers = ModelBuffers(
            parts,
            plan,
            mesh=mesh,
            ranks=ranks,
            shards=self.shards,
            groups=groups,
            rule=rule,
            bucket=bucket,
            moments=partial(moments_of, rule),
            seed=seed,
            reduction=GradReduction(
                self.average,
                self._numerics.start_sum,
                sharded=shard_gradients,
                shards_weights=shard_weights,
            ),
            kept=Kept(ema=ema > 0, memory=offload),
            virtual=virtual,
        )
        self._moving_average = WeightAverage(self._model_buffers.all, ema) if ema else None
        self._virtual = virtual
        # with the attribute `buffers` the optimizer is complete for `TorchOptimizerApi`
        self.buffers = self._model_buffers.chunks
        self.frozen = self._model_buffers.frozen
        buffers = self._model_buffers.all
        claim_rule(rule)
        self._whole_tensor_updates = self._make_whole_tensor_updates(groups, mesh)
        self._buffer_spans = self._cut_into_spans(groups)
        self._reducer = self._make_reducer(tp, overlap)
        self._gatherer = ParamGatherer(parts, buffers, overlap)
        # of ZeRO-3; None if all weights are whole
        self.layer_weights = self._make_layer_weights(overlap, keep_layers, keep_bytes)
        # Views of what this rank counts in norm and zeros, each logical element once over all
        # ranks; copies that another rank counts must be finite too. Made once: the memory stays.
        self._counted_grads = list(self._model_buffers.counted())
        self._grads_counted_elsewhere = list(self._model_buffers.counted_elsewhere())
        self._fp8_masters = self._model_buffers.fp8_masters(
            self._gatherer.begin, self._gatherer.finish_update
        )
        self._consensus = self._numerics.consensus(
            self.pp, self.world, norm, self.device, self._leaves
        )
        # of the whole model, on all ranks
        self.num_elements, self.num_frozen = self._model_buffers.num_elements(self.world)

    def _make_reducer(self, tp: Axis, overlap: bool) -> GradReducer:
        """Return what sums the gradients over ranks, in the order in which they are complete."""
        sums = self._numerics.sums_over_microbatches(self.buffers)
        chunks = [
            in_forward_order(part, buffers)
            for part, buffers in zip(self._parts, self.buffers, strict=True)
        ]
        return GradReducer(chunks, tp, overlap, sums)

    def _make_layer_weights(
        self, overlap: bool, keep_layers: int, keep_bytes: int
    ) -> LayerWeights | None:
        """Return what gathers the weights of a layer when it computes; None if they are whole."""
        if not any(buffer.shards_weights for buffer in self._model_buffers.all):
            return None
        return LayerWeights(self._parts, self.buffers, overlap, keep_layers, keep_bytes)

    def _make_whole_tensor_updates(
        self,
        groups: Sequence[Group],
        mesh: DeviceMesh | None,
    ) -> list[MatrixUpdates | LoadBalance]:
        """Return the updates that are not element by element: of whole matrices by Muon, and of
        parameters from counts. Collective over the world if the rule is Muon."""
        updates: list[MatrixUpdates | LoadBalance] = [LoadBalance(self._model_buffers.all)]
        if isinstance(self.rule, Muon):
            ranks = self._ranks
            stage = ranks.dp if mesh is None else Axis.stage(mesh)
            matrices = MatrixUpdates(
                self.rule, self._model_buffers.all, groups, stage, ranks.device
            )
            updates.insert(0, matrices)
        return [update for update in updates if update.buffers]

    def _cut_into_spans(self, groups: Sequence[Group]) -> list[_BufferSpans]:
        """Return, of each buffer that is updated element by element, this rank's slice, cut into
        spans of elements with equal factors of learning rate and weight decay, each with the tiles
        in which it is updated."""
        others: set[Buffer] = set()  # of Muon's matrices, and of routers' corrections
        for updates in self._whole_tensor_updates:
            others.update(updates.buffers)
        cut_buffers: list[_BufferSpans] = []
        for buffer in self._model_buffers.all:
            if buffer not in others:
                spans = [
                    _SpanTiles(span, self._tiles(buffer, span))
                    for span in factor_spans(buffer, groups, self.rule)
                ]
                cut_buffers.append(_BufferSpans(buffer, spans))
        return cut_buffers

    def _tiles(self, buffer: Buffer, span: FactorSpan) -> list[Tile]:
        """Return the tiles of a span of a buffer. If compiled code updates them, they have the
        lengths that `runs` gives, so that it is compiled for few lengths."""
        tiles = list(buffer.tiles(span.start, span.stop))
        if self._leaves is None or not tiles or not has_one_pass(tiles[0], self.rule):
            return tiles
        tiles_of_runs: list[Tile] = []
        longest = buffer.memory.tile_elements if buffer.memory else span.stop - span.start
        for start, stop in runs(span.start, span.stop, longest):
            tiles_of_runs += buffer.tiles(start, stop, stop - start)
        return tiles_of_runs

    def all_buffers(self) -> list[Buffer]:
        """Return every buffer of this rank, in an order that all dp ranks share."""
        return self._model_buffers.all

    @property
    def scale(self) -> Tensor:
        """Return the factor for the loss of this step: float32 of shape [], the same on every
        rank."""
        self._scale_read = True
        return self.scaler.scale

    @property
    def bytes_per_parameter(self) -> float:
        """Return this rank's bytes of weights, gradients, masters, moments and a moving average for
        each element of its weights."""
        buffers = self.all_buffers()
        num_bytes = sum(buffer.num_bytes() for buffer in buffers)
        return num_bytes / max(1, sum(buffer.size for buffer in buffers))

    def saved_numbers(self) -> dict[str, Any]:
        """Return the state that is not a tensor of the model: plain numbers, the same on every
        rank."""
        self.require_own_weights("a save")
        numbers: dict[str, Any] = {
            "steps": int(self.applied_steps.item()),
            "scaler": self.scaler.state_dict(),
            "rule": self.rule.scalars,
        }
        groups = saved_groups(self._groups)
        if groups:
            numbers["param_groups"] = groups
        return numbers

    @torch.no_grad()
    def load_saved_numbers(self, numbers: dict[str, Any]) -> None:
        """Load saved numbers, and compute the weights from the present masters."""
        require_saved(numbers, ("steps", "scaler"))
        self.require_own_weights("a load")
        self.wait()
        self.applied_steps.fill_(numbers["steps"])
        self.scaler.load_state_dict(numbers["scaler"])
        self.rule.load_scalars(numbers.get("rule", {}))
        load_groups(numbers.get("param_groups", ()), self._groups)
        # only masters were loaded: weights are their rounding, as after the step of the checkpoint
        for buffer in self.all_buffers():
            buffer.renew_weights(self.applied_steps)
        self._model_buffers.write_dtensor_weights()
        if self._fp8_masters is not None:
            self._fp8_masters.outdate()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank: `saved_numbers` and, by "kind/logical name",
        tensors on the CPU.

        Collective over the mesh. For a state that does not fit into the memory of each rank, use
        `megaprec.checkpoint`.
        """
        numbers = self.saved_numbers()
        return numbers | {"tensors": gather_tensors(self.all_buffers(), self.world, self.device)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of any layout. Raise UserError, before anything is changed, if it belongs to
        another model."""
        require_saved(state, ("tensors", "steps", "scaler"))
        self.require_own_weights("a load")
        self.wait()
        load_tensors(state["tensors"], self.all_buffers(), self.world, self.device)
        self.load_saved_numbers(state)

    @property
    def shards_gradients(self) -> bool:
        """Return True if this rank frees gradients within a step (ZeRO-2 over several ranks)."""
        return any(buffer.shards_gradients for buffer in self.all_buffers())

    @property
    def shards_weights(self) -> bool:
        """Return True if this rank has weights whole only while layers read them (ZeRO-3 over
        several ranks)."""
        return self.layer_weights is not None

    def expect(self, chunk: int = 0, is_last: bool = True) -> None:
        """Announce that the next backward pass through model chunk `chunk` completes the gradients
        of a micro-batch.

        With `overlap` or `shard_gradients`, the reduction of each buffer starts when its gradients
        are complete.
        is_last: it is the last such pass of the step. Without `shard_gradients` any other pass is
            ignored.
        """
        self._reducer.expect(chunk, is_last)

    @torch.no_grad()
    def end_microbatch(
        self,
        number: int,
        count: int,
        chunk: int = 0,
        complete: bool = True,
    ) -> None:
        """Announce that a backward pass of micro-batch `number`, of `count` on this rank, has ended
        in a model chunk.

        complete: False if a second pass of the micro-batch computes the gradients of further
        parameters. Without effect unless `canonical` or `shard_gradients`. Raises UserError for
        contradicting numbers.
        """
        self._reducer.end_microbatch(number, count, chunk, complete)

    @torch.no_grad()
    def reduce(self, chunk: int = 0) -> None:
        """Reduce the complete gradients of model chunk `chunk` over tp and dp. To be called once
        per step.

        With `overlap` the reduction is only started, and `step` waits for it.
        """
        self._reducer.reduce(chunk)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the model has the moving average of its weights, rounded to their dtype;
        afterwards its own weights with equal bits.

            with optimizer.averaged_weights():
                loss = evaluate(model)

        Meanwhile this rank keeps its slice of the own weights, and whatever is written to weights
        is lost. Collective over the ranks that share state, at the beginning and at the end. Raises
        UserError if no average is kept, and for a step, a save or a load inside the block.
        """
        if self._moving_average is None:
            raise UserError.of("optimizer.no_ema")
        self.require_own_weights("another averaged_weights")
        self.wait()
        self._model_buffers.adopt_written_weights(self.checks_loop, self.applied_steps)
        self._moving_average.begin()
        with self._moving_average.swapped_in(self._fp8_masters, self._gather_at_once):
            yield

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside the block the model's weights may be read and written outside of its layers under
        `shard_weights` too; each rank then has all of them.

            with optimizer.whole_weights():
                norm = model.head.weight.norm()

        What is written must be the same on all ranks that share the weights. Without
        `shard_weights` this is `wait`. Collective over the ranks that share them.
        """
        self.wait()
        if self.layer_weights is None:
            yield
            return
        with self.layer_weights.whole():
            yield

    def restart_ema(self) -> None:
        """Let the moving average, if one is kept, begin anew with the weights of the next step."""
        if self._moving_average is not None:
            self._moving_average.restart()

    def require_own_weights(self, action: str) -> None:
        """Raise UserError if the model has the average of its weights, of which `action` would make
        its own."""
        if self._moving_average is not None and self._moving_average.is_swapped_in:
            raise UserError.of("optimizer.averaged_weights_held", action=action)

    def watch_local_gradients(self, look: Callable[[Buffer], None] | None) -> None:
        """Have `look` called with each buffer just before its gradients on this rank are reduced;
        None to end this."""
        self._reducer.before_reduce = look

    def wait(self) -> None:
        """Wait until the layers have the weights of the last step. A model's forward waits by
        itself."""
        self._gatherer.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this step, as `step` does by itself. Collective while reductions
        are running."""
        self._reducer.drop()
        self._model_buffers.forget_gradients()

    @torch.no_grad()
    def step(  # pyright: ignore
        self,
        lr: float | None = None,
        loss: Tensor | None = None,
        counted_tokens: Tensor | float | None = None,
        further: Tensor | None = None,
        limits: StepLimits = NO_LIMITS,
        row_factors: "RowFactors | None" = None,
    ) -> StepReport:
        """Apply or skip the step and discard the gradients. Chunks without a call of `reduce` are
        reduced first.

        lr: the learning rate; None if the optimizer was built with one, because then `param_groups`
            has it.
        loss: of this rank (unscaled), None for no share: with `average` the mean of its own
            samples, else its share of the global mean loss, so that the sum over dp (and over
            stages that have one) is that loss. The first tensor-parallel rank gives the whole
            loss, which counts once; the others give the same, 0 or None. With `canonical` the
            shares of its micro-batches [n]. If no rank gives one, the report's loss is NaN.
        counted_tokens: the number of tokens of the whole batch, over all dp ranks, that count in
            the loss, or the sum of their weights: a number or a tensor []. If a rank gives 0, the
            step is skipped, and the loss scale stays. None or NaN on ranks that do not know it; if
            no rank gives it, some are taken to count.
        further: float64 [n], numbers for the report alone, which reach the host with its own.
        limits: of loss and gradient norm, the same on every rank. A finite step above one of them
            is skipped: weights, moments and step count stay, and the loss scale counts a good step.
        row_factors: what the rows of some weights are multiplied by after the update, unless the
            step is skipped (`megaprec.optim.rules.row_factors`), the same on every rank.
        Raises UserError unless the learning rate is given once, if ranks gave different losses of
            one batch, and with `average` if some replicas gave one and others did not.
        Raises RuntimeError on every rank, with nothing changed, if the ranks have different
        scalers, limits or gradients of different parameters, or if parameters were moved out of the
        optimizer's memory. Raises NonFiniteStep if the plan says so.
        """
        require_count(counted_tokens)
        self.require_own_weights("a step")
        settings = self._settings_of_step(lr, limits)
        require_scaled(self._scale_read, self.plan.scaling)
        self._complete_gradients(loss)
        numbers = self._exchange(self._local_numbers(settings, loss, counted_tokens))
        decision = self._decide(numbers, settings)
        self._update(decision, settings, row_factors)
        report = self._report(decision, settings, further)
        self._end_step(decision, report)
        # last, so that a caller who catches it has an optimizer that is ready for the next step
        if report.overflowed and self.plan.on_nonfinite == "raise":
            raise NonFiniteStep(report)
        return report

    def _settings_of_step(self, lr: float | None, limits: StepLimits) -> StepSettings:
        """Return the settings of a step. Raises UserError for a step that cannot be made."""
        require_unreplaced_groups(self.param_groups, self._groups)
        rates = step_rates(self._groups, lr)
        return StepSettings(
            rates=rates,
            rules=step_rules(self._groups, self.rule),
            limits=limits,
            lines=describe_settings(self._groups, rates, self.clip),
        )

    def _complete_gradients(self, loss: Tensor | None) -> None:
        """Complete all reductions, and show the gradients to observers."""
        # The order matters: weights have arrived before they are compared with their masters, and
        # gradients are in the buffers before they are reduced, over tp and dp first and then over
        # tied and virtual copies.
        self.wait()
        # Weights that a loop has written to, such as clamped ones, become masters. All are looked
        # at in a user's loop, in the engine's only those whose version has changed.
        self._model_buffers.adopt_written_weights(self.checks_loop, self.applied_steps)
        if self._moving_average is not None:
            self._moving_average.begin()
        self._model_buffers.read_dtensor_gradients()
        self._reducer.finish()
        self._model_buffers.sum_tied_and_virtual()
        self._num_attempted += 1
        is_power_of_two = self._num_attempted & (self._num_attempted - 1) == 0
        if self.checks_loop and is_power_of_two:  # ever rarer: they cost nothing in the long run
            self._compare_ranks(loss)
        for observer in self.observers:
            observer.gradients_ready(self.all_buffers(), self.scaler.scale)

    def _compare_ranks(self, loss: Tensor | None) -> None:
        """Raise UserError if a loop gives ranks losses, gradients or weights that contradict each
        other. Collective over the world."""
        require_same_loss(loss, self.tp, self.world, self.device)
        require_loss_of_one_stage(loss, self.pp, self.world, self.device)
        if self.average:
            require_loss_of_all_replicas(loss, self.dp, self.world, self.device)
        require_same_replicated_grads(self.all_buffers(), self._reducer.tp, self.world, self.device)
        # Not over tp: on a GPU the gradients of copies may differ in their last bits.
        if self.layer_weights is None:  # ranks that share weights have none to compare
            require_same_weights(self._parts, self._ranks, (self.dp,), "have")

    def _local_numbers(
        self,
        settings: StepSettings,
        loss: Tensor | None,
        counted_tokens: Tensor | float | None,
    ) -> Tensor:
        """Return this rank's numbers about its gradients and its loss in one flat tensor, as
        `_exchange` sums it over all ranks."""
        gave_loss = loss is not None
        if loss is not None and self.tp.rank > 0:
            # the first tensor-parallel rank has the same loss; an inf or a NaN of any rank counts
            loss = loss * 0
        # as it is, unless numerics are canonical, which alone count micro-batches
        loss = self._numerics.arrange_loss(
            loss,
            self._reducer.num_microbatches,
            self.dp,
            self.device,
        )
        if loss is not None and self.average:
            loss = loss / self.dp.size  # so that the sum over dp is the mean
        # which parameters have a gradient: the ranks of a stage must agree on it
        presence = summarize_presence(self.all_buffers(), settings.lines)
        no_token_counts: Tensor | float = 0.0
        if counted_tokens is not None:
            # a NaN, of a rank that does not know the number, compares as unknown
            no_token_counts = torch.as_tensor(counted_tokens, device=self.device) <= 0
        measured = self._consensus.measure(self._counted_grads, self._grads_counted_elsewhere)
        numbers = {
            "loss": 0.0 if loss is None else loss,
            "agrees_globally": self._common_digest(settings),
            "stops": self.stop,
            "num_gradients": presence.num_gradients,
            "no_token_counts": no_token_counts,
            "num_losses": gave_loss,
            "agrees_in_pp_ranks": presence.digest,
        }
        return self._consensus.pack(measured, numbers)

    def _common_digest(self, settings: StepSettings) -> Tensor:
        """Return a digest of what must be equal on all ranks."""
        # ranks whose schedulers have gone apart would update replicas by different rates
        rate = torch.full((), settings.lr, dtype=torch.float32, device=self.device)
        limits = settings.limits.tensors(self.device)
        return digest((*self.scaler.tensors(), self.applied_steps, rate, *limits))

    def _exchange(self, local: Tensor) -> StepNumbers:
        """Return the numbers of all ranks together, by one all-reduce over the world: those that
        were packed, and what is made of them, as the norm and whether it is finite."""
        return self._consensus.read(self.world.sum_(local))

    def _decide(self, numbers: StepNumbers, settings: StepSettings) -> StepDecision:
        """Return the decision, the same on every rank: norm, spike, and whether to skip."""
        # the scale that multiplied the loss, before `_end_step` updates it
        scale = self.scaler.scale.clone()
        norm = numbers["norm"] / scale
        # a step that is not finite is an overflow and no spike
        is_spike = settings.limits.exceeded_by(numbers["loss"], norm) & numbers["finite"]
        skip = forbids(numbers, self.plan.on_nonfinite).maximum(is_spike.float())
        for observer in self.observers:
            observer.decided(self.all_buffers(), scale, skip)
        return StepDecision(numbers, scale, norm, is_spike, skip)

    def _end_step(self, decision: StepDecision, report: StepReport) -> None:
        """Update the loss scale, discard the gradients, and tell observers."""
        if report.changed and self._fp8_masters is not None:
            self._fp8_masters.outdate()  # the next pass computes the codes
        # a step in which no token counts says nothing about the scale
        if report.outcome != NO_TOKENS:
            self.scaler.update(decision.numbers["finite"].logical_not())
        self._model_buffers.forget_gradients()
        for observer in self.observers:
            observer.outcome(report)

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """Return the factor, at most 1, that makes the norm of the gradients `clip`. It is 1 for a
        non-finite norm, which only matters if the plan applies such a step."""
        if self.clip <= 0:  # no clipping
            return torch.ones_like(norm)
        factor = (self.clip / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        return torch.where(norm.isfinite(), factor, 1.0)

    def _update(
        self, decision: StepDecision, settings: StepSettings, row_factors: "RowFactors | None"
    ) -> None:
        """Apply the rule, or change nothing if the step is skipped."""
        skip = decision.skip
        self.applied_steps += 1 - skip  # no read of `skip`, for which the host would wait
        # A GPU does not wait for `skip`: an update that is skipped changes nothing.
        if self.device.type != "cpu" or not skip:
            self._apply(decision, settings, row_factors)
        for observer in self.observers:
            observer.updated(self.all_buffers())

    def _apply(
        self, decision: StepDecision, settings: StepSettings, row_factors: "RowFactors | None"
    ) -> None:
        """Update all tiles as step number `applied_steps`, and all-gather the weights."""
        # one divisor undoes the loss scale and clips
        divisor = decision.scale.double() / self._clip_factor(decision.norm)
        skip = decision.skip

        @cache
        def step_of(factors: Factors) -> Step:
            rates = settings.rates[factors]
            return Step(rates.lr, rates.weight_decay, divisor, skip, self.applied_steps)

        @cache
        def numbers_of(factors: Factors) -> AdamWNumbers | None:
            rule = settings.rules[factors]
            if self._leaves is None or type(rule) is not AdamW:
                return None
            return adamw_numbers(rule, step_of(factors))

        for buffer, spans in self._buffer_spans:
            tiles = (tile for span_tiles in spans for tile in span_tiles.tiles)
            factors_of_tiles = (
                span_tiles.span.factors for span_tiles in spans for _ in span_tiles.tiles
            )
            on_device = buffer.on_device(tiles)
            for tile, factors in zip(on_device, factors_of_tiles, strict=True):
                # a group's rule has the options that a scheduler has changed there
                rule = settings.rules[factors]
                step = step_of(factors)
                numbers = numbers_of(factors)
                if numbers is not None and has_one_pass(tile, rule):
                    self._update_in_one_pass(tile, rule, step, numbers)
                else:
                    self._update_tile(tile, rule, step)
            self._end_update(buffer, skip, row_factors)
        # Muon's matrices, and what is updated from the loads of experts
        for updates in self._whole_tensor_updates:
            end_update = partial(self._end_update, skip=skip, row_factors=row_factors)
            updates.apply(step_of, end_update)
        self._gatherer.finish_update()
        self._model_buffers.write_dtensor_weights()
        self.rule.advance(skip)

    def _end_update(self, buffer: Buffer, skip: Tensor, row_factors: "RowFactors | None") -> None:
        """Multiply rows of an updated buffer by their factors, start to all-gather its weights, and
        move its average towards them."""
        if row_factors is not None:
            row_factors.multiply(buffer, skip, self.applied_steps)
        # FP8 codes are computed and gathered at the start of the next pass
        if not buffer.has_fp8_weights:
            self._gatherer.begin(buffer)  # overlaps with the update of the next buffer
        if self._moving_average is not None:
            self._moving_average.follow(buffer, skip)

    def _gather_at_once(self, buffers: Iterable[Buffer]) -> None:
        """All-gather the weights of buffers, and write those of DTensors to the model."""
        for buffer in buffers:
            self._gatherer.begin(buffer)
        self._gatherer.wait()
        self._model_buffers.write_dtensor_weights()

    def _update_in_one_pass(
        self,
        tile: Tile,
        rule: UpdateRule,
        step: Step,
        numbers: AdamWNumbers,
    ) -> None:
        """Update one tile by compiled code; operator by operator where that does not compile."""
        assert self._leaves is not None
        update_in_one_pass(
            self._leaves,
            tile,
            rule,
            numbers,
            otherwise=lambda: self._update_tile(tile, rule, step),
        )

    def _update_tile(self, tile: Tile, rule: UpdateRule, step: Step) -> None:
        """Update one tile. Its gradients may be overwritten, but non-finite ones stay
        non-finite."""
        wide = tile.wide()  # views where the stored dtype is wide enough
        self._numerics.update_(rule, wide, step)
        # the number of applied steps seeds stochastic rounding
        tile.store(wide.masters, wide.moments, step.applied)

    def _report(
        self, decision: StepDecision, settings: StepSettings, further: Tensor | None
    ) -> StepReport:
        """Return the report of the step, with offenders if it was not finite.

        The host waits for the device here, when it has given it all work of the update, and
        elsewhere only in steps that are skipped or in which ranks are compared, and with canonical
        numerics. Raises RuntimeError, on every rank, if the ranks cannot take one step together.
        """
        device_numbers = {
            **decision.numbers,
            "norm": decision.norm,
            "loss_scale": decision.scale,
            "is_spike": decision.is_spike,
        }
        if further is not None:
            device_numbers["further"] = further
        numbers = to_host(device_numbers)
        self._require_agreement(numbers, settings)
        zeros = tuple(map(int, numbers["zeros"]))
        return StepReport(
            outcome=self._outcome(numbers),
            loss=math.nan if numbers["no_token_counts"] else numbers["loss"],
            grad_norm=numbers["norm"],
            num_zeros=sum(zeros),
            zero_ratio=sum(zeros) / self.num_elements,
            stage_zeros=zeros,
            loss_scale=numbers["loss_scale"],
            lr=settings.lr,
            offenders=self._offenders(numbers),
            stop=numbers["stops"] > 0,
            further=numbers.get("further", ()),
        )

    def _require_agreement(self, numbers: Mapping[str, Any], settings: StepSettings) -> None:
        """Raise RuntimeError, on every rank, if the ranks cannot take one step together. Nothing
        was changed then: `consensus.forbids` has skipped the update."""
        if not numbers["agrees_globally"]:
            steps = int(self.applied_steps)
            raise RuntimeError(disagreement(self.scaler, steps, settings.lr, settings.limits))
        has_gradients = numbers["num_gradients"] > 0
        if not numbers["agrees_in_pp_ranks"] or not has_gradients:
            raise RuntimeError(
                explain_presence(self.all_buffers(), self._ranks, has_gradients, settings.lines)
            )

    def _outcome(self, numbers: Mapping[str, Any]) -> Outcome:
        """Return what became of the step with these numbers of all ranks."""
        if numbers["no_token_counts"]:
            return NO_TOKENS
        if numbers["finite"]:
            return SPIKE if numbers["is_spike"] else "applied"
        if self.plan.on_nonfinite == "ignore":
            return "applied_nonfinite"
        return "skipped_overflow"

    def _offenders(self, numbers: Mapping[str, Any]) -> tuple[Offender, ...]:
        """Return what was not finite, if anything was: the loss first, then tensors by their
        gradients. Collective over the world only then."""
        if numbers["finite"] or numbers["no_token_counts"]:
            return ()
        tp_rank = None if self._virtual else self.tp.rank
        tensors = attribute_nonfinite(self.all_buffers(), self.pp, tp_rank, self.world, self.device)
        if numbers["gave_loss"] and not math.isfinite(numbers["loss"]):
            return (loss_offender(numbers["loss"], self.pp.size - 1), *tensors)
        return tensors


def _require_trainable(parts: Sequence[nn.Module]) -> None:
    """Raise UserError in inference mode, and unless the model chunks are given as a list."""
    if torch.is_inference_mode_enabled():
        # the optimizer's memory could not be trained
        raise UserError.of("optimizer.inference_mode")
    if isinstance(parts, nn.Module) and not isinstance(parts, nn.ModuleList):
        # a Sequential is a sequence too, of its layers: parameters of its own would be left out
        raise UserError.of("optimizer.parts_not_listed", kind=type(parts).__name__)
    # As other optimizers take them: a generator, or a list of tensors or of groups.
    is_list = isinstance(parts, Sequence | nn.ModuleList)
    if not is_list or not all(isinstance(part, nn.Module) for part in parts):
        raise UserError.of("optimizer.parts_no_modules")


def _require_argument_kinds(
    plan: object, mesh: object, rule: object, groups: Sequence[object]
) -> None:
    """Raise UserError, naming all, for arguments that are not of the kind that an optimizer
    takes."""
    problems: list[Problem] = []
    if not isinstance(plan, PrecisionPlan):
        problems.append(Problem.of("precision.not_a_plan", plan=plan))
    if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
        problems.append(Problem.of("optimizer.mesh_kind", mesh=mesh))
    is_rule = not isinstance(rule, type) and hasattr(rule, "update_")
    if not is_rule:
        problems.append(Problem.of("optimizer.rule_kind", rule=rule))
    if not all(isinstance(group, Group) for group in groups):
        problems.append(Problem.of("optimizer.groups_kind", groups=groups))
    if problems:
        raise UserError(*problems)


def _require_whole_gradients(shard_gradients: bool, canonical: bool) -> None:
    """Raise UserError if gradients are to be both freed within a step and summed canonically."""
    if shard_gradients and canonical:
        # a canonical sum adds the micro-batches of a rank before those of other ranks
        raise UserError.of("optimizer.canonical_shard_gradients")
