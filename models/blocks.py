"""A decoder layer: attention, a column-parallel and a row-parallel layer, followed by a feed-forward or experts.

Shapes: s sequence, b micro-batch, h hidden, n heads of this rank, d head_dim. Activations are [s, b, h]. Under sequence
parallelism they are [s / tp, b, h] between blocks. A rank has heads / tp query heads; if there are fewer key/value
heads than ranks, neighbouring ranks hold the same one.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.precision.gemm import slow_half
from models import bf16_attention
from models.config import ModelConfig
from models.mlp import MLP
from models.moe import MixtureOfExperts
from models.packing import causal_mask
from models.rope import Rotate
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, attention_dropout, dropout
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows
from parallel.norms import LayerNorm, RMSNorm


def make_norm(config: ModelConfig, context: Context, name: str) -> nn.Module:
    """Return the norm of the model's family, over the hidden features."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(context, config.hidden, name=name, eps=config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, over all earlier tokens or the last `window` ones.

    Query, key and value enter the two attention products in the plan's `attention` dtype, independently of the layers'
    dtype. Scores and weights are in the sensitive dtype, or rounded to the plan's `scores` dtype.
    attn_mask: bool [b, 1, s, s], True where a token (row) attends to another, if the mask differs between samples.
    """

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
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
        self.qkv = ColumnParallelLinear(
            context, config.hidden, stack, bias=config.qkv_bias, std=config.initial_std("qkv")
        )
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                RMSNorm(context, config.head_dim, name=f"{name}.{which}_norm", eps=config.norm_eps, own=True)
                for which in ("query", "key")
            )
        std = config.initial_std("output", layer)
        self.output = RowParallelLinear(
            context, width, config.hidden, name=f"{name}.output", bias=config.output_bias, std=std
        )

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        return self.context.recompute.run(
            "attention",
            partial(self._attend, rotary=rotary, place=place, attn_mask=attn_mask),
            self.qkv(x)[0],
            into=lambda mixed: self.output(mixed)[0],
        )

    def _attend(
        self, y: Tensor, rotary: tuple[Tensor, Tensor] | None, place: MicrobatchInfo | None, attn_mask: Tensor | None
    ) -> Tensor:
        """Map the query-key-value projection's output, [s, b, own features], to the output projection's input."""
        query, key, value = (z.unflatten(-1, (-1, self.config.head_dim)) for z in y.split(self.own, -1))  # [s, b, n, d]
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = Rotate.apply(query, *rotary), Rotate.apply(key, *rotary)
        query, key, value = (z.permute(1, 2, 0, 3).to(self.context.plan.attention) for z in (query, key, value))
        if rotary is not None or self.config.qk_norm:
            value = value.contiguous()  # a view would keep the whole product that it belongs to
        return self._mix(query, key, value, place, attn_mask).permute(2, 0, 1, 3).flatten(2)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, place: MicrobatchInfo | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Return attention of query, key, value [b, n, s, d] each, as [b, n, s, d] in the dtype of products.

        Key and value may have fewer heads than query.
        """
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        plan, by_products = self.context.plan, bf16_attention.worthwhile(query)  # by_products always rounds scores
        rounded = plan.scores != plan.sensitive and not by_products
        if rounded or (place is not None and self.config.attention_dropout > 0):
            return self._mix_plainly(query, key, value, place, attn_mask).to(plan.compute)
        if slow_half(query):
            query, key, value = query.float(), key.float(), value.float()
        if attn_mask is None and 0 < self.config.window < query.shape[2]:
            attn_mask = self._mask(query)
        if by_products:
            return bf16_attention.attend(query, key, value, attn_mask).to(plan.compute)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=attn_mask is None)
        return mixed.to(plan.compute)

    def _mix_plainly(
        self, query: Tensor, key: Tensor, value: Tensor, place: MicrobatchInfo | None, attn_mask: Tensor | None
    ) -> Tensor:
        """Return unfused attention, in the dtype of the weights.

        The fused kernel draws its dropout from a generator that does not know the layout, and it rounds neither scores
        nor weights.
        """
        rounded = self.context.plan.scores
        made = torch.promote_types(rounded, torch.float32) if slow_half(query) else rounded
        scores = query.to(made) @ key.to(made).transpose(2, 3) / self.config.head_dim**0.5
        attends = self._mask(query) if attn_mask is None else attn_mask
        weights = scores.to(rounded).masked_fill(~attends, float("-inf")).softmax(-1)
        weights = attention_dropout(weights, self.config.attention_dropout, self.context, f"{self.name}.weights", place)
        return weights.to(made) @ value.to(made)

    def _mask(self, query: Tensor) -> Tensor:
        """Return the mask that is the same in all samples: bool [s, s]."""
        return causal_mask(query.shape[2], self.config.window, None, query.device)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or both branches, each with its own norm, of the same x.

    Dropout is optional. The residual stream x, input and output, has its own dtype; the branches compute in the dtype
    of products.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
        attention: type[Attention] = Attention,
    ) -> None:
        super().__init__()
        self.config, self.context, self.name = config, context, name
        self.attention_norm = make_norm(config, context, f"{name}.attention_norm")
        self.attention = attention(config, context, f"{name}.attention", layer)
        self.mlp_norm = make_norm(config, context, f"{name}.mlp_norm")
        self.mlp = (MixtureOfExperts if config.experts else MLP)(config, context, f"{name}.mlp", layer)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        stream = self.config.dropout_at == "stream"
        x = self._drop(x, "input", place) if stream else x
        normally = partial(self.context.recompute.run, "norm")
        mixed = normally(self.attention_norm, x, into=lambda y: self.attention(y, rotary, place, attn_mask))
        attended = (x + self._drop(mixed, "attention", place)).to(x.dtype)
        fed = normally(
            self.mlp_norm, x if self.config.parallel_residual else attended, into=lambda y: self._feed(y, place)
        )
        return (attended + (fed if stream else self._drop(fed, "mlp", place))).to(x.dtype)

    def _feed(self, y: Tensor, place: MicrobatchInfo | None) -> Tensor:
        return self.mlp(y, place) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(y)

    def _drop(self, x: Tensor, branch: str, place: MicrobatchInfo | None) -> Tensor:
        return dropout(x, self.config.dropout, self.context, f"{self.name}.{branch}", place)
