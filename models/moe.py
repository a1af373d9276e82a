"""Mixture of experts: a router sends each token through a few of many feed-forwards, and no token
is dropped.

Every expert is sharded over tp like an ordinary feed-forward, so all tp ranks work on all tokens
and stay equally busy whatever the router does. There is one collective into the layer and one out
of it, as for one feed-forward. Between them, every result on a tp rank is a partial sum, the
router's gradient included, and the partial sums are reduced at the end. Experts may instead be
spread over ranks, to which tokens travel (`models.dispatch`); the rest stays the same.

Shared experts are one more feed-forward, which every token passes. It is sharded like the others
and its partial sums are added to theirs, so there is no further collective. They may have a gate,
as in Qwen2-MoE: the sigmoid of one more logit of each token. The router is in `models.routing`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.axis import sent as on_device
from megaprec.comm.layout import Part
from megaprec.precision.gemm import Gemm
from models.config import ModelConfig
from models.dispatch import Dispatch, own_rows
from models.expert_bias import add_biases, bias_of_sum, features_of
from models.grouped_products import GroupedLinear, groups_on
from models.mlp import MLP
from models.routing import Router
from parallel import collectives
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, parameter
from parallel.linear import Input, Linear, Widen
from parallel.weight_grad_queue import WeightGradQueue


class Expert(MLP):
    """A feed-forward without collectives, forward and backward; the caller does these.

    x: tokens [n, hidden], replicated on every tp rank. The result is this rank's partial sum, and
    so is the gradient of x.
    """

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__(config, context, name, layer, (config.expert_bias, False))
        self.tp = context.tp
        self.deferred = context.deferred
        if config.expert_bias:
            self.down_bias = bias_of_sum(context, f"{name}.down.bias", config.hidden)
        else:
            self.down_bias = None

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x, self.inner)
        return self.recompute.run("activation", self.activate, y, into=self._into_down)

    def _into_down(self, y: Tensor) -> Tensor:
        y = self._product(y, self.down)
        bias = self.down_bias
        return y if bias is None else add_biases(y, [bias], own=features_of(bias))

    def groups(self, x: Tensor) -> bool:
        """Return True if the products of several such experts with tokens x are computed as grouped
        products."""
        plain = all(layer.products == Gemm(x.dtype, x.dtype) for layer in (self.inner, self.down))
        sizes = (*self.inner.weight.shape, *self.down.weight.shape)
        return plain and self.inner.weight.dtype == x.dtype and groups_on(x.device, x.dtype, sizes)

    def _product(self, x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
        return Linear.apply(
            x, layer.weight, layer.bias, Input.OWN, self.tp, self.deferred, layer.products
        )


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of weight times result, plus that of shared experts, which may
    have a gate."""

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.router = Router(config, context, f"{name}.router")
        if context.experts is None:
            numbers = range(config.experts)
        else:
            numbers = context.experts.own(config.experts)
        own = context.for_experts()
        elsewhere = context.for_experts_elsewhere()
        self.experts = nn.ModuleDict()
        for n in range(config.experts):
            if n in numbers:
                self.experts[str(n)] = Expert(config, own, f"{name}.experts.{n}", layer)
            elif context.plan.fp8 is not None:
                with torch.device(
                    "meta"
                ):  # registers the scales, which all ranks of a stage keep alike
                    Expert(config, elsewhere, f"{name}.experts.{n}", layer)
        shared = config.model_copy(update={"ffn": config.shared_experts})
        if config.shared_experts:
            self.shared = Expert(shared, context, f"{name}.shared", layer)
        else:
            self.shared = None
        gate = [Part.cut(f"{name}.shared_gate.weight", (1, config.hidden), None, context.tp)]
        if config.shared_gate:
            self.shared_gate = parameter(context, gate, config.init_std, partial=True)
        else:
            self.shared_gate = None

    def forward(self, x: Tensor, place: MicrobatchInfo | None) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape."""
        tp = self.context.tp
        cut = self.context.cut_sequence
        whole = collectives.gather(x, tp) if cut else collectives.copy(x, tp)
        weights, chosen = self.router(whole, place)
        rows = [one.flatten(0, 1) for one in (whole, weights, chosen)]
        experts = self.context.experts
        if experts is None or experts.tp.size == tp.size:
            y = self._through_experts(*rows)
        else:
            own = own_rows(len(rows[0]), tp, experts)
            y = self._through_experts(*(one[own] for one in rows))
            if cut and experts.tp.size == 1 and self.shared is None:
                return y.view(x.shape)  # no other rank has an addend of these rows
            y = F.pad(y, (0, 0, own.start, len(rows[0]) - own.stop))
        y = (y if self.shared is None else y + self._of_shared(rows[0], self.shared)).view(
            whole.shape
        )
        return collectives.scatter(y, tp) if cut else collectives.reduce(y, tp)

    def _of_shared(self, tokens: Tensor, shared: nn.Module) -> Tensor:
        """Map tokens [t, hidden] to this rank's partial sum of the shared experts, times their
        gate."""
        y: Tensor = shared(tokens)
        if self.shared_gate is None:
            return y
        wide = self.context.plan.sensitive
        logits = F.linear(tokens.to(wide), Widen.apply(self.shared_gate, wide))
        return (y * logits.sigmoid()).to(y.dtype)

    def _through_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Map tokens [t, hidden], weights and chosen [t, k] to this rank's partial sum [t,
        hidden]."""
        # the t * k pairs of a token and an expert, sorted by expert
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        sent = Take.apply(tokens, order // chosen.shape[1], inverse.view(chosen.shape))
        results = self._results(sent, counted(chosen, self.config.experts))
        back = Take.apply(results, inverse, order.unsqueeze(1)).view(*chosen.shape, tokens.shape[1])
        return (back * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _results(self, sent: Tensor, counts: Tensor) -> Tensor:
        """Map rows that are sorted by expert to the results of experts of any rank.

        counts: int64, the rows of each expert of the layer.
        """
        if self.context.experts is None or self.context.experts.spread.size == 1:
            return self._of_experts(sent, counts)
        way = Dispatch.of(counts, self.context.experts.spread)
        return way.back(self._of_experts(way.there(sent), way.counts))

    def _of_experts(self, sent: Tensor, counts: Tensor | list[int]) -> Tensor:
        """Map rows that are sorted by expert to the results of this rank's experts.

        counts: the rows of each expert: int64 on the device, or on the host.
        """
        if self._first.groups(sent):
            if isinstance(counts, list):
                known = on_device(torch.tensor(counts), sent.device)
            else:
                known = counts
            return self._grouped(sent, known.cumsum(0).int())
        # With counts on a GPU the host waits here: `groups_on` says for which products.
        some = sent.split(counts if isinstance(counts, list) else counts.tolist())
        return torch.cat(
            [expert(rows) for expert, rows in zip(self.experts.values(), some, strict=True)]
        )

    @property
    def _first(self) -> Expert:
        first = next(iter(self.experts.values()))
        assert isinstance(first, Expert)
        return first

    def _grouped(self, sent: Tensor, ends: Tensor) -> Tensor:
        """Compute all experts in two grouped products. ends: int32, the end of each expert's
        rows."""
        experts = [expert for expert in self.experts.values() if isinstance(expert, Expert)]
        first = experts[0]
        queue = experts[0].deferred
        y = GroupedLinear.apply(sent, ends, queue, *(expert.inner.weight for expert in experts))
        if biases := [expert.inner.bias for expert in experts if expert.inner.bias is not None]:
            y = add_biases(y, biases, ends)
        down = [expert.down.weight for expert in experts]
        biases = [expert.down_bias for expert in experts if expert.down_bias is not None]
        into = partial(_into_down, ends=ends, queue=queue, weights=down, biases=biases)
        return first.recompute.run("activation", first.activate, y, into=into)


def _into_down(
    y: Tensor,
    ends: Tensor,
    queue: WeightGradQueue,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter],
) -> Tensor:
    y = GroupedLinear.apply(y, ends, queue, *weights)
    return add_biases(y, biases, ends, features_of(biases[0])) if biases else y


def counted(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is in `chosen`: int64 [experts], on its device, without a wait
    of the host."""
    flat = chosen.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).index_add_(
        0, flat, torch.ones_like(flat)
    )


class Take(torch.autograd.Function):
    """x[index]: [n, h] -> [m, h].

    places [n, k]: the rows of the result that come from each row of x, so that the gradient is
    summed in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places].sum(1), None, None
