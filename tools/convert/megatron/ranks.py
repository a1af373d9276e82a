"""Tensors of Megatron's ranks put together into whole ones, layers and experts numbered over all
ranks.

A rank is one of tp x pp x ep. Those of one ep axis have experts of their own and all else alike.
Experts may be cut over fewer ranks than all else (expert_tensor_parallel_size); then neighbours
along tp have other parts, in turn, and other experts: not every pair of a tp and an ep rank has a
file.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.errors import UserError
from tools.convert.core.finite import same_values
from tools.convert.core.rules import Match
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents
from tools.convert.megatron.experts import is_expert, one_by_one
from tools.convert.megatron.keys import ONLY, READ
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.layout import EMBEDDING, FILE, merged, part_shape

RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
CHUNK = re.compile(r"model\d+")
OF_MODEL = {*ONLY, *READ.split()}
LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Whole:
    """A tensor put together from the ranks' ones. shape: with the padding of the vocabulary left
    out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Held = Stored | Whole


@dataclass(frozen=True)
class Rank:
    """A rank's file. chunks: its model's tensors by the names there; several if there are virtual
    stages."""

    folder: Path
    content: Mapping[str, Any]
    chunks: list[dict[str, Stored]]


@dataclass(frozen=True)
class Ranks:
    """All of them, and what their args say. files: by (tp, pp, ep). sizes: how many there are along
    each."""

    path: Path
    args: Mapping[str, Any]
    files: Mapping[tuple[int, int, int], Rank]
    sizes: tuple[int, int, int]

    @property
    def first(self) -> Rank:
        return self.files[min(self.files)]

    @property
    def expert_tp(self) -> int:
        """Over how many ranks each expert is cut."""
        cut = self.args.get("expert_tensor_parallel_size") if self.args.get("num_experts") else None
        return cut or self.sizes[0]


def read_ranks(path: Path) -> Ranks:
    """Contents of the ranks' files. UserError if one is missing."""
    found = [
        (match, folder / FILE)
        for folder in sorted(path.iterdir())
        if (match := RANK.fullmatch(folder.name))
    ]
    if odd := [
        folder
        for folder in path.glob("mp_rank_*")
        if folder.is_dir() and not RANK.fullmatch(folder.name)
    ]:
        raise UserError(
            f"{odd[0]} is not named as a rank's folder is: move it away if it belongs to no rank"
        )
    if missing := [file for _, file in found if not file.is_file()]:
        raise UserError(f"{missing[0]} is missing")
    held = contents([file for _, file in found])
    if wrong := [
        file
        for (_, file), content in zip(found, held, strict=True)
        if not isinstance(content, dict)
    ]:
        raise UserError(f"{wrong[0]} does not hold a dict, as Megatron's files do")
    args = held[0].get("args")
    if not isinstance(args, dict):
        raise UserError(f"{path}: its files have no args, which say what the model is")
    require_kinds(args)
    cut_experts = (args.get("expert_model_parallel_size") or 1) > 1
    places: dict[tuple[int, int, int], Rank] = {}
    for (match, file), content in zip(found, held, strict=True):
        if other := places.get(place := _place(match, cut_experts)):
            raise UserError(
                f"{file.parent} and {other.folder} are both of {_rank_in_words(place)}: move "
                "one away"
            )
        places[place] = Rank(file.parent, content, chunks(content))
    tp, pp, ep = (1 + max(place[n] for place in places) for n in range(3))
    ranks = Ranks(path, args, dict(sorted(places.items())), (tp, pp, ep))
    _check_complete(ranks)
    _check_alike(ranks)
    return ranks


def _check_complete(ranks: Ranks) -> None:
    """Raises UserError unless each part of every tensor is in some file."""
    tp, pp, ep = ranks.sizes
    if tp % ranks.expert_tp:
        raise UserError(
            f"{ranks.path}: expert_tensor_parallel_size = {ranks.expert_tp} does not divide "
            f"the {tp} tensor-parallel "
            "ranks, so these files do not hold all experts: have Megatron save with "
            "--ckpt-format torch_dist"
        )
    there = {(t, p) for t, p, _ in ranks.files}
    experts = {(t % ranks.expert_tp, p, e) for t, p, e in ranks.files}
    for t, p, e in product(range(tp), range(pp), range(ep)):
        if (t, p) not in there or (t % ranks.expert_tp, p, e) not in experts:
            raise UserError(f"{ranks.path} lacks {FILE} of {_rank_in_words((t, p, e))}")


def _check_alike(ranks: Ranks) -> None:
    """Raise UserError unless all files describe one model, in as many parts."""
    first = ranks.first
    for rank in ranks.files.values():
        said = rank.content.get("args")
        if not isinstance(said, dict):
            raise UserError(
                f"{rank.folder / FILE} has no args, which the file of every rank has: have "
                "Megatron-LM save it again"
            )
        own: dict[str, Any] = said
        if differ := sorted(
            key for key in OF_MODEL & own.keys() if own[key] != ranks.args.get(key)
        ):
            key = differ[0]
            raise UserError(
                f"{rank.folder / FILE} is of another run than {first.folder / FILE}: its args "
                f"have {key} = "
                f"{own[key]!r}, and those of the other {ranks.args.get(key)!r}"
            )
        if len(rank.chunks) != len(first.chunks):
            raise UserError(
                f"{rank.folder / FILE} holds the model in {len(rank.chunks)} virtual stages, "
                f"and {first.folder / FILE} "
                f"in {len(first.chunks)}"
            )


def contradicted(ranks: Ranks) -> Iterator[str]:
    """Yield a note for each axis along which the args say that there are more ranks, or fewer, than
    have files."""
    for axis, size in zip(
        ("tensor_model", "pipeline_model", "expert_model"), ranks.sizes, strict=True
    ):
        said = ranks.args.get(key := f"{axis}_parallel_size")
        if said not in (None, size):
            yield (
                f"args say {key} = {said}, but there are files of {size}; the files were read as "
                "they are"
            )
    numbers = {place: rank.content["args"].get("rank") for place, rank in ranks.files.items()}
    if len({*numbers.values()}) == 1:  # as programs write it that convert files
        return
    for place, number in numbers.items():
        if (
            isinstance(number, int) and number % ranks.sizes[0] != place[0]
        ):  # Megatron numbers ranks along tensor first
            file = ranks.files[place].folder / FILE
            yield (
                f"args of {file} say rank = {number}, which has another folder: files may have "
                "each other's names"
            )
            return


def copied(path: Path, held: Mapping[Any, Sequence[Mapping[str, Stored]]]) -> Iterator[str]:
    """Yield a note for each rank whose file holds what that of another does, by their checksums.

    held: of each rank, the tensors of each of its chunks, without ranks that hold what another does
    by design. No two of these hold the same unless all began with the same random numbers.
    """
    seen: dict[Any, Path] = {}
    for chunks in held.values():
        every = [
            (n, name, stored) for n, chunk in enumerate(chunks) for name, stored in chunk.items()
        ]
        if every and all(stored.crc is not None for _, _, stored in every):
            known = frozenset(
                (n, name, stored.shape, stored.dtype, stored.crc) for n, name, stored in every
            )
            own = every[0][2].file
            if (other := seen.setdefault(known, own)) != own:
                yield (
                    f"{path}: {own} and {other} hold the same numbers throughout: one may be a "
                    "copy of the other"
                )


def _rank_in_words(place: tuple[int, int, int]) -> str:
    return "tensor rank {}, pipeline rank {}, expert rank {}".format(*place)


def _place(match: re.Match[str], cut_experts: bool) -> tuple[int, int, int]:
    """(tp, pp, ep). An axis of size one is not in the name, so a second number alone may be of
    either."""
    tensor, second, third = (int(number or 0) for number in match.groups())
    if cut_experts and match[3] is None:
        return (tensor, 0, second)
    return (tensor, second, third)


def chunks(content: Mapping[str, Any]) -> list[dict[str, Stored]]:
    """The state dicts of a rank: one, or one for each virtual stage. Without extra states."""
    numbered = [content[f"model{v}"] for v in range(len(content)) if f"model{v}" in content]
    found = [content["model"]] if "model" in content else numbered
    if more := [key for key in content if CHUNK.fullmatch(key)][
        0 if "model" in content else len(numbered) :
    ]:
        raise UserError(f"a Megatron file holds {more[-1]} beside what is the whole model already")
    if not found or not all(isinstance(chunk, dict) for chunk in found):
        raise UserError("a Megatron file holds no model of the names that Megatron-core gives")
    return [_parameters_in(chunk) for chunk in found]


def _parameters_in(state: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a state dict but for extra states, which hold no parameters."""
    return {
        k: v
        for k, v in state.items()
        if isinstance(v, Stored) and not str(k).endswith("_extra_state")
    }


def named_over_all(
    ranks: Ranks, held: Callable[[Rank], Sequence[Mapping[str, Stored]]]
) -> dict[str, list[Held]]:
    """Name, with layers and experts counted over all ranks -> its parts, one of each tp rank that
    it is cut over.

    held: of a rank, the tensors of each of its chunks.
    """
    virtual = len(ranks.first.chunks)
    pp = ranks.sizes[1]
    stages = [_of_stage(ranks, held, p, v) for v in range(virtual) for p in range(pp)]
    modules = bool(ranks.args.get("mtp_num_layers"))
    return numbered_over_stages(
        ranks.path, stages, LAYER, _ends(stages, modules), (EMBEDDING,) if modules else ()
    )


def _ends(stages: Sequence[Mapping[str, list[Held]]], modules: bool) -> dict[str, int]:
    """Return begins of names -> the one stage that has them.

    modules: there is multi-token prediction, whose layers may have stages of their own. Then the
    last norm is that of the stage with the decoder's last layer
    (megatron/core/transformer/transformer_block.py).
    """
    last = len(stages) - 1
    with_layers = [n for n, stage in enumerate(stages) if any(LAYER.match(name) for name in stage)]
    norm = with_layers[-1] if modules and with_layers else last
    return {"embedding.": 0, "decoder.final_layernorm.": norm, "output_layer.": last}


def _of_stage(
    ranks: Ranks, held: Callable[[Rank], Sequence[Mapping[str, Stored]]], stage: int, chunk: int
) -> dict[str, list[Held]]:
    """Name, with experts counted over all ranks -> its parts. What several ranks have, they have
    alike."""
    tp, _, ep = ranks.sizes
    experts = (ranks.args.get("num_experts") or 0) // ep
    hidden = ranks.args["hidden_size"]
    copies: dict[str, dict[int, list[tuple[int, Held]]]] = {}  # by part: the ep ranks that have it
    for (t, p, e), rank in ranks.files.items():
        own = one_by_one(held(rank)[chunk], hidden, experts, e * experts) if p == stage else {}
        for name, stored in own.items():
            part = t % ranks.expert_tp if is_expert(name) else t
            copies.setdefault(name, {}).setdefault(part, []).append((e, stored))
    for name, parts in copies.items():
        if is_expert(name) and any(len({e for e, _ in found}) > 1 for found in parts.values()):
            raise UserError(f"{ranks.path}: two ranks have {name}")
        if sorted(parts) != [*range(ranks.expert_tp if is_expert(name) else tp)]:
            raise UserError(
                f"{ranks.path}: tensor-parallel ranks of one stage hold tensors of different "
                f"names: {name}"
            )
    return {
        name: [
            alike(ranks.path, name, [stored for _, stored in parts[part]]) for part in sorted(parts)
        ]
        for name, parts in copies.items()
    }


def alike(path: Path, name: str, copies: Sequence[Held]) -> Held:
    """The first of several copies; reading it raises UserError if another differs."""
    first, *others = copies
    if not others:
        return first
    require_one_dtype(path, name, copies)

    def read() -> Tensor:
        values = first.read()
        if not all(same_values(values, other.read()) for other in others):
            raise UserError(f"{path}: ranks disagree about {name}, which they should all hold")
        return values

    return Whole(first.shape, first.dtype, read)


def require_one_dtype(path: Path, name: str, parts: Sequence[Held]) -> None:
    """Raise UserError if ranks hold a tensor in several dtypes: put together, some of it would be
    rounded."""
    if len(dtypes := sorted({str(part.dtype).removeprefix("torch.") for part in parts})) > 1:
        raise UserError(f"{path}: ranks hold {name} in several dtypes, {' and '.join(dtypes)}")


def numbered_over_stages(
    path: Path,
    stages: Sequence[Mapping[str, list[Held]]],
    layer: re.Pattern[str],
    ends: Mapping[str, int],
    twice: Sequence[str] = (),
) -> dict[str, list[Held]]:
    """Name, with layers counted over all stages -> its parts.

    layer: matches what is before a layer's number, the number and the rest of a name. ends: begins
    of names -> the stage that alone has them; UserError if another has them, for then files have
    each other's names.
    twice: names that several stages may have, which must then be alike.
    """
    for n, stage in enumerate(stages):
        others = tuple(begin for begin, at in ends.items() if at != n)
        if odd := [name for name in stage if name.startswith(others) and name not in twice]:
            at = next(at for begin, at in ends.items() if odd[0].startswith(begin))
            raise UserError(
                f"{path}: {odd[0]} belongs to pipeline stage {at} of {len(stages)}, counted "
                f"from 0, and stage {n} has "
                "it: files of stages have each other's names"
            )
    by_name: dict[str, list[Held]] = {}
    before = 0
    for stage in stages:
        for name, parts in stage.items():
            match = layer.match(name)
            shown = f"{match[1]}{int(match[2]) + before}{match[3]}" if match else name
            if shown in by_name and shown in twice:
                parts = [
                    alike(path, name, both) for both in zip(by_name[shown], parts, strict=True)
                ]
            elif shown in by_name:
                raise UserError(f"{path}: two pipeline stages have {shown}")
            by_name[shown] = parts
        before += len({match[2] for name in stage if (match := layer.match(name))})
    return by_name


def wholes_of(
    path: Path, found: list[Match], by_name: Mapping[str, list[Held]], vocab: int
) -> dict[str, Held]:
    """The whole tensors. One that fits no match keeps its shape, for `check_tensors` to speak of.

    UserError for parts of other shapes than ranks have of it, and for parts in several dtypes.
    """
    known = {match.foreign: match for match in found}
    wholes: dict[str, Held] = {}
    for name, parts in by_name.items():
        require_one_dtype(path, name, parts)
        match = known.get(name)
        fits = match is not None and _fits(match, parts, vocab)
        if (
            match
            and not fits
            and any(part.shape != parts[0].shape or part.shape == match.shape for part in parts)
        ):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise UserError(
                f"{path}: {name} is {shapes} on the tensor-parallel ranks, which do not fit "
                "each other"
            )
        wholes[name] = _whole_of(path, match, parts) if match and fits else parts[0]
    return wholes


def _fits(match: Match, parts: Sequence[Held], vocab: int) -> bool:
    """Return True if the parts are those of a tensor. Each has as many rows of a vocabulary, some
    of them padding."""
    rows = sum(parts[0].shape[:1])
    shape = part_shape(match.shape, match.cut, len(parts), len(parts) * rows)
    return all(part.shape == shape for part in parts) and (
        match.cut != "vocabulary" or len(parts) * rows >= vocab
    )


def _whole_of(path: Path, match: Match, parts: list[Held]) -> Held:
    """The tensor of `match` put together from those of the tensor-parallel ranks."""
    if match.cut == "whole":
        return alike(path, match.foreign, parts)

    def read() -> Tensor:
        return merged((p.read() for p in parts), match.cut, match.shape, len(parts))

    return Whole(match.shape, parts[0].dtype, read)
