"""Experts of a layer in one tensor, and other names that transformers 5 has inside and may save.

`save_pretrained(save_original_format=False)` writes a model as transformers 5 holds it:

    model.layers.N.mlp.experts.gate_up_proj    [experts, 2 ffn, hidden], gate above up
    model.layers.N.mlp.experts.down_proj       [experts, hidden, ffn]

Nemotron-H has its experts in `mixer` in place of `mlp`, and without a gate: up_proj [experts, ffn,
hidden].

Kimi Linear has its three convolutions in one tensor too, self_attn.conv1d.weight [3 features, 1,
kernel].

Here they are put as the tensors of published files: one for each expert and projection. gpt-oss has
one tensor in published files too, of another order (`tools.convert.core.names`).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megaprec.errors import UserError
from tools.convert.core.rules import NameRule
from tools.convert.core.tensors import Stored
from tools.convert.core.transforms import CONVOLUTIONS, EXPERTS_GATE_UP, EXPERTS_STACKED
from tools.convert.hf.keys import short

_STACKED = re.compile(r"(.*\.)(?:mlp|mixer)\.(experts\.)(gate_up|up|down)_proj")


_GATE = ".experts.E.gate.weight"
# Shapes of a stacked tensor by its projection.
_FORMS = {
    "gate_up": "[experts, 2 ffn, hidden]",
    "up": "[experts, ffn, hidden]",
    "down": "[experts, hidden, ffn]",
}


class ExpertNames(NamedTuple):
    """Names in published files: of what holds experts, and of an expert's projections."""

    module: str
    gate: str
    up: str
    down: str


_USUAL = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_OF_MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
# By model_type, if they are not the usual ones.
_NAMES = {
    "mixtral": _OF_MIXTRAL,
    "minimax_m2": _OF_MIXTRAL,
    "nemotron_h": _USUAL._replace(module="mixer"),
    "kimi_linear": _OF_MIXTRAL,
}
_GATED_PARTS = ("gate", "up", "down")
# Of Kimi Delta Attention: the end of the name of three convolutions in one tensor, and of each.
_CONVOLUTIONS = ".self_attn.conv1d.weight"
_CONVOLUTION = ".self_attn.{part}_conv1d.weight"
_CONVOLVED = ("q", "k", "v")
# By model_type: parts of other names -> those of published files.
_RENAMED = {
    "mixtral": {".mlp.gate.": ".block_sparse_moe.gate."},
    "minimax_m2": {
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
    },
    "gpt_neox": {"lm_head.": "embed_out."},
    # whose published files stack experts too, by other names
    "granitemoe": {
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        ".router.weight": ".router.layer.weight",
    },
    "kimi_linear": {
        ".mlp.gate.": ".block_sparse_moe.gate.",
        ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
        ".forget_gate.": ".",
        # of layers without experts, which transformers saves as if they had some
        **{f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in _GATED_PARTS},
    },
}


def unstack_experts(stored: Mapping[str, Stored], model_type: str) -> dict[str, Stored]:
    """Return the tensors by the names of published files, experts one by one.

    Raises UserError for a tensor of experts that does not consist of theirs.
    """
    # Its published files stack experts too, and the name table knows them.
    if model_type == "gpt_oss":
        return dict(stored)
    published: dict[str, Stored] = {}
    for tensor_name, tensor in stored.items():
        tensor_name = published_name(tensor_name, model_type)
        if match := _STACKED.fullmatch(tensor_name):
            published |= dict(_unstack(tensor_name, tensor, match, model_type))
        elif _joins_convolutions(tensor_name, model_type):
            published |= dict(_three_convolutions(tensor_name, tensor))
        else:
            published[tensor_name] = tensor
    return published


def published_name(tensor_name: str, model_type: str) -> str:
    """Return the name that published files have for a tensor; experts in one keep theirs."""
    for inside, published in _RENAMED.get(model_type, {}).items():
        tensor_name = tensor_name.replace(inside, published)
    return tensor_name


def _joins_convolutions(tensor_name: str, model_type: str) -> bool:
    return model_type == "kimi_linear" and tensor_name.endswith(_CONVOLUTIONS)


def _three_convolutions(tensor_name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of the convolutions of queries, keys and values. Raises UserError if it
    does not consist of theirs."""
    if len(tensor.shape) != 3 or tensor.shape[0] % len(_CONVOLVED):
        raise UserError.of(
            "convert.hf_expert_shape",
            file=tensor.file,
            name=tensor_name,
            shape=short(list(tensor.shape)),
            form="[3 features, 1, kernel]",
        )
    features, *others = tensor.shape
    rows = features // len(_CONVOLVED)
    # in elements; a contiguous tensor has no strides
    row_stride = prod(others) if tensor.strides is None else tensor.strides[0]
    layer = tensor_name.removesuffix(_CONVOLUTIONS)
    for number, part in enumerate(_CONVOLVED):
        start = tensor.start + number * rows * row_stride * tensor.dtype.itemsize
        name = layer + _CONVOLUTION.format(part=part)
        yield name, tensor.part((rows, *others), start, tensor.strides)


def rules_inside(rules: Sequence[NameRule], names: Collection[str]) -> list[NameRule]:
    """Return a table of published files with what transformers 5 has inside in one tensor, if the
    names of tensors have it so: experts of a layer, and convolutions of Kimi Delta Attention."""
    inside = [*rules]
    # A matrix of one expert's own ends with .weight.
    if any(name.endswith(".experts.down_proj") for name in names):
        inside = stacked_rules(inside)
    if any(name.endswith(_CONVOLUTIONS) for name in names):
        inside = _with_joined_convolutions(inside)
    return inside


def _with_joined_convolutions(rules: Sequence[NameRule]) -> list[NameRule]:
    """Return a table with the three convolutions of Kimi Delta Attention in one tensor; of other
    families the same table."""
    ends = tuple(_CONVOLUTION.format(part=part) for part in _CONVOLVED)
    of_parts = [rule for rule in rules if rule.foreign.endswith(ends)]
    if not of_parts:
        return [*rules]
    others = [rule for rule in rules if rule not in of_parts]
    place = rules.index(of_parts[0])
    logical = tuple(name for rule in of_parts for name in rule.logical)
    layer, _, _ = of_parts[0].foreign.rpartition(".self_attn.")
    joined = NameRule(layer + _CONVOLUTIONS, logical, CONVOLUTIONS)
    return [*others[:place], joined, *others[place:]]


def stacked_rules(rules: Sequence[NameRule]) -> list[NameRule]:
    """Return a table of published files with the experts of a layer in one tensor, as transformers
    5 has them inside."""
    stacked: list[NameRule] = []
    has_gates = any(name.endswith(_GATE) for rule in rules for name in rule.logical)
    for rule in rules:
        module, is_expert, _ = rule.foreign.partition(".experts.E.")
        if not is_expert:
            stacked.append(rule)
            continue
        # A gate stands for gate and up, which are one tensor.
        (logical,) = rule.logical
        layer, _, module_name = module.rpartition(".")
        # but for the mixers of Nemotron-H, transformers 5 has one name inside of all models
        name_inside = "mixer" if module_name == "mixer" else "mlp"
        experts = f"{layer}.{name_inside}.experts"
        if logical.endswith(_GATE):
            gate_up = (logical, logical.replace(".gate.weight", ".up.weight"))
            stacked.append(NameRule(f"{experts}.gate_up_proj", gate_up, EXPERTS_GATE_UP))
        elif logical.endswith(".down.weight"):
            stacked.append(NameRule(f"{experts}.down_proj", (logical,), EXPERTS_STACKED))
        elif not has_gates:
            stacked.append(NameRule(f"{experts}.up_proj", (logical,), EXPERTS_STACKED))
    return stacked


def _unstack(
    tensor_name: str, tensor: Stored, match: re.Match[str], model_type: str
) -> Iterator[tuple[str, Stored]]:
    """Yield each expert's tensors of one that stacks them. match: of its name."""
    prefix, experts_name, projection = match.groups()
    names = _NAMES.get(model_type, _USUAL)
    parts_of_projection = {
        "gate_up": (names.gate, names.up),
        "up": (names.up,),
        "down": (names.down,),
    }
    parts = parts_of_projection[projection]
    if len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
        raise UserError.of(
            "convert.hf_expert_shape",
            file=tensor.file,
            name=tensor_name,
            shape=short(list(tensor.shape)),
            form=_FORMS[projection],
        )
    experts, height, width = tensor.shape
    rows = height // len(parts)
    # A contiguous tensor has no strides, nor have its matrices.
    expert_stride, row_stride, _ = tensor.strides or (height * width, width, 1)
    matrix_strides = None if tensor.strides is None else tuple(tensor.strides[1:])
    module = f"{prefix}{names.module}.{experts_name}"
    for expert in range(experts):
        for number, part in enumerate(parts):
            # The rows of a gate come first, and those of its up follow.
            elements = expert * expert_stride + number * rows * row_stride
            start = tensor.start + elements * tensor.dtype.itemsize
            matrix = tensor.part((rows, width), start, matrix_strides)
            yield f"{module}{expert}.{part}.weight", matrix
