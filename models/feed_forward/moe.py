"""Mixture of experts: a router sends each token through a few of many feed-forwards.

No token is dropped.

Every expert is sharded over tp like an ordinary feed-forward, so all tp ranks work on all tokens
and stay equally busy whatever the router does. There is one collective into the layer and one out
of it, as for one feed-forward. Between them, every result on a tp rank is a partial sum, the
router's gradient included, and the partial sums are reduced at the end. Experts may instead be
spread over ranks, to which tokens travel (`models.feed_forward.dispatch`); the rest stays the same.

Shared experts are one more feed-forward, which every token passes. It is sharded like the others
and its partial sums are added to theirs, so there is no further collective. They may have a gate,
as in Qwen2-MoE: the sigmoid of one more logit of each token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.axis import copy_to_device
from megaprec.comm.layout import Part
from megaprec.precision.gemm import Gemm
from models.config import ModelConfig
from models.feed_forward.dispatch import Dispatch, rows_of_rank
from models.feed_forward.expert_bias import add_biases, features_of_bias, make_bias_of_sum
from models.feed_forward.grouped_products import GroupedLinear, groups_on
from models.feed_forward.mlp import MLP
from models.feed_forward.router import Router
from parallel import collectives
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.gradient_scale import scale_gradient
from parallel.layers import ColumnParallelLinear, RowParallelLinear, parameter
from parallel.linear import InputLayout, Linear, Widen
from parallel.weight_grad_queue import WeightGradQueue


class Expert(MLP):
    """A feed-forward without collectives, forward and backward; the caller does these.

    x: tokens [n, hidden], replicated on every tp rank. The result is this rank's partial sum, and
    so is the gradient of x.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        # The layer down has no bias of its own: every rank of tp would add it to its partial sum.
        super().__init__(config, context, name, layer, (config.expert_bias, False))
        self.tp = context.tp
        self.deferred = context.deferred
        self.down_bias = None
        if config.expert_bias:
            self.down_bias = make_bias_of_sum(context, f"{name}.down.bias", config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        inner = self._product(x, self.inner)
        return self.recompute.run_forward(
            "activation", self.activate, inner, then=self._project_down
        )

    def _project_down(self, activated: Tensor) -> Tensor:
        """Return this rank's partial sum [n, hidden] of the product down, with its part of the
        bias."""
        output = self._product(activated, self.down)
        if self.down_bias is None:
            return output
        return add_biases(output, [self.down_bias], features=features_of_bias(self.down_bias))

    def uses_grouped_products(self, x: Tensor) -> bool:
        """Return True if the products of several such experts with tokens like x are computed as
        grouped products (`models.feed_forward.grouped_products`)."""
        inner = self.inner
        down = self.down
        # Grouped products take one dtype for all, and know neither FP8 nor TF32.
        plain = Gemm(x.dtype, x.dtype)
        if inner.products != plain or down.products != plain or inner.weight.dtype != x.dtype:
            return False
        return groups_on(x.device, x.dtype, (*inner.weight.shape, *down.weight.shape))

    def _product(self, x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
        """Return the product of x with the weight of a layer on this rank, without collectives."""
        return Linear.apply(
            x,
            layer.weight,
            layer.bias,
            InputLayout.OWN,
            self.tp,
            self.deferred,
            layer.products,
        )


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of weight times result, plus that of shared experts, which may
    have a gate.

    name: its logical name. layer: the number of the decoder layer, which may decide how initial
    weights are scaled.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.router = Router(config, context, f"{name}.router")
        self.experts = nn.ModuleDict()
        self._make_experts(name, layer)
        self.shared = None
        if config.shared_experts:
            shared_config = config.model_copy(update={"ffn": config.shared_experts})
            self.shared = Expert(shared_config, context, f"{name}.shared", layer)
        self.shared_gate = None
        if config.shared_gate:
            # On every rank of tp, each of which has a partial gradient.
            gate = Part.cut(f"{name}.shared_gate.weight", (1, config.hidden), None, context.tp)
            std = config.init_std * config.mup.readout
            self.shared_gate = parameter(context, [gate], std, partial=True)

    def _make_experts(self, name: str, layer: int) -> None:
        """Make this rank's experts. If the plan has FP8, register the scales of all others too."""
        config = self.config
        context = self.context
        if context.experts is None:
            local_numbers = range(config.experts)
        else:
            local_numbers = context.experts.local_experts(config.experts)
        local_context = context.for_experts(f"{name}.experts")
        remote_context = context.for_experts_elsewhere(f"{name}.experts")
        for number in range(config.experts):
            expert_name = f"{name}.experts.{number}"
            if number in local_numbers:
                self.experts[str(number)] = Expert(config, local_context, expert_name, layer)
            elif context.plan.fp8 is not None:
                # Made and dropped: it registers the scales, which all ranks of a stage keep alike.
                with torch.device("meta"):
                    Expert(config, remote_context, expert_name, layer)

    def forward(self, x: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape.

        microbatch: None: evaluation, without losses of the router.
        Collective over tp and over the axes of experts.
        """
        tp = self.context.tp
        cut = self.context.cut_sequence
        # Every tp rank routes all tokens, each with its slices of the experts.
        full = collectives.gather(x, tp) if cut else collectives.copy(x, tp)
        weights, chosen = self.router(full, microbatch)
        tokens = full.flatten(0, 1)
        weights = weights.flatten(0, 1)
        chosen = chosen.flatten(0, 1)
        experts = self.context.experts
        if experts is None or experts.tp.size == tp.size:
            output = self._apply_experts(tokens, weights, chosen)
        else:
            # Fewer slices of an expert than tp ranks: each rank sends a part of the tokens.
            rows = rows_of_rank(len(tokens), tp, experts)
            output = self._apply_experts(tokens[rows], weights[rows], chosen[rows])
            if cut and experts.tp.size == 1 and self.shared is None:
                return output.view(x.shape)  # no other rank has an addend of these rows
            # zeros for the rows of other ranks: the sum over tp adds these
            output = F.pad(output, (0, 0, rows.start, len(tokens) - rows.stop))
        if self.shared is not None:
            output = output + self._apply_shared(tokens, self.shared)
        # The one collective out: sums of all ranks' partial sums.
        output = output.view(full.shape)
        if cut:
            return collectives.reduce_scatter(output, tp)
        return collectives.reduce(output, tp)

    def _apply_shared(self, tokens: Tensor, shared: nn.Module) -> Tensor:
        """Map tokens [t, hidden] to this rank's partial sum of the shared experts, times their
        gate."""
        output: Tensor = shared(tokens)
        if self.shared_gate is None:
            return output
        wide_dtype = self.context.plan.sensitive
        gate_weight = scale_gradient(
            Widen.apply(self.shared_gate, wide_dtype), self.config.mup.readout
        )
        gate = F.linear(tokens.to(wide_dtype), gate_weight).sigmoid()
        # The gate is the same on every rank, so it may be applied to partial sums.
        return (output * gate).to(output.dtype)

    def _apply_experts(
        self,
        tokens: Tensor,
        weights: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Return this rank's partial sum, [t, hidden], of the results of each token's experts,
        multiplied by their weights.

        tokens: [t, hidden]. weights, chosen: of each token's k experts, [t, k]. Collective over the
        ranks over which experts are spread.
        """
        counts = count_choices(chosen, self.config.experts)
        # Begun before the rows are sorted, so that the device has work while the host waits.
        wait_for_dispatch = self._start_dispatch(counts)
        experts_per_token = chosen.shape[1]
        # There are t * k pairs of a token and an expert; pair p is of token p // k. Sorted by
        # expert they are rows. A stable sort keeps the tokens of an expert in their order.
        pair_of_row = chosen.flatten().argsort(stable=True)
        # the inverse of this permutation
        row_of_pair = pair_of_row.argsort()
        # Unnamed tensors here and below are freed at once: a name would hold them up to the end.
        rows = TakeRows.apply(
            tokens, pair_of_row // experts_per_token, row_of_pair.view(chosen.shape)
        )
        if wait_for_dispatch is None:
            results = self._apply_local_experts(rows, counts)
        else:
            # The host waits for the counts here, because messages need sizes.
            results = self._apply_spread_experts(rows, wait_for_dispatch())
        by_pair = TakeRows.apply(results, row_of_pair, pair_of_row.unsqueeze(1))
        by_token = by_pair.view(*chosen.shape, tokens.shape[1])
        # Summed in the dtype of weights, the sensitive one, and rounded once.
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _start_dispatch(self, counts: Tensor) -> Callable[[], Dispatch] | None:
        """Start to tell other ranks how many rows their experts get; None if this rank has all
        experts.

        counts: int64, the rows of each expert of the layer.
        """
        experts = self.context.experts
        if experts is None or experts.spread.size == 1:
            return None
        return Dispatch.start(counts, experts.spread)

    def _apply_spread_experts(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """Return the results of rows that are sorted by expert: each rank's rows go to the ranks of
        their experts, and their results come back in the same order. Collective over these ranks.

        dispatch: how many rows go where.
        """
        received = dispatch.send(rows)
        return dispatch.send_back(self._apply_local_experts(received, dispatch.counts))

    def _apply_local_experts(self, rows: Tensor, counts: Tensor | list[int]) -> Tensor:
        """Return the results of this rank's experts for rows that are sorted by expert.

        counts: the number of rows of each expert: int64 on the device, or numbers on the host.
        """
        experts = [expert for expert in self.experts.values() if isinstance(expert, Expert)]
        if experts[0].uses_grouped_products(rows):
            if isinstance(counts, list):
                counts = copy_to_device(torch.tensor(counts), rows.device)
            return _apply_grouped(experts, rows, counts.cumsum(0).int())
        # With counts on a GPU the host waits here: `groups_on` says for which products.
        if not isinstance(counts, list):
            counts = counts.tolist()
        rows_of_experts = rows.split(counts)
        results = [
            expert(expert_rows)
            for expert, expert_rows in zip(experts, rows_of_experts, strict=True)
        ]
        return torch.cat(results)


def _apply_grouped(
    experts: Sequence[Expert],
    rows: Tensor,
    ends: Tensor,
) -> Tensor:
    """Return the results of experts for rows that are sorted by expert, in two grouped products.

    ends: int32 [experts], the end of each expert's rows.
    """
    first = experts[0]
    inner_weights = [expert.inner.weight for expert in experts]
    inner = GroupedLinear.apply(rows, ends, first.deferred, *inner_weights)
    # All experts have biases, or none has.
    biases = [expert.inner.bias for expert in experts if expert.inner.bias is not None]
    if biases:
        inner = add_biases(inner, biases, ends)
    project_down = partial(
        _project_down_grouped,
        ends=ends,
        queue=first.deferred,
        weights=[expert.down.weight for expert in experts],
        biases=[expert.down_bias for expert in experts if expert.down_bias is not None],
    )
    return first.recompute.run_forward("activation", first.activate, inner, then=project_down)


def _project_down_grouped(
    activated: Tensor,
    ends: Tensor,
    queue: WeightGradQueue,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter],
) -> Tensor:
    """Return this rank's partial sums of the experts' products down, with their biases if there are
    any.

    activated: rows that are sorted by expert. ends: int32 [experts], the end of each expert's rows.
    queue: for the weight gradients.
    """
    output = GroupedLinear.apply(activated, ends, queue, *weights)
    if not biases:
        return output
    return add_biases(output, biases, ends, features_of_bias(biases[0]))


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is in `chosen`: int64 [experts], on its device, without a wait
    of the host."""
    choices = chosen.flatten()
    # not torch.bincount, whose result has a size that the host must wait for
    counts = torch.zeros(experts, dtype=torch.int64, device=choices.device)
    return counts.index_add_(0, choices, torch.ones_like(choices))


class TakeRows(torch.autograd.Function):
    """x[index]: [n, h] -> [m, h].

    taken_as: [n, k], the rows of the result that come from each row of x: the gradient of that row
        is the sum of theirs, in this order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        taken_as: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(taken_as)
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (taken_as,) = ctx.saved_tensors
        return grad[taken_as].sum(1), None, None
