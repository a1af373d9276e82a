"""The rows of the name tables: a tensor of another system, and the logical tensors that it is made
of.

The logical tensors of a model are listed as names and shapes, so that nothing has to be built for a
conversion. "Modules" are those for multi-token prediction, with one layer each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from tools.convert.core.transforms import SAME, HeadSizes, Transform

Cut = Literal["whole", "rows", "columns", "halves", "thirds", "vocabulary"] | tuple[int, ...]
Layers = Literal["all", "experts", "dense", "attention", "mamba", "delta_net"]


@dataclass(frozen=True)
class NameRule:
    """One row of a name table. In names `.N.` stands for the number of a layer and `.E.` for that
    of an expert.

    Rules of `mtp.K.` are of modules for multi-token prediction: `.K.` is the number of the module,
    and `.N.` that of its layer, which follows the model's own. A foreign tensor without `.E.` whose
    logical names have it consists of the tensors of all experts, expert by expert.

    cut: how the system shards the tensor over tensor-parallel ranks: not at all, by rows, by
        columns, by rows of each of its two halves or three thirds, by rows of each of its blocks,
        of which a tuple has the rows, or by rows after padding. Hugging Face does not shard.
    layers: those that have the tensor under this name: all, those with experts or without, or those
        with one kind of mixer (`ModelConfig.mixer`).
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

    def join(self, head_sizes: HeadSizes, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the foreign tensor of these logical ones."""
        return self.how.join(parts, head_sizes)


def matches(rules: Sequence[NameRule], model: ModelConfig) -> list[Match]:
    """Return the foreign tensors of `model`, layer by layer in the order of the rules; each logical
    tensor is in one of them.
    """
    shapes = logical_shapes(model)
    sizes = head_sizes(model)
    expected: list[Match] = []
    covered: list[str] = []
    for rule in _rules_in_order(rules, model):
        names = rule.logical
        # A rule of a tensor that this model does not have, such as a bias, matches nothing; nor
        # does one of all experts where there are none.
        if not names or not shapes.keys() >= set(names):
            continue
        # What a tensor without values becomes tells the foreign tensor's shape.
        parts = [torch.empty(shapes[tensor_name], device="meta") for tensor_name in names]
        joined = rule.how.join(parts, sizes)
        shape = tuple(joined.shape)
        match = Match(rule.foreign, names, rule.how, rule.cut, shape)
        expected.append(match)
        covered += names
    # A tensor in two rows would be written twice, and one in none would be lost.
    uncovered = shapes.keys() ^ set(covered)
    assert sorted(covered) == sorted(shapes), f"the table does not cover {uncovered}"
    return expected


def tensors_without_rule(rules: Sequence[NameRule], model: ModelConfig) -> list[str]:
    """Return the logical tensors of `model` that a table does not have: another system has no such
    model."""
    ruled = set[str]()
    for rule in _rules_in_order(rules, model):
        ruled.update(rule.logical)
    return [name for name in logical_shapes(model) if name not in ruled]


def _rules_in_order(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    """Yield all rules with numbers inserted; those of layers, and those of modules, stand where the
    first of them stands.
    """
    in_modules: list[NameRule] = []
    in_layers: list[NameRule] = []
    for rule in rules:
        # Asked first, for the layer of a module has a number of a layer too.
        if has_module_rules([rule]):
            in_modules.append(rule)
        elif ".N." in rule.foreign:
            in_layers.append(rule)
    numbered = (*in_layers, *in_modules)
    for rule in rules:
        # Tensors outside of layers: embedding, last norm, head.
        if rule not in numbered:
            yield rule
        elif rule is in_layers[0]:
            yield from _rules_of_layers(in_layers, model)
        elif in_modules and rule is in_modules[0]:
            yield from _rules_of_modules(in_modules, model)


def _rules_of_layers(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    """Yield the rules of layers, layer by layer, with the numbers of layers and experts."""
    for layer in range(model.layers):
        layer_model = model.kind_of_layer(layer)
        for rule in _rules_for_layer(rules, layer_model):
            yield from _insert_numbers(rule, layer, model.experts)


def _rules_of_modules(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    """Yield the rules of modules, whose layers are of the kind of the model's last."""
    last_layer = model.layers - 1
    layer_model = model.kind_of_layer(last_layer)
    rules_of_module = _rules_for_layer(rules, layer_model)
    for module in range(model.mtp_layers):
        layer = model.layers + module
        for rule in rules_of_module:
            numbered = _replace_in_names(rule, ".K.", f".{module}.")
            yield from _insert_numbers(numbered, layer, model.experts)


def has_module_rules(rules: Sequence[NameRule]) -> bool:
    """Return True if a table has rows for modules of multi-token prediction."""
    names_of_rules = [rule.logical for rule in rules]
    logical_names = chain.from_iterable(names_of_rules)
    return any(name.startswith("mtp.K.") for name in logical_names)


def layers_of_modules(rules: Sequence[NameRule], layer: str, module: str) -> list[NameRule]:
    """Return the rows of the layers of modules, whose names have `module` for `layer`."""
    of_modules = []
    for rule in rules:
        if ".N." in rule.foreign:
            foreign = rule.foreign.replace(layer, module)
            logical = [name.replace("layers.N.", "mtp.K.") for name in rule.logical]
            of_module = replace(rule, foreign=foreign, logical=tuple(logical))
            of_modules.append(of_module)
    return of_modules


def _rules_for_layer(rules: Sequence[NameRule], layer_model: ModelConfig) -> list[NameRule]:
    """Return the rules for a layer with its kind of feed-forward and of mixer.

    layer_model: the model as it would be if all layers were like this one.
    """
    feed_forward = "experts" if layer_model.experts else "dense"
    kinds = ("all", feed_forward, layer_model.mixer)
    return [rule for rule in rules if rule.layers in kinds]


def _replace_in_names(rule: NameRule, placeholder: str, number: str) -> NameRule:
    """Return the rule with `number` for `placeholder` in its names."""
    foreign = rule.foreign.replace(placeholder, number)
    logical = [name.replace(placeholder, number) for name in rule.logical]
    return replace(rule, foreign=foreign, logical=tuple(logical))


def _insert_numbers(rule: NameRule, layer: int, experts: int) -> Iterator[NameRule]:
    """Yield the rule for a layer: one for each expert, one with all experts' tensors, or one."""
    rule = _replace_in_names(rule, ".N.", f".{layer}.")
    names = (rule.foreign, *rule.logical)
    if not any(".E." in name for name in names):
        yield rule
        return
    of_experts = [_replace_in_names(rule, ".E.", f".{expert}.") for expert in range(experts)]
    if ".E." in rule.foreign:
        yield from of_experts
    else:
        # One foreign tensor has all experts, whose parts follow expert by expert.
        names_of_experts = [numbered.logical for numbered in of_experts]
        logical_names = chain.from_iterable(names_of_experts)
        yield replace(rule, logical=tuple(logical_names))


def head_sizes(model: ModelConfig) -> HeadSizes:
    """Return the sizes of the attention heads of `model`."""
    return HeadSizes(
        query=model.heads,
        kv=model.kv_heads,
        dim=model.head_dim,
        rotary=model.rotary_dims,
        value=model.latent.value_dim,
        delta=model.delta_net,
        mamba=model.mamba,
    )
