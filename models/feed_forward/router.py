"""The router of a layer with experts: the choice of a token's experts, its losses, and loads.

    scores    softmax or sigmoid of the logits, one for each expert
    choice    the `experts_per_token` highest of scores + correction (`models.router_settings`)
    weights   the scores of the chosen experts, divided by their sum (`norm_topk`), times `scale`

Two losses keep a router healthy. Both are means over the positions of one sample, then over the
samples of the global batch, and they are summed over the layers:

    balance   experts * sum over experts of (fraction of the sample's choices) * (mean probability);
              1 if balanced
    z         square of the log of the sum of the exponentials of the logits

Probabilities are the scores, divided by their sum. The means are over whole samples, whatever ranks
share them, so these losses are the same in every layout and for every micro-batch size. (The loss
of Hugging Face's Mixtral multiplies means over whole micro-batches and all layers, so it depends on
the micro-batch size; for one sample and one layer it is `experts_per_token` times this one. A
balance over the global batch would need the loads of all micro-batches before the first backward
pass.) Tokens that the loss mask excludes count, because they are routed too. Only the gradient of
these losses enters the training loss: it does so at the router, on any pipeline stage, multiplied
by the same loss scale as every other gradient. Their values are reported beside the loss, with the
loads of the experts (`models.feed_forward.router_tally`).

A correction of the choice (`router.correction`) has no loss. Its "gradient" is the number of tokens
that each expert was given; it is summed over micro-batches and ranks like any other, and the
optimizer moves the correction by a fixed speed against the loads of the global batch
(`megaprec.optim.rules.load_balance`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach
from models.config import ModelConfig
from models.feed_forward.router_tally import RouterTally, sum_router
from models.router_settings import RouterSettings
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.gradient_scale import scale_gradient
from parallel.layers import parameter
from parallel.linear import Widen
from parallel.sequence_cut import mean_of_sequence

# Added to the sum of sigmoid scores, which may all be zero, as transformers and Megatron-core do.
SUM_FLOOR = 1e-20


class Router(nn.Module):
    """Chooses the experts of each token, in the sensitive dtype.

    x: [s, b, hidden], replicated on every tp rank. The gradient of x and of the weight is this
        rank's partial sum.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        # All of it is on every rank of tp, but each rank has a partial sum of its gradient.
        weight = Part.cut(f"{name}.weight", (config.experts, config.hidden), None, context.tp)
        std = config.init_std * config.mup.readout
        self.weight = parameter(context, [weight], std, partial=True)
        self.bias = None
        if config.router_bias:
            bias = Part.cut(f"{name}.bias", (config.experts,), None, context.tp)
            self.bias = parameter(context, [bias], config.init_std, partial=True)
        self.tally = RouterTally(layer=name.removesuffix(".mlp.router"))
        self.correction = None
        if config.router.correction:
            self.correction = _make_correction(config, context, f"{name}.correction")

    def forward(self, x: Tensor, microbatch: MicrobatchInfo | None) -> tuple[Tensor, Tensor]:
        """Return the weights (sensitive dtype) and the indices (int64) of each token's experts,
        both [s, b, experts_per_token].

        microbatch: None: evaluation, without losses, and loads are not counted.
        Collective over cp if there are losses.
        """
        config = self.config
        # Rounded logits would send tokens to other experts.
        wide_dtype = self.context.plan.sensitive
        weight = scale_gradient(Widen.apply(self.weight, wide_dtype), config.mup.readout)
        bias = None if self.bias is None else Widen.apply(self.bias, wide_dtype)
        logits = F.linear(x.to(wide_dtype), weight, bias)
        scores = expert_scores(config.router, logits)
        correction = None if self.correction is None else self.correction.to(wide_dtype)
        chosen = choose_experts(config.router, scores, correction, config.experts_per_token)
        weights = expert_weights(config.router, scores, chosen, config.norm_topk)
        if microbatch is None:
            return weights, chosen
        probabilities = scores
        # The scores of a sigmoid do not sum to 1.
        if config.router.score == "sigmoid":
            probabilities = scores / scores.sum(-1, keepdim=True)
        losses = None
        if config.router_aux_loss or config.router_z_loss:
            losses = router_losses(config, logits, probabilities, chosen, self.context.cp)
            weights = self._attach_losses(weights, *losses, microbatch)
        if self.correction is not None:
            weights = WithLoads.apply(weights, self.correction, chosen)
        # all ranks of tp route the same tokens, so one of them counts
        if self.context.tp.rank == 0:
            is_first_of_cp = self.context.cp.rank == 0
            sums = sum_router(probabilities, chosen, losses, counts_samples=is_first_of_cp)
            weights = self.tally.count(weights, sums)
        return weights, chosen

    def _attach_losses(
        self,
        weights: Tensor,
        balance_loss: Tensor,
        z_loss: Tensor,
        microbatch: MicrobatchInfo,
    ) -> Tensor:
        """Return `weights`, whose backward pass also starts that of the router's losses.

        balance_loss, z_loss: of each sample, [b]. Raises ValueError if the micro-batch has no
        weight.
        """
        if microbatch.weight is None:
            raise ValueError(
                "a router's losses need microbatch.weight: "
                "the loss scale over the samples of a batch"
            )
        config = self.config
        losses = config.router_aux_loss * balance_loss + config.router_z_loss * z_loss
        # Every rank of tp has the whole loss, and the ranks' gradients are summed.
        weight_on_rank = microbatch.weight / self.context.tp.size
        return WithLoss.apply(weights, losses.sum(), weight_on_rank)


def _make_correction(
    config: ModelConfig,
    context: Context,
    name: str,
) -> nn.Parameter:
    """Return the parameter that corrects the choice of experts: zeros [experts] in the sensitive
    dtype, the same on all ranks. The optimizer moves it by the loads of experts."""
    # wide: a step moves it by less than half precision can tell apart
    values = torch.zeros(config.experts, dtype=context.plan.sensitive)
    # NaN until other values are loaded, as of every parameter.
    if context.blank:
        values.fill_(torch.nan)
    part = Part.cut(name, (config.experts,), None, context.tp)
    return attach(nn.Parameter(values), Layout((part,), balancing=config.router_correction_speed))


def router_losses(
    config: ModelConfig,
    logits: Tensor,
    probabilities: Tensor,
    chosen: Tensor,
    cp: Axis,
) -> tuple[Tensor, Tensor]:
    """Return the balance loss and the z-loss of each sample, without their weights: [b] each.

    logits, probabilities: [s, b, experts].
    chosen: [s, b, k].
    cp: the ranks that share each sample. All of them return the same. Collective over it.
    """
    # 1 for chosen experts: counts have no gradient, so that flows through the probabilities alone
    is_chosen = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    choice_fractions = mean_of_sequence(is_chosen, cp) / config.experts_per_token
    mean_probabilities = mean_of_sequence(probabilities, cp)
    balance_loss = config.experts * (choice_fractions * mean_probabilities).sum(-1)
    z_loss = mean_of_sequence(logits.logsumexp(-1).square(), cp)
    return balance_loss, z_loss


class WithLoss(torch.autograd.Function):
    """The identity on x, whose backward pass also gives `loss` the gradient `weight`. loss, weight:
    scalars."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loss: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight.to(loss.dtype))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad, weight, None


class WithLoads(torch.autograd.Function):
    """The identity on x, whose backward pass gives `correction` [experts] the number of times each
    expert is chosen.

    chosen: int64, of any shape. The counts do not depend on the gradient of x or the loss scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        correction: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.correction = correction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (chosen,) = ctx.saved_tensors
        choices = chosen.flatten()
        ones = torch.ones(len(choices), dtype=ctx.correction.dtype, device=choices.device)
        loads = torch.zeros_like(ctx.correction).index_add_(0, choices, ones)
        return grad, loads, None


def is_correction(name: str) -> bool:
    """Return True if a logical tensor corrects a router's choice.

    Such a tensor has no moments, and its gradient are counts of tokens.
    """
    return name.endswith(".router.correction")


def expert_scores(settings: RouterSettings, logits: Tensor) -> Tensor:
    """Return the score of each expert, of the shape and dtype of `logits` [..., experts]."""
    return logits.softmax(-1) if settings.score == "softmax" else logits.sigmoid()


def choose_experts(
    settings: RouterSettings,
    scores: Tensor,
    correction: Tensor | None,
    per_token: int,
) -> Tensor:
    """Return the indices of the chosen experts, int64 [..., per_token]: those with the highest
    scores after the correction, of the best groups if the settings limit the choice to these.

    scores: [..., experts].
    correction: [experts], or None.
    """
    # the choice itself has no gradient; the weights of what is chosen have one
    with torch.no_grad():
        ranked = scores if correction is None else scores + correction
        if settings.limits:
            eligible = experts_of_best_groups(settings, ranked)
            # minus infinity: a correction can make the scores of eligible experts negative
            ranked = ranked.masked_fill(~eligible, float("-inf"))
        return ranked.topk(per_token, -1).indices


def experts_of_best_groups(settings: RouterSettings, ranked: Tensor) -> Tensor:
    """Return bool [..., experts], True for the experts of the best groups.

    A group is as good as the sum of its `group_best` best experts.
    ranked: [..., experts], the numbers by which experts are compared.
    """
    by_group = ranked.unflatten(-1, (settings.groups, -1))
    group_scores = by_group.topk(settings.group_best, -1).values.sum(-1)
    best_groups = group_scores.topk(settings.groups_per_token, -1).indices
    group_is_best = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=ranked.device)
    group_is_best.scatter_(-1, best_groups, True)
    return group_is_best.unsqueeze(-1).expand(by_group.shape).flatten(-2)


def expert_weights(
    settings: RouterSettings,
    scores: Tensor,
    chosen: Tensor,
    normalize: bool,
) -> Tensor:
    """Return the weights of the chosen experts, [..., per_token].

    scores: [..., experts].
    chosen: [..., per_token].
    normalize: divide by the sum of the chosen experts' scores.
    """
    weights = scores.gather(-1, chosen)
    if normalize:
        floor = SUM_FLOOR if settings.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + floor)
    return weights if settings.scale == 1 else weights * settings.scale
