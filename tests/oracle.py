"""The same models and the same training, written plainly: one process, no code of ours, torch's own optimizer.

Weights are a dict of logical tensors. Everything here is as short and as obvious as it can be; that is its use.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

Weights = dict[str, Tensor]


def logits(config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor, losses: list[Tensor] | None = None) -> Tensor:
    """ids [b, s] -> [b, s, vocab]. losses: receives the routers' losses, if there are any."""
    x = F.embedding(ids, w["embedding.weight"])
    if config.positions == "learned":
        x = x + w["positions.weight"][: ids.shape[1]]
    for n in range(config.layers):
        attended = x + attention(config, w, f"layers.{n}.attention", norm(config, w, f"layers.{n}.attention_norm", x))
        normal = norm(config, w, f"layers.{n}.mlp_norm", x if config.parallel_residual else attended)
        if config.experts:
            x = attended + experts(config, w, f"layers.{n}.mlp", normal, [] if losses is None else losses)
        else:
            x = attended + mlp(config, w, f"layers.{n}.mlp", normal)
    return norm(config, w, "final_norm", x) @ w["embedding.weight" if config.tied else "head.weight"].T


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], config.norm_eps)
    return rms_norm(config, w[f"{name}.weight"], x)


def rms_norm(config: ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def attention(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    b, s, _ = x.shape
    query, key, value = (
        linear(w, f"{name}.{which}", x).view(b, s, -1, config.head_dim).transpose(1, 2)
        for which in ("query", "key", "value")
    )
    if config.qk_norm:
        query, key = (rms_norm(config, w[f"{name}.{n}_norm.weight"], x) for n, x in (("query", query), ("key", key)))
    if config.positions == "rope":
        query, key = rotate(config, query), rotate(config, key)
    groups = config.heads // config.kv_heads
    key, value = (z.repeat_interleave(groups, 1) for z in (key, value))
    scores = query @ key.transpose(2, 3) / config.head_dim**0.5
    ago = torch.arange(s)[:, None] - torch.arange(s)
    scores = scores.masked_fill((ago < 0) | (ago >= (config.window or s)), float("-inf"))
    return linear(w, f"{name}.output", (scores.softmax(-1) @ value).transpose(1, 2).reshape(b, s, -1))


def rotate(config: ModelConfig, x: Tensor) -> Tensor:
    """Complex multiplication of (x[i], x[i + half]) by exp(i * position * frequency), of the features that turn."""
    half = int(config.head_dim * config.rotary_fraction) // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def mlp(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    up = linear(w, f"{name}.up", x)
    if config.mlp == "swiglu":
        return linear(w, f"{name}.down", F.silu(linear(w, f"{name}.gate", x)) * up)
    return linear(w, f"{name}.down", F.gelu(up, approximate="tanh" if config.mlp == "gelu" else "none"))


def experts(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, losses: list[Tensor]) -> Tensor:
    """Every token goes through every expert, and most weights are zero. Adds the router's loss to `losses`."""
    scores = linear(w, f"{name}.router", x)
    probabilities = scores.softmax(-1)
    chosen = probabilities >= probabilities.sort(-1, descending=True).values[..., [config.experts_per_token - 1]]
    weights = probabilities * chosen
    if config.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    for sample_chosen, sample, score in zip(chosen.to(x.dtype), probabilities, scores, strict=True):
        shares = sample_chosen.sum(0) / sample_chosen.sum()
        balance = config.experts * shares @ sample.mean(0)
        z = score.exp().sum(-1).log().square().mean()
        losses.append((config.router_aux_loss * balance + config.router_z_loss * z) / len(x))
    return sum(
        (weights[..., [n]] * mlp(config, w, f"{name}.experts.{n}", x) for n in range(config.experts)), torch.zeros(())
    )


def mean_loss(
    config: ModelConfig, w: Mapping[str, Tensor], tokens: Tensor, targets: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of the tokens that count, and of the routers."""
    losses = [torch.zeros(())]
    each = F.cross_entropy(logits(config, w, tokens, losses).flatten(0, 1), targets.flatten(), reduction="none")
    mean = each.mean() if mask is None else (each * mask.flatten()).sum() / mask.sum()
    return mean, torch.stack(losses).sum()


def train(
    config: ModelConfig,
    weights: Weights,
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    lr: float,
    clip: float,
) -> list[dict[str, object]]:
    """Trains with torch's AdamW; one record per step: loss, norm, the gradients before clipping, the weights after."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": [p for p in w.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in w.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    records = []
    for tokens, targets, mask in batches:
        loss, router_loss = mean_loss(config, w, tokens, targets, mask)
        optimizer.zero_grad()
        (loss + router_loss).backward()
        grads = {name: p.grad.clone() for name, p in w.items() if p.grad is not None}
        norm_before = torch.nn.utils.clip_grad_norm_(list(w.values()), clip)
        optimizer.step()
        records.append(
            {
                "loss": loss.item(),
                "norm": norm_before.item(),
                "grads": grads,
                "weights": {name: p.detach().clone() for name, p in w.items()},
            }
        )
    return records
