"""The same models and the same training, written plainly: one process, no code of ours, torch's own optimizer.

Weights are a dict of logical tensors. Everything here is as short and as obvious as it can be; that is its use.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

Weights = dict[str, Tensor]


def logits(config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """ids [b, s] -> [b, s, vocab]."""
    x = F.embedding(ids, w["embedding.weight"])
    if config.positions == "learned":
        x = x + w["positions.weight"][: ids.shape[1]]
    for n in range(config.layers):
        x = x + attention(config, w, f"layers.{n}.attention", norm(config, w, f"layers.{n}.attention_norm", x))
        x = x + mlp(config, w, f"layers.{n}.mlp", norm(config, w, f"layers.{n}.mlp_norm", x))
    return norm(config, w, "final_norm", x) @ w["embedding.weight" if config.tied else "head.weight"].T


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], config.norm_eps)
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]


def attention(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    b, s, _ = x.shape
    query, key, value = (
        linear(w, f"{name}.{which}", x).view(b, s, -1, config.head_dim).transpose(1, 2)
        for which in ("query", "key", "value")
    )
    if config.positions == "rope":
        query, key = rotate(config, query), rotate(config, key)
    groups = config.heads // config.kv_heads
    key, value = (z.repeat_interleave(groups, 1) for z in (key, value))
    scores = query @ key.transpose(2, 3) / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
    return linear(w, f"{name}.output", (scores.softmax(-1) @ value).transpose(1, 2).reshape(b, s, -1))


def rotate(config: ModelConfig, x: Tensor) -> Tensor:
    """Complex multiplication of (x[i], x[i + d/2]) by exp(i * position * frequency)."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) * 2 / config.head_dim)
    angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def mlp(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    up = linear(w, f"{name}.up", x)
    inner = F.silu(linear(w, f"{name}.gate", x)) * up if config.mlp == "swiglu" else F.gelu(up, approximate="tanh")
    return linear(w, f"{name}.down", inner)


def mean_loss(
    config: ModelConfig, w: Mapping[str, Tensor], tokens: Tensor, targets: Tensor, mask: Tensor | None
) -> Tensor:
    each = F.cross_entropy(logits(config, w, tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return each.mean() if mask is None else (each * mask.flatten()).sum() / mask.sum()


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
        loss = mean_loss(config, w, tokens, targets, mask)
        optimizer.zero_grad()
        loss.backward()
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
