"""Maximal update parametrization (muP): the optimizer's factors for matrices that are wider than
those of the base model.

Settings that are best for a small base model stay best for a wider one if every update moves every
activation as far as in the base model. With n times as many inputs, and an update whose elements
all point the same way, a product moves n times as far. So

    AdamW   the learning rate of a matrix is divided by the growth of its inputs, and that of a
            tensor whose values are scaled is scaled as they are
    Muon    the spectral norm of an update grows as sqrt(outputs / inputs)
    both    the weight decay is divided by the factor of the learning rate: the part of a weight
            that a step takes away, rate times decay, does not depend on the width
    AdamW   epsilon is divided by the growth of the model, because gradients are smaller by it

Sources: "Tensor Programs V" (arXiv 2203.03466), table 3 (Adam) and appendix B.3 (epsilon, and
weight decay apart from the rate); "A Spectral Condition for Feature Learning" (arXiv 2310.17813)
for Muon.
Embeddings, whose one input is chosen, norms and biases grow in outputs only, and keep the base
model's rate. SGD and other rules scale otherwise and are refused. docs/mup.md has the whole
convention, with initial weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from megaprec.comm.layout import AS_BASE, Part, layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.update_rules import AdamW, UpdateRule


def width_rate(part: Part, rule: UpdateRule) -> float:
    """Return the factor of the learning rate of a logical tensor under muP."""
    if isinstance(rule, Muon) and rule.orthogonalizes(part):
        return _muon_rate(part, rule)
    return part.growth.scale / part.growth.inputs


def _muon_rate(part: Part, rule: Muon) -> float:
    """Return the factor of the learning rate of a matrix that Muon orthogonalizes.

    Muon's own factor depends on the shape too, and its growth is taken out.
    """
    growth = part.growth
    rows, columns = part.shape
    spectral_growth = (growth.outputs / growth.inputs) ** 0.5
    base_rows = rows / growth.outputs
    base_columns = columns / growth.inputs
    own_factor = rule.factor((rows, columns))
    own_factor_of_base = rule.factor((base_rows, base_columns))
    return spectral_growth * own_factor_of_base / own_factor


def model_growth(parts: Sequence[nn.Module]) -> float:
    """Return how many times as wide as the base model a model is: 1 without muP."""
    for part in _logical_parts(parts):
        growth = part.growth
        # all features grow by one factor, or not at all
        for factor in (growth.inputs, growth.outputs):
            if factor != 1:
                return factor
    return 1.0


def rule_at_width(rule: UpdateRule, parts: Sequence[nn.Module]) -> UpdateRule:
    """Return a rule with the epsilon that a model's gradients need, the rule itself if that is its
    own."""
    growth = model_growth(parts)
    if growth == 1:
        return rule
    if isinstance(rule, Muon):
        adamw = _with_smaller_epsilon(rule.adamw, growth)
        return replace(rule, adamw=adamw)
    if isinstance(rule, AdamW):
        return _with_smaller_epsilon(rule, growth)
    return rule


def _with_smaller_epsilon(rule: AdamW, growth: float) -> AdamW:
    """Return AdamW for gradients that are smaller by `growth` than those of the base model."""
    smaller = rule.eps / growth
    return replace(rule, eps=smaller)


def require_width_rule(rule: UpdateRule, parts: Sequence[nn.Module]) -> None:
    """Raise UserError for a rule whose factors under muP are not known, if a model needs any."""
    for part in _logical_parts(parts):
        if part.growth != AS_BASE:
            require_width_factors(rule, part)


def require_width_factors(rule: UpdateRule, part: Part) -> None:
    """Raise UserError unless a rule has a factor for a logical tensor that grows: if it is neither
    AdamW nor Muon, or if Muon would orthogonalize an embedding, or heads by themselves."""
    if not isinstance(rule, AdamW | Muon):
        rule_name = type(rule).__name__
        raise UserError.of("optimizer.mup_rule", rule=rule_name)
    # The factor needs the growth of one head's rows. The layout has that of all rows together,
    # which may come from larger heads or from more heads.
    if isinstance(rule, Muon) and rule.per_head:
        raise UserError.of("optimizer.mup_muon_per_head")
    is_embedding = len(part.shape) == 2 and part.growth.inputs == 1
    if is_embedding and isinstance(rule, Muon) and rule.orthogonalizes(part):
        raise UserError.of("optimizer.mup_muon_embedding", name=part.name)


def _logical_parts(parts: Sequence[nn.Module]) -> Iterable[Part]:
    """Yield the logical tensors of which a rank holds slices, and that are trained."""
    for parameter in parameters_of(parts):
        yield from layout_of(parameter).parts
