"""The regions of a decoder layer: all that lies between two of its products.

`train.compile = "block"` compiles each region as a whole. Between attention's first product and the
attention itself: cut into heads, norms of queries and keys, rotation and the layout of attention.
Between the products of attention and those of the feed-forward: the residual sum and the norm. The
gate of the feed-forward lies alone between two products, and is a leaf.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.attention.rope import Rotate
from parallel.linear import Widen
from parallel.norms import LayerNorm, Normalize, RMSNorm, layer_norm


@dataclass(frozen=True)
class NormRule:
    """The settings of a norm.

    centered: it is a LayerNorm, which subtracts the mean; otherwise an RMSNorm.
    eps: added to the variance.
    sensitive: the dtype in which it computes.
    compute: the dtype of its result.
    offset: added to the weight.
    """

    eps: float
    sensitive: torch.dtype
    compute: torch.dtype
    offset: float = 0.0
    centered: bool = False

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return x normalized over its last dimension."""
        if self.centered:
            assert weight is not None, "a LayerNorm has a weight"
            return layer_norm(x, weight, bias, self.eps, self.compute)
        return Normalize.apply(x, weight, self.eps, self.sensitive, self.compute, self.offset)


class RegionNorm(NamedTuple):
    """A norm as a region computes it: its settings, weight and bias.

    weight, bias: in the sensitive dtype, so that their gradients are not rounded; None where the
        norm has none.
    """

    rule: NormRule
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(norm: nn.Module | None) -> "RegionNorm | None":
        """Return the norm of a module as a region computes it; None if a region cannot: there is no
        module, it is a norm of another kind, or it has a hook, which a region would not call."""
        if not isinstance(norm, RMSNorm | LayerNorm):
            return None
        if norm._forward_hooks or norm._forward_pre_hooks:
            return None
        plan = norm.context.plan
        weight = None if norm.weight is None else Widen.apply(norm.weight, plan.sensitive)
        if isinstance(norm, RMSNorm):
            rule = NormRule(norm.eps, plan.sensitive, plan.compute, norm.offset)
            return RegionNorm(rule, weight, None)
        rule = NormRule(norm.eps, plan.sensitive, plan.compute, centered=True)
        bias = None if norm.bias is None else Widen.apply(norm.bias, plan.sensitive)
        return RegionNorm(rule, weight, bias)


@dataclass(frozen=True)
class HeadRule:
    """The settings of `split_heads`.

    local_widths: this rank's features of queries, keys and values.
    dtype: that of attention.
    norm: of queries and keys; None: they have none.
    by_head: True if the results are [b, n, s, d], head after head, as products of a CPU read them;
        otherwise [s, b, n, d]. A GPU's fused attention writes its result in the order of its
        query, so that the next product reads this one without a copy.
    """

    local_widths: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    norm: NormRule | None = None
    by_head: bool = True


def add_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rule: NormRule,
) -> tuple[Tensor, Tensor]:
    """Return x + branch in the dtype of x, and its norm."""
    total = (x + branch).to(x.dtype)
    return total, rule(total, weight, bias)


def split_heads(
    projected: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    rule: HeadRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, normalized and rotated, in the order that the rule says.

    projected: [s, b, local features], the output of attention's first product.
    cosine, sine: as `Rotate` takes them; None: without rotation.
    query_weight, key_weight: of the norms; None: they have none.
    """
    # [s, b, n, d]
    query, key, value = (
        features.unflatten(-1, (-1, rule.head_dim))
        for features in projected.split(rule.local_widths, -1)
    )
    if rule.norm is not None:
        query = rule.norm(query, query_weight)
        key = rule.norm(key, key_weight)
    if cosine is not None:
        query = Rotate.apply(query, cosine, sine)
        key = Rotate.apply(key, cosine, sine)
    if rule.by_head:
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
    # In the layout of attention: a compiled region writes it at once.
    query, key, value = (heads.to(rule.dtype).contiguous() for heads in (query, key, value))
    return query, key, value
