"""A Hugging Face state dict as NxD saves it, rank by rank.

Cut as src/neuronx_distributed/scripts/checkpoint_converter.py:convert_full_state_to_tp cuts it,
written as trainer/checkpoint.py:save_checkpoint and parallel_layers/checkpointing.py:save write it.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """What differs among NxD's models. fused: of query, key and value. qkv_linear:
    GQAQKVColumnParallelLinear.

    copies: kv_size_multiplier. grouped: copies lie side by side (trn2), else heads follow each
        other (trn1).
    """

    tp: int = 1
    pp: int = 1
    qkv_linear: bool = False
    fused: bool = False
    gate_up: bool = True
    copies: int = 1
    grouped: bool = False
    xser: bool = False
    across: bool = False  # the embedding's features are cut, not its vocabulary


def order(form: Form, groups: int) -> list[int]:
    """The key/value head at each place, over all ranks."""
    once = list(range(groups))
    if form.grouped:
        return [head for head in once for _ in range(form.copies)]
    return once * form.copies


def queries(form: Form, heads: int, groups: int) -> list[int]:
    """The query head at each place: those of a key/value head are dealt out to its copies."""
    each = heads // groups // form.copies
    seen = dict.fromkeys(range(groups), 0)
    found: list[int] = []
    for head in order(form, groups):
        first = head * (heads // groups) + seen[head] * each
        found += range(first, first + each)
        seen[head] += 1
    return found


def rank_state(
    whole: Mapping[str, Tensor], config: Mapping[str, Any], form: Form, t: int, p: int
) -> dict[str, Tensor]:
    """What a rank has."""
    layers, heads, groups = (
        config[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    own = range(p * layers // form.pp, (p + 1) * layers // form.pp)
    found: dict[str, Tensor] = {}
    for name, values in whole.items():
        parts = name.split(".")
        ends = {"embed_tokens": 0, "norm": form.pp - 1, "lm_head": form.pp - 1}
        here = int(parts[2]) in own if "layers" in parts else ends[parts[-2]] == p
        if here:
            found[name] = _cut(name, values, form, t, heads, groups).clone()
    return _fused(found, form)


def _cut(name: str, values: Tensor, form: Form, t: int, heads: int, groups: int) -> Tensor:
    layer = name.split(".")[-2]
    dim = 0
    if layer in ("k_proj", "v_proj"):
        values = torch.cat([values.chunk(groups)[head] for head in order(form, groups)])
    elif layer == "q_proj":
        values = torch.cat([values.chunk(heads)[head] for head in queries(form, heads, groups)])
    elif layer == "o_proj" and name.endswith("weight"):
        values = torch.cat(
            [values.chunk(heads, 1)[head] for head in queries(form, heads, groups)], 1
        )
        dim = 1
    elif layer == "down_proj" and name.endswith("weight"):
        dim = 1
    elif layer == "embed_tokens":
        dim = int(form.across)
    elif layer not in ("gate_proj", "up_proj", "lm_head"):
        return values
    return values.chunk(form.tp, dim)[t]


def _fused(state: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    for name in list(state):
        front, _, last = name.rpartition("_proj.")
        if form.gate_up and front.endswith("mlp.gate"):
            up = state.pop(f"{front[:-4]}up_proj.{last}")
            state[f"{front[:-4]}gate_up_proj.{last}"] = torch.cat([state.pop(name), up])
        if front.endswith("self_attn.q") and (form.qkv_linear or form.fused):
            three = [state.pop(f"{front[:-1]}{part}_proj.{last}") for part in "qkv"]
            if form.fused:
                state[f"{front[:-1]}qkv_proj.{last}{'_qkv' if form.qkv_linear else ''}"] = (
                    torch.cat(three)
                )
            else:
                state |= {
                    f"{front[:-1]}qkv_proj.{last}_{part}": v
                    for part, v in zip("qkv", three, strict=True)
                }
    return state


@contextmanager
def reference_class() -> Iterator[type]:
    """torch_xla's TensorReference, which stands for a tensor in a file of its own."""
    name = "torch_xla.utils.serialization"
    parents = [name.rsplit(".", n)[0] for n in (2, 1)] + [name]
    sys.modules |= {parent: ModuleType(parent) for parent in parents}
    try:
        reference = type("TensorReference", (), {"__module__": name})
        sys.modules[name].TensorReference = reference  # type: ignore[attr-defined]
        yield reference
    finally:
        for parent in parents:
            del sys.modules[parent]


def put(file: Path, state: Mapping[str, Tensor], xser: bool) -> None:
    """A state dict, or its references with the tensors beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(dict(state), file)
        return
    folder = file.with_name(f"{file.name}.tensors")
    folder.mkdir()
    with reference_class() as reference:
        refs = {name: reference() for name in state}
        for number, (name, one) in enumerate(refs.items()):
            one.tid = number
            torch.save(state[name], folder / f"tensor_{number}.pt")
        torch.save(refs, file)
    info = {
        n: {"dtype": v.dtype, "shape": v.shape, "expert_model_parallel": False}
        for n, v in enumerate(state.values())
    }
    torch.save(info, file.with_name(f"{file.name}.info.pt"))


def save(
    folder: Path,
    config: Mapping[str, Any],
    whole: Mapping[str, Tensor],
    form: Form,
    tag: str = "step_100",
) -> Path:
    """The folder that a run saves into; the checkpoint is in it under its tag."""
    for p in range(form.pp):
        for t in range(form.tp):
            name = f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt"
            put(folder / tag / "model" / name, rank_state(whole, config, form, t, p), form.xser)
            put(folder / tag / "optim" / name, {}, False)
    for name in ("checkpoint", "done"):
        (folder / tag / name).write_text("1")
    torch.save({"last_epoch": 3}, folder / tag / "scheduler.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
