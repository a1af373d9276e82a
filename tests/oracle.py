"""The same models and the same training, written plainly: one process, none of our layers, torch's own
optimizer.

Weights are a dict of logical tensors. The decoder is that of `megaprec parity --oracle plain`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_decoder import ahead, hidden, logits, mean_over_modules, of_head
from tools.verify.oracle.plain_feed_forward import Routing, experts, router_loss

__all__ = ["Weights", "ahead", "experts", "hidden", "logits", "mean_loss", "of_head", "train"]
Weights = dict[str, Tensor]


class Losses(NamedTuple):
    """Losses of a batch.

    mean: of the tokens that count.
    routers: of all routers, with their weights.
    ahead, z: without weights, of modules for multi-token prediction and of the size of logits.
    reports: what each router did, as `RouterReport` has it.
    """

    mean: Tensor
    routers: Tensor
    ahead: Tensor
    z: Tensor
    reports: list[dict[str, Any]]


def mean_loss(
    config: ModelConfig, w: Weights, tokens: Tensor, targets: Tensor, mask: Tensor | None
) -> Losses:
    """The losses of a batch. Adds up how many tokens each expert gets in the gradient of its
    correction."""
    routings: list[Routing] = []
    read = hidden(config, w, tokens, routings)
    mask = torch.ones(tokens.shape) if mask is None else mask
    logits = of_head(config, w, read).flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none")
    mean = (each * mask.flatten()).sum() / mask.sum()
    z = (logits.exp().sum(-1).log().square() * mask.flatten()).sum() / mask.sum()
    of_modules = ahead(config, w, read, tokens, targets, routings)
    for routing in routings:
        _count(routing)
    reports = [_report(config, routing) for routing in routings]
    losses = router_loss(config, routings)
    return Losses(mean, losses, mean_over_modules(of_modules, mask), z, reports)


def _count(routing: Routing) -> None:
    correction = routing.correction
    if correction is None or not correction.requires_grad:
        return
    counts = routing.counts.to(correction.dtype)
    correction.grad = counts if correction.grad is None else correction.grad + counts


def _report(config: ModelConfig, routing: Routing) -> dict[str, Any]:
    counts = routing.counts.tolist()
    tokens = routing.chosen[..., 0].numel()
    shares = [count / sum(counts) for count in counts if count]
    mean = routing.probabilities.detach().flatten(0, -2).mean(0).tolist()
    bias = routing.correction
    return {
        "max_load": max(counts) / tokens,
        "min_load": min(counts) / tokens,
        "used_experts": math.exp(-sum(share * math.log(share) for share in shares)),
        "entropy": -sum(p * math.log(p) for p in mean) / math.log(config.experts),
        "corrections": None if bias is None else (bias.min().item(), bias.max().item()),
        "balance_loss": routing.balance.item() if config.router_aux_loss else None,
        "z_loss": routing.z.item() if config.router_z_loss else None,
    }


def train(
    config: ModelConfig,
    weights: Weights,
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    lr: float,
    clip: float,
    frozen: Weights | None = None,
) -> list[dict[str, object]]:
    """Trains with torch's AdamW; one record per step: loss, norm, the gradients before clipping,
    the weights after. frozen: weights that are not trained."""
    trained_weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    w = trained_weights | (frozen or {})
    balancing = [p for name, p in trained_weights.items() if name.endswith(".correction")]
    trained = [p for name, p in trained_weights.items() if not name.endswith(".correction")]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    records = []
    for tokens, targets, mask in batches:
        for p in trained_weights.values():
            p.grad = None
        losses = mean_loss(config, w, tokens, targets, mask)
        extra = config.mtp_loss_weight * losses.ahead + config.z_loss * losses.z
        (losses.mean + losses.routers + extra).backward()
        grads = {name: p.grad.clone() for name, p in w.items() if p.grad is not None}
        norm_before = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        for p in balancing:
            assert p.grad is not None
            p.data += config.router_correction_speed * (p.grad.mean() - p.grad).sign()
        records.append(
            {
                "loss": losses.mean.item(),
                "mtp_loss": losses.ahead.item(),
                "z_loss": losses.z.item() if config.z_loss else None,
                "routers": losses.reports,
                "norm": norm_before.item(),
                "grads": grads,
                "weights": {name: p.detach().clone() for name, p in trained_weights.items()},
            }
        )
    return records
