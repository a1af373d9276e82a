"""The rows of the name tables: a tensor of another system, and the logical tensors of megaprec that
it consists of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from tools.convert.core.transforms import SAME, Heads, Transform

Cut = Literal["whole", "rows", "columns", "halves", "thirds", "vocabulary"]
Layers = Literal["all", "experts", "dense"]


@dataclass(frozen=True)
class Rule:
    """One row of a name table. In names `.N.` stands for the number of a layer and `.E.` for that
    of an expert.

    Rules of `mtp.K.` are of modules for multi-token prediction: `.K.` is the number of the module,
    and `.N.` that of its layer, which follows the model's own. A foreign tensor without `.E.` whose
    logical names have it consists of the tensors of all experts, expert by expert.

    cut: how the system shards the tensor over tensor-parallel ranks: not at all, by rows, by
        columns, by rows of each of its two halves or three thirds, or by rows after padding.
        Hugging Face does not shard.
    layers: those that have the tensor under this name: all, those with experts, or those without.
    """

    foreign: str
    logical: tuple[str, ...]
    how: Transform = SAME
    cut: Cut = "whole"
    layers: Layers = "all"


@dataclass(frozen=True)
class Match:
    """A rule for one layer and expert. shape: of the foreign tensor, uncut and without padding."""

    foreign: str
    logical: tuple[str, ...]
    how: Transform
    cut: Cut
    shape: tuple[int, ...]


def matches(rules: Sequence[Rule], model: ModelConfig) -> list[Match]:
    """Return the foreign tensors of `model`, layer by layer in the order of the rules; each logical
    tensor is in one of them.
    """
    shapes = logical_shapes(model)
    sizes = head_sizes(model)
    expected: list[Match] = []
    covered: list[str] = []
    for rule in _rules_in_order(rules, model):
        names = rule.logical
        # A rule of a tensor that this model does not have, such as a bias, matches nothing.
        if not names or any(name not in shapes for name in names):
            continue
        # What a tensor without values becomes tells the foreign tensor's shape.
        parts = [torch.empty(shapes[name], device="meta") for name in names]
        shape = tuple(rule.how.join(parts, sizes).shape)
        expected.append(Match(rule.foreign, names, rule.how, rule.cut, shape))
        covered += names
    assert sorted(covered) == sorted(shapes), (
        f"the table does not cover {set(shapes) ^ set(covered)}"
    )
    return expected


def _rules_in_order(rules: Sequence[Rule], model: ModelConfig) -> Iterator[Rule]:
    """Yield all rules with numbers inserted; those of layers, and those of modules, stand where the
    first of them stands.
    """
    in_modules = [rule for rule in rules if has_modules([rule])]
    in_layers = [rule for rule in rules if ".N." in rule.foreign and rule not in in_modules]
    for rule in rules:
        # Tensors outside of layers: embedding, last norm, head.
        if rule not in (*in_layers, *in_modules):
            yield rule
        elif rule is in_layers[0]:
            yield from _rules_of_layers(in_layers, model)
        elif in_modules and rule is in_modules[0]:
            yield from _rules_of_modules(in_modules, model)


def _rules_of_layers(rules: Sequence[Rule], model: ModelConfig) -> Iterator[Rule]:
    for layer in range(model.layers):
        for rule in _rules_for_kind(rules, model.kind_of_layer(layer)):
            yield from _insert_numbers(rule, layer, model.experts)


def _rules_of_modules(rules: Sequence[Rule], model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of modules, whose layers are of the kind of the model's last."""
    kind = model.kind_of_layer(model.layers - 1)
    for module in range(model.mtp_layers):
        for rule in _rules_for_kind(rules, kind):
            numbered = _replace_in_names(rule, ".K.", f".{module}.")
            yield from _insert_numbers(numbered, model.layers + module, model.experts)


def has_modules(rules: Sequence[Rule]) -> bool:
    """Return True if a table has rows for modules of multi-token prediction."""
    logical_names = chain.from_iterable(rule.logical for rule in rules)
    return any(name.startswith("mtp.K.") for name in logical_names)


def layers_of_modules(rules: Sequence[Rule], layer: str, module: str) -> list[Rule]:
    """Return the rows of the layers of modules, whose names have `module` for `layer`."""
    of_modules = []
    for rule in rules:
        if ".N." in rule.foreign:
            foreign = rule.foreign.replace(layer, module)
            logical = tuple(name.replace("layers.N.", "mtp.K.") for name in rule.logical)
            of_modules.append(replace(rule, foreign=foreign, logical=logical))
    return of_modules


def _rules_for_kind(rules: Sequence[Rule], layer: ModelConfig) -> list[Rule]:
    """Return the rules for a layer with experts, or for one without."""
    kind = "experts" if layer.experts else "dense"
    return [rule for rule in rules if rule.layers in ("all", kind)]


def _replace_in_names(rule: Rule, placeholder: str, number: str) -> Rule:
    """Return the rule with `number` for `placeholder` in its names."""
    logical = tuple(name.replace(placeholder, number) for name in rule.logical)
    return replace(rule, foreign=rule.foreign.replace(placeholder, number), logical=logical)


def _insert_numbers(rule: Rule, layer: int, experts: int) -> Iterator[Rule]:
    """Yield the rule for a layer: one for each expert, one with all experts' tensors, or one."""
    rule = _replace_in_names(rule, ".N.", f".{layer}.")
    if not any(".E." in name for name in (rule.foreign, *rule.logical)):
        yield Rule(rule.foreign, rule.logical, rule.how, rule.cut)
        return
    of_experts = [_replace_in_names(rule, ".E.", f".{expert}.") for expert in range(experts)]
    if ".E." in rule.foreign:
        for numbered in of_experts:
            yield Rule(numbered.foreign, numbered.logical, rule.how, rule.cut)
    else:
        all_logical = tuple(chain.from_iterable(numbered.logical for numbered in of_experts))
        yield Rule(rule.foreign, all_logical, rule.how, rule.cut)


def head_sizes(model: ModelConfig) -> Heads:
    """Return the sizes of the attention heads of `model`."""
    return Heads(
        query=model.heads,
        kv=model.kv_heads,
        dim=model.head_dim,
        rotary=model.rotary_dims,
        value=model.latent.value_dim,
    )
