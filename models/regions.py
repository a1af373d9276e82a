"""The regions of a decoder layer, which `train.compile = "block"` compiles: what lies between two
products, in one.

Between attention's first product and the attention itself: cut into heads, norms of queries and
keys, rotation and the layout of attention. Between the products of attention and those of the
feed-forward: the residual sum and the norm. The gate of the feed-forward lies alone between two
products, and is a leaf.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.rotate import Rotate
from parallel.linear import Widen
from parallel.norms import LayerNorm, Normalize, RMSNorm, layer_norm


@dataclass(frozen=True)
class NormRule:
    """The settings of a norm: LayerNorm if it has a bias, otherwise RMSNorm.

    eps: added to the variance.
    sensitive: the dtype in which it computes.
    compute: the dtype of its result.
    offset: added to the weight.
    """

    eps: float
    sensitive: torch.dtype
    compute: torch.dtype
    offset: float = 0.0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x normalized over its last dimension."""
        if bias is None:
            return Normalize.apply(x, weight, self.eps, self.sensitive, self.compute, self.offset)
        return layer_norm(x, weight, bias, self.eps, self.compute)


@dataclass(frozen=True)
class HeadRule:
    """The settings of `heads`.

    own: this rank's features of queries, keys and values.
    dtype: that of attention.
    norm: of queries and keys.
    """

    own: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    norm: NormRule | None = None


Vectors = tuple[Tensor, Tensor | None]


def norm_of(module: nn.Module | None) -> tuple[NormRule, Vectors] | None:
    """Return the rule of a norm and its weight and bias, wide enough that their gradients stay
    unrounded.

    None if a region cannot contain it: there is none, it is of another kind, or a hook waits for
    its result.
    """
    if not isinstance(module, RMSNorm | LayerNorm):
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    plan = module.context.plan
    weight = Widen.apply(module.weight, plan.sensitive)
    if isinstance(module, RMSNorm):
        rule = NormRule(module.eps, plan.sensitive, plan.compute, module.offset)
        return rule, (weight, None)
    rule = NormRule(module.eps, plan.sensitive, plan.compute)
    return rule, (weight, Widen.apply(module.bias, plan.sensitive))


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, rule: NormRule
) -> tuple[Tensor, Tensor]:
    """Return x + branch in the dtype of x, and its norm."""
    total = (x + branch).to(x.dtype)
    return total, rule(total, weight, bias)


def heads(
    y: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    rule: HeadRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut y [s, b, own features] into query, key and value [b, n, s, d], normalized and turned."""
    # [s, b, n, d]
    query, key, value = (
        features.unflatten(-1, (-1, rule.head_dim)) for features in y.split(rule.own, -1)
    )
    if rule.norm is not None and query_weight is not None and key_weight is not None:
        query = rule.norm(query, query_weight)
        key = rule.norm(key, key_weight)
    if cosine is not None:
        query = Rotate.apply(query, cosine, sine)
        key = Rotate.apply(key, cosine, sine)
    query, key, value = (
        x.permute(1, 2, 0, 3).to(rule.dtype).contiguous() for x in (query, key, value)
    )
    return query, key, value
