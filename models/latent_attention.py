"""Multi-head latent attention: queries, keys and values are made from short vectors that all heads
share.

    x [s, b, hidden] -> query latent, key/value latent (each with a norm), rotary part of the key     down, replicated
    query latent     -> queries of own heads; without a query latent, they are projected from x         up, over tp
    key/value latent -> keys without positions and values of own heads                                  up, over tp

Heads are sharded over tp. The projections down are on every rank. Under sequence parallelism each
rank computes them for its own shard of the sequence, and what all heads share is all-gathered: a
few times less than x. So one collective leads into the layer, and one of the same width leads out
of it in the backward pass, where each rank has gradients of its own heads. A model without a query
latent has the collectives of an ordinary projection besides.

Queries and keys have other widths than values. Zeros make them equally wide for the attention core:
zeros of queries and keys add nothing to scores, and zeros of values are cut off again. So the core
is the one of ordinary attention, and fused kernels, which want one width, serve it. The features of
a head's query and key are first those with rotary positions, then those without.

Recomputation of "attention" begins at the latents: the projections up are computed again too.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.comm.layout import Part
from megaprec.errors import UserError
from models.blocks import Attention
from models.rotate import Rotate
from parallel import collectives
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows, parameter
from parallel.linear import Input, Linear
from parallel.norms import RMSNorm


class ReplicatedLinear(nn.Module):
    """y = x @ W.T + b without collectives, with all of W on every tp rank. x: [s, b, input_size],
    or a shard of it.

    stack: the logical matrices that are stacked in W. Under sequence parallelism each rank has
        partial gradients.
    """

    def __init__(
        self, context: Context, input_size: int, stack: list[Rows], *, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.context = context
        partly = context.cut_sequence
        shapes = [(rows.name, rows.rows) for rows in stack]
        weights = [
            Part.cut(f"{name}.weight", (n, input_size), None, context.tp) for name, n in shapes
        ]
        self.weight = parameter(context, weights, std, partly)
        self.products = context.products(self.weight)
        biases = [Part.cut(f"{name}.bias", (n,), None, context.tp) for name, n in shapes]
        self.bias = parameter(context, biases, 0.0, partly) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        c = self.context
        return Linear.apply(x, self.weight, self.bias, Input.OWN, c.tp, c.deferred, self.products)


class LatentAttention(Attention):
    """Causal self-attention whose queries, keys and values are made from latents; `config.latent`
    has the sizes.

    Raises UserError if FP8 scales advance with every micro-batch and the projections up are to be
    computed again.
    """

    def _make_projections(self, layer: int) -> None:
        config = self.config
        context = self.context
        name = self.name
        sizes = self.config.latent
        if context.fp8.by_microbatch and "attention" in context.recompute.modules:
            raise UserError(
                'fp8.history = "te" advances the scales before the projections of '
                "model.latent are recomputed: set "
                'fp8.history = "step", or recompute other modules than attention'
            )
        std = config.initial_std("qkv")
        eps = sizes.norm_eps
        heads = config.heads
        down = [
            Rows(f"{name}.key_value_down", sizes.kv_rank),
            Rows(f"{name}.key_rope", sizes.rope_dim),
        ]
        if sizes.query_rank:
            down = [Rows(f"{name}.query_down", sizes.query_rank), *down]
            self.query_down_norm = RMSNorm(
                context, sizes.query_rank, name=f"{name}.query_down_norm", eps=eps
            )
        self.down = ReplicatedLinear(context, config.hidden, down, bias=config.qkv_bias, std=std)
        self.key_value_down_norm = RMSNorm(
            context, sizes.kv_rank, name=f"{name}.key_value_down_norm", eps=eps
        )
        from_latent = Input.OWN if sizes.query_rank else None
        query = Rows(
            f"{name}.query_up" if sizes.query_rank else f"{name}.query", heads * sizes.head_dim
        )
        read = sizes.query_rank or config.hidden
        self.query = ColumnParallelLinear(
            context, read, [query], bias=False, std=std, lies=from_latent
        )
        up = [
            Rows(f"{name}.key_up", heads * sizes.nope_dim),
            Rows(f"{name}.value_up", heads * sizes.value_dim),
        ]
        self.key_value = ColumnParallelLinear(
            context, sizes.kv_rank, up, bias=False, std=std, lies=Input.OWN
        )
        self.output = RowParallelLinear(
            context,
            heads * sizes.value_dim,
            config.hidden,
            name=f"{name}.output",
            bias=config.output_bias,
            std=config.initial_std("output", layer),
        )
        self.scale = config.attention_scalar**-0.5

    def key_value_shape(self) -> tuple[int, int]:
        sizes = self.config.latent
        return self.config.heads // self.context.tp.size, max(sizes.head_dim, sizes.value_dim)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        place: MicrobatchInfo | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        return self.context.recompute.run(
            "attention",
            partial(self._attend, rotary=rotary, microbatch=place, attn_mask=attn_mask),
            self._shared(x),
            into=self.output,
        )

    def _shared(self, x: Tensor) -> Tensor:
        """Return what is made of x before heads differ, [s, b, features]: `config.latent.width` of
        them on all ranks.

        Without a query latent, the queries of own heads come first, in place of it.
        """
        sizes = self.config.latent
        tp = self.context.tp
        made = self.down(x).split((sizes.query_rank, sizes.kv_rank, sizes.rope_dim), -1)
        parts = [self.key_value_down_norm(made[1]), made[2]]
        if sizes.query_rank:
            parts = [self.query_down_norm(made[0]), *parts]
        shared = torch.cat(parts, -1)
        if self.context.cut_sequence:
            shared = collectives.gather(shared, tp)
        else:
            shared = collectives.copy(shared, tp)
        if sizes.query_rank:
            return shared
        return torch.cat((self.query(x), shared), -1)

    def _attend(
        self,
        y: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | None,
    ) -> Tensor:
        """Map what `_shared` returns to the output projection's input, [s, b, own features]."""
        sizes = self.config.latent
        query, latent, turning = y.split(
            (y.shape[-1] - sizes.kv_rank - sizes.rope_dim, sizes.kv_rank, sizes.rope_dim), -1
        )
        if sizes.query_rank:
            query = self.query(query)
        query = query.unflatten(-1, (-1, sizes.head_dim))  # [s, b, n, d]
        own = query.shape[2]
        turning = turning.unsqueeze(2)
        made = self.key_value(latent)
        still, value = (
            z.unflatten(-1, (own, -1))
            for z in made.split((own * sizes.nope_dim, own * sizes.value_dim), -1)
        )
        assert rotary is not None
        query, turning = (Rotate.apply(z, *rotary, self.context.leaves) for z in (query, turning))
        key = torch.cat((turning.expand(-1, -1, own, -1), still), -1)
        _, wide = self.key_value_shape()
        query, key, value = (
            F.pad(z, (0, wide - z.shape[-1])).permute(1, 2, 0, 3).to(self.context.plan.attention)
            for z in (query, key, value)
        )
        mixed = self._core_attention(query, key, value, microbatch, attn_mask)[
            ..., : sizes.value_dim
        ]
        return mixed.permute(2, 0, 1, 3).flatten(2)
