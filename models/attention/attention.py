"""Self-attention of a decoder layer, sharded over tensor-parallel ranks by heads.

Shapes: s sequence, b micro-batch, n heads of this rank, d head_dim. A rank has heads / tp query
heads; if there are fewer key/value heads than ranks, neighbouring ranks hold the same one.
"""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megaprec.comm.layout import Part
from models.attention.flash_windows import Documents
from models.attention.kernels import KERNELS, KernelInputs, choose_kernel, describe_call
from models.attention.regions import HeadRule, RegionNorm, split_heads
from models.attention.rope import RotaryTables, Rotate
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, parameter
from parallel.norms import RMSNorm
from parallel.sharded_norm import ShardedRMSNorm

if TYPE_CHECKING:
    from models.attention.largest_logits import LargestLogits


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, over all earlier tokens or the last
    `window` ones.

    Query, key and value enter the two attention products in the plan's `attention` dtype,
    independently of the layers' dtype. Scores and weights are in the sensitive dtype, or rounded to
    the plan's `scores` dtype.
    name: begins the logical names of its parameters.
    layer: the number of its layer, by which initial weights may be scaled.
    attn_mask: bool [b, 1, s, s], True where a token (row) attends to another, if the mask differs
        between samples; or the documents that attention is restricted to. Under context
        parallelism, which makes masks in parts, it is int64 [b, whole s] instead: the number of
        each token's document.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: Context,
        name: str,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.name = name
        # the factor of scores; None: the usual one, which kernels compute from the width of a head
        has_usual_scale = config.attention_scalar == config.head_dim
        self.scale = None if has_usual_scale else config.attention_scalar**-0.5
        self._make_projections(layer)
        # set by an engine whose reports have them
        self.largest_logits: LargestLogits | None = None
        self.sinks = None
        if config.attention_sinks:
            local_heads = Part.cut(f"{name}.sinks.weight", (config.heads,), 0, context.tp)
            self.sinks = parameter(context, [local_heads], config.init_std)

    def _make_projections(self, layer: int) -> None:
        """Make the projections to heads and from them, and the norms of queries, keys and values.

        layer: the number of the layer, by which initial weights may be scaled.
        """
        config = self.config
        context = self.context
        name = self.name
        # Ranks beyond the number of key/value heads hold the same ones as their neighbours.
        kv_shards = min(context.tp.size, config.kv_heads)
        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        stack = [
            Rows(f"{name}.query", width, heads=config.heads),
            Rows(f"{name}.key", kv_width, kv_shards, config.kv_heads),
        ]
        if not config.global_key_as_value:
            stack.append(Rows(f"{name}.value", kv_width, kv_shards, config.kv_heads))
        # this rank's features of query, key and value, or of query and key alone
        self.local_widths = [matrix.rows // (matrix.shards or context.tp.size) for matrix in stack]
        self.gate_width = 0
        if config.attention_gate:
            stack.append(Rows(f"{name}.gate", width, heads=config.heads))
            self.gate_width = width // context.tp.size
        self.qkv = ColumnParallelLinear(
            context,
            config.hidden,
            stack,
            bias=config.qkv_bias,
            std=config.initial_std("qkv"),
        )
        if config.qk_norm:
            self.query_norm = self._make_qk_norm(stack[0])
            self.key_norm = self._make_qk_norm(stack[1])
        self.value_norm: RMSNorm | None = None
        if config.value_norm:
            self.value_norm = self._make_value_norm()
        # Parameters lie in the optimizer's buffers in the order in which they are made.
        self.output = RowParallelLinear(
            context,
            width,
            config.hidden,
            name=f"{name}.output",
            bias=config.output_bias,
            std=config.initial_std("output", layer),
        )

    def _make_qk_norm(self, matrix: Rows) -> nn.Module:
        """Return the norm of queries or keys: over all heads, or over each one.

        matrix: that of the projection to queries or keys.
        """
        config = self.config
        name = f"{matrix.name}_norm"
        eps = config.norm_eps
        offset = float(config.norm_unit_offset)
        # All heads lie on several ranks of tp, which sum their squares.
        if config.qk_norm_over == "all":
            return ShardedRMSNorm(
                self.context,
                matrix.rows,
                name=name,
                eps=eps,
                shards=matrix.shards,
                offset=offset,
            )
        return RMSNorm(
            self.context,
            config.head_dim,
            name=name,
            eps=eps,
            differs_over_tp=True,
            offset=offset,
            weighted=config.norm_weight,
        )

    def _make_value_norm(self) -> RMSNorm:
        """Return the norm of each head's value, which has no weight."""
        return RMSNorm(
            self.context,
            self.config.head_dim,
            name=f"{self.name}.value_norm",
            eps=self.config.norm_eps,
            differs_over_tp=True,
            weighted=False,
        )

    def key_value_shape(self) -> tuple[int, int]:
        """Return the number of this rank's key/value heads, and the width of each of them in
        `_core_attention`."""
        _, key_width, *_ = self.local_widths
        return key_width // self.config.head_dim, self.config.head_dim

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Map x [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism, to a tensor of
        the same shape.

        rotary: the tables of `rope.py`; None: heads are not rotated.
        microbatch: the micro-batch; None (evaluation) drops nothing.
        """
        return self.context.recompute.run_forward(
            "attention",
            partial(self._attend, rotary=rotary, microbatch=microbatch, attn_mask=attn_mask),
            self._project(x),
            # given here, so that attention's result is not kept for the backward pass
            then=self.output,
        )

    def _project(self, x: Tensor) -> Tensor:
        """Return what a layer keeps of x if it recomputes attention: [s, b, features]."""
        return self.qkv(x)

    def _attend(
        self,
        projected: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Map what `_project` returns to the output projection's input, [s, b, local features]."""
        gate = None
        if self.gate_width:
            projected, gate = projected.split([sum(self.local_widths), self.gate_width], -1)
        heads = self._split_heads_by_region(projected, rotary)
        if heads is None:
            heads = self._split_heads(projected, rotary)
        query, key, value = heads
        attended = self._core_attention(query, key, value, microbatch, attn_mask)
        # [b, n, s, d] -> [s, b, n * d]
        attended = attended.permute(2, 0, 1, 3).flatten(2)
        if gate is None:
            return attended
        plan = self.context.plan
        opened = attended * gate.to(plan.sensitive).sigmoid()
        return opened.to(plan.compute)

    def _normed_heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, [s, b, n, d] each, after the norms that they have."""
        config = self.config
        norms_all_heads = config.qk_norm and config.qk_norm_over == "all"
        norms_each_head = config.qk_norm and not norms_all_heads
        query, key, *values = projected.split(self.local_widths, -1)
        # without a projection to values (`global_key_as_value`) that to keys makes both
        value = values[0] if values else key
        if norms_all_heads:
            query = self.query_norm(query)
            key = self.key_norm(key)
        query = query.unflatten(-1, (-1, config.head_dim))
        key = key.unflatten(-1, (-1, config.head_dim))
        value = value.unflatten(-1, (-1, config.head_dim))
        if norms_each_head:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if self.value_norm is not None:
            value = self.value_norm(value)
        return query, key, value

    def _split_heads(
        self, projected: Tensor, rotary: RotaryTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, [b, n, s, d] each, normalized and rotated, in the dtype of
        attention.

        projected: [s, b, features]. rotary: None: heads are not rotated.
        """
        config = self.config
        query, key, value = self._normed_heads(projected)
        if rotary is not None:
            cosine, sine, *query_factors = rotary
            query = Rotate.apply(query, cosine, sine, self.context.leaves)
            key = Rotate.apply(key, cosine, sine, self.context.leaves)
            # one, if queries grow with their position, else none
            for factor in query_factors:
                query = query * factor
        dtype = self.context.plan.attention
        query, key, value = (x.permute(1, 2, 0, 3).to(dtype) for x in (query, key, value))
        if rotary is not None or config.qk_norm:
            # Query and key are tensors of their own by now. A value that stays a view would keep
            # the whole product that it belongs to.
            value = value.contiguous()
        return query, key, value

    def _split_heads_by_region(
        self, projected: Tensor, rotary: RotaryTables | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return query, key and value as `_split_heads` does, computed as one region
        (`parallel.regions`), which torch may compile as a whole.

        None if regions are not wanted, or if this layer has what no region computes: factors of
        queries, norms of values, values without a projection, or norms of other kinds.
        """
        leaves = self.context.leaves
        has_factors = self.config.rope_scaling.query_beta > 0
        makes_values = self.config.value_norm or self.config.global_key_as_value
        if not leaves.by_region or has_factors or makes_values:
            return None
        norm_rule = None
        query_weight = None
        key_weight = None
        if self.config.qk_norm:
            query_norm = RegionNorm.of(self.query_norm)
            key_norm = RegionNorm.of(self.key_norm)
            if query_norm is None or key_norm is None:
                return None
            norm_rule = query_norm.rule
            query_weight = query_norm.weight
            key_weight = key_norm.weight
        by_head = self._reads_by_head(projected)
        head_rule = HeadRule(
            tuple(self.local_widths),
            self.config.head_dim,
            self.context.plan.attention,
            norm_rule,
            by_head,
        )
        # A region has tensors and one rule as arguments, so the tables come one by one.
        cosine, sine = (None, None) if rotary is None else rotary
        query, key, value = leaves.call_region(
            split_heads,
            projected,
            cosine,
            sine,
            query_weight,
            key_weight,
            head_rule,
        )
        if by_head:
            return query, key, value
        # [s, b, n, d] -> [b, n, s, d]
        return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    def _reads_by_head(self, projected: Tensor) -> bool:
        """Return True if query, key and value should be contiguous as [b, n, s, d], head after
        head."""
        # a CPU's products read them so, and keys and values that travel over cp are sent so
        return projected.device.type == "cpu" or self.context.cp.size > 1

    def _core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Return attention of query, key, value [b, n, s, d] each, as [b, n, s, d] in the dtype of
        products.

        Key and value may have fewer heads than query. Collective over cp.
        """
        inputs = KernelInputs(
            config=self.config,
            context=self.context,
            name=self.name,
            scale=self.scale,
            sinks=self.sinks,
            microbatch=microbatch,
            mask=attn_mask,
        )
        # of training passes alone
        if self.largest_logits is not None and microbatch is not None:
            self.largest_logits.note(query, key, inputs)
        kernel = choose_kernel(describe_call(query, key, value, inputs))
        return KERNELS[kernel](query, key, value, inputs).to(self.context.plan.compute)
