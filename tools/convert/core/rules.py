"""The rows of the name tables: a tensor of another system, and the logical tensors that it is made
of.

The logical tensors of a model are listed as names and shapes, so that nothing has to be built for a
conversion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from tools.convert.core.transforms import SAME, HeadSizes, Transform

Cut = Literal["whole", "rows", "columns", "halves", "thirds", "vocabulary"]
Layers = Literal["all", "experts", "dense"]
NamedShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class NameRule:
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
    for name_rule in _rules_in_order(rules, model):
        names = name_rule.logical
        # A rule of a tensor that this model does not have, such as a bias, matches nothing.
        if not names or any(tensor_name not in shapes for tensor_name in names):
            continue
        # What a tensor without values becomes tells the foreign tensor's shape.
        parts = [torch.empty(shapes[tensor_name], device="meta") for tensor_name in names]
        shape = tuple(name_rule.how.join(parts, sizes).shape)
        expected.append(Match(name_rule.foreign, names, name_rule.how, name_rule.cut, shape))
        covered += names
    # A tensor in two rows would be written twice, and one in none would be lost.
    assert sorted(covered) == sorted(shapes), (
        f"the table does not cover {set(shapes) ^ set(covered)}"
    )
    return expected


def _rules_in_order(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    """Yield all rules with numbers inserted; those of layers, and those of modules, stand where the
    first of them stands.
    """
    in_modules: list[NameRule] = []
    in_layers: list[NameRule] = []
    for name_rule in rules:
        # Those of modules come first: the layer of a module has a number too.
        if has_module_rules([name_rule]):
            in_modules.append(name_rule)
        elif ".N." in name_rule.foreign:
            in_layers.append(name_rule)
    for name_rule in rules:
        # Tensors outside of layers: embedding, last norm, head.
        if name_rule not in (*in_layers, *in_modules):
            yield name_rule
        elif name_rule is in_layers[0]:
            yield from _rules_of_layers(in_layers, model)
        elif in_modules and name_rule is in_modules[0]:
            yield from _rules_of_modules(in_modules, model)


def _rules_of_layers(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    for layer in range(model.layers):
        for name_rule in _rules_for_kind(rules, model.kind_of_layer(layer)):
            yield from _insert_numbers(name_rule, layer, model.experts)


def _rules_of_modules(rules: Sequence[NameRule], model: ModelConfig) -> Iterator[NameRule]:
    """Yield the rules of modules, whose layers are of the kind of the model's last."""
    kind = model.kind_of_layer(model.layers - 1)
    for module in range(model.mtp_layers):
        for name_rule in _rules_for_kind(rules, kind):
            numbered = _replace_in_names(name_rule, ".K.", f".{module}.")
            yield from _insert_numbers(numbered, model.layers + module, model.experts)


def has_module_rules(rules: Sequence[NameRule]) -> bool:
    """Return True if a table has rows for modules of multi-token prediction."""
    logical_names = chain.from_iterable(name_rule.logical for name_rule in rules)
    return any(name.startswith("mtp.K.") for name in logical_names)


def layers_of_modules(rules: Sequence[NameRule], layer: str, module: str) -> list[NameRule]:
    """Return the rows of the layers of modules, whose names have `module` for `layer`."""
    of_modules = []
    for name_rule in rules:
        if ".N." in name_rule.foreign:
            foreign = name_rule.foreign.replace(layer, module)
            logical = tuple(name.replace("layers.N.", "mtp.K.") for name in name_rule.logical)
            of_modules.append(replace(name_rule, foreign=foreign, logical=logical))
    return of_modules


def _rules_for_kind(rules: Sequence[NameRule], layer: ModelConfig) -> list[NameRule]:
    """Return the rules for a layer with experts, or for one without."""
    kind = "experts" if layer.experts else "dense"
    of_kind = []
    for name_rule in rules:
        if name_rule.layers in ("all", kind):
            of_kind.append(name_rule)
    return of_kind


def _replace_in_names(name_rule: NameRule, placeholder: str, number: str) -> NameRule:
    """Return the rule with `number` for `placeholder` in its names."""
    logical = tuple(name.replace(placeholder, number) for name in name_rule.logical)
    return replace(
        name_rule, foreign=name_rule.foreign.replace(placeholder, number), logical=logical
    )


def _insert_numbers(name_rule: NameRule, layer: int, experts: int) -> Iterator[NameRule]:
    """Yield the rule for a layer: one for each expert, one with all experts' tensors, or one."""
    name_rule = _replace_in_names(name_rule, ".N.", f".{layer}.")
    if not any(".E." in name for name in (name_rule.foreign, *name_rule.logical)):
        yield name_rule
        return
    of_experts = [_replace_in_names(name_rule, ".E.", f".{expert}.") for expert in range(experts)]
    if ".E." in name_rule.foreign:
        yield from of_experts
    else:
        # One foreign tensor has all experts, whose parts follow expert by expert.
        logical_names = chain.from_iterable(numbered.logical for numbered in of_experts)
        yield replace(name_rule, logical=tuple(logical_names))


def head_sizes(model: ModelConfig) -> HeadSizes:
    """Return the sizes of the attention heads of `model`."""
    return HeadSizes(
        query=model.heads,
        kv=model.kv_heads,
        dim=model.head_dim,
        rotary=model.rotary_dims,
        value=model.latent.value_dim,
    )
