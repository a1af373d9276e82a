"""The same models and the same training, written plainly: one process, no code of ours, torch's own
optimizer.

Weights are a dict of logical tensors. Everything here is as short and as obvious as it can be; that
is its use.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig

Weights = dict[str, Tensor]


def logits(
    config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor, losses: list[Tensor] | None = None
) -> Tensor:
    """ids [b, s] -> [b, s, vocab]. losses: receives the routers' losses, if there are any."""
    return of_head(config, w, hidden(config, w, ids, losses))


def of_head(config: ModelConfig, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return capped(
        x @ w["embedding.weight" if config.tied else "head.weight"].T, config.final_softcap
    )


def hidden(
    config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor, losses: list[Tensor] | None = None
) -> Tensor:
    """ids [b, s] -> what the head reads, [b, s, hidden]."""
    x = F.embedding(ids, w["embedding.weight"]) * config.embedding_scale
    if config.positions == "learned":
        x = x + w["positions.weight"][: ids.shape[1]]
    for n in range(config.layers):
        x = layer(config, w, n, x, [] if losses is None else losses)
    return norm(config, w, "final_norm", x)


def layer(
    config: ModelConfig, w: Mapping[str, Tensor], n: int, x: Tensor, losses: list[Tensor]
) -> Tensor:
    if config.hybrid_pattern:
        return x + of_one_branch(config, w, n, x, losses)
    mix = delta_net if n in config.delta_layers else attention
    mixed = mix(config, w, n, norm_if_there(config, w, f"layers.{n}.attention_norm", x))
    attended = x + norm_if_there(config, w, f"layers.{n}.attention_post_norm", mixed)
    normal = norm_if_there(
        config, w, f"layers.{n}.mlp_norm", x if config.parallel_residual else attended
    )
    if config.experts and n not in config.dense_layers:
        fed = experts(config, w, f"layers.{n}.mlp", normal, losses)
    else:
        fed = mlp(config, w, f"layers.{n}.mlp", normal)
    return attended + norm_if_there(config, w, f"layers.{n}.mlp_post_norm", fed)


def of_one_branch(
    config: ModelConfig, w: Mapping[str, Tensor], n: int, x: Tensor, losses: list[Tensor]
) -> Tensor:
    letter = config.hybrid_pattern[n]
    if letter in "-E":
        normal = norm(config, w, f"layers.{n}.mlp_norm", x)
        if letter == "E":
            return experts(config, w, f"layers.{n}.mlp", normal, losses)
        return mlp(config, w, f"layers.{n}.mlp", normal)
    mix = mamba if letter == "M" else attention
    return mix(config, w, n, norm(config, w, f"layers.{n}.attention_norm", x))


def ahead(
    config: ModelConfig,
    w: Mapping[str, Tensor],
    x: Tensor,
    tokens: Tensor,
    targets: Tensor,
    losses: list[Tensor],
) -> list[Tensor]:
    """What each module of multi-token prediction loses at each position, [b, s - k]. x: what the
    head reads.

    Position i of module k reads token i + k and predicts target i + k; the last k positions read
    token 0.
    """
    found = []
    length = tokens.shape[1]
    for k in range(1, config.mtp_layers + 1):
        own = {
            f"layers.{config.layers - 1}.{n[6:]}": v
            for n, v in w.items()
            if n.startswith(f"mtp.{k - 1}.")
        }
        later = torch.cat((tokens[:, k:], torch.zeros_like(tokens[:, :k])), 1)[:, :length]
        read = F.embedding(later, w["embedding.weight"]) * config.embedding_scale
        both = (
            norm(config, w, f"mtp.{k - 1}.embedding_norm", read),
            norm(config, w, f"mtp.{k - 1}.hidden_norm", x),
        )
        x = layer(
            config,
            own,
            config.layers - 1,
            linear(w, f"mtp.{k - 1}.projection", torch.cat(both, -1)),
            losses,
        )
        x = norm(config, w, f"mtp.{k - 1}.final_norm", x)
        made = of_head(config, w, x[:, : max(0, length - k)])
        found.append(F.cross_entropy(made.transpose(1, 2), targets[:, k:], reduction="none"))
    return found


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * (x / cap).tanh() if cap else x


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layer":
        weight = w[f"{name}.weight"]
        return F.layer_norm(x, x.shape[-1:], weight, w.get(f"{name}.bias"), config.norm_eps)
    return rms_norm(config, w[f"{name}.weight"], x)


def norm_if_there(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return norm(config, w, name, x) if f"{name}.weight" in w else x


def rms_norm(config: ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    return (
        x
        / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        * (weight + config.norm_unit_offset)
    )


def attention(config: ModelConfig, w: Mapping[str, Tensor], n: int, x: Tensor) -> Tensor:
    b, s, _ = x.shape
    name = f"layers.{n}.attention"
    window = config.window if n in (config.window_layers or range(config.layers)) else 0
    if config.latent:
        query, key, value = from_latents(config, w, name, x)
    else:
        query, key, value = projected(config, w, name, x)
    if config.positions == "rope":
        base = config.window_rope_base if window and config.window_rope_base else config.rope_base
        query = rotate(config, query, base)
        key = rotate(config, key, base)
    groups = config.heads // config.kv_heads
    key, value = (z.repeat_interleave(groups, 1) for z in (key, value))
    scores = capped(
        query @ key.transpose(2, 3) / config.attention_scalar**0.5, config.attention_softcap
    )
    ago = torch.arange(s)[:, None] - torch.arange(s)
    scores = scores.masked_fill((ago < 0) | (ago >= (window or s)), float("-inf"))
    weights = scores.softmax(-1)
    if config.attention_sinks:
        exponentials = scores.exp()
        weights = exponentials / (
            exponentials.sum(-1, True) + w[f"{name}.sinks.weight"].exp().view(-1, 1, 1)
        )
    mixed = (weights @ value).transpose(1, 2).reshape(b, s, -1)
    if config.attention_gate:
        mixed = mixed * linear(w, f"{name}.gate", x).sigmoid()
    return linear(w, f"{name}.output", mixed)


def delta_net(config: ModelConfig, w: Mapping[str, Tensor], n: int, x: Tensor) -> Tensor:
    """Token by token, with the state of each head as a matrix."""
    sizes = config.delta_net
    b, s, _ = x.shape
    name = f"layers.{n}.delta_net"

    def convolved(which: str, width: int) -> Tensor:
        features = F.pad(linear(w, f"{name}.{which}", x), (0, 0, sizes.kernel - 1, 0))
        seen = features.unfold(1, sizes.kernel, 1)  # [b, s, features, kernel]
        return F.silu((seen * w[f"{name}.{which}_convolution.weight"]).sum(-1)).view(
            b, s, -1, width
        )

    def unit(heads: Tensor) -> Tensor:
        of_each_value = heads.repeat_interleave(sizes.value_heads // sizes.key_heads, 2)
        return of_each_value / (of_each_value.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    query = unit(convolved("query", sizes.key_dim)) / sizes.key_dim**0.5
    key = unit(convolved("key", sizes.key_dim))
    value = convolved("value", sizes.value_dim)
    strength = linear(w, f"{name}.strength", x).sigmoid()
    decay = (-w[f"{name}.decay.log_rate"].exp() * F.softplus(linear(w, f"{name}.decay", x))).exp()
    state = x.new_zeros(b, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    outputs = []
    for t in range(s):
        state = state * decay[:, t, :, None, None]
        error = value[:, t] - torch.einsum("bnkv,bnk->bnv", state, key[:, t])
        written = strength[:, t, :, None] * error
        state = state + torch.einsum("bnk,bnv->bnkv", key[:, t], written)
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, query[:, t]))
    read = torch.stack(outputs, 1)
    scale = (read.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    normal = (read / scale * w[f"{name}.output_norm.weight"]).flatten(2)
    return linear(w, f"{name}.output", normal * F.silu(linear(w, f"{name}.gate", x)))


def mamba(config: ModelConfig, w: Mapping[str, Tensor], n: int, x: Tensor) -> Tensor:
    """Token by token, with the state of each head as a matrix."""
    sizes = config.mamba
    b, s, _ = x.shape
    name = f"layers.{n}.mamba"

    def convolved(which: str, heads: int) -> Tensor:
        features = F.pad(linear(w, f"{name}.{which}", x), (0, 0, sizes.kernel - 1, 0))
        seen = features.unfold(1, sizes.kernel, 1)  # [b, s, features, kernel]
        made = (seen * w[f"{name}.{which}_convolution.weight"]).sum(-1)
        active = F.silu(made + w[f"{name}.{which}_convolution.bias"]).view(b, s, heads, -1)
        return active.repeat_interleave(sizes.heads // heads, 2)

    query = convolved("query", sizes.groups)
    key = convolved("key", sizes.groups)
    value = convolved("value", sizes.heads)
    step = F.softplus(linear(w, f"{name}.step", x)).clamp(min=sizes.least_step)
    state = x.new_zeros(b, sizes.heads, sizes.state_dim, sizes.head_dim)
    outputs = []
    for t in range(s):
        decay = (-w[f"{name}.log_rate"].exp() * step[:, t]).exp()
        written = torch.einsum("bnk,bnv,bn->bnkv", key[:, t], value[:, t], step[:, t])
        state = state * decay[..., None, None] + written
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, query[:, t]))
    read = torch.stack(outputs, 2).transpose(1, 2) + w[f"{name}.skip"][:, None] * value
    gated = read.flatten(2) * F.silu(linear(w, f"{name}.gate", x))
    groups = gated.unflatten(-1, (sizes.groups, -1))
    scale = (groups.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    normal = (groups / scale).flatten(2) * w[f"{name}.output_norm.weight"]
    return linear(w, f"{name}.output", normal)


def projected(
    config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor
) -> tuple[Tensor, ...]:
    """x [b, s, hidden] -> query, key and value [b, n, s, d], not yet rotated."""
    b, s, _ = x.shape
    query, key, value = (linear(w, f"{name}.{which}", x) for which in ("query", "key", "value"))
    if config.qk_norm and config.qk_norm_over == "all":
        query, key = (
            rms_norm(config, w[f"{name}.{n}_norm.weight"], x)
            for n, x in (("query", query), ("key", key))
        )
    query, key, value = (
        z.view(b, s, -1, config.head_dim).transpose(1, 2) for z in (query, key, value)
    )
    if config.qk_norm and config.qk_norm_over == "head":
        query, key = (
            rms_norm(config, w[f"{name}.{n}_norm.weight"], x)
            for n, x in (("query", query), ("key", key))
        )
    return query, key, value


def from_latents(
    config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor
) -> tuple[Tensor, ...]:
    """As `projected`, of latent attention: the features that turn come first, and heads share those
    of their keys."""
    sizes, (b, s, _) = config.latent, x.shape

    def normal(which: str) -> Tensor:
        y = linear(w, f"{name}.{which}_down", x)
        return (
            y
            / (y.square().mean(-1, keepdim=True) + sizes.norm_eps).sqrt()
            * w[f"{name}.{which}_down_norm.weight"]
        )

    if sizes.query_rank:
        query = linear(w, f"{name}.query_up", normal("query"))
    else:
        query = linear(w, f"{name}.query", x)
    still, value = (
        linear(w, f"{name}.{which}_up", normal("key_value")) for which in ("key", "value")
    )
    query, still, value = (
        z.view(b, s, config.heads, -1).transpose(1, 2) for z in (query, still, value)
    )
    turning = linear(w, f"{name}.key_rope", x).unsqueeze(1).expand(-1, config.heads, -1, -1)
    return query, torch.cat((turning, still), -1), value


def rotate(config: ModelConfig, x: Tensor, base: float) -> Tensor:
    """Complex multiplication of (x[i], x[i + half]) by exp(i * position * frequency), of the
    features that turn."""
    half = (config.latent.rope_dim or int(config.head_dim * config.rotary_fraction)) // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def mlp(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    up = linear(w, f"{name}.up", x)
    if config.mlp == "swiglu":
        return linear(w, f"{name}.down", F.silu(linear(w, f"{name}.gate", x)) * up)
    if config.mlp == "swiglu_clamped":
        gate = linear(w, f"{name}.gate", x).clamp(max=config.swiglu_limit)
        up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
        return linear(w, f"{name}.down", (up + 1) * gate * (config.swiglu_alpha * gate).sigmoid())
    if config.mlp == "geglu":
        return linear(
            w, f"{name}.down", F.gelu(linear(w, f"{name}.gate", x), approximate="tanh") * up
        )
    if config.mlp == "relu2":
        return linear(w, f"{name}.down", up.relu().square())
    return linear(
        w, f"{name}.down", F.gelu(up, approximate="tanh" if config.mlp == "gelu" else "none")
    )


def experts(
    config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor, losses: list[Tensor]
) -> Tensor:
    """Every token goes through every expert, and most weights are zero. Adds the router's loss to
    `losses`."""
    scores = linear(w, f"{name}.router", x)
    each = scores.softmax(-1) if config.router.score == "softmax" else scores.sigmoid()
    probabilities = each / each.sum(-1, keepdim=True)
    chosen = best(config, w, name, each.detach())
    weights = each * chosen
    if config.norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.router.scale
    of_samples = []
    for sample_chosen, sample, score in zip(chosen.to(x.dtype), probabilities, scores, strict=True):
        shares = sample_chosen.sum(0) / sample_chosen.sum()
        balance = config.experts * shares @ sample.mean(0)
        z = score.exp().sum(-1).log().square().mean()
        losses.append((config.router_aux_loss * balance + config.router_z_loss * z) / len(x))
        of_samples.append((balance.item(), z.item()))
    if isinstance(losses, Losses):
        report = router_report(config, w, name, chosen, probabilities.detach())
        balance, z = (sum(values) / len(x) for values in zip(*of_samples, strict=True))
        report["balance_loss"] = balance if config.router_aux_loss else None
        report["z_loss"] = z if config.router_z_loss else None
        losses.routers.append(report)
    shared = mlp(config, w, f"{name}.shared", x) if config.shared_experts else torch.zeros(())
    if config.shared_gate:
        shared = shared / (1 + (-linear(w, f"{name}.shared_gate", x)).exp())
    return sum(
        (
            weights[..., [n]] * mlp(config, w, f"{name}.experts.{n}", x)
            for n in range(config.experts)
        ),
        shared,
    )


class Losses(list[Tensor]):
    """Losses of routers, and what each router did, as `RouterReport` has it."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(())])
        self.routers: list[dict[str, Any]] = []


def router_report(
    config: ModelConfig, w: Mapping[str, Tensor], name: str, chosen: Tensor, probabilities: Tensor
) -> dict[str, Any]:
    counts = [int(chosen[..., expert].sum()) for expert in range(config.experts)]
    tokens = chosen[..., 0].numel()
    shares = [count / sum(counts) for count in counts if count]
    mean = probabilities.flatten(0, -2).mean(0).tolist()
    bias = w.get(f"{name}.router.correction")
    return {
        "max_load": max(counts) / tokens,
        "min_load": min(counts) / tokens,
        "used_experts": math.exp(-sum(share * math.log(share) for share in shares)),
        "entropy": -sum(p * math.log(p) for p in mean) / math.log(config.experts),
        "corrections": None if bias is None else (bias.min().item(), bias.max().item()),
    }


def best(config: ModelConfig, w: Mapping[str, Tensor], name: str, scores: Tensor) -> Tensor:
    """True for the experts that a token is sent to. Adds up how many tokens each gets in the
    gradient of its bias."""
    settings = config.router
    bias = w.get(f"{name}.router.correction")
    ranked = scores if bias is None else scores + bias.detach()
    groups = ranked.unflatten(-1, (settings.groups, -1))
    of_groups = groups.sort(-1, descending=True).values[..., : settings.group_best].sum(-1)
    least = of_groups.sort(-1, descending=True).values[..., [settings.groups_per_token - 1]]
    ranked = groups.masked_fill((of_groups < least).unsqueeze(-1), -9.0).flatten(-2)
    chosen = ranked >= ranked.sort(-1, descending=True).values[..., [config.experts_per_token - 1]]
    if bias is not None and bias.requires_grad:
        counts = chosen.flatten(0, -2).sum(0).to(bias.dtype)
        bias.grad = counts if bias.grad is None else bias.grad + counts
    return chosen


def mean_loss(
    config: ModelConfig,
    w: Mapping[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Losses]:
    """Of the tokens that count, of the routers and, without their weights, of modules for multi-token
    prediction and of the size of logits; and what the routers did."""
    losses = Losses()
    read = hidden(config, w, tokens, losses)
    mask = torch.ones(tokens.shape) if mask is None else mask
    logits = of_head(config, w, read).flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none")
    mean = (each * mask.flatten()).sum() / mask.sum()
    z = (logits.exp().sum(-1).log().square() * mask.flatten()).sum() / mask.sum()
    further = further_loss(config, ahead(config, w, read, tokens, targets, losses), mask)
    return mean, torch.stack(losses).sum(), further, z, losses


def further_loss(config: ModelConfig, each: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The mean over modules of their mean losses; 0 without modules."""
    means = [(loss * mask[:, k:]).sum() / mask[:, k:].sum() for k, loss in enumerate(each, 1)]
    return torch.stack(means).mean() if means else torch.zeros(())


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
        loss, router_loss, further, z, losses = mean_loss(config, w, tokens, targets, mask)
        extra = config.mtp_loss_weight * further + config.z_loss * z
        (loss + router_loss + extra).backward()
        grads = {name: p.grad.clone() for name, p in w.items() if p.grad is not None}
        norm_before = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        for p in balancing:
            assert p.grad is not None
            p.data += config.router_correction_speed * (p.grad.mean() - p.grad).sign()
        records.append(
            {
                "loss": loss.item(),
                "mtp_loss": further.item(),
                "z_loss": z.item() if config.z_loss else None,
                "routers": losses.routers,
                "norm": norm_before.item(),
                "grads": grads,
                "weights": {name: p.detach().clone() for name, p in trained_weights.items()},
            }
        )
    return records
