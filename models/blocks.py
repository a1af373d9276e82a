"""A decoder layer: attention, a column-parallel and a row-parallel layer, followed by a
feed-forward or experts.

Shapes: s sequence, b micro-batch, h hidden, n heads of this rank, d head_dim. Activations are [s,
b, h]. Under sequence parallelism they are [s / tp, b, h] between blocks. A rank has heads / tp
query heads; if there are fewer key/value heads than ranks, neighbouring ranks hold the same one.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from megaprec.precision.gemm import slow_bf16, slow_half
from models import bf16_attention, cpu_attention, flash_windows, sink_attention
from models.config import ModelConfig
from models.context_attention import attend_over_ranks
from models.flash_windows import Documents
from models.mlp import MLP
from models.moe import MixtureOfExperts
from models.packing import causal_mask
from models.partial_attention import Rule
from models.regions import HeadRule, add_norm, heads, norm_of
from models.rotate import Rotate
from models.softcap import softcap
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, attention_dropout, dropout
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, parameter
from parallel.linear import Widen
from parallel.norms import LayerNorm, RMSNorm
from parallel.sharded_norm import ShardedRMSNorm


def make_norm(config: ModelConfig, context: Context, name: str) -> nn.Module:
    """Return the norm of the model's family, over the hidden features."""
    if config.norm == "layer":
        return LayerNorm(context, config.hidden, name=name, eps=config.norm_eps)
    offset = float(config.norm_unit_offset)
    return RMSNorm(context, config.hidden, name=name, eps=config.norm_eps, offset=offset)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, over all earlier tokens or the last
    `window` ones.

    Query, key and value enter the two attention products in the plan's `attention` dtype,
    independently of the layers' dtype. Scores and weights are in the sensitive dtype, or rounded to
    the plan's `scores` dtype.
    attn_mask: bool [b, 1, s, s], True where a token (row) attends to another, if the mask differs
        between samples; or the documents that attention is restricted to. Under context
        parallelism, which makes masks in parts, it is int64 [b, whole s] instead: the number of
        each token's document.
    """

    def __init__(self, config: ModelConfig, context: Context, name: str, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.name = name
        if config.attention_scalar == config.head_dim:
            self.scale = None
        else:
            self.scale = config.attention_scalar**-0.5
        self._make_projections(layer)
        own_heads = Part.cut(f"{name}.sinks.weight", (config.heads,), 0, context.tp)
        if config.attention_sinks:
            self.sinks = parameter(context, [own_heads], config.init_std)
        else:
            self.sinks = None

    def _make_projections(self, layer: int) -> None:
        config = self.config
        context = self.context
        name = self.name
        kv_shards = min(context.tp.size, config.kv_heads)
        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
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
            self.query_norm, self.key_norm = (self._make_qk_norm(rows) for rows in stack[:2])
        std = config.initial_std("output", layer)
        self.output = RowParallelLinear(
            context, width, config.hidden, name=f"{name}.output", bias=config.output_bias, std=std
        )

    def _make_qk_norm(self, rows: Rows) -> nn.Module:
        c = self.config
        name = f"{rows.name}_norm"
        offset = float(self.config.norm_unit_offset)
        if c.qk_norm_over == "all":
            return ShardedRMSNorm(
                self.context,
                rows.rows,
                name=name,
                eps=c.norm_eps,
                shards=rows.shards,
                offset=offset,
            )
        return RMSNorm(self.context, c.head_dim, name=name, eps=c.norm_eps, own=True, offset=offset)

    def kept_sizes(self) -> tuple[int, int]:
        """Return the number of own key/value heads, and the width in which the attention core gets
        each of them."""
        return self.own[1] // self.config.head_dim, self.config.head_dim

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        return self.context.recompute.run(
            "attention",
            partial(self._attend, rotary=rotary, place=place, attn_mask=attn_mask),
            self.qkv(x),
            into=self.output,
        )

    def _attend(
        self,
        y: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Map the query-key-value projection's output, [s, b, own features], to the output
        projection's input."""
        query, key, value = self._heads_by_region(y, rotary) or self._heads(y, rotary)
        return self._mix(query, key, value, place, attn_mask).permute(2, 0, 1, 3).flatten(2)

    def _heads(
        self, y: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, [b, n, s, d] each, in the dtype of attention."""
        query, key, value = y.split(self.own, -1)
        over_all = self.config.qk_norm_over == "all"
        if self.config.qk_norm and over_all:
            query = self.query_norm(query)
            key = self.key_norm(key)
        # [s, b, n, d]
        query, key, value = (
            z.unflatten(-1, (-1, self.config.head_dim)) for z in (query, key, value)
        )
        if self.config.qk_norm and not over_all:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if rotary is not None:
            query, key = (Rotate.apply(z, *rotary, self.context.leaves) for z in (query, key))
        query, key, value = (
            z.permute(1, 2, 0, 3).to(self.context.plan.attention) for z in (query, key, value)
        )
        if rotary is not None or self.config.qk_norm:
            value = value.contiguous()  # a view would keep the whole product that it belongs to
        return query, key, value

    def _heads_by_region(
        self, y: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `_heads` does, as one region; None if that is not wanted or its norms hinder
        it."""
        if not self.context.leaves.by_region:
            return None
        query = key = (None, (None, None))
        if self.config.qk_norm:
            query = norm_of(self.query_norm)
            key = norm_of(self.key_norm)
            if query is None or key is None:
                return None
        rule = HeadRule(
            tuple(self.own), self.config.head_dim, self.context.plan.attention, query[0]
        )
        return self.context.leaves.through(
            heads, y, *(rotary or (None, None)), query[1][0], key[1][0], rule
        )

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Return attention of query, key, value [b, n, s, d] each, as [b, n, s, d] in the dtype of
        products.

        Key and value may have fewer heads than query.
        """
        if self.context.cp.size > 1:
            assert not isinstance(attn_mask, Documents)  # they come as numbers
            return self._mix_over_ranks(query, key, value, place, attn_mask)
        plan = self.context.plan
        softcapped = self.config.attention_softcap > 0
        rounded = plan.scores != plan.sensitive
        # it always rounds scores
        by_products = self.sinks is None and bf16_attention.worthwhile(query, rounded)
        unfused = softcapped or (self.sinks is not None and not sink_attention.fuses(query))
        plainly = (
            (rounded and not by_products)
            or unfused
            or (place is not None and self.config.attention_dropout > 0)
        )
        window = 0 < self.config.window < query.shape[2]
        documents = attn_mask if isinstance(attn_mask, Documents) else None
        bounded = documents is not None or (window and attn_mask is None)
        if (
            bounded
            and not (plainly or self.sinks is not None)
            and flash_windows.worthwhile(query, key, value)
        ):
            within = self.config.window if window else 0
            return flash_windows.attend(query, key, value, documents, within, self.scale).to(
                plan.compute
            )
        if isinstance(attn_mask, Documents):
            attn_mask = attn_mask.mask(self.config.window)
        groups = query.shape[1] // key.shape[1]
        grouped = (
            groups > 1
            and not plainly
            and (by_products or takes_groups(query, attn_mask is not None or window))
        )
        if groups > 1 and not grouped:
            key = key.repeat_interleave(groups, 1)
            value = value.repeat_interleave(groups, 1)
        if plainly:
            return self._mix_plainly(query, key, value, place, attn_mask).to(plan.compute)
        if query.dtype == torch.float16 and slow_half(query):
            query = query.float()
            key = key.float()
            value = value.float()
        if attn_mask is None and window:
            attn_mask = self._mask(query)
        if by_products:
            return bf16_attention.attend(query, key, value, attn_mask, scale=self.scale).to(
                plan.compute
            )
        if self.sinks is not None:
            sinks = Widen.apply(self.sinks, plan.sensitive)
            return sink_attention.attend(query, key, value, sinks, attn_mask, self.scale).to(
                plan.compute
            )
        if slow_bf16(query):
            return cpu_attention.attend(query, key, value, attn_mask, self.scale).to(plan.compute)
        causal = attn_mask is None
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )
        return mixed.to(plan.compute)

    def _mix_over_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        place: MicrobatchInfo | None,
        documents: Tensor | None,
    ) -> Tensor:
        """Return attention of this rank's tokens over those of all ranks of cp. documents: int64
        [b, whole s]."""
        c = self.context
        wide = torch.promote_types(self.context.plan.sensitive, torch.float32)
        drop = None
        if place is not None and self.config.attention_dropout > 0:
            drop = partial(self._drop_weights, place)
        scale = self.config.attention_scalar**-0.5 if self.scale is None else self.scale
        rule = Rule(scale, self.config.window, documents, drop, self.config.attention_softcap)
        sinks = None if self.sinks is None else Widen.apply(self.sinks, c.plan.sensitive)
        return attend_over_ranks(query, key, value, c.cp, rule, c.ring, wide, sinks).to(
            c.plan.compute
        )

    def _drop_weights(
        self, place: MicrobatchInfo, weights: Tensor, queries: range, keys: range
    ) -> Tensor:
        c = self.config
        name = f"{self.name}.weights"
        return attention_dropout(
            weights, c.attention_dropout, self.context, name, place, (queries, keys)
        )

    def _mix_plainly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | None,
    ) -> Tensor:
        """Return unfused attention, in the dtype of the weights.

        The fused kernel draws its dropout from a generator that does not know the layout, it rounds
        neither scores nor weights, and it has no soft cap.
        """
        rounded = self.context.plan.scores
        made = torch.promote_types(rounded, torch.float32) if slow_half(query) else rounded
        scores = query.to(made) @ key.to(made).transpose(2, 3) / self.config.attention_scalar**0.5
        attends = self._mask(query) if attn_mask is None else attn_mask
        scores = (
            softcap(scores, self.config.attention_softcap)
            .to(rounded)
            .masked_fill(~attends, float("-inf"))
        )
        sinks = None if self.sinks is None else Widen.apply(self.sinks, self.context.plan.sensitive)
        weights = sink_attention.softmax(scores, sinks)
        weights = attention_dropout(
            weights, self.config.attention_dropout, self.context, f"{self.name}.weights", place
        )
        return weights.to(made) @ value.to(made)

    def _mask(self, query: Tensor) -> Tensor:
        """Return the mask that is the same in all samples: bool [s, s]."""
        return causal_mask(query.shape[2], self.config.window, None, query.device)


def takes_groups(query: Tensor, masked: bool) -> bool:
    """Return True if torch's fused attention is to read each key/value head for several query heads
    itself.

    Flash attention on CUDA does so (meta tensors stand for a GPU's). With a mask torch takes
    another kernel, which does not. The kernel for CPUs would sum the gradients of a key/value head
    in half precision (tests/models/test_gqa.py).
    """
    return query.device.type in ("cuda", "meta") and query.dtype.itemsize == 2 and not masked


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or both branches, each with its own norm, of
    the same x.

    `config.norm_at` places the norms before the branches, after them, or both. Dropout is optional.
    The residual stream x, input and output, has its own dtype; the branches compute in the dtype of
    products.
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
        self.config = config
        self.context = context
        self.name = name
        before = config.norm_at != "after"
        after = config.norm_at != "before"
        if before:
            self.attention_norm = make_norm(config, context, f"{name}.attention_norm")
        else:
            self.attention_norm = None
        self.attention = attention(config, context, f"{name}.attention", layer)
        if after:
            self.attention_post_norm = make_norm(config, context, f"{name}.attention_post_norm")
        else:
            self.attention_post_norm = None
        self.mlp_norm = make_norm(config, context, f"{name}.mlp_norm") if before else None
        self.mlp = (MixtureOfExperts if config.experts else MLP)(
            config, context, f"{name}.mlp", layer
        )
        self.mlp_post_norm = make_norm(config, context, f"{name}.mlp_post_norm") if after else None

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        stream = self.config.dropout_at == "stream"
        x = self._drop(x, "input", place) if stream else x
        attend = partial(self.attention, rotary=rotary, place=place, attn_mask=attn_mask)
        mixed = self._drop(
            self._branch(x, self.attention_norm, attend, self.attention_post_norm),
            "attention",
            place,
        )
        attended, fed = self._feed_by_region(x, mixed, place) or self._add_and_feed(x, mixed, place)
        return (attended + (fed if stream else self._drop(fed, "mlp", place))).to(x.dtype)

    def _add_and_feed(
        self, x: Tensor, mixed: Tensor, place: MicrobatchInfo | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + mixed, and the feed-forward's branch."""
        attended = (x + mixed).to(x.dtype)
        read = x if self.config.parallel_residual else attended
        return attended, self._branch(
            read, self.mlp_norm, lambda y: self._feed(y, place), self.mlp_post_norm
        )

    def _feed_by_region(
        self, x: Tensor, mixed: Tensor, place: MicrobatchInfo | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return what `_add_and_feed` does, with sum and norm as one region; None if that is not
        wanted or hindered."""
        c = self.context
        if not c.leaves.by_region or self.config.parallel_residual or "norm" in c.recompute.modules:
            return None
        norm = norm_of(self.mlp_norm)
        if norm is None:
            return None
        rule, vectors = norm
        attended, normal = c.leaves.through(add_norm, x, mixed, *vectors, rule)
        fed = self._feed(normal, place)
        return attended, fed if self.mlp_post_norm is None else self.mlp_post_norm(fed)

    def _branch(
        self,
        x: Tensor,
        before: nn.Module | None,
        compute: Callable[[Tensor], Tensor],
        after: nn.Module | None,
    ) -> Tensor:
        if before is None:
            y = compute(x.to(self.context.plan.compute))
        else:
            y = self.context.recompute.run("norm", before, x, into=compute)
        return y if after is None else after(y)

    def _feed(self, y: Tensor, place: MicrobatchInfo | None) -> Tensor:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(y, place)
        return self.mlp(y)

    def _drop(self, x: Tensor, branch: str, place: MicrobatchInfo | None) -> Tensor:
        rate = self.config.dropout
        if rate:
            return dropout(x, rate, self.context, f"{self.name}.{branch}", place)
        return x
