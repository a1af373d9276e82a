"""Tensors of Megatron's ranks put together into whole ones, layers and experts numbered over all ranks.

A rank is one of tp x pp x ep. Those of one ep axis have experts of their own and all else alike.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.megatron_experts import is_expert, one_by_one
from tools.convert.megatron_layout import FILE, merged, part_shape
from tools.convert.rules import Match
from tools.convert.tensors import Stored
from tools.convert.torch_files import contents

RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Whole:
    """A tensor put together from the ranks' ones. shape: with the padding of the vocabulary left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Held = Stored | Whole


@dataclass(frozen=True)
class Rank:
    """A rank's file. chunks: its model's tensors by the names there; several if there are virtual stages."""

    folder: Path
    content: Mapping[str, Any]
    chunks: list[dict[str, Stored]]


@dataclass(frozen=True)
class Ranks:
    """All of them, and what their args say. files: [tp][pp][ep]."""

    path: Path
    args: Mapping[str, Any]
    files: list[list[list[Rank]]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many there are along tp, pp and ep."""
        return len(self.files), len(self.files[0]), len(self.files[0][0])

    @property
    def first(self) -> Rank:
        return self.files[0][0][0]


def read_ranks(path: Path) -> Ranks:
    """Contents of the ranks' files. UserError if one is missing."""
    found = [(match, folder / FILE) for folder in sorted(path.iterdir()) if (match := RANK.fullmatch(folder.name))]
    if missing := [file for _, file in found if not file.is_file()]:
        raise UserError(f"{missing[0]} is missing")
    held = contents([file for _, file in found])
    if wrong := [file for (_, file), content in zip(found, held, strict=True) if not isinstance(content, dict)]:
        raise UserError(f"{wrong[0]} does not hold a dict, as Megatron's files do")
    args = held[0].get("args")
    if not isinstance(args, dict):
        raise UserError(f"{path}: its files have no args, which say what the model is")
    cut_experts = (args.get("expert_model_parallel_size") or 1) > 1
    places = {
        _place(match, cut_experts): Rank(file.parent, content, chunks(content))
        for (match, file), content in zip(found, held, strict=True)
    }
    tp, pp, ep = (1 + max(place[n] for place in places) for n in range(3))
    wanted = [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]
    if lost := [place for place in wanted if place not in places]:
        said = ", ".join(f"{axis} rank {n}" for axis, n in zip(("tensor", "pipeline", "expert"), lost[0], strict=True))
        raise UserError(f"{path} lacks {FILE} of {said}")
    return Ranks(path, args, [[[places[t, p, e] for e in range(ep)] for p in range(pp)] for t in range(tp)])


def _place(match: re.Match[str], cut_experts: bool) -> tuple[int, int, int]:
    """(tp, pp, ep). An axis of size one is not in the name, so a second number alone may be of either."""
    tensor, second, third = (int(number or 0) for number in match.groups())
    return (tensor, 0, second) if cut_experts and match[3] is None else (tensor, second, third)


def chunks(content: Mapping[str, Any]) -> list[dict[str, Stored]]:
    """The state dicts of a rank: one, or one for each virtual stage. Without extra states."""
    numbered = [content[f"model{v}"] for v in range(len(content)) if f"model{v}" in content]
    found = [content["model"]] if "model" in content else numbered
    if not found or not all(isinstance(chunk, dict) for chunk in found):
        raise UserError("a Megatron file holds no model of the names that Megatron-core gives")
    return [_parameters_in(chunk) for chunk in found]


def _parameters_in(state: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a state dict but for extra states, which hold no parameters."""
    return {k: v for k, v in state.items() if isinstance(v, Stored) and not k.endswith("_extra_state")}


def named_over_all(ranks: Ranks, held: Callable[[Rank], Sequence[Mapping[str, Stored]]]) -> dict[str, list[Held]]:
    """Name, with layers and experts counted over all ranks -> the tensors of the tp ranks.

    held: of a rank, the tensors of each of its chunks.
    """
    tp, pp, ep = ranks.sizes
    experts = (ranks.args.get("num_experts") or 0) // ep

    def of_stage(t: int, p: int, v: int) -> dict[str, Held]:
        own = [held(rank)[v] for rank in ranks.files[t][p]]
        hidden = ranks.args["hidden_size"]
        return _together(ranks.path, [one_by_one(own[e], hidden, experts, e * experts) for e in range(ep)])

    virtual = len(ranks.first.chunks)
    stages = [[of_stage(t, p, v) for t in range(tp)] for v in range(virtual) for p in range(pp)]
    return _numbered_over_stages(ranks.path, stages)


def _together(path: Path, ranks: Sequence[Mapping[str, Held]]) -> dict[str, Held]:
    """The tensors of all ep ranks. What is no expert's they have alike; of optimizer state one alone may have it."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    copies = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    if twice := [name for name, found in copies.items() if is_expert(name) and len(found) > 1]:
        raise UserError(f"{path}: two ranks have {twice[0]}")
    return {name: _alike(path, name, found) for name, found in copies.items()}


def _alike(path: Path, name: str, copies: Sequence[Held]) -> Held:
    first, *others = copies
    if not others:
        return first

    def read() -> Tensor:
        values = first.read()
        if any(not torch.equal(values, other.read()) for other in others):
            raise UserError(f"{path}: ranks disagree about {name}, which they should all hold")
        return values

    return Whole(first.shape, first.dtype, read)


def _numbered_over_stages(path: Path, stages: list[list[dict[str, Held]]]) -> dict[str, list[Held]]:
    """Name, with layers counted over all stages -> the tensors of the tp ranks."""
    by_name: dict[str, list[Held]] = {}
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


def wholes_of(path: Path, found: list[Match], by_name: Mapping[str, list[Held]], vocab: int) -> dict[str, Held]:
    """The whole tensors. One that fits no match keeps its shape, for `check_tensors` to speak of."""
    known = {match.foreign: match for match in found}
    wholes: dict[str, Held] = {}
    for name, parts in by_name.items():
        match = known.get(name)
        fits = match and all(
            p.shape == part_shape(match.shape, match.cut, len(parts), len(parts) * p.shape[0]) for p in parts
        )
        enough = match and (match.cut != "vocabulary" or sum(p.shape[0] for p in parts) >= vocab)
        shape = match.shape if match and fits and enough else parts[0].shape
        wholes[name] = _whole_of(path, match, parts) if match and shape == match.shape else parts[0]
    return wholes


def _whole_of(path: Path, match: Match, parts: list[Held]) -> Held:
    """The tensor of `match` put together from those of the tensor-parallel ranks."""
    if match.cut == "whole":
        return _alike(path, match.foreign, parts)

    def read() -> Tensor:
        return merged((p.read() for p in parts), match.cut, match.shape, len(parts))

    return Whole(match.shape, parts[0].dtype, read)
