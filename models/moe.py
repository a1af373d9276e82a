"""Mixture of experts: a router sends each token through a few of many feed-forwards, and no token is dropped.

Every expert is sharded over tp like an ordinary feed-forward, so all tp ranks work on all tokens and stay equally busy
whatever the router does. There is one collective into the layer and one out of it, as for one feed-forward. Between
them, every result on a tp rank is a partial sum, the router's gradient included, and the partial sums are reduced at
the end.

Two losses keep a router healthy. Both are means over the positions of one sample, then over the samples of the global
batch, and they are summed over the layers:

    balance   experts * sum over experts of (fraction of the sample's choices) * (mean probability); 1 if balanced
    z         square of the log of the sum of the exponentials of the logits

No layout cuts a sample, so these losses are the same in every layout and for every micro-batch size. (The loss of
Hugging Face's Mixtral multiplies means over whole micro-batches and all layers, so it depends on the micro-batch size;
for one sample and one layer it is `experts_per_token` times this one.) Tokens that the loss mask excludes count,
because they are routed too. Only the gradient of these losses is computed: it enters at the router, on any pipeline
stage, multiplied by the same loss scale as every other gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from models.config import ModelConfig
from models.mlp import MLP
from parallel import collectives
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, parameter
from parallel.linear import Input, Linear, Widen


class Expert(MLP):
    """A feed-forward without biases and without collectives, forward and backward; the caller does these.

    x: tokens [n, hidden], replicated on every tp rank. The result is this rank's partial sum, and so is the gradient of
    x.
    """

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__(config, context, name, layer)
        self.tp, self.deferred = context.tp, context.deferred

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x, self.inner)
        return self.recompute.run("activation", self.activate, y, into=lambda y: self._product(y, self.down))

    def _product(self, x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
        return Linear.apply(x, layer.weight, None, Input.OWN, self.tp, self.deferred, layer.products)


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of weight times result, with the router in the sensitive dtype."""

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__()
        self.config, self.context = config, context
        whole = Part.cut(f"{name}.router.weight", (config.experts, config.hidden), None, context.tp)
        self.router = parameter(context, [whole], config.init_std, partial=True)
        self.experts = nn.ModuleList(
            Expert(config, context, f"{name}.experts.{n}", layer) for n in range(config.experts)
        )

    def forward(self, x: Tensor, place: MicrobatchInfo | None) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of the same shape."""
        tp, cut = self.context.tp, self.context.cut_sequence
        whole = collectives.gather(x, tp) if cut else collectives.copy(x, tp)
        weights, chosen = self._route(whole, place)
        y = self._through_experts(whole.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)).view(whole.shape)
        return collectives.scatter(y, tp) if cut else collectives.reduce(y, tp)

    def _route(self, x: Tensor, place: MicrobatchInfo | None) -> tuple[Tensor, Tensor]:
        """Return the weights (sensitive dtype) and numbers of each token's experts, both [s, b, experts_per_token]."""
        wide = self.context.plan.sensitive
        logits = F.linear(x.to(wide), Widen.apply(self.router, wide))
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.config.experts_per_token, -1)
        if self.config.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if place is not None and (self.config.router_aux_loss or self.config.router_z_loss):
            if place.weight is None:
                raise ValueError("a router's losses need place.weight: the loss scale over the samples of a batch")
            loss = router_losses(self.config, logits, probabilities, chosen).sum()
            weights = WithLoss.apply(weights, loss, place.weight / self.context.tp.size)
        return weights, chosen

    def _through_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Map tokens [t, hidden], weights and chosen [t, k] to this rank's partial sum [t, hidden]."""
        order = chosen.flatten().argsort(stable=True)  # the t * k pairs of a token and an expert, sorted by expert
        inverse = order.argsort()
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        sent = Take.apply(tokens, order // chosen.shape[1], inverse.view(chosen.shape))
        results = [expert(some) for expert, some in zip(self.experts, sent.split(counts), strict=True)]
        back = Take.apply(torch.cat(results), inverse, order.unsqueeze(1)).view(*chosen.shape, -1)
        return (back * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def router_losses(config: ModelConfig, logits: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the weighted losses of each sample, [b]. logits, probabilities: [s, b, experts]; chosen: [s, b, k]."""
    hits = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    shares = hits.mean(0) / config.experts_per_token
    balance = config.experts * (shares * probabilities.mean(0)).sum(-1)
    z = logits.logsumexp(-1).square().mean(0)
    return config.router_aux_loss * balance + config.router_z_loss * z


class WithLoss(torch.autograd.Function):
    """The identity on x, whose backward pass also gives `loss` the gradient `weight`. loss, weight: scalars."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.to(loss.dtype))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad, weight, None


class Take(torch.autograd.Function):
    """x[index]: [n, h] -> [m, h].

    places [n, k]: the rows of the result that come from each row of x, so that the gradient is summed in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places].sum(1), None, None
