"""The optimizer state in Megatron's legacy files: FP32 masters and Adam's moments, by the order of the parameters.

Megatron's optimizer knows parameters by number only: first all with weight decay, then those without (biases and
other vectors), each in the order of the model. With half weights there are FP32 masters besides. What its distributed
optimizer saves lies in distrib_optim.pt, in the order of its communication buffers; that is not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from tools.convert.hf import check_tensors
from tools.convert.megatron_ranks import Whole, numbered_over_stages, parameters_in, wholes_of
from tools.convert.rules import Match
from tools.convert.tensors import Stored

MOMENTS = ("exp_avg", "exp_avg_sq")


def decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether Megatron decays the parameter."""
    return not name.endswith(".bias") and len(shape) > 1


@dataclass(frozen=True)
class State:
    """tensors: kind -> Megatron's name -> the whole tensor. Empty without a state that can be read."""

    tensors: Mapping[str, Mapping[str, Whole]]
    steps: int
    scaler: dict[str, float]


def optimizer_state(path: Path, ranks: list[list[dict[str, Any]]], found: list[Match], vocab: int) -> State:
    """The state of all ranks, [tp][pp]; without any if no file holds one that can be read."""
    optimizers: list[list[Any]] = [[rank.get("optimizer") for rank in stages] for stages in ranks]
    if not all(_has_state(optimizer) for stages in optimizers for optimizer in stages):
        return State({}, 0, {})
    stages = [[_named(path, ranks[t][p], optimizers[t][p]) for t in range(len(ranks))] for p in range(len(ranks[0]))]
    kinds = {kind for kind in stages[0][0] if kind == "weight" or kind in MOMENTS}
    tensors = {}
    for kind in sorted(kinds):
        by_name = numbered_over_stages(path, [[rank[kind] for rank in stage] for stage in stages])
        tied = by_name.keys() - {m.foreign for m in found}  # the last stage's copy of the embedding
        wholes = wholes_of(path, found, {n: parts for n, parts in by_name.items() if n not in tied}, vocab)
        check_tensors(path, found, wholes)
        tensors[kind] = wholes
    return State(tensors, _steps(optimizers[0][0]), _scaler(optimizers[0][0]))


def _has_state(optimizer: Any) -> bool:
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    return isinstance(inner, dict) and bool(inner.get("state")) and "param_groups" in inner


def _named(path: Path, content: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, dict[str, Stored]]:
    """kind -> name -> tensor, of one rank."""
    model = parameters_in(content.get("model", {}))
    inner = optimizer.get("optimizer", optimizer)
    groups = inner["param_groups"]
    named: dict[str, dict[str, Stored]] = {kind: {} for kind in MOMENTS}
    for number, group in enumerate(groups):
        decays = bool(group.get("wd_mult", group.get("weight_decay", 0)))
        names = [n for n, tensor in model.items() if decayed(n, tensor.shape) == decays]
        if len(names) != len(group["params"]) or len(groups) > 2:
            raise UserError(f"{path}: its optimizer has other groups of parameters than Megatron makes by default")
        for name, index in zip(names, group["params"], strict=True):
            for kind in MOMENTS:
                named[kind][name] = inner["state"][index][kind]
        if masters := optimizer.get("fp32_from_fp16_params"):
            named.setdefault("weight", {}).update(zip(names, masters[number], strict=True))
    order = list(model)
    return {kind: {name: held[name] for name in order} for kind, held in named.items()}


def _steps(optimizer: Mapping[str, Any]) -> int:
    inner = optimizer.get("optimizer", optimizer)
    said = [group["step"] for group in inner["param_groups"] if "step" in group]
    said += [entry["step"] for entry in inner["state"].values() if "step" in entry]
    return max((int(step.read().item() if isinstance(step, Stored) else step) for step in said[:1]), default=0)


def _scaler(optimizer: Mapping[str, Any]) -> dict[str, float]:
    """Megatron's three numbers are ours."""
    kept = optimizer.get("grad_scaler") or {}
    if not {"scale", "growth_tracker", "hysteresis_tracker"} <= kept.keys():
        return {}
    return {k: v.read().item() if isinstance(v, Stored) else float(v) for k, v in kept.items()}
