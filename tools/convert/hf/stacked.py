"""Experts of a layer in one tensor, and other names that transformers 5 has inside and may save.

`save_pretrained(save_original_format=False)` writes a model as transformers 5 holds it:

    model.layers.N.mlp.experts.gate_up_proj    [experts, 2 ffn, hidden], each expert's gate above its up
    model.layers.N.mlp.experts.down_proj       [experts, hidden, ffn]

Here they are put as the tensors of published files: one for each expert and projection. gpt-oss has
one tensor in published files too, of another order (`tools.convert.core.names`).
"""

import re
from collections.abc import Iterator, Mapping
from math import prod

from megaprec.errors import UserError
from tools.convert.core.tensors import Stored
from tools.convert.hf.kinds import short

_STACKED = re.compile(r"(.*\.)mlp\.(experts\.)(gate_up|down)_proj")
# By model_type: the folder of experts, and the names of gate, up and down, if they are not the usual ones.
_USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")
_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
# By model_type: parts of other names -> those of published files.
_RENAMED = {
    "mixtral": {".mlp.gate.": ".block_sparse_moe.gate."},
    "gpt_neox": {"lm_head.": "embed_out."},
}


def unstack_experts(stored: Mapping[str, Stored], kind: str) -> dict[str, Stored]:
    """Return the tensors by the names of published files, experts one by one. kind: model_type.

    Raises UserError for a tensor of experts that does not consist of theirs.
    """
    if kind == "gpt_oss":
        return dict(stored)
    renamed = {_published(name, kind): one for name, one in stored.items()}
    whole: dict[str, Stored] = {}
    for name, one in renamed.items():
        place = _STACKED.fullmatch(name)
        whole |= dict(_apart(name, one, place, kind)) if place else {name: one}
    return whole


def _published(name: str, kind: str) -> str:
    for inside, published in _RENAMED.get(kind, {}).items():
        name = name.replace(inside, published)
    return name


def _apart(name: str, one: Stored, place: re.Match[str], kind: str) -> Iterator[tuple[str, Stored]]:
    """Yield each expert's tensors of one that stacks them."""
    folder, gate, up, down = _NAMES.get(kind, _USUAL)
    parts = (gate, up) if place[3] == "gate_up" else (down,)
    if len(one.shape) != 3 or one.shape[1] % len(parts):
        form = "[experts, 2 ffn, hidden]" if len(parts) > 1 else "[experts, hidden, ffn]"
        raise UserError(
            f"{one.file}: {name} is {short(list(one.shape))}, not {form}: such experts are "
            "not known"
        )
    experts, height, width = one.shape
    rows = height // len(parts)
    strides = one.strides or (prod(one.shape[1:]), width, 1)
    kept = None if one.strides is None else tuple(strides[1:])
    for expert in range(experts):
        for number, part in enumerate(parts):
            elements = expert * strides[0] + number * rows * strides[1]
            start = one.start + elements * one.dtype.itemsize
            yield (
                f"{place[1]}{folder}.{place[2]}{expert}.{part}.weight",
                one.part((rows, width), start, kept),
            )
