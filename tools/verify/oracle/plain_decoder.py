"""A plain decoder: a function of tokens and of weights by logical name, made of torch's own
functions, on one process. It is as short and as obvious as it can be; that is its use."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from tools.verify.oracle.plain_attention import attention
from tools.verify.oracle.plain_feed_forward import Routing, experts, mlp
from tools.verify.oracle.plain_parts import (
    Weights,
    capped,
    linear,
    norm,
    norm_if_there,
    with_scaled_gradient,
)
from tools.verify.oracle.plain_recurrent import delta_net, mamba


def logits(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Return logits [b, s, vocab] of tokens [b, s]."""
    return of_head(config, weights, hidden(config, weights, tokens, []))


def of_head(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """Return the logits of what the head reads."""
    weight = weights["embedding.weight" if config.tied else "head.weight"]
    weight = with_scaled_gradient(weight, config.head_grad_scale)
    return capped(F.linear(x, weight) / config.logit_divisor, config.final_softcap)


def hidden(
    config: ModelConfig,
    weights: Weights,
    tokens: Tensor,
    routings: list[Routing],
    positions: Tensor | None = None,
) -> Tensor:
    """Return what the head reads, [b, s, hidden].

    tokens: int64 [b, s]. routings: receives those of all routers. positions: of the tokens, [b, s];
        None: each sample's from 0.
    """
    if positions is None:
        positions = _places(tokens)
    x = _embedded(config, weights, tokens)
    if config.positions == "learned":
        x = x + F.embedding(positions, weights["positions.weight"])
    if config.embedding_norm:
        x = norm(config, weights, "embedding_norm", x)
    for layer in range(config.layers):
        x = _layer(config, weights, layer, x, positions, routings)
    return norm(config, weights, "final_norm", x)


def ahead(
    config: ModelConfig,
    weights: Weights,
    x: Tensor,
    tokens: Tensor,
    targets: Tensor,
    routings: list[Routing],
) -> list[Tensor]:
    """Return the loss of each module of multi-token prediction at each position, [b, s - k].

    x: what the head reads. routings: receives those of the modules.

    Position i of module k reads token i + k and predicts target i + k; the last k positions read
    token 0.
    """
    losses: list[Tensor] = []
    length = tokens.shape[1]
    last = config.layers - 1
    for k in range(1, config.mtp_layers + 1):
        name = f"mtp.{k - 1}"
        padding = torch.zeros_like(tokens[:, :k])
        shifted_tokens = torch.cat((tokens[:, k:], padding), 1)
        embedded = _embedded(config, weights, shifted_tokens[:, :length])
        normal_embedded = norm(config, weights, f"{name}.embedding_norm", embedded)
        normal_hidden = norm(config, weights, f"{name}.hidden_norm", x)
        joined = torch.cat((normal_embedded, normal_hidden), -1)
        projected = linear(weights, f"{name}.projection", joined)
        # a module's layer has the settings of the model's last layer, and weights of its own
        own_weights = _renamed(weights, name, f"layers.{last}")
        x = _layer(config, own_weights, last, projected, _places(tokens), routings)
        x = norm(config, weights, f"{name}.final_norm", x)
        num_predicting = max(0, length - k)
        module_logits = of_head(config, weights, x[:, :num_predicting])
        loss = F.cross_entropy(module_logits.transpose(1, 2), targets[:, k:], reduction="none")
        losses.append(loss)
    return losses


def _renamed(weights: Weights, module: str, layer_name: str) -> Weights:
    """Return the weights of a module under the names of a layer."""
    renamed: dict[str, Tensor] = {}
    for name, values in weights.items():
        if name.startswith(f"{module}."):
            own_name = name.removeprefix(f"{module}.")
            renamed[f"{layer_name}.{own_name}"] = values
    return renamed


def mean_over_modules(losses: list[Tensor], counts: Tensor) -> Tensor:
    """Return the mean over modules of multi-token prediction of the means of their losses; 0
    without modules.

    losses: the result of `ahead`, [b, s - k] of module k. counts: the weight of each target,
        [b, s].
    """
    if not losses:
        return torch.zeros(())
    means: list[Tensor] = []
    for k, loss in enumerate(losses, 1):
        counted = counts[:, k:]
        weighted = loss * counted
        means.append(weighted.sum() / counted.sum())
    return torch.stack(means).mean()


def _places(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def _embedded(config: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    embedded = F.embedding(tokens, weights["embedding.weight"]) * config.embedding_scale
    return with_scaled_gradient(embedded, config.embedding_grad_scale)


def _layer(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,
    positions: Tensor,
    routings: list[Routing],
) -> Tensor:
    """Return what a layer makes of the residual stream x [b, s, hidden]: x and what its attention
    and its feed-forward add, or its one branch with `hybrid_pattern`."""
    name = f"layers.{layer}"
    if config.hybrid_pattern:
        summed = x + config.branch_scale * _branch(config, weights, layer, x, positions, routings)
        return summed * weights[f"{name}.scalar"] if config.layer_scalar else summed
    mix = delta_net if layer in config.delta_layers else attention
    normal = norm_if_there(config, weights, f"{name}.attention_norm", x)
    mixed = mix(config, weights, layer, normal, positions)
    branch = norm_if_there(config, weights, f"{name}.attention_post_norm", mixed)
    attended = x + config.branch_scale * branch
    if not config.shared_norm:
        fed_with = x if config.parallel_residual else attended
        normal = norm_if_there(config, weights, f"{name}.mlp_norm", fed_with)
    if config.experts and layer not in config.dense_layers:
        fed = experts(config, weights, f"{name}.mlp", normal, routings)
    else:
        fed = mlp(config, weights, f"{name}.mlp", normal)
    branch = norm_if_there(config, weights, f"{name}.mlp_post_norm", fed)
    summed = attended + config.branch_scale * branch
    return summed * weights[f"{name}.scalar"] if config.layer_scalar else summed


def _branch(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,
    positions: Tensor,
    routings: list[Routing],
) -> Tensor:
    """Return what the one branch of a layer of `hybrid_pattern` adds."""
    name = f"layers.{layer}"
    letter = config.hybrid_pattern[layer]
    if letter == "E":
        normal = norm(config, weights, f"{name}.mlp_norm", x)
        return experts(config, weights, f"{name}.mlp", normal, routings)
    if letter == "-":
        return mlp(config, weights, f"{name}.mlp", norm(config, weights, f"{name}.mlp_norm", x))
    mix = mamba if letter == "M" else attention
    return mix(
        config, weights, layer, norm(config, weights, f"{name}.attention_norm", x), positions
    )
