"""Tensors of Megatron's ranks put together into whole ones, with layers numbered over all pipeline stages."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.megatron_layout import FILE, merged, part_shape
from tools.convert.rules import Match
from tools.convert.tensors import Stored
from tools.convert.torch_files import contents

RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Whole:
    """A tensor put together from the ranks' ones. shape: with the padding of the vocabulary left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def read_ranks(path: Path) -> list[list[dict[str, Any]]]:
    """Contents of the ranks' files, [tp][pp]. UserError if one is missing."""
    folders = {}
    for folder in sorted(path.iterdir()):
        if match := RANK.fullmatch(folder.name):
            folders[int(match[1]), int(match[2] or 0)] = folder / FILE
        elif folder.name.startswith("mp_rank_"):
            raise UserError(f"{folder}: experts over several ranks (expert parallelism) cannot be read")
    tp, pp = (1 + max(place[n] for place in folders) for n in (0, 1))
    wanted = [(t, p) for t in range(tp) for p in range(pp)]
    if missing := [place for place in wanted if place not in folders or not folders[place].is_file()]:
        raise UserError(f"{path} lacks {FILE} of tensor rank {missing[0][0]}, pipeline rank {missing[0][1]}")
    held = dict(zip(wanted, contents([folders[place] for place in wanted]), strict=True))
    if wrong := [place for place, content in held.items() if not isinstance(content, dict)]:
        raise UserError(f"{folders[wrong[0]]} does not hold a dict, as Megatron's files do")
    return [[held[t, p] for p in range(pp)] for t in range(tp)]


def chunks(content: Mapping[str, Any]) -> list[dict[str, Stored]]:
    """The state dicts of a rank: one, or one for each virtual stage. Without extra states."""
    numbered = [content[f"model{v}"] for v in range(len(content)) if f"model{v}" in content]
    found = [content["model"]] if "model" in content else numbered
    if not found or not all(isinstance(chunk, dict) for chunk in found):
        raise UserError("a Megatron file holds no model of the names that Megatron-core gives")
    return [parameters_in(chunk) for chunk in found]


def parameters_in(state: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a state dict but for extra states, which hold no parameters."""
    return {k: v for k, v in state.items() if isinstance(v, Stored) and not k.endswith("_extra_state")}


def numbered_over_stages(path: Path, stages: list[list[dict[str, Stored]]]) -> dict[str, list[Stored]]:
    """Name, with layers counted over all stages -> the tensors of the tp ranks."""
    by_name: dict[str, list[Stored]] = {}
    before = 0
    for ranks in stages:
        if len({frozenset(rank) for rank in ranks}) > 1:
            raise UserError(f"{path}: tensor-parallel ranks of one stage hold tensors of different names")
        for name in ranks[0]:
            match = LAYER.match(name)
            shown = f"{match[1]}{int(match[2]) + before}{match[3]}" if match else name
            if shown in by_name:
                raise UserError(f"{path}: two pipeline stages have {shown}")
            by_name[shown] = [rank[name] for rank in ranks]
        before += len({match[2] for name in ranks[0] if (match := LAYER.match(name))})
    return by_name


def wholes_of(path: Path, found: list[Match], by_name: Mapping[str, list[Stored]], vocab: int) -> dict[str, Whole]:
    """The whole tensors. One that fits no match keeps its shape, for `check_tensors` to speak of."""
    known = {match.foreign: match for match in found}
    wholes = {}
    for name, parts in by_name.items():
        match = known.get(name)
        fits = match and all(
            p.shape == part_shape(match.shape, match.cut, len(parts), len(parts) * p.shape[0]) for p in parts
        )
        enough = match and (match.cut != "vocabulary" or sum(p.shape[0] for p in parts) >= vocab)
        shape = match.shape if match and fits and enough else parts[0].shape
        wholes[name] = whole_of(path, match, parts, vocab) if match and shape == match.shape else parts[0]
    return wholes


def whole_of(path: Path, match: Match, parts: list[Stored], vocab: int) -> Whole:
    """The tensor of `match` put together from those of the tensor-parallel ranks."""

    def read() -> Tensor:
        if match.cut != "whole":
            return merged([p.read() for p in parts], match.cut, vocab)
        values = parts[0].read()
        if any(not torch.equal(values, other.read()) for other in parts[1:]):
            raise UserError(f"{path}: tensor-parallel ranks disagree about {match.foreign}, which they should all hold")
        return values

    return Whole(match.shape, parts[0].dtype, read)
