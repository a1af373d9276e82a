"""The optimizer state in Megatron's legacy files: FP32 masters and moments, in parameters' order.

Megatron's optimizer knows parameters by number only: first all with weight decay, then those
without (biases and other vectors), each in the order of the model. With half weights there are FP32
masters besides. Experts that other ranks have not have an optimizer of their own, the second in a
list. Its distributed optimizer saves elsewhere (`flat`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.rules import Match
from tools.convert.core.shards import TensorSource
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.flat import flat_state
from tools.convert.megatron.layout import is_expert, is_trained
from tools.convert.megatron.order import shared_weights
from tools.convert.megatron.ranks import (
    RankFile,
    RankFiles,
    merge_parts,
    parts_over_all,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
DISTRIBUTED = "distrib_optim.pt"
Content = Mapping[str, Any]  # of a file, or of an optimizer in it
RankState = list[dict[str, dict[str, Stored]]]  # of one rank, by chunk: kind -> name -> tensor


def decayed(tensor_name: str, shape: Sequence[int]) -> bool:
    """Return True if Megatron applies weight decay to the parameter."""
    return not tensor_name.endswith(".bias") and len(shape) > 1


def optimizer_state(
    rank_files: RankFiles, expected: list[Match], model: ModelConfig
) -> dict[str, Mapping[str, TensorSource]]:
    """Return kind -> Megatron's name -> the whole tensor, of all ranks; empty if no file holds a
    state that can be read.

    Kinds are exp_avg, exp_avg_sq, and master where the weights are half.
    """
    states = _read_distributed(rank_files, model) or _read_numbered(rank_files)
    if not states:
        return {}
    trained = [match for match in expected if is_trained(match.foreign)]
    names = {match.foreign for match in trained}
    chunks_of_first = next(iter(states.values()))
    first_chunk = chunks_of_first[0]
    merged_by_kind = {}
    for kind in sorted(first_chunk):
        tensors_of = partial(_tensors_of_kind, states, kind)
        parts_by_name = parts_over_all(rank_files, tensors_of)
        # What is not among the names is the last stage's copy of the embedding, as a head.
        for tensor_name in parts_by_name.keys() - names:
            del parts_by_name[tensor_name]
        merged = merge_parts(rank_files.path, trained, parts_by_name)
        check_tensors(rank_files.path, trained, merged)
        merged_by_kind[kind] = merged
    return merged_by_kind


def _tensors_of_kind(
    states: Mapping[Path, RankState], kind: str, rank_file: RankFile
) -> list[dict[str, Stored]]:
    """Return the tensors of one kind of each of a rank's chunks. states: by a rank's folder."""
    return [chunk[kind] for chunk in states[rank_file.folder]]


def _optimizers(content: Content) -> list[dict[str, Any]]:
    """Return the states of a file's optimizer, or of both. Empty if there is none."""
    saved = content.get("optimizer")
    if isinstance(saved, list):
        states: list[Any] = saved
    elif isinstance(saved, dict) and 0 in saved:
        # A distributed checkpoint has several by number.
        states = list(saved.values())
    else:
        states = [saved]
    for state in states:
        if not isinstance(state, dict) or "param_groups" not in _inner(state):
            return []
    return states


def _inner(optimizer: Content) -> Any:
    """Return the state of torch's optimizer, around which one with FP32 masters has its own."""
    return optimizer.get("optimizer", optimizer)


def _read_distributed(rank_files: RankFiles, model: ModelConfig) -> dict[Path, RankState]:
    """Return by folder what distrib_optim.pt holds; nothing if there are no such files."""
    folders = [rank_file.folder for rank_file in rank_files.files.values()]
    files = [folder / DISTRIBUTED for folder in folders]
    missing = [file for file in files if not file.is_file()]
    # None of them: the ranks' own files may hold the state.
    if len(missing) == len(files):
        return {}
    if missing:
        raise UserError.of("convert.megatron_optimizer_missing", missing=missing[0])
    # Its groups and steps are in the rank's file.
    if not _optimizers(rank_files.first.content):
        raise UserError.of(
            "convert.megatron_no_optimizer", folder=rank_files.first.folder, distributed=DISTRIBUTED
        )
    # All files at once: starting the process that opens pickles takes seconds.
    loaded = dict(zip(folders, contents(files), strict=True))
    on_both_ends = shared_weights(model, rank_files.sizes.pp)
    states = {}
    for rank_axes, rank_file in rank_files.files.items():
        states[rank_file.folder] = flat_state(
            rank_file, loaded[rank_file.folder], rank_files.args, rank_axes.pp, on_both_ends
        )
    return states


def _read_numbered(rank_files: RankFiles) -> dict[Path, RankState]:
    """Return by folder what the optimizers in the ranks' own files hold; nothing unless all have
    state."""
    optimizers_by_folder = {}
    for rank_file in rank_files.files.values():
        optimizers_by_folder[rank_file.folder] = _optimizers(rank_file.content)
    for optimizers in optimizers_by_folder.values():
        if not optimizers or not all(_inner(optimizer).get("state") for optimizer in optimizers):
            return {}
    states = {}
    for rank_file in rank_files.files.values():
        optimizers = optimizers_by_folder[rank_file.folder]
        states[rank_file.folder] = _named_state(rank_file, optimizers)
    return states


def _named_state(rank_file: RankFile, optimizers: Sequence[Content]) -> RankState:
    """Return the masters and the moments of a rank's numbered parameters by their names."""
    chunks: RankState = []
    for _ in rank_file.chunks:
        chunks.append({kind: {} for kind in MOMENTS})
    for optimizer in optimizers:
        inner = _inner(optimizer)
        # FP32 masters are a list beside the groups, group by group.
        masters = optimizer.get("fp32_from_fp16_params")
        for group_number, group in enumerate(inner["param_groups"]):
            parameters = list(_parameters_of_group(rank_file, group))
            indices = group["params"]
            if len(parameters) != len(indices):
                raise UserError.of("convert.megatron_groups", folder=rank_file.folder)
            for (chunk, tensor_name), index in zip(parameters, indices, strict=True):
                moments = inner["state"][index]
                for kind in MOMENTS:
                    chunks[chunk][kind][tensor_name] = moments[kind]
            if masters:
                masters_of_group = zip(parameters, masters[group_number], strict=True)
                for (chunk, tensor_name), master in masters_of_group:
                    masters_of_chunk = chunks[chunk].setdefault("master", {})
                    masters_of_chunk[tensor_name] = master
    _require_all_parameters(rank_file, chunks)
    return chunks


def _require_all_parameters(rank_file: RankFile, chunks: RankState) -> None:
    """Raise UserError unless there is a tensor of each kind for each parameter."""
    for chunk, weights in zip(chunks, rank_file.chunks, strict=True):
        trained = sum(map(is_trained, weights))
        if any(len(tensors) != trained for tensors in chunk.values()):
            raise UserError.of("convert.megatron_parameters", folder=rank_file.folder)


def _parameters_of_group(rank_file: RankFile, group: Content) -> Iterator[tuple[int, str]]:
    """Yield (chunk, name) of the parameters that Megatron puts in such a group, in its order."""
    # Groups without Megatron's own factor of the decay are torch's, and have the decay itself.
    group_decays = bool(group.get("wd_mult", group.get("weight_decay", 0)))
    group_has_experts = bool(group.get("is_expert_parallel"))
    # They have an optimizer of their own.
    separate_experts = len(_optimizers(rank_file.content)) > 1
    for number, chunk in enumerate(rank_file.chunks):
        for tensor_name, stored in chunk.items():
            same_decay = decayed(tensor_name, stored.shape) == group_decays
            # With one optimizer for all, experts are in the groups of other parameters.
            same_experts = (is_expert(tensor_name) and separate_experts) == group_has_experts
            if same_decay and same_experts and is_trained(tensor_name):
                yield number, tensor_name


def steps_of(content: Content) -> int:
    """Return the number of steps of a file's optimizer; 0 if the file does not state it."""
    optimizers = _optimizers(content)
    if not optimizers:
        return 0
    inner = _inner(optimizers[0])
    state = inner.get("state") or {}
    # It is in the groups, in the states of parameters, or beside them.
    step = state.get("common_step", 0)
    for entry in (*inner["param_groups"], *state.values()):
        if isinstance(entry, dict) and "step" in entry:
            step = entry["step"]
            break
    return int(_number(step))


def scaler_of(content: Content) -> dict[str, float]:
    """Return the loss scaler of a file's optimizer: Megatron's three numbers are ours. Empty if it
    has none."""
    optimizers = _optimizers(content)
    if not optimizers:
        return {}
    saved = optimizers[0].get("grad_scaler") or {}
    if not {"scale", "growth_tracker", "hysteresis_tracker"} <= saved.keys():
        return {}
    return {key: float(_number(value)) for key, value in saved.items()}


def _number(value: Any) -> Any:
    """Return a number that may be stored as a tensor of one element."""
    return value.read().item() if isinstance(value, Stored) else value
