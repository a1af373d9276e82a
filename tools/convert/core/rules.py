"""The rows of the name tables: a tensor of another system, and the logical tensors of megaprec that it consists of.

The logical tensors of a model are listed as names and shapes, so that nothing has to be built for a conversion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from models.config import ModelConfig
from tools.convert.core.transforms import SAME, Heads, Transform

Cut = Literal["whole", "rows", "columns", "halves", "thirds", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """One row of a name table. In names `.N.` stands for the number of a layer and `.E.` for that of an expert.

    cut: how the system shards the tensor over tensor-parallel ranks: not at all, by rows, by columns, by rows of each
    of its two halves or three thirds, or by rows after padding. Hugging Face does not shard.
    """

    foreign: str
    logical: tuple[str, ...]
    how: Transform = SAME
    cut: Cut = "whole"


@dataclass(frozen=True)
class Match:
    """A rule for one layer and expert. shape: of the foreign tensor, uncut and without padding."""

    foreign: str
    logical: tuple[str, ...]
    how: Transform
    cut: Cut
    shape: tuple[int, ...]


def matches(rules: Sequence[Rule], model: ModelConfig) -> list[Match]:
    """Return the foreign tensors of `model`, layer by layer in the order of the rules; each logical tensor is in
    one of them.
    """
    shapes, sizes = logical_shapes(model), heads(model)
    found: list[Match] = []
    for rule in _in_order(rules, model):
        if all(name in shapes for name in rule.logical):
            ours = [torch.empty(shapes[name], device="meta") for name in rule.logical]
            found.append(Match(rule.foreign, rule.logical, rule.how, rule.cut, tuple(rule.how.join(ours, sizes).shape)))
    covered = [name for match in found for name in match.logical]
    assert sorted(covered) == sorted(shapes), f"the table does not cover {set(shapes) ^ set(covered)}"
    return found


def _in_order(rules: Sequence[Rule], model: ModelConfig) -> Iterator[Rule]:
    """Return all rules with numbers inserted; those of layers stand where the first of them stands."""
    in_layers = [rule for rule in rules if ".N." in rule.foreign]
    for rule in rules:
        if rule not in in_layers:
            yield rule
        elif rule is in_layers[0]:
            for n in range(model.layers):
                for of_layer in in_layers:
                    yield from _numbered(of_layer, n, model.experts)


def _numbered(rule: Rule, layer: int, experts: int) -> Iterator[Rule]:
    for e in range(experts) if ".E." in rule.foreign else (0,):
        foreign, *logical = (
            name.replace(".N.", f".{layer}.").replace(".E.", f".{e}.") for name in (rule.foreign, *rule.logical)
        )
        yield Rule(foreign, tuple(logical), rule.how, rule.cut)


def heads(model: ModelConfig) -> Heads:
    """Return the sizes of the attention heads of `model`."""
    return Heads(model.heads, model.kv_heads, model.head_dim, model.rotary_dims)


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every logical tensor of `model`."""
    h = model.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab, h)}
    if model.positions == "learned":
        shapes["positions.weight"] = (model.max_positions, h)
    for n in range(model.layers):
        shapes |= {f"layers.{n}.{name}": shape for name, shape in _layer(model)}
    shapes |= dict(_norm("final_norm", model, h))
    if not model.tied:
        shapes["head.weight"] = (model.vocab, h)
    return shapes


def _layer(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, d = model.hidden, model.head_dim
    width, kv_width = model.heads * d, model.kv_heads * d
    yield from _norm("attention_norm", model, h)
    for name, rows in (("query", width), ("key", kv_width), ("value", kv_width)):
        yield from _linear(f"attention.{name}", rows, h, model.qkv_bias)
    if model.qk_norm:
        yield "attention.query_norm.weight", (d,)
        yield "attention.key_norm.weight", (d,)
    yield from _linear("attention.output", h, width, model.output_bias)
    yield from _norm("mlp_norm", model, h)
    if model.experts:
        yield "mlp.router.weight", (model.experts, h)
        for e in range(model.experts):
            yield from _feed_forward(f"mlp.experts.{e}", model)
    else:
        yield from _feed_forward("mlp", model)


def _feed_forward(name: str, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, ffn, bias = model.hidden, model.ffn, model.mlp_bias
    for part in ("gate", "up") if model.mlp == "swiglu" else ("up",):
        yield from _linear(f"{name}.{part}", ffn, h, bias)
    yield from _linear(f"{name}.down", h, ffn, bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, model: ModelConfig, features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (features,)
    if model.norm == "layer":
        yield f"{name}.bias", (features,)
