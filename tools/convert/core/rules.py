"""The rows of the name tables: a tensor of another system, and the logical tensors of megaprec that
it consists of.

The logical tensors of a model are listed as names and shapes, so that nothing has to be built for a
conversion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from models.config import ModelConfig
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
    columns, by rows of each of its two halves or three thirds, or by rows after padding. Hugging
    Face does not shard. layers: those that have the tensor under this name: all, those with
    experts, or those without.
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
    sizes = heads(model)
    found: list[Match] = []
    for rule in _in_order(rules, model):
        if rule.logical and all(name in shapes for name in rule.logical):
            ours = [torch.empty(shapes[name], device="meta") for name in rule.logical]
            found.append(
                Match(
                    rule.foreign,
                    rule.logical,
                    rule.how,
                    rule.cut,
                    tuple(rule.how.join(ours, sizes).shape),
                )
            )
    covered = [name for match in found for name in match.logical]
    assert sorted(covered) == sorted(shapes), (
        f"the table does not cover {set(shapes) ^ set(covered)}"
    )
    return found


def _in_order(rules: Sequence[Rule], model: ModelConfig) -> Iterator[Rule]:
    """Return all rules with numbers inserted; those of layers, and those of modules, stand where
    the first of them stands.
    """
    in_modules = [rule for rule in rules if has_modules([rule])]
    in_layers = [rule for rule in rules if ".N." in rule.foreign and rule not in in_modules]
    for rule in rules:
        if rule not in (*in_layers, *in_modules):
            yield rule
        elif rule is in_layers[0]:
            for n in range(model.layers):
                for of_layer in _of_kind(in_layers, model.kind_of_layer(n)):
                    yield from _numbered(of_layer, n, model.experts)
        elif in_modules and rule is in_modules[0]:
            for k in range(model.mtp_layers):
                for of_module in _of_kind(in_modules, model.kind_of_layer(model.layers - 1)):
                    yield from _numbered(_of_module(of_module, k), model.layers + k, model.experts)


def has_modules(rules: Sequence[Rule]) -> bool:
    """Return True if a table has rows for modules of multi-token prediction."""
    return any(name.startswith("mtp.K.") for rule in rules for name in rule.logical)


def layers_of_modules(rules: Sequence[Rule], layer: str, module: str) -> list[Rule]:
    """Return the rows of the layers of modules, whose names have `module` for `layer`."""
    return [
        replace(
            rule,
            foreign=rule.foreign.replace(layer, module),
            logical=tuple(name.replace("layers.N.", "mtp.K.") for name in rule.logical),
        )
        for rule in rules
        if ".N." in rule.foreign
    ]


def _of_kind(rules: Sequence[Rule], layer: ModelConfig) -> list[Rule]:
    """Return the rules for a layer with experts, or for one without."""
    return [
        rule for rule in rules if rule.layers in ("all", "experts" if layer.experts else "dense")
    ]


def _of_module(rule: Rule, module: int) -> Rule:
    foreign, *logical = (
        name.replace(".K.", f".{module}.") for name in (rule.foreign, *rule.logical)
    )
    return replace(rule, foreign=foreign, logical=tuple(logical))


def _numbered(rule: Rule, layer: int, experts: int) -> Iterator[Rule]:
    foreign, *logical = (
        name.replace(".N.", f".{layer}.") for name in (rule.foreign, *rule.logical)
    )
    if ".E." in foreign:
        for e in range(experts):
            own = tuple(name.replace(".E.", f".{e}.") for name in logical)
            yield Rule(foreign.replace(".E.", f".{e}."), own, rule.how, rule.cut)
    elif any(".E." in name for name in logical):
        of_all = tuple(name.replace(".E.", f".{e}.") for e in range(experts) for name in logical)
        yield Rule(foreign, of_all, rule.how, rule.cut)
    else:
        yield Rule(foreign, tuple(logical), rule.how, rule.cut)


def heads(model: ModelConfig) -> Heads:
    """Return the sizes of the attention heads of `model`."""
    return Heads(
        model.heads, model.kv_heads, model.head_dim, model.rotary_dims, model.latent.value_dim
    )


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every logical tensor of `model`."""
    h = model.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab, h)}
    if model.positions == "learned":
        shapes["positions.weight"] = (model.max_positions, h)
    for n in range(model.layers):
        shapes |= {f"layers.{n}.{name}": shape for name, shape in _layer(model.kind_of_layer(n))}
    shapes |= dict(_norm("final_norm", model, h))
    for n in range(model.mtp_layers):
        shapes |= {f"mtp.{n}.{name}": shape for name, shape in _module(model)}
    if not model.tied:
        shapes["head.weight"] = (model.vocab, h)
    return shapes


def _module(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a module of multi-token prediction: of its layer, and of what is around
    it."""
    for name in ("embedding_norm", "hidden_norm", "final_norm"):
        yield from _norm(name, model, model.hidden)
    yield "projection.weight", (model.hidden, 2 * model.hidden)
    yield from _layer(model.kind_of_layer(model.layers - 1))


def _layer(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h = model.hidden
    yield from _branch_norms("attention", model, h)
    yield from _latents(model) if model.latent else _queries_keys_values(model)
    yield from _linear(
        "attention.output",
        h,
        model.heads * (model.latent.value_dim or model.head_dim),
        model.output_bias,
    )
    yield from _branch_norms("mlp", model, h)
    if model.experts:
        yield from _linear("mlp.router", model.experts, h, model.router_bias)
        if model.router.correction:
            yield "mlp.router.correction", (model.experts,)
        for e in range(model.experts):
            yield from _feed_forward(f"mlp.experts.{e}", model, model.ffn, model.expert_bias)
        if model.shared_experts:
            yield from _feed_forward("mlp.shared", model, model.shared_experts, model.expert_bias)
        if model.shared_gate:
            yield "mlp.shared_gate.weight", (1, h)
    else:
        yield from _feed_forward("mlp", model, model.ffn, model.mlp_bias)


def _queries_keys_values(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = model.head_dim
    width = model.heads * model.head_dim
    kv_width = model.kv_heads * model.head_dim
    for name, rows in (("query", width), ("key", kv_width), ("value", kv_width)):
        yield from _linear(f"attention.{name}", rows, model.hidden, model.qkv_bias)
    if model.qk_norm:
        over_all = model.qk_norm_over == "all"
        yield "attention.query_norm.weight", (width if over_all else d,)
        yield "attention.key_norm.weight", (kv_width if over_all else d,)
    if model.attention_sinks:
        yield "attention.sinks.weight", (model.heads,)


def _latents(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h = model.hidden
    sizes = model.latent
    queries = model.heads * model.head_dim
    if sizes.query_rank:
        yield from _linear("attention.query_down", sizes.query_rank, h, model.qkv_bias)
        yield "attention.query_down_norm.weight", (sizes.query_rank,)
        yield "attention.query_up.weight", (queries, sizes.query_rank)
    else:
        yield "attention.query.weight", (queries, h)
    yield from _linear("attention.key_value_down", sizes.kv_rank, h, model.qkv_bias)
    yield from _linear("attention.key_rope", sizes.rope_dim, h, model.qkv_bias)
    yield "attention.key_value_down_norm.weight", (sizes.kv_rank,)
    yield "attention.key_up.weight", (model.heads * sizes.nope_dim, sizes.kv_rank)
    yield "attention.value_up.weight", (model.heads * sizes.value_dim, sizes.kv_rank)


def _feed_forward(
    name: str, model: ModelConfig, ffn: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    h = model.hidden
    for part in ("gate", "up") if model.gated else ("up",):
        yield from _linear(f"{name}.{part}", ffn, h, bias)
    yield from _linear(f"{name}.down", h, ffn, bias)


def _linear(
    name: str, rows: int, columns: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _branch_norms(
    branch: str, model: ModelConfig, features: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if model.norm_at != "after":
        yield from _norm(f"{branch}_norm", model, features)
    if model.norm_at != "before":
        yield from _norm(f"{branch}_post_norm", model, features)


def _norm(name: str, model: ModelConfig, features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (features,)
    if model.norm == "layer":
        yield f"{name}.bias", (features,)
