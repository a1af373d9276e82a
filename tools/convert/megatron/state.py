"""The optimizer state in Megatron's legacy files: FP32 masters and Adam's moments, by the order of
the parameters.

Megatron's optimizer knows parameters by number only: first all with weight decay, then those
without (biases and other vectors), each in the order of the model. With half weights there are FP32
masters besides. Experts that other ranks have not have an optimizer of their own, the second in a
list. Its distributed optimizer saves elsewhere (`flat`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.core.rules import Match
from tools.convert.core.tensors import Stored
from tools.convert.core.torch_files import contents
from tools.convert.hf.folder import check_tensors
from tools.convert.megatron.experts import is_expert, is_trained
from tools.convert.megatron.flat import flat_state
from tools.convert.megatron.order import shared
from tools.convert.megatron.ranks import Held, Rank, Ranks, named_over_all, wholes_of

MOMENTS = ("exp_avg", "exp_avg_sq")
DISTRIBUTED = "distrib_optim.pt"
Named = list[dict[str, dict[str, Stored]]]  # of one rank, by chunk: kind -> name -> tensor


def decayed(name: str, shape: Sequence[int]) -> bool:
    """Return True if Megatron applies weight decay to the parameter."""
    return not name.endswith(".bias") and len(shape) > 1


def optimizer_state(
    ranks: Ranks, found: list[Match], model: ModelConfig
) -> dict[str, Mapping[str, Held]]:
    """kind -> Megatron's name -> the whole tensor, of all ranks; empty if no file holds a state
    that can be read.

    Kinds are exp_avg, exp_avg_sq, and master where the weights are half.
    """
    named = _distributed(ranks, model) or _numbered(ranks)
    found = [m for m in found if is_trained(m.foreign)]
    tensors = {}
    for kind in sorted(kind for kind in next(iter(named.values()))[0]) if named else ():
        by_name = named_over_all(ranks, _pick(named, kind))
        # the last stage's copy of the embedding, as a head
        tied = by_name.keys() - {m.foreign for m in found}
        kept = {n: parts for n, parts in by_name.items() if n not in tied}
        wholes = wholes_of(ranks.path, found, kept, model.vocab)
        check_tensors(ranks.path, found, wholes)
        tensors[kind] = wholes
    return tensors


def _pick(named: Mapping[Any, Named], kind: str) -> Callable[[Rank], list[dict[str, Stored]]]:
    return lambda rank: [chunk[kind] for chunk in named[rank.folder]]


def _all(ranks: Ranks) -> Iterator[tuple[int, Rank]]:
    """(pipeline stage, rank) of each."""
    yield from ((stage, rank) for (_, stage, _), rank in ranks.files.items())


def _optimizers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of a file's optimizer, or of both. Empty if there is none."""
    held = content.get("optimizer")
    if isinstance(held, dict) and 0 in held:  # of a distributed checkpoint: by number
        held = list(held.values())
    states: list[Any] = held if isinstance(held, list) else [held]
    if all(isinstance(s, dict) and "param_groups" in s.get("optimizer", s) for s in states):
        return states
    return []


def _distributed(ranks: Ranks, model: ModelConfig) -> dict[Any, Named]:
    """By folder, what distrib_optim.pt holds; nothing if there are no such files."""
    files = {rank.folder: rank.folder / DISTRIBUTED for _, rank in _all(ranks)}
    there = [file for file in files.values() if file.is_file()]
    if not there:
        return {}
    if lost := [file for file in files.values() if file not in there]:
        raise UserError(f"{lost[0]} is missing, though other ranks have theirs")
    if not _optimizers(ranks.first.content):
        raise UserError(
            f"{ranks.first.folder} has {DISTRIBUTED} but no optimizer in its other file"
        )
    held = dict(zip(files, contents(list(files.values())), strict=True))
    twice = shared(model, ranks.sizes[1])
    return {
        rank.folder: flat_state(rank, held[rank.folder], ranks.args, stage, twice)
        for stage, rank in _all(ranks)
    }


def _numbered(ranks: Ranks) -> dict[Any, Named]:
    """By folder, what the optimizers in the ranks' own files hold; nothing unless all have
    state."""
    states = {rank.folder: _optimizers(rank.content) for _, rank in _all(ranks)}
    if not all(
        own and all(s.get("optimizer", s).get("state") for s in own) for own in states.values()
    ):
        return {}
    return {rank.folder: _named(rank, states[rank.folder]) for _, rank in _all(ranks)}


def _named(rank: Rank, optimizers: Sequence[Mapping[str, Any]]) -> Named:
    named: Named = [{kind: {} for kind in MOMENTS} for _ in rank.chunks]
    for optimizer in optimizers:
        inner = optimizer.get("optimizer", optimizer)
        masters = optimizer.get("fp32_from_fp16_params")
        for number, group in enumerate(inner["param_groups"]):
            names = list(_of_group(rank, group))
            if len(names) != len(group["params"]):
                raise UserError(
                    f"{rank.folder}: its optimizer has other groups of parameters than "
                    "Megatron's default"
                )
            for (chunk, name), index in zip(names, group["params"], strict=True):
                for kind in MOMENTS:
                    named[chunk][kind][name] = inner["state"][index][kind]
            for (chunk, name), master in zip(
                names, masters[number] if masters else (), strict=bool(masters)
            ):
                named[chunk].setdefault("master", {})[name] = master
    counts = [sum(map(is_trained, own)) for own in rank.chunks]
    if any(
        len(chunk[kind]) != count
        for chunk, count in zip(named, counts, strict=True)
        for kind in chunk
    ):
        raise UserError(
            f"{rank.folder}: its optimizer has not the parameters of the model, or some of "
            "them twice"
        )
    return named


def _of_group(rank: Rank, group: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """(chunk, name) of the parameters that Megatron puts in such a group, in its order."""
    decays = bool(group.get("wd_mult", group.get("weight_decay", 0)))
    own_experts = bool(group.get("is_expert_parallel"))
    apart = len(_optimizers(rank.content)) > 1  # experts have an optimizer of their own
    for number, chunk in enumerate(rank.chunks):
        for name, stored in chunk.items():
            of_group = (
                decayed(name, stored.shape) == decays and (is_expert(name) and apart) == own_experts
            )
            if of_group and is_trained(name):
                yield number, name


def steps_of(content: Mapping[str, Any]) -> int:
    """Return the number of steps of a file's optimizer; 0 if the file does not state it."""
    optimizers = _optimizers(content)
    inner = optimizers[0].get("optimizer", optimizers[0]) if optimizers else {}
    state = inner.get("state") or {}
    said = [group["step"] for group in inner.get("param_groups", ()) if "step" in group]
    said += [
        entry["step"] for entry in state.values() if isinstance(entry, dict) and "step" in entry
    ]
    step = next(iter(said), state.get("common_step", 0))
    return int(step.read().item() if isinstance(step, Stored) else step)


def scaler_of(content: Mapping[str, Any]) -> dict[str, float]:
    """The loss scaler of a file's optimizer: Megatron's three numbers are ours. Empty if it has
    none."""
    kept = next((optimizer.get("grad_scaler") or {} for optimizer in _optimizers(content)), {})
    if not {"scale", "growth_tracker", "hysteresis_tracker"} <= kept.keys():
        return {}
    return {k: v.read().item() if isinstance(v, Stored) else float(v) for k, v in kept.items()}
