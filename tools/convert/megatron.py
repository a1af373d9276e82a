"""Reading Megatron-LM's checkpoints: the legacy folders mp_rank_XX[_YYY] and distributed ones (torch_dist).

Ranks' tensors are put together into whole ones, numbered over all stages; what several ranks hold alike must be alike.
No pickle is opened in this process (`tools.convert.untrusted`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf import check_tensors, origin_of
from tools.convert.megatron_layout import TRACKER, model_of
from tools.convert.megatron_ranks import LAYER, RANK, Whole, chunks, numbered_over_stages, read_ranks, wholes_of
from tools.convert.megatron_state import MOMENTS, optimizer_state
from tools.convert.names import megatron
from tools.convert.rules import Match, matches
from tools.convert.source import Facts, Source
from tools.convert.tensors import Stored
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
    tp, pp = len(ranks), len(ranks[0])
    first = ranks[0][0]
    if not isinstance(args := first.get("args"), dict):
        raise UserError(f"{path}: its files have no args, which say what the model is")
    model = model_of(args, vocab)
    held = [[chunks(rank) for rank in stages] for stages in ranks]
    virtual = len(held[0][0])
    by_name = numbered_over_stages(
        path, [[held[t][p][v] for t in range(tp)] for v in range(virtual) for p in range(pp)]
    )
    _check_tied(path, model, by_name)
    found = _found(by_name, args, model)
    wholes = wholes_of(path, found, by_name, model.vocab)
    check_tensors(path, found, wholes)
    state = optimizer_state(path, ranks, found, model.vocab)
    kinds = {"weight": wholes, **state.tensors}
    origins = [
        origin_of(m, kinds[k][m.foreign].read, kinds[k][m.foreign].dtype, model, k) for k in kinds for m in found
    ]
    return Source(path, "megatron", model, origins, _facts(first, args, tp, pp, state.steps, state.scaler), ())


def _found(names: Mapping[str, Any], args: Mapping[str, Any], model: ModelConfig) -> list[Match]:
    """The tensors that the model has in Megatron, by the names that these tensors have."""
    fused = any(".linear_qkv.layer_norm_" in name for name in names)
    return matches(megatron(fused, bool(args.get("rotary_interleaved")), model), model)


def _facts(
    first: Mapping[str, Any], args: Mapping[str, Any], tp: int, pp: int, steps: int, scaler: dict[str, float]
) -> Facts:
    iteration = first.get("iteration") or 0
    samples = args.get("consumed_train_samples") or 0
    tokens = samples * (args.get("seq_length") or 0)
    progress = {"step": iteration, "applied": steps or iteration, "tokens": tokens}
    schedule = first.get("opt_param_scheduler")
    applied = schedule.get("num_steps") if isinstance(schedule, dict) else None
    progress |= {"samples": samples, "applied_samples": samples if applied is None else applied}
    layout = {"tensor": tp, "pipeline": pp, "data": args.get("data_parallel_size") or 1}
    compute = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"
    progress = progress if iteration else {}
    return Facts(steps, scaler, progress=progress, precision={"compute": compute}, layout=layout)


def _check_tied(path: Path, model: ModelConfig, by_name: dict[str, list[Stored]]) -> None:
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
    tp, pp = (args.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline"))
    return Source(path, "megatron", model, origins, _facts(common, args, tp, pp, 0, {}), ())


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
