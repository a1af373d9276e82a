"""Reading Megatron-LM's checkpoints: the legacy folders mp_rank_XX[_YYY] and distributed ones (torch_dist).

Ranks' tensors are put together into whole ones, numbered over all stages; what several ranks hold alike must be alike.
No pickle is opened in this process (`tools.convert.untrusted`).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf import check_tensors, origin_of
from tools.convert.megatron_layout import TRACKER, model_of
from tools.convert.megatron_ranks import LAYER, RANK, Held, Whole, named_over_all, read_ranks, wholes_of
from tools.convert.megatron_state import MOMENTS, optimizer_state
from tools.convert.names import megatron
from tools.convert.rules import Match, matches
from tools.convert.source import Facts, Source
from tools.convert.torch_files import contents, distributed_contents

HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def find_megatron(path: Path) -> Path | None:
    """The folder of an iteration: `path`, or the one that its tracker file names; None if there is none."""
    if (path / TRACKER).is_file():
        said = (path / TRACKER).read_text().strip()
        name = said if said == "release" else f"iter_{int(said):07d}" if said.isdigit() else ""
        if not name or not (path / name).is_dir():
            raise UserError(f"{path / TRACKER} says {said!r}, but there is no such checkpoint beside it")
        path = path / name
    is_one = (path / ".metadata").is_file() or any(RANK.fullmatch(p.name) for p in path.iterdir())
    return path if is_one else None


def open_megatron(path: Path, vocab: int | None = None) -> Source:
    """Opens the folder of an iteration. vocab: tokens without padding, if its args do not say."""
    return _open_distributed(path, vocab) if (path / ".metadata").is_file() else _open_legacy(path, vocab)


def _open_legacy(path: Path, vocab: int | None) -> Source:
    ranks = read_ranks(path)
    model = model_of(ranks.args, vocab)
    by_name = named_over_all(ranks, lambda rank: rank.chunks)
    _check_tied(path, model, by_name)
    found = _found(by_name, ranks.args, model)
    wholes = wholes_of(path, found, by_name, model.vocab)
    check_tensors(path, found, wholes)
    state = optimizer_state(ranks, found, model)
    kinds = {"weight": wholes, **state.tensors}
    if masters := state.tensors.get("weight"):
        kinds["weight"] = {name: _master(path, name, masters[name], wholes[name]) for name in wholes}
    origins = [
        origin_of(m, kinds[k][m.foreign].read, kinds[k][m.foreign].dtype, model, k) for k in kinds for m in found
    ]
    facts = _facts(ranks.first.content, ranks.args, ranks.sizes, state.steps, state.scaler)
    return Source(path, "megatron", model, origins, facts, ())


def _master(path: Path, name: str, master: Held, weight: Held) -> Whole:
    """A master, which has to be the weight but for rounding: what was saved in another order does not pass."""

    def read() -> Tensor:
        values = master.read()
        if not torch.equal(values.to(weight.dtype), weight.read()):
            raise UserError(f"{path}: what its optimizer holds as the FP32 master of {name} is not that of its weight")
        return values

    return Whole(master.shape, master.dtype, read)


def _found(names: Mapping[str, Any], args: Mapping[str, Any], model: ModelConfig) -> list[Match]:
    """The tensors that the model has in Megatron, by the names that these tensors have."""
    fused = any(".linear_qkv.layer_norm_" in name for name in names)
    return matches(megatron(fused, bool(args.get("rotary_interleaved")), model), model)


def _facts(
    first: Mapping[str, Any],
    args: Mapping[str, Any],
    sizes: tuple[int, int, int],
    steps: int = 0,
    scaler: Mapping[str, float] = MappingProxyType({}),
) -> Facts:
    iteration = first.get("iteration") or 0
    samples = args.get("consumed_train_samples") or 0
    tokens = samples * (args.get("seq_length") or 0)
    progress = {"step": iteration, "applied": steps or iteration, "tokens": tokens}
    schedule = first.get("opt_param_scheduler")
    applied = schedule.get("num_steps") if isinstance(schedule, dict) else None
    progress |= {"samples": samples, "applied_samples": samples if applied is None else applied}
    tp, pp, ep = sizes
    layout = {"tensor": tp, "pipeline": pp, "data": args.get("data_parallel_size") or 1}
    layout |= {"expert": ep} if ep > 1 else {}
    compute = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"
    progress = progress if iteration else {}
    return Facts(steps, dict(scaler), progress=progress, precision={"compute": compute}, layout=layout)


def _check_tied(path: Path, model: ModelConfig, by_name: dict[str, list[Held]]) -> None:
    """The last stage's copy of a tied embedding must be one; it is then left aside."""
    if not model.tied or HEAD not in by_name:
        return
    for head, embedding in zip(by_name.pop(HEAD), by_name.get(EMBEDDING, ()), strict=True):
        if not torch.equal(head.read(), embedding.read()):
            raise UserError(f"{path}: {HEAD} of the last stage differs from {EMBEDDING}, though they are tied")


def _open_distributed(path: Path, vocab: int | None) -> Source:
    """A torch_dist checkpoint: whole tensors in chunks; the layers of a model are mostly stacked into one tensor."""
    common = contents([path / "common.pt"])[0] if (path / "common.pt").is_file() else {}
    if not isinstance(common, dict) or not isinstance(args := common.get("args"), dict):
        raise UserError(f"{path}: common.pt has no args, which say what the model is")
    model = model_of(args, vocab)
    held = distributed_contents(path)
    found = _found(held, args, model)
    origins = []
    for kind in ("weight", *MOMENTS):
        prefix = "" if kind == "weight" else f"optimizer.state.{kind}."
        wholes = {m.foreign: _stacked(path, m, held, prefix) for m in found}
        there = {name: whole for name, whole in wholes.items() if whole}
        if there or kind == "weight":
            check_tensors(path, found, there)
            origins += [origin_of(m, there[m.foreign].read, there[m.foreign].dtype, model, kind) for m in found]
    tp, pp, ep = (args.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline", "expert"))
    return Source(path, "megatron", model, origins, _facts(common, args, (tp, pp, ep)), ())


def _stacked(path: Path, match: Match, held: Mapping[str, Any], prefix: str) -> Whole | None:
    """The tensor of `match`, of its own name or as one layer of the tensor that all layers are stacked in."""
    layer = LAYER.match(match.foreign)
    name, index = match.foreign, None
    if prefix + name not in held and layer:
        name, index = f"{layer[1].removesuffix('.')}{layer[3]}", int(layer[2])
    entry = held.get(prefix + name)
    if entry is None:
        return None
    shape = tuple(entry["shape"][1:] if index is not None else entry["shape"])
    rows = match.shape[0] if match.cut == "vocabulary" and shape and shape[0] >= match.shape[0] else None
    wanted = (rows, *shape[1:]) if rows else shape
    return Whole(wanted, entry["chunks"][0][1].dtype, lambda: _assembled(path, name, entry, index, shape)[slice(rows)])


def _assembled(path: Path, name: str, entry: Mapping[str, Any], index: int | None, shape: tuple[int, ...]) -> Tensor:
    """One layer of a stacked tensor, or all of a tensor."""
    whole: Tensor | None = None
    filled = 0
    for offset, stored in entry["chunks"]:
        size = stored.shape
        if index is not None:
            if not offset[0] <= index < offset[0] + size[0]:
                continue
            values = stored.read()[index - offset[0]]
            offset, size = offset[1:], size[1:]
        else:
            values = stored.read()
        whole = torch.empty(shape, dtype=values.dtype) if whole is None else whole
        whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] = values
        filled += values.numel()
    if whole is None or filled != whole.numel():
        raise UserError(f"{path} lacks a part of {name}")
    return whole
