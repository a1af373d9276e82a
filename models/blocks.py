"""What a decoder layer is made of: attention and feed-forward, each a column-parallel and a row-parallel layer.

Shapes: s sequence, b micro-batch, h hidden, n heads of this rank, d head_dim. Activations are [s, b, h], and
[s / tp, b, h] between blocks under sequence parallelism. A rank has heads / tp query heads; when there are fewer
key/value heads than ranks, neighbours hold the same one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.gemm import slow_half
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import Place, attention_dropout, dropout
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows
from parallel.norms import LayerNorm, RMSNorm


def make_norm(config: ModelConfig, context: Context, name: str) -> nn.Module:
    """The norm of the family, over the hidden features."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(context, config.hidden, name=name, eps=config.norm_eps)


def output_std(config: ModelConfig) -> float:
    """Of layers that write into the residual stream: smaller the more of them there are (GPT-2)."""
    return config.init_std / (2 * config.layers) ** 0.5


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, config: ModelConfig, context: Context, name: str) -> None:
        super().__init__()
        self.config, self.context, self.name = config, context, name
        kv_shards = min(context.tp.size, config.kv_heads)
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        stack = [
            Rows(f"{name}.query", width),
            Rows(f"{name}.key", kv_width, kv_shards),
            Rows(f"{name}.value", kv_width, kv_shards),
        ]
        self.own = [r.rows // (r.shards or context.tp.size) for r in stack]
        self.qkv = ColumnParallelLinear(context, config.hidden, stack, bias=config.bias, std=config.init_std)
        self.output = RowParallelLinear(
            context, width, config.hidden, name=f"{name}.output", bias=config.bias, std=output_std(config)
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, place: Place | None) -> Tensor:
        y, _ = self.qkv(x)
        query, key, value = (z.unflatten(-1, (-1, self.config.head_dim)) for z in y.split(self.own, -1))  # [s, b, n, d]
        if rotary is not None:
            query, key = Rotate.apply(query, *rotary), Rotate.apply(key, *rotary)
        query, key, value = (z.permute(1, 2, 0, 3) for z in (query, key, value))
        mixed = self._mix(query, key, value, place)
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))[0]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, place: Place | None) -> Tensor:
        """[b, n, s, d] each, with fewer key/value heads; softmax in the sensitive dtype. Returns [b, n, s, d]."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if place is not None and self.config.attention_dropout > 0:
            return self._mix_with_dropout(query, key, value, place)
        if slow_half(query):
            query, key, value = query.float(), key.float(), value.float()
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).to(self.context.plan.compute)

    def _mix_with_dropout(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> Tensor:
        """Written out, because the fused kernel draws its mask from a generator that knows nothing of layouts."""
        wide = self.context.plan.sensitive
        scores = query.to(wide) @ key.to(wide).transpose(2, 3) / self.config.head_dim**0.5
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        weights = attention_dropout(weights, self.config.attention_dropout, self.context, f"{self.name}.weights", place)
        return (weights @ value.to(wide)).to(query.dtype)


class MLP(nn.Module):
    """gelu(x up) down, or gated: (silu(x gate) * (x up)) down."""

    def __init__(self, config: ModelConfig, context: Context, name: str) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        stack = [Rows(f"{name}.{part}", config.ffn) for part in (("gate", "up") if self.gated else ("up",))]
        self.inner = ColumnParallelLinear(context, config.hidden, stack, bias=config.bias, std=config.init_std)
        self.down = RowParallelLinear(
            context, config.ffn, config.hidden, name=f"{name}.down", bias=config.bias, std=output_std(config)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x)
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return self.down(y)[0]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    def __init__(self, config: ModelConfig, context: Context, name: str) -> None:
        super().__init__()
        self.config, self.context, self.name = config, context, name
        self.attention_norm = make_norm(config, context, f"{name}.attention_norm")
        self.attention = Attention(config, context, f"{name}.attention")
        self.mlp_norm = make_norm(config, context, f"{name}.mlp_norm")
        self.mlp = MLP(config, context, f"{name}.mlp")

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, place: Place | None) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), rotary, place), "attention", place)
        return x + self._drop(self.mlp(self.mlp_norm(x)), "mlp", place)

    def _drop(self, x: Tensor, branch: str, place: Place | None) -> Tensor:
        return dropout(x, self.config.dropout, self.context, f"{self.name}.{branch}", place)


class Rotate(torch.autograd.Function):
    """Turns the pairs (x[i], x[i + d/2]) by the angles of their position, in the dtype of the tables, by promotion.

    x [s, b, n, d]; cosine, sine [s, 1, 1, d/2]. The backward pass turns the other way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad, cosine, -sine), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.empty_like(x)
    half = x.shape[-1] // 2
    turned[..., :half] = first * cosine - second * sine
    turned[..., half:] = second * cosine + first * sine
    return turned


def rotary_tables(config: ModelConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cosine, sine), each [length, 1, 1, head_dim / 2]: position times base ** (-2 i / head_dim), in float64 first."""
    frequency = config.rope_base ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)
