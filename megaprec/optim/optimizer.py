"""The parallel AMP optimizer: every step is applied on all ranks or on none.

One step, after the backward pass has accumulated gradients in the buffers:

    1. reduce      partial gradients are summed over tp, then all over dp, tied ones over their pipeline ranks
    2. statistics  one read of this rank's slices; one all-reduce of a few numbers over the whole mesh, so that every
                   rank has the same loss, norm and zero count and takes the same decision, in every
                   precision
    3. update      one pass over this rank's slices. Unscaling and clipping are one division inside it, and if
                   a gradient or the loss was not finite, weights, moments and step count stay
                   unchanged
    4. scaler      is updated; the divisor in 3 is the scale by which the loss was multiplied
    5. gather      the masters were rounded to the weights in 3; under ZeRO-1 the slices are now all-gathered
    6. attribute   only after a skipped step: the parameters that held non-finite gradients are named

Over dp, gradients are averaged if each rank's loss is the mean over its own samples, or summed if
it is the rank's share of a mean over all samples: `average` says which.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes
from megaprec.comm.layout import parameters_of
from megaprec.comm.virtual import VirtualAxis
from megaprec.optim import grad_presence
from megaprec.optim.alike import require_alike, require_same_weights
from megaprec.optim.attribution import attribute_nonfinite
from megaprec.optim.canonical import require_canonical
from megaprec.optim.canonical_consensus import CanonicalConsensus, in_slots
from megaprec.optim.consensus import Consensus, StepConsensus, digest
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.full_state import gather_tensors, load_tensors
from megaprec.optim.given_kinds import require_kinds
from megaprec.optim.given_numbers import (
    claimed,
    require_count,
    require_loss,
    require_saved,
    require_scaled,
    require_settings,
)
from megaprec.optim.grad_sync import GradReducer, ParamGatherer
from megaprec.optim.group_factors import Group, Slice, slices
from megaprec.optim.loss_check import (
    require_loss_of_all_replicas,
    require_loss_of_one_stage,
    require_same_loss,
)
from megaprec.optim.matrix_updates import require_understood
from megaprec.optim.microbatch_sums import MicrobatchSums
from megaprec.optim.model_buffers import ModelBuffers
from megaprec.optim.model_intake import (
    Ranks,
    averages,
    disable_ddp_sync,
    require_known,
    require_nothing_left,
    with_marked,
)
from megaprec.optim.muon import moments_of
from megaprec.optim.native import kernels_for
from megaprec.optim.observer import StepObserver
from megaprec.optim.param_groups import (
    cycled_options,
    param_groups,
    rates,
    require_own,
    rules,
    saved,
    take_up,
    told,
)
from megaprec.optim.scaler import disagreement, make_scaler
from megaprec.optim.step_report import NO_TOKENS, NonFiniteStep, Outcome, StepReport, loss_offender
from megaprec.optim.torch_face import TorchFace, require_no_others
from megaprec.optim.update_rules import AdamW, Step, UpdateRule, update_padded
from megaprec.optim.update_tile import Tile
from megaprec.optim.whole_copies import require_same_copies
from megaprec.optim.whole_updates import whole_updates
from megaprec.precision.plan import PrecisionPlan


class ParallelAMPOptimizer(TorchFace):
    """An optimizer with loss scaling, clipping and exact statistics over a (pp, dp, tp) mesh.

    parts: the model chunks that this rank holds, in order. Their parameters carry layouts. Flat
        buffers take over their memory, on the mesh's device, or without a mesh on the parameters'
        device. A chunk may be wrapped in DistributedDataParallel, whose all-reduce is then switched
        off, or sharded by fully_shard (`megaprec.optim.dtensors`).
    mesh: with some of the axes pp, dp, cp and tp, in this order; None for one process and for a
        model of fully_shard.
    lr: the learning rate, which torch's schedulers change in `param_groups`; None if each `step` is
        given its own.
    average: True if each dp rank's loss is the mean over its own samples, so that gradients are
        averaged over dp; False if it is the rank's share of a mean over all ranks' samples, so that
        they are summed. Required for several dp ranks, unless the model is wrapped in
        DistributedDataParallel or sharded by fully_shard: these average.
    virtual: the tensor-parallel axis, if the layouts are those of virtual ranks. experts: the ranks
        of experts that are spread over ranks, as for `parallel.Context`.
    rule: the update rule; AdamW with its defaults unless given. Each optimizer needs its own.
    groups: factors of learning rate and weight decay by logical name; biases and norms do not decay
        by default.
    clip: the largest global norm of the gradients; 0 disables clipping. norm: its order, 2, inf or
        any p >= 1.
    zero_size: number of neighbouring dp ranks that share one copy of masters and moments (ZeRO-1):
        0 for all dp ranks, 1 for no sharding. It must divide the number of dp ranks.
    overlap: the reduction over dp starts during the backward pass that `expect` announces, and
        weights are all-gathered during the next forward pass. Call `wait` before reading weights in
        between, and before discarding the optimizer: later collectives would be matched with those
        that were never waited for.
    bucket: elements of a reduction or an all-gather; the last parameter of a bucket may exceed this
        number. 0: 40 million, or a million for each dp rank if that is more.
    seed: of stochastic rounding.
    native: AdamW on a CPU by kernels that a C compiler builds, wherever masters, gradients and
        moments are FP32 and weights are FP32 or rounded to nearest bf16. The results are equal
        except for the last bits of the norm.
    canonical: weights, moments, loss and norm have the same bits for every number of dp ranks, a
        power of two, for all zero sizes and pipelines. Call `end_microbatch` after each backward
        pass; average must be False.
    observers: called at each moment of a step; more may be added to the attribute of this name.
    others: none. Raises UserError that names what stands in place of an argument of torch's
        optimizers, and for inconsistent arguments.
    """

    # each step looks for weights written to; 1, 2, 4, 8, ... compare what ranks must have alike
    checks_loop = True
    _prepared = 0  # number of steps that were tried

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PrecisionPlan | None = None,
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
        overlap: bool = False,
        bucket: int = 0,
        seed: int = 0,
        native: bool = False,
        canonical: bool = False,
        observers: Sequence[StepObserver] = (),
        **others: Any,
    ) -> None:
        require_no_others(others, inspect.signature(ParallelAMPOptimizer).parameters)
        switches = {
            "average": average,
            "overlap": overlap,
            "native": native,
            "canonical": canonical,
        }
        require_kinds(
            parts, plan, mesh, rule or AdamW(), groups, observers, virtual, experts, **switches
        )
        assert plan is not None, "require_kinds refuses it"
        # stop: any rank may set it, and all learn of it
        self.observers = [*observers]
        self.stop = False
        self.clip = clip
        self.weight_decay = weight_decay
        self.seed = seed
        self.overlap = overlap
        self.rule: UpdateRule = rule or AdamW()
        given = {"clip": clip, "norm": norm, "bucket": bucket, "zero_size": zero_size, "seed": seed}
        require_settings(**given, lr=lr, weight_decay=weight_decay)
        given |= {"lr": lr, "weight_decay": weight_decay, "groups": groups, **switches}
        ranks = self._ranks = Ranks.of(mesh, parts, experts)
        self.pp = ranks.pp
        self.dp = ranks.dp
        self.tp = ranks.tp
        self.world = ranks.world
        self.device = ranks.device
        require_known(parts, virtual.size if virtual else self.tp.size, experts)
        self.average = averages(parts, self.dp, average)
        self.canonical = canonical
        plan, self.marked = with_marked(
            parts, plan, [g.pattern for g in groups], self.world, self.device
        )
        self._parts = parts
        require_understood(self.rule, parts, ranks)
        require_alike(parts, ranks, plan, {**given, "rule": self.rule})
        if canonical:
            require_canonical(
                parts, plan, self.dp, Axis("tp") if virtual else self.tp, self.average
            )
        self.kernels = kernels_for(self.rule, self.device) if native else None
        self.plan = plan
        self.scaler = make_scaler(plan.scaling, self.device)
        self._scale_read = False
        # number of applied steps
        self.steps = torch.zeros((), dtype=torch.float32, device=self.device)
        cycled = cycled_options(self.rule)
        self._groups = param_groups(parameters_of(parts), groups, lr, weight_decay, cycled)
        defaults = {} if lr is None else {"lr": lr, **cycled}
        super().__init__(self._groups.values(), {"weight_decay": weight_decay, **defaults})
        disable_ddp_sync(parts)
        require_nothing_left(parts, overlap, zero_size)
        moments = partial(moments_of, self.rule)
        mean = self.average
        shards = self.shards = self.dp.in_runs(zero_size or self.dp.size, "zero")
        memory = ModelBuffers(
            parts,
            plan,
            mesh,
            ranks,
            shards,
            groups,
            bucket,
            moments,
            seed,
            mean,
            canonical,
            virtual,
        )
        self._memory = memory
        self._virtual = virtual
        self.buffers = memory.chunks
        self.untrained = memory.untrained
        self._whole = whole_updates(claimed(self.rule), memory.all, groups, mesh, ranks)
        self._slices = self._tiles_of(groups)
        tp = Axis("tp") if virtual else self.tp
        tree = MicrobatchSums(self.buffers) if canonical else None
        # `sum_copies` sums over virtual ranks
        self._sums = GradReducer(self.buffers, tp, overlap, tree)
        self._weights = ParamGatherer(parts, self.all_buffers(), overlap)
        self._counted = list(memory.counted())
        self._copies = list(memory.copies())
        self._fp8 = memory.fp8_masters(self._weights.begin, self._weights.settle)
        self._agreement = (CanonicalConsensus if canonical else StepConsensus)(
            self.pp, self.world, norm, self.device
        )
        self.num_elements, self.num_frozen = memory.num_elements(self.world)

    def _tiles_of(
        self, groups: Sequence[Group]
    ) -> list[tuple[Buffer, list[tuple[Slice, list[Tile]]]]]:
        """Return, for each buffer that is updated element by element, its slices of one group and
        their tiles."""
        rest = [b for b in self._memory.all if not any(b in one.buffers for one in self._whole)]
        return [
            (buffer, [(s, self._blocks_of(buffer, s)) for s in slices(buffer, groups)])
            for buffer in rest
        ]

    def _blocks_of(self, buffer: Buffer, s: Slice) -> list[Tile]:
        """Return the tiles of a slice: a single one if the C kernels support it, else runs that
        suit the device."""
        whole = list(buffer.blocks(s.first, s.last, s.last - s.first))
        if self.kernels is not None and self.kernels.updates(whole[0]):
            return whole
        return list(buffer.blocks(s.first, s.last))

    def all_buffers(self) -> list[Buffer]:
        """Return every buffer of this rank, in an order that all dp ranks share."""
        return self._memory.all

    @property
    def scale(self) -> Tensor:
        """Return the factor for the loss of this step: float32 of shape [], the same on every
        rank."""
        self._scale_read = True
        return self.scaler.scale

    @property
    def bytes_per_parameter(self) -> float:
        """Return this rank's bytes of weights, gradients, masters and moments for each element of
        its weights."""
        buffers = self.all_buffers()
        return sum(b.num_bytes() for b in buffers) / max(1, sum(b.size for b in buffers))

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not a tensor of the model: plain numbers, the same on every
        rank."""
        rates = {"param_groups": kept} if (kept := saved(self._groups)) else {}
        return {
            "steps": int(self.steps.item()),
            "scaler": self.scaler.state_dict(),
            "rule": self.rule.scalars,
            **rates,
        }

    @torch.no_grad()
    def load_numbers(self, numbers: dict[str, Any]) -> None:
        """Load saved numbers, and compute the weights from the present masters."""
        require_saved(numbers)
        self.wait()
        self.steps.fill_(numbers["steps"])
        self.scaler.load_state_dict(numbers["scaler"])
        self.rule.load_scalars(numbers.get("rule", {}))
        take_up(numbers.get("param_groups", ()), self._groups)
        for buffer in self.all_buffers():
            buffer.publish(self.steps)
        self._memory.give_back()
        if self._fp8 is not None:
            self._fp8.outdate()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank: `numbers` and, by "kind/logical name", tensors on
        the CPU.

        Collective over the mesh. For a state that does not fit into the memory of each rank, use
        `megaprec.checkpoint`.
        """
        return {
            **self.numbers(),
            "tensors": gather_tensors(self.all_buffers(), self.world, self.device),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of any layout. Raise UserError, before anything is changed, if it belongs to
        another model."""
        require_saved(state, ("tensors", "steps", "scaler"))
        self.wait()
        load_tensors(state["tensors"], self.all_buffers(), self.world, self.device)
        self.load_numbers(state)

    def expect(self, chunk: int = 0) -> None:
        """Announce that the next backward pass through model chunk `chunk` completes its gradients.

        With `overlap`, the reduction of each buffer starts when its gradients are complete.
        """
        self._sums.expect(chunk)

    @torch.no_grad()
    def end_microbatch(
        self, number: int, count: int, chunk: int = 0, complete: bool = True
    ) -> None:
        """Announce that a backward pass of micro-batch `number`, of `count` on this rank, has ended
        in a model chunk.

        complete: False if a second pass of the micro-batch computes the gradients of further
        parameters. Without effect unless `canonical`. Raises UserError for contradicting numbers.
        """
        if self._sums.microbatches is not None:
            self._sums.microbatches.end(number, count, chunk, complete)

    @torch.no_grad()
    def reduce(self, chunk: int = 0) -> None:
        """Reduce the complete gradients of model chunk `chunk` over tp and dp. To be called once
        per step.

        With `overlap` the reduction is only started, and `step` waits for it.
        """
        self._sums.reduce(chunk)

    def watch_local_gradients(self, look: Callable[[Buffer], None] | None) -> None:
        """Call `look`, if it is not None, with each buffer whose gradients on this rank are about
        to be reduced."""
        self._sums.before = look

    def wait(self) -> None:
        """Wait until the layers have the weights of the last step. A model's forward waits by
        itself."""
        self._weights.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this step, as `step` does by itself. Collective while reductions
        are running."""
        self._sums.drop()
        self._memory.forget_gradients()

    @torch.no_grad()
    def step(  # pyright: ignore
        self,
        lr: float | None = None,
        loss: Tensor | None = None,
        counted_tokens: Tensor | float | None = None,
    ) -> StepReport:
        """Apply or skip the step and discard the gradients. Chunks without a call of `reduce` are
        reduced first.

        lr: the learning rate; None if the optimizer was built with one, because then `param_groups`
            has it.
        loss: of this rank (unscaled), None for no share: with `average` the mean of its own
            samples, else its share of the global mean loss, so that the sum over dp (and over
            stages that have one) is that loss. All tensor-parallel ranks give the whole loss, and
            it counts once. With `canonical` the shares of its micro-batches [n]. If no rank gives
            one, the report's loss is NaN.
        counted_tokens: the number of tokens of the whole batch, over all dp ranks, that count in
            the loss, or the sum of their weights: a number or a tensor []. If a rank gives 0, the
            step is skipped, and the loss scale stays. None or NaN on ranks that do not know it; if
            no rank gives it, some are taken to count.
        Raises UserError unless the learning rate is given once, if ranks gave different losses of
            one batch, and with `average` if some replicas gave one and others did not.
        Raises RuntimeError on every rank, with nothing changed, if the ranks have different scalers
        or gradients of different parameters, or if parameters were moved out of the optimizer's
        memory. Raises NonFiniteStep if the plan says so.
        """
        require_count(counted_tokens)
        self._prepare(lr, loss)
        return self._conclude(self.world.sum_(self._own_numbers(loss, counted_tokens)), lr)

    def _prepare(self, lr: float | None, loss: Tensor | None) -> None:
        """Refuse what no step can be made of, complete all reductions and show the gradients to
        observers."""
        require_own(self.param_groups, self._groups)
        self._rate = rates(self._groups, lr)[1.0, 1.0][0]
        self._told = told(self._groups, lr, self.clip)
        self._rules = rules(self._groups, self.rule)
        require_loss(loss, self.canonical)
        require_scaled(self._scale_read, self.plan.scaling)
        self.wait()
        self._memory.take_up_model(self.checks_loop, self.steps)
        self._memory.take_gradients()
        self._sums.finish()
        self._memory.sum_copies()
        self._prepared += 1
        if (
            self.checks_loop and self._prepared & (self._prepared - 1) == 0
        ):  # costs nothing in the long run
            require_same_loss(loss, self.tp, self.world, self.device)
            require_loss_of_one_stage(loss, self.pp, self.world, self.device)
            if self.average:
                require_loss_of_all_replicas(loss, self.dp, self.world, self.device)
            require_same_copies(self.all_buffers(), self._sums.tp, self.world, self.device)
            # Not over tp: on a GPU the gradients of copies may differ in their last bits.
            require_same_weights(self._parts, self._ranks, (self.dp,), "have")
        for observer in self.observers:
            observer.gradients_ready(self.all_buffers(), self.scaler.scale)

    def _conclude(self, agreed_on: Tensor, lr: float | None) -> StepReport:
        """Decide, update and report a step from `agreed_on`, the numbers of all ranks; discard the
        gradients."""
        agreed = self._agreement.read(agreed_on)
        scale = self.scaler.scale.clone()
        norm = agreed.norm / scale
        found = agreed.forbids(self.plan.on_nonfinite)
        for observer in self.observers:
            observer.decided(self.all_buffers(), scale, found)
        self._update(lr, scale.double() / self._clip_factor(norm), found)
        for observer in self.observers:
            observer.updated(self.all_buffers())
        report = self._report(agreed, norm, scale, lr)
        if report.changed and self._fp8 is not None:
            self._fp8.outdate()
        self._update_scale(agreed)
        self._memory.forget_gradients()
        for observer in self.observers:
            observer.outcome(report)
        if report.overflowed and self.plan.on_nonfinite == "raise":
            raise NonFiniteStep(report)
        return report

    def _update_scale(self, agreed: Consensus) -> None:
        """Update the loss scale. A step in which no token counts says nothing about it, and leaves
        it as it is."""
        before = [number.clone() for number in self.scaler.tensors()]
        self.scaler.update(agreed.finite.logical_not())
        for number, kept in zip(self.scaler.tensors(), before, strict=True):
            number.copy_(torch.where(agreed.nothing_counts, kept, number))

    def _own_numbers(
        self, loss: Tensor | None, counted_tokens: Tensor | float | None = None
    ) -> Tensor:
        """Return this rank's numbers about its gradients, to be summed over the whole mesh."""
        gave_loss = loss is not None
        if loss is not None and self.tp.rank > 0:
            # the first tensor-parallel rank has the same loss; an inf or a NaN of any rank counts
            loss = loss * 0
        if self.canonical:
            loss = in_slots(loss, self._sums.num_microbatches, self.dp, self.device)
        counted, norm = self._agreement.measured(self._counted, self._copies, self.kernels)
        rate = torch.full((), self._rate, dtype=torch.float32, device=self.device)
        scaler = digest((*self.scaler.tensors(), self.steps, rate))
        loss = loss / self.dp.size if loss is not None and self.average else loss
        missing, given = grad_presence.summary(self.all_buffers(), self._told)
        if counted_tokens is not None:
            counted_tokens = torch.as_tensor(
                counted_tokens, dtype=torch.float64, device=self.device
            ).reshape(())
        told = self.stop, given, counted_tokens, gave_loss
        return self._agreement.pack(counted, loss, scaler, missing, norm, *told)

    def _clip_factor(self, norm: Tensor) -> Tensor:
        """Return the clip factor, at most 1. It is 1 for a non-finite norm, used only if the plan
        ignores overflows."""
        if self.clip <= 0:
            return torch.ones_like(norm)
        return torch.where(norm.isfinite(), (self.clip / (norm + 1e-6)).clamp(max=1.0), 1.0)

    def _update(self, lr: float | None, divisor: Tensor, found: Tensor) -> None:
        """Apply the rule to gradient / divisor, or change nothing if `found` is 1."""
        self.steps += 1 - found
        if (
            self.device.type != "cpu" or not found
        ):  # no wait for `found` on a GPU: a skipped update changes nothing
            self._apply(lr, divisor, found, self._update_block)

    def _apply(
        self, lr: float | None, divisor: Tensor, found: Tensor, update: Callable[[Tile, Step], None]
    ) -> None:
        """Update all tiles as step number `steps`, and all-gather the weights."""
        steps = self.steps.clamp(min=1)
        rates_of = rates(self._groups, lr)
        for buffer, parts in self._slices:
            for s, blocks in parts:
                pair = s.lr, s.weight_decay
                step = Step(*rates_of[pair], divisor, found, steps, self._rules[pair])
                for block in blocks:
                    update(block, step)
            self._collect(buffer)  # overlaps with the update of the next buffer
        for one in self._whole:
            one.apply(lambda pair: Step(*rates_of[pair], divisor, found, steps), self._collect)
        self._weights.settle()
        self._memory.give_back()
        self.rule.advance(found)

    def _collect(self, buffer: Buffer) -> None:
        """Start to all-gather the weights of an updated buffer; FP8 codes are computed and gathered
        later."""
        if not buffer.in_codes:
            self._weights.begin(buffer)

    def _update_block(self, block: Tile, step: Step) -> None:
        """Update one tile. Its gradients may be overwritten, but non-finite ones stay
        non-finite."""
        rule = step.rule or self.rule
        if self.kernels is not None and self.kernels.updates(block):
            assert isinstance(rule, AdamW)
            self.kernels.adamw_(block, rule, step)
            return
        weights, grads, state = block.wide()
        (update_padded if self.canonical else type(rule).update_)(rule, weights, grads, state, step)
        block.keep(weights, state, self.steps)

    def _report(
        self, agreed: Consensus, norm: Tensor, scale: Tensor, lr: float | None
    ) -> StepReport:
        """Return the report of the step, with offenders if it was skipped. Here alone the host
        waits for the device."""
        flags = torch.stack(
            (
                agreed.finite,
                agreed.same_scaler,
                agreed.same_parameters,
                agreed.gradients > 0,
                agreed.nothing_counts,
                agreed.gave_loss,
            )
        ).double()
        numbers = torch.cat(
            (torch.stack((agreed.loss, norm, scale.double(), agreed.stops)), flags, agreed.zeros)
        )
        loss, size, scaled_by, stops, *rest = numbers.tolist()
        finite, same_scaler, same_parameters, given, nothing_counts, gave_loss, *zeros = rest
        if not same_scaler:
            raise RuntimeError(disagreement(self.scaler, int(self.steps), self._rate))
        if not same_parameters or not given:
            raise RuntimeError(
                grad_presence.why(self.all_buffers(), self._ranks, bool(given), self._told)
            )
        tp = None if self._virtual else self.tp.rank
        if finite or nothing_counts:
            offenders = ()
        else:
            offenders = attribute_nonfinite(
                self.all_buffers(), self.pp, tp, self.world, self.device
            )
        if gave_loss and not (finite or nothing_counts or math.isfinite(loss)):
            offenders = (loss_offender(loss, self.pp.size - 1), *offenders)
        broken: Outcome
        if self.plan.on_nonfinite == "ignore":
            broken = "applied_nonfinite"
        else:
            broken = "skipped_overflow"
        outcome: Outcome = "applied" if finite else broken
        if nothing_counts:
            outcome = NO_TOKENS
            loss = math.nan
        counts = tuple(int(count) for count in zeros)
        return StepReport(
            outcome=outcome,
            loss=loss,
            grad_norm=size,
            num_zeros=sum(counts),
            zero_ratio=sum(counts) / self.num_elements,
            stage_zeros=counts,
            loss_scale=scaled_by,
            lr=rates(self._groups, lr)[1.0, 1.0][0],
            offenders=offenders,
            stop=stops > 0,
        )
