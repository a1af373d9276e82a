"""Multi-head latent attention: queries, keys and values are made from short shared vectors.

    down, replicated   x [s, b, hidden] -> query latent and key/value latent (each with a norm), and
                                           the rotary part of the key
    up, over tp        query latent     -> queries of local heads; without a query latent they are
                                           projected from x
    up, over tp        key/value latent -> keys without positions, and values, of local heads

Heads are sharded over tp. The projections down are on every rank. Under sequence parallelism each
rank computes them for its own shard of the sequence, and what all heads share is all-gathered: a
few times less than x. So one collective leads into the layer, and one of the same width leads out
of it in the backward pass, where each rank has gradients of its local heads. A model without a
query latent has the collectives of an ordinary projection besides.

Queries and keys have other widths than values. Zeros make them equally wide for the attention core:
zeros of queries and keys add nothing to scores, and zeros of values are cut off again. So the core
is the one of ordinary attention, and fused kernels, which want one width, serve it. The features of
a head's query and key are first those with rotary positions, then those without.

Recomputation of "attention" begins at the latents: the projections up are computed again too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.errors import UserError
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.rope import RotaryTables, Rotate
from models.latent import Latent
from parallel.dropout import MicrobatchInfo
from parallel.layers import ColumnParallelLinear, RowParallelLinear, Rows
from parallel.linear import InputLayout
from parallel.norms import RMSNorm
from parallel.replicated_linear import ReplicatedLinear, whole_on_all_ranks


class LatentAttention(Attention):
    """Causal self-attention whose queries, keys and values are made from latents; `config.latent`
    has the sizes.

    Raises UserError if FP8 scales advance with every micro-batch and the projections up are to be
    computed again.
    """

    def _make_projections(self, layer: int) -> None:
        """Make the projections down to latents and up to this rank's heads, the norms of latents,
        and the output projection."""
        config = self.config
        context = self.context
        sizes = config.latent
        # Products in FP8 would be computed again with other scales.
        if context.fp8.by_microbatch and "attention" in context.recompute.modules:
            raise UserError.of("model.latent_recompute")
        self._make_down(sizes)
        self._make_up(sizes)
        self.output = RowParallelLinear(
            context,
            config.heads * sizes.value_dim,
            config.hidden,
            name=f"{self.name}.output",
            bias=config.output_bias,
            std=config.initial_std("output", layer),
        )
        # Given explicitly: kernels would take it from the padded width of queries and keys.
        self.scale = config.attention_scalar**-0.5

    def _make_down(self, sizes: Latent) -> None:
        """Make the projections from hidden states to latents, and the norms of latents."""
        config = self.config
        context = self.context
        name = self.name
        stack = [
            Rows(f"{name}.key_value_down", sizes.kv_rank),
            Rows(f"{name}.key_rope", sizes.rope_dim),
        ]
        if sizes.query_rank:
            stack = [Rows(f"{name}.query_down", sizes.query_rank), *stack]
            self.query_down_norm = RMSNorm(
                context, sizes.query_rank, name=f"{name}.query_down_norm", eps=sizes.norm_eps
            )
        self.down = ReplicatedLinear(
            context,
            config.hidden,
            stack,
            bias=config.qkv_bias,
            std=config.initial_std("qkv"),
        )
        self.key_value_down_norm = RMSNorm(
            context, sizes.kv_rank, name=f"{name}.key_value_down_norm", eps=sizes.norm_eps
        )

    def _make_up(self, sizes: Latent) -> None:
        """Make the projections to this rank's heads."""
        config = self.config
        context = self.context
        name = self.name
        std = config.initial_std("qkv")
        query_width = config.heads * sizes.head_dim
        # Latents lie whole on every rank; hidden states lie as in any layer of the model.
        if sizes.query_rank:
            query = Rows(f"{name}.query_up", query_width, heads=config.heads)
            self.query = ColumnParallelLinear(
                context,
                sizes.query_rank,
                [query],
                bias=False,
                std=std,
                input_layout=InputLayout.OWN,
            )
        else:
            query = Rows(f"{name}.query", query_width, heads=config.heads)
            self.query = ColumnParallelLinear(context, config.hidden, [query], bias=False, std=std)
        stack = [
            Rows(f"{name}.key_up", config.heads * sizes.nope_dim, heads=config.heads),
            Rows(f"{name}.value_up", config.heads * sizes.value_dim, heads=config.heads),
        ]
        self.key_value = ColumnParallelLinear(
            context,
            sizes.kv_rank,
            stack,
            bias=False,
            std=std,
            input_layout=InputLayout.OWN,
        )

    def key_value_shape(self) -> tuple[int, int]:
        sizes = self.config.latent
        # Each query head has a key and a value of its own.
        local_heads = self.config.heads // self.context.tp.size
        return local_heads, max(sizes.head_dim, sizes.value_dim)

    def _project(self, x: Tensor) -> Tensor:
        """Return the latents of x and the rotary part of the keys, [whole s, b, features], the same
        on all ranks of tp: what a layer keeps if it recomputes attention.

        Without a query latent, the queries of this rank's heads come first, in its place.
        Collective over tp.
        """
        sizes = self.config.latent
        widths = (sizes.query_rank, sizes.kv_rank, sizes.rope_dim)
        query_latent, latent, key_rope = self.down(x).split(widths, -1)
        parts = [self.key_value_down_norm(latent), key_rope]
        if sizes.query_rank:
            parts = [self.query_down_norm(query_latent), *parts]
        shared = whole_on_all_ranks(torch.cat(parts, -1), self.context)
        if sizes.query_rank:
            return shared
        return torch.cat((self.query(x), shared), -1)

    def _attend(
        self,
        projected: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Map what `_project` returns to the output projection's input, [s, b, local
        features]."""
        query, key, value = self._project_up(projected, rotary)
        _, width = self.key_value_shape()
        dtype = self.context.plan.attention

        def as_wide_heads(heads: Tensor) -> Tensor:
            """Return heads [s, b, n, d] padded with zeros, as [b, n, s, width]."""
            padded = F.pad(heads, (0, width - heads.shape[-1]))
            return padded.permute(1, 2, 0, 3).to(dtype)

        query, key, value = map(as_wide_heads, (query, key, value))
        attended = self._core_attention(query, key, value, microbatch, attn_mask)
        # the zeros that made values as wide as queries are cut off
        outputs = attended[..., : self.config.latent.value_dim]  # [b, n, s, e]
        return outputs.permute(2, 0, 1, 3).flatten(2)  # [s, b, n * e]

    def _project_up(
        self, projected: Tensor, rotary: RotaryTables | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of local heads, [s, b, n, d] each, of different d."""
        sizes = self.config.latent
        query_width = projected.shape[-1] - sizes.kv_rank - sizes.rope_dim
        widths = (query_width, sizes.kv_rank, sizes.rope_dim)
        query, latent, key_rope = projected.split(widths, -1)
        if sizes.query_rank:
            query = self.query(query)
        query = query.unflatten(-1, (-1, sizes.head_dim))
        heads = query.shape[2]
        key_rope = key_rope.unsqueeze(2)  # one for all heads
        key_and_value = self.key_value(latent)
        key_nope, value = key_and_value.split((heads * sizes.nope_dim, heads * sizes.value_dim), -1)
        key_nope = key_nope.unflatten(-1, (heads, -1))
        value = value.unflatten(-1, (heads, -1))
        # Kimi Linear has no positions: what would be rotated is left as it is.
        if rotary is not None:
            query = Rotate.apply(query, *rotary, self.context.leaves)
            key_rope = Rotate.apply(key_rope, *rotary, self.context.leaves)
        # Rotated features come first, as in the query.
        key_rope_of_heads = key_rope.expand(-1, -1, heads, -1)
        key = torch.cat((key_rope_of_heads, key_nope), -1)
        return query, key, value
