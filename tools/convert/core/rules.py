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
from tools.convert.core.transforms import SAME, HeadSizes, Transform

Cut = Literal["whole", "rows", "columns", "halves", "thirds", "vocabulary"]
Layers = Literal["all", "experts", "dense"]
NamedShape = tuple[str, tuple[int, ...]]
NamedShapes = Iterator[NamedShape]  # of logical tensors


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
    return [name_rule for name_rule in rules if name_rule.layers in ("all", kind)]


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


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every logical tensor of `model`."""
    hidden = model.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab, hidden)}
    if model.positions == "learned":
        shapes["positions.weight"] = (model.max_positions, hidden)
    for layer in range(model.layers):
        for tensor_name, shape in _layer(model.kind_of_layer(layer)):
            shapes[f"layers.{layer}.{tensor_name}"] = shape
    shapes |= dict(_norm("final_norm", model, hidden))
    for module in range(model.mtp_layers):
        for tensor_name, shape in _module(model):
            shapes[f"mtp.{module}.{tensor_name}"] = shape
    # A tied head is the embedding, and no tensor of its own.
    if not model.tied:
        shapes["head.weight"] = (model.vocab, hidden)
    return shapes


def _module(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a module of multi-token prediction: of its layer, and of what is around
    it."""
    for tensor_name in ("embedding_norm", "hidden_norm", "final_norm"):
        yield from _norm(tensor_name, model, model.hidden)
    yield "projection.weight", (model.hidden, 2 * model.hidden)
    yield from _layer(model.kind_of_layer(model.layers - 1))


def _layer(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a layer. model: that of the layer (`ModelConfig.kind_of_layer`)."""
    hidden = model.hidden
    yield from _branch_norms("attention", model, hidden)
    if model.latent:
        yield from _latents(model)
    else:
        yield from _queries_keys_values(model)
    # In latent attention values have a width of their own.
    values = model.heads * (model.latent.value_dim or model.head_dim)
    yield from _linear("attention.output", hidden, values, model.output_bias)
    yield from _branch_norms("mlp", model, hidden)
    if model.experts:
        yield from _experts(model)
    else:
        yield from _feed_forward("mlp", model, model.ffn, model.mlp_bias)


def _experts(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of a layer's router, experts and shared experts."""
    hidden = model.hidden
    bias = model.expert_bias
    yield from _linear("mlp.router", model.experts, hidden, model.router_bias)
    if model.router.correction:
        yield "mlp.router.correction", (model.experts,)
    for expert in range(model.experts):
        tensor_name = f"mlp.experts.{expert}"
        yield from _feed_forward(tensor_name, model, model.ffn, bias)
    if model.shared_experts:
        yield from _feed_forward("mlp.shared", model, model.shared_experts, bias)
    if model.shared_gate:
        yield "mlp.shared_gate.weight", (1, hidden)


def _queries_keys_values(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of queries, keys and values of ordinary attention."""
    head_dim = model.head_dim
    query_rows = model.heads * head_dim
    kv_rows = model.kv_heads * head_dim
    for name, rows in (("query", query_rows), ("key", kv_rows), ("value", kv_rows)):
        yield from _linear(f"attention.{name}", rows, model.hidden, model.qkv_bias)
    if model.qk_norm:
        # A norm over all heads has a weight for each feature of each head.
        if model.qk_norm_over == "all":
            query_features = query_rows
            key_features = kv_rows
        else:
            query_features = head_dim
            key_features = head_dim
        yield "attention.query_norm.weight", (query_features,)
        yield "attention.key_norm.weight", (key_features,)
    if model.attention_sinks:
        yield "attention.sinks.weight", (model.heads,)


def _latents(model: ModelConfig) -> NamedShapes:
    """Yield the tensors of queries, keys and values of latent attention."""
    hidden = model.hidden
    bias = model.qkv_bias
    sizes = model.latent
    query_rows = model.heads * model.head_dim
    key_rows = model.heads * sizes.nope_dim
    value_rows = model.heads * sizes.value_dim
    if sizes.query_rank:
        yield from _linear("attention.query_down", sizes.query_rank, hidden, bias)
        yield "attention.query_down_norm.weight", (sizes.query_rank,)
        yield "attention.query_up.weight", (query_rows, sizes.query_rank)
    else:
        yield "attention.query.weight", (query_rows, hidden)
    # All heads share the latent of keys and values, and the rotary part of keys.
    yield from _linear("attention.key_value_down", sizes.kv_rank, hidden, bias)
    yield from _linear("attention.key_rope", sizes.rope_dim, hidden, bias)
    yield "attention.key_value_down_norm.weight", (sizes.kv_rank,)
    yield "attention.key_up.weight", (key_rows, sizes.kv_rank)
    yield "attention.value_up.weight", (value_rows, sizes.kv_rank)


def _feed_forward(tensor_name: str, model: ModelConfig, ffn: int, bias: bool) -> NamedShapes:
    if model.gated:
        yield from _linear(f"{tensor_name}.gate", ffn, model.hidden, bias)
    yield from _linear(f"{tensor_name}.up", ffn, model.hidden, bias)
    yield from _linear(f"{tensor_name}.down", model.hidden, ffn, bias)


def _linear(tensor_name: str, rows: int, columns: int, bias: bool) -> NamedShapes:
    yield f"{tensor_name}.weight", (rows, columns)
    if bias:
        yield f"{tensor_name}.bias", (rows,)


def _branch_norms(branch: str, model: ModelConfig, features: int) -> NamedShapes:
    """Yield the norms before a branch of a layer, after it, or both."""
    if model.norm_at != "after":
        yield from _norm(f"{branch}_norm", model, features)
    if model.norm_at != "before":
        yield from _norm(f"{branch}_post_norm", model, features)


def _norm(tensor_name: str, model: ModelConfig, features: int) -> NamedShapes:
    yield f"{tensor_name}.weight", (features,)
    if model.norm == "layer":
        yield f"{tensor_name}.bias", (features,)
