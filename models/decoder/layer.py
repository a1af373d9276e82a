"""A decoder layer: attention, followed by a feed-forward or experts, or one of the two alone.

Activations are [s, b, h]: s sequence, b micro-batch, h hidden. Under sequence parallelism they are
[s / tp, b, h] between layers.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from models import optional_parts
from models.attention.attention import Attention
from models.attention.flash_windows import Documents
from models.attention.regions import RegionNorm, add_norm
from models.attention.rope import RotaryTables
from models.config import ModelConfig
from models.feed_forward.mlp import MLP
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, dropout, note_microbatch
from parallel.norms import LayerNorm, RMSNorm, vector

if TYPE_CHECKING:
    from models.feed_forward.moe import MixtureOfExperts
    from models.recurrent.gated_delta_net import GatedDeltaNet
    from models.recurrent.mamba_mixer import MambaMixer

    # attention, or what stands in its place: it mixes the tokens of a sequence
    Mixer = Attention | GatedDeltaNet | MambaMixer


def make_norm(
    config: ModelConfig,
    context: Context,
    name: str,
    scale: float = 1.0,
) -> nn.Module:
    """Return a norm over the hidden features, of the kind that the model has: LayerNorm or RMSNorm.

    name: the logical name of its parameters. scale: the value that its factor begins with.
    """
    if config.norm == "layer":
        return LayerNorm(
            context,
            config.hidden,
            name=name,
            eps=config.norm_eps,
            scale=scale,
            bias=config.norm_bias,
        )
    return RMSNorm(
        context,
        config.hidden,
        name=name,
        eps=config.norm_eps,
        offset=float(config.norm_unit_offset),
        scale=scale,
        weighted=config.norm_weight,
    )


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or both branches, each with its own norm or
    with one norm, of the same x. Some layers have a gated delta net in place of attention. A layer
    of `config.hybrid_pattern` has one branch alone: attention, a Mamba-2 mixer, a feed-forward or
    experts.

    The sum is multiplied by a number of the layer, which is not trained, if `config.layer_scalar`.
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
        attention: "type[Mixer]" = Attention,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.name = name
        before = config.norm_at != "after"
        after = config.norm_at != "before"
        # Parameters lie in the optimizer's buffers in the order in which modules are made.
        self.attention: Mixer | None = None
        if config.has_mixer:
            self.attention_norm = self._make_norm("attention_norm", before)
            self.attention = attention(config, context, f"{name}.{config.mixer}", layer)
            self.attention_post_norm = self._make_norm("attention_post_norm", after)
        # Frozen before an optimizer is made, like what `models.decoder.frozen` freezes.
        self.scalar: nn.Parameter | None = None
        if config.layer_scalar:
            self.scalar = vector(context, f"{name}.scalar", 1, 1.0)
            self.scalar.requires_grad_(False)
        self.mlp: MLP | MixtureOfExperts | None = None
        if config.has_feed_forward:
            self.mlp_norm = self._make_norm("mlp_norm", before and not config.shared_norm)
            feed_forward = optional_parts.MixtureOfExperts if config.experts else MLP
            self.mlp = feed_forward(config, context, f"{name}.mlp", layer)
            self.mlp_post_norm = self._make_norm("mlp_post_norm", after)

    def _make_norm(self, place: str, wanted: bool) -> nn.Module | None:
        if not wanted:
            return None
        return make_norm(self.config, self.context, f"{self.name}.{place}")

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None = None,
    ) -> Tensor:
        """Map the residual stream x to the one after this layer.

        x: [s, b, hidden], or [s / tp, b, hidden] under sequence parallelism.
        The other parameters are those of `Attention`.
        """
        # NVFP4 rounds gradients by random numbers of the micro-batch: told in the first pass and in
        # a recomputed one, which may run beside another micro-batch's
        note_microbatch(self.context.fp8, microbatch)
        added = self._add_branches(x, rotary, microbatch, attn_mask)
        return added if self.scalar is None else added * self.scalar.to(added.dtype)

    def _add_branches(
        self,
        x: Tensor,
        rotary: RotaryTables | None,
        microbatch: MicrobatchInfo | None,
        attn_mask: Tensor | Documents | None,
    ) -> Tensor:
        """Return the residual stream x with the branches added, in the dtype of x, which may be
        wider than that of branches."""
        # As in InternEvo: each layer drops its input in place of the feed-forward's branch, so the
        # last layer's sum is not dropped.
        drops_stream = self.config.dropout_at == "stream"
        if drops_stream:
            x = self._drop(x, "input", microbatch)
        if self.attention is None:
            summed = x
            fed = self._feed_norm(x, microbatch)
        else:
            attend = partial(
                self.attention, rotary=rotary, microbatch=microbatch, attn_mask=attn_mask
            )
            if self.config.shared_norm:
                attended, fed = self._branches_of_one_norm(x, attend, microbatch)
                attended = self._as_added(attended, microbatch)
                summed = (x + attended).to(x.dtype)
            else:
                attended = self._branch(x, self.attention_norm, attend, self.attention_post_norm)
                attended = self._as_added(attended, microbatch)
                if self.mlp is None:
                    return (x + attended).to(x.dtype)
                sum_and_branch = self._feed_by_region(x, attended, microbatch)
                if sum_and_branch is None:
                    sum_and_branch = self._add_and_feed(x, attended, microbatch)
                summed, fed = sum_and_branch
        fed = self._scaled(fed)
        if not drops_stream:
            fed = self._drop(fed, "mlp", microbatch)
        return (summed + fed).to(x.dtype)

    def _branches_of_one_norm(
        self,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        microbatch: MicrobatchInfo | None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention's branch of x and the feed-forward's branch, which both read one norm of
        x, computed once."""
        assert self.attention_norm is not None, "the norm that both branches read"

        def both(normalized: Tensor) -> tuple[Tensor, Tensor]:
            return attend(normalized), self._feed(normalized, microbatch)

        return self.context.recompute.run_forward("norm", self.attention_norm, x, then=both)

    def _as_added(self, attended: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        """Return attention's branch as it is added to the residual stream."""
        return self._drop(self._scaled(attended), "attention", microbatch)

    def _scaled(self, branch: Tensor) -> Tensor:
        """Return the output of a branch as it is added to the residual stream."""
        scale = self.config.branch_scale
        return branch if scale == 1 else branch * scale

    def _add_and_feed(
        self,
        x: Tensor,
        attended: Tensor,
        microbatch: MicrobatchInfo | None,
    ) -> tuple[Tensor, Tensor]:
        """Return x + attended, and the feed-forward's branch: of that sum, or of x if both branches
        are parallel."""
        summed = (x + attended).to(x.dtype)
        # parallel branches both read the input of the layer
        branch_input = x if self.config.parallel_residual else summed
        return summed, self._feed_norm(branch_input, microbatch)

    def _feed_norm(self, x: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        """Return the feed-forward's branch of x, with its norms."""
        feed = partial(self._feed, microbatch=microbatch)
        return self._branch(x, self.mlp_norm, feed, self.mlp_post_norm)

    def _feed_by_region(
        self,
        x: Tensor,
        attended: Tensor,
        microbatch: MicrobatchInfo | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return what `_add_and_feed` does, with sum and norm as one region, which
        torch compiles as a whole (`parallel.regions`).

        None if regions are not wanted, or the norm cannot be part of one.
        """
        leaves = self.context.leaves
        norm_is_recomputed = "norm" in self.context.recompute.modules
        # The norm of a parallel branch is of x and not of the sum; a recomputed norm is not kept.
        if not leaves.by_region or self.config.parallel_residual or norm_is_recomputed:
            return None
        norm = RegionNorm.of(self.mlp_norm)
        if norm is None:
            return None
        summed, normalized = leaves.call_region(
            add_norm,
            x,
            attended,
            norm.weight,
            norm.bias,
            norm.rule,
        )
        fed = self._feed(normalized, microbatch)
        if self.mlp_post_norm is not None:
            fed = self.mlp_post_norm(fed)
        return summed, fed

    def _branch(
        self,
        x: Tensor,
        norm: nn.Module | None,
        compute: Callable[[Tensor], Tensor],
        post_norm: nn.Module | None,
    ) -> Tensor:
        """Return compute(norm(x)), normalized by `post_norm` if there is one."""
        if norm is None:
            # A norm would round to the dtype of products; without one it is done here.
            output = compute(x.to(self.context.plan.compute))
        else:
            output = self.context.recompute.run_forward("norm", norm, x, then=compute)
        return output if post_norm is None else post_norm(output)

    def _feed(self, normalized: Tensor, microbatch: MicrobatchInfo | None) -> Tensor:
        assert self.mlp is not None, "a layer without a feed-forward has no such branch"
        # Only a router needs to know the micro-batch: its losses are weighted by it.
        if self.config.experts:
            return self.mlp(normalized, microbatch)
        return self.mlp(normalized)

    def _drop(
        self,
        x: Tensor,
        branch: str,
        microbatch: MicrobatchInfo | None,
    ) -> Tensor:
        """Return x with dropout, if the model has any. branch: its name in the layer."""
        rate = self.config.dropout
        if rate == 0:
            return x
        return dropout(x, rate, self.context, f"{self.name}.{branch}", microbatch)
