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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import UserError
from tools.convert.core.rules import Match
from tools.convert.core.shards import (
    RankTensors,
    ShardPart,
    TensorSource,
    collect_shards,
    count_ranks,
    merge_shards,
    number_over_stages,
    unlike_shapes,
)
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents
from tools.convert.megatron.keys import ALLOWED_VALUES, READ_ARGUMENTS
from tools.convert.megatron.kinds import require_kinds
from tools.convert.megatron.layout import (
    EMBEDDING,
    FILE,
    is_expert,
    with_global_experts,
)

RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
CHUNK = re.compile(r"model\d+")
MODEL_ARGUMENTS = {*ALLOWED_VALUES, *READ_ARGUMENTS}
# A mixer's convolution, which is no module of its own in later versions.
_CONVOLUTION = re.compile(r"(\.mixer\.conv1d)_(weight|bias)$")
LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")


class PerAxis(NamedTuple):
    """A number for each axis of model parallelism: where a rank is, or how many ranks there are."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class RankFile:
    """A rank's file. chunks: its model's tensors by the names there; several if there are virtual
    stages."""

    folder: Path
    content: Mapping[str, Any]
    chunks: list[dict[str, Stored]]


TensorsOfRank = Callable[[RankFile], Sequence[Mapping[str, Stored]]]


@dataclass(frozen=True)
class RankFiles:
    """The files of all ranks.

    args: of the first.
    sizes: how many ranks there are along each axis.
    """

    path: Path
    args: Mapping[str, Any]
    files: Mapping[PerAxis, RankFile]
    sizes: PerAxis

    @property
    def first(self) -> RankFile:
        return self.files[min(self.files)]

    @property
    def expert_tp(self) -> int:
        """Return over how many ranks each expert is cut."""
        size = None
        if self.args.get("num_experts"):
            size = self.args.get("expert_tensor_parallel_size")
        return size or self.sizes.tp

    def tensor_ranks(self, tensor_name: str) -> int:
        """Return over how many ranks a tensor is cut."""
        return self.expert_tp if is_expert(tensor_name) else self.sizes.tp


def read_ranks(checkpoint: Path) -> RankFiles:
    """Return the contents of the ranks' files. Raises UserError if one is missing."""
    matches = _find_files(checkpoint)
    # All files at once: starting the process that opens pickles takes seconds.
    loaded = contents(list(matches))
    for rank_file, content in zip(matches, loaded, strict=True):
        if not isinstance(content, dict):
            raise UserError.of("convert.megatron_not_dict", file=rank_file)
    args = loaded[0].get("args")
    if not isinstance(args, dict):
        raise UserError.of("convert.megatron_files_no_args", path=checkpoint)
    # Before any number of theirs is used.
    require_kinds(args)
    experts_are_spread = (args.get("expert_model_parallel_size") or 1) > 1
    files: dict[PerAxis, RankFile] = {}
    for (rank_file, match), content in zip(matches.items(), loaded, strict=True):
        rank_axes = _rank_of_folder(match, experts_are_spread)
        if rank_axes in files:
            raise UserError.of(
                "convert.megatron_rank_twice",
                parent=rank_file.parent,
                folder=files[rank_axes].folder,
                rank=_describe_rank(rank_axes),
            )
        files[rank_axes] = RankFile(rank_file.parent, content, model_chunks(content))
    sizes = PerAxis(*count_ranks(files))
    ranks = RankFiles(checkpoint, args, dict(sorted(files.items())), sizes)
    _check_complete(ranks)
    _check_same_model(ranks)
    return ranks


def _find_files(checkpoint: Path) -> dict[Path, re.Match[str]]:
    """Return the files of ranks by name, each with the match of its folder's name."""
    matches: dict[Path, re.Match[str]] = {}
    for folder in sorted(checkpoint.iterdir()):
        if match := RANK.fullmatch(folder.name):
            matches[folder / FILE] = match
    for folder in checkpoint.glob("mp_rank_*"):
        if folder.is_dir() and not RANK.fullmatch(folder.name):
            raise UserError.of("convert.megatron_folder_name", folder=folder)
    for file in matches:
        if not file.is_file():
            raise UserError.of("convert.megatron_folder_missing", file=file)
    return matches


def _check_complete(rank_files: RankFiles) -> None:
    """Raise UserError unless each part of every tensor is in some file."""
    sizes = rank_files.sizes
    if sizes.tp % rank_files.expert_tp:
        raise UserError.of(
            "convert.megatron_expert_tensor_ranks",
            path=rank_files.path,
            expert_tp=rank_files.expert_tp,
            tp=sizes.tp,
        )
    # An expert's part is the same on all tp ranks that are equal modulo expert_tp, and all else is
    # the same on all ep ranks.
    dense_parts = set()
    expert_parts = set()
    for tp, pp, ep in rank_files.files:
        dense_parts.add((tp, pp))
        expert_parts.add((tp % rank_files.expert_tp, pp, ep))
    for tp, pp, ep in product(range(sizes.tp), range(sizes.pp), range(sizes.ep)):
        has_expert = (tp % rank_files.expert_tp, pp, ep) in expert_parts
        if (tp, pp) not in dense_parts or not has_expert:
            raise UserError.of(
                "convert.megatron_rank_missing",
                path=rank_files.path,
                file=FILE,
                rank=_describe_rank(PerAxis(tp, pp, ep)),
            )


def _check_same_model(rank_files: RankFiles) -> None:
    """Raise UserError unless all files describe one model, in as many parts."""
    first = rank_files.first
    for rank_file in rank_files.files.values():
        args = rank_file.content.get("args")
        if not isinstance(args, dict):
            raise UserError.of("convert.megatron_rank_no_args", folder=rank_file.folder / FILE)
        _check_same_args(rank_files, rank_file, args)
        if len(rank_file.chunks) != len(first.chunks):
            raise UserError.of(
                "convert.megatron_virtual_stages",
                folder=rank_file.folder / FILE,
                num_chunks=len(rank_file.chunks),
                other_folder=first.folder / FILE,
                other_num_chunks=len(first.chunks),
            )


def _check_same_args(rank_files: RankFiles, rank_file: RankFile, args: dict[str, Any]) -> None:
    """Raise UserError for the first of a rank's args that makes it another model."""
    # Others differ by design, such as the number of the rank.
    for argument_name in sorted(MODEL_ARGUMENTS & args.keys()):
        if args[argument_name] != rank_files.args.get(argument_name):
            raise UserError.of(
                "convert.megatron_other_run",
                folder=rank_file.folder / FILE,
                other_folder=rank_files.first.folder / FILE,
                key=argument_name,
                value=args[argument_name],
                other_value=rank_files.args.get(argument_name),
            )


def notes_on_contradictions(rank_files: RankFiles) -> Iterator[str]:
    """Yield a note for each axis along which the args say that there are more ranks, or fewer, than
    have files, and one if a file has the name of another rank's."""
    axes = ("tensor_model", "pipeline_model", "expert_model")
    for axis, size in zip(axes, rank_files.sizes, strict=True):
        argument_name = f"{axis}_parallel_size"
        stated = rank_files.args.get(argument_name)
        if stated not in (None, size):
            yield (
                f"args say {argument_name} = {stated}, but there are files of {size}; the files "
                "were read as they are"
            )
    stated_ranks = {}
    for rank_axes, rank_file in rank_files.files.items():
        stated_ranks[rank_axes] = rank_file.content["args"].get("rank")
    if len({*stated_ranks.values()}) == 1:  # as programs write it that convert files
        return
    for rank_axes, stated_rank in stated_ranks.items():
        # Megatron numbers ranks along tensor first.
        if isinstance(stated_rank, int) and stated_rank % rank_files.sizes.tp != rank_axes.tp:
            rank_file = rank_files.files[rank_axes].folder / FILE
            yield (
                f"args of {rank_file} say rank = {stated_rank}, which has another folder: files "
                "may have each other's names"
            )
            return


def _describe_rank(rank_axes: PerAxis) -> str:
    return f"tensor rank {rank_axes.tp}, pipeline rank {rank_axes.pp}, expert rank {rank_axes.ep}"


def _rank_of_folder(match: re.Match[str], experts_are_spread: bool) -> PerAxis:
    """Return the rank of a folder's name. An axis of size one is not in the name, so a second
    number alone may be of either."""
    tensor, second, third = (int(number or 0) for number in match.groups())
    # Without pipeline stages the second number is the expert rank's.
    if experts_are_spread and match[3] is None:
        return PerAxis(tensor, 0, second)
    return PerAxis(tensor, second, third)


def model_chunks(content: Mapping[str, Any]) -> list[dict[str, Stored]]:
    """Return the tensors of a rank: of its model, or of each of its virtual stages."""
    # Virtual stages are model0, model1, ...; a rank without them has one model.
    possible_keys = [f"model{number}" for number in range(len(content))]
    if "model" in content:
        keys = ["model"]
    else:
        keys = [key for key in possible_keys if key in content]
    surplus = [key for key in content if CHUNK.fullmatch(key) and key not in keys]
    if surplus:
        raise UserError.of("convert.megatron_beside_whole", surplus=surplus[-1])
    chunks = [content[key] for key in keys]
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
        raise UserError.of("convert.megatron_no_model")
    return [_parameters_in(chunk) for chunk in chunks]


def _parameters_in(state: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a state dict but for extra states, which hold no parameters."""
    parameters = {}
    for tensor_name, value in state.items():
        if isinstance(value, Stored) and not str(tensor_name).endswith("_extra_state"):
            parameters[_CONVOLUTION.sub(r"\1.\2", str(tensor_name))] = value
    return parameters


def parts_over_all(
    rank_files: RankFiles, tensors_of: TensorsOfRank
) -> dict[str, list[TensorSource]]:
    """Return name, with layers and experts counted over all ranks -> its parts, one of each tp rank
    that it is cut over.

    tensors_of: returns the tensors of each of a rank's chunks.
    """
    stages = []
    for chunk in range(len(rank_files.first.chunks)):
        for stage in range(rank_files.sizes.pp):
            ranks_of_stage = _tensors_of_stage(rank_files, tensors_of, stage, chunk)
            stages.append(collect_shards(rank_files.path, ranks_of_stage))
    has_modules = bool(rank_files.args.get("mtp_num_layers"))
    ends = _names_at_ends(stages, has_modules)
    repeated = (EMBEDDING,) if has_modules else ()
    return number_over_stages(rank_files.path, stages, LAYER, ends, repeated)


def _names_at_ends(
    stages: Sequence[Mapping[str, list[TensorSource]]], has_modules: bool
) -> dict[str, int]:
    """Return beginnings of names -> the one stage that has them.

    has_modules: there is multi-token prediction, whose layers may have stages of their own. Then
        the last norm is that of the stage with the decoder's last layer
        (megatron/core/transformer/transformer_block.py).
    """
    last = len(stages) - 1
    norm_stage = last
    if has_modules:
        for number, stage in enumerate(stages):
            if any(LAYER.match(tensor_name) for tensor_name in stage):
                norm_stage = number
    return {
        "embedding.": 0,
        "decoder.final_layernorm.": norm_stage,
        "decoder.final_norm.": last,
        "output_layer.": last,
    }


def _tensors_of_stage(
    rank_files: RankFiles, tensors_of: TensorsOfRank, stage: int, chunk: int
) -> Iterator[RankTensors]:
    """Yield the tensors of each rank of a stage, with experts counted over all ranks. UserError if
    an expert is on two ep ranks."""
    experts = (rank_files.args.get("num_experts") or 0) // rank_files.sizes.ep
    # By it a packed tensor of experts is taken apart.
    hidden = rank_files.args["hidden_size"]
    owners: dict[str, int] = {}
    for rank_axes, rank_file in rank_files.files.items():
        if rank_axes.pp != stage:
            continue
        first_expert = rank_axes.ep * experts
        tensors = with_global_experts(tensors_of(rank_file)[chunk], hidden, experts, first_expert)
        for tensor_name in filter(is_expert, tensors):
            # Copies along tp are of one ep rank; two of these would each have trained it.
            if owners.setdefault(tensor_name, rank_axes.ep) != rank_axes.ep:
                raise UserError.of(
                    "convert.megatron_name_on_ranks", path=rank_files.path, name=tensor_name
                )
        yield partial(_part_of, rank_files, rank_axes.tp), tensors


def _part_of(rank_files: RankFiles, tp_rank: int, tensor_name: str) -> ShardPart:
    """Return which part of a tensor a rank has. Experts that are cut over fewer ranks repeat their
    parts along tp."""
    count = rank_files.tensor_ranks(tensor_name)
    return ShardPart(tp_rank % count, count)


def merge_parts(
    checkpoint: Path, expected: list[Match], parts_by_name: Mapping[str, Sequence[TensorSource]]
) -> dict[str, TensorSource]:
    """Return the whole tensors. UserError unless every rank has as much of each."""
    for tensor_name, parts in parts_by_name.items():
        if any(part.shape != parts[0].shape for part in parts):
            raise unlike_shapes(checkpoint, tensor_name, parts)
    return merge_shards(checkpoint, expected, parts_by_name)
