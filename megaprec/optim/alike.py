"""Checks, when an optimizer is built, that all ranks build the same one over the same model.

Ranks that begin with other weights, clip at another norm or hold their parameters in another order
would add up gradients of different models. Under ZeRO-1 the first all-gather would even mix their
weights into one. Stages that give one name to different tensors would share a place in every state.
No later check sees it: gradients, scales and norms are then equal on all ranks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.everyones import everyones_texts
from megaprec.comm.layout import has_layout, layout_of, parameters_of
from megaprec.errors import UserError
from megaprec.optim.dtensors import is_dtensor
from megaprec.optim.model_intake import Ranks
from megaprec.precision.plan import PrecisionPlan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PLACES = 2**16  # for digests of names


def require_alike(
    parts: Sequence[nn.Module], ranks: Ranks, plan: PrecisionPlan, settings: Mapping[str, object]
) -> None:
    """Raise UserError on every rank if the ranks differ in what they train or how. Collective over
    the world."""
    said = {name: _said(value) for name, value in settings.items()} | {
        f"plan.{n}": v for n, v in _fields(plan)
    }
    own = {"settings": said, "stage": ranks.pp.rank, "parameters": list(_parameters(parts))}
    if _differ(own["settings"], own["parameters"], ranks):
        texts = everyones_texts(json.dumps(own).encode(), ranks.world, ranks.device)
        raise UserError(*_differences([json.loads(text) for text in texts]))
    _require_apart(parts, ranks)
    require_same_weights(parts, ranks, (ranks.dp, ranks.tp), "begin with")


def _require_apart(parts: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise UserError, on every rank of a pipeline, if stages give one name to different tensors.

    A state would hold one of them, or their sum. Tied parameters have one name on purpose.
    Collective over pp.
    """
    if ranks.pp.size == 1:
        return
    laid = (layout_of(p) for part in parts for p in part.parameters() if has_layout(p))
    names = sorted({part.name for layout in laid if not layout.tied for part in layout.parts})
    places = torch.zeros(_PLACES, dtype=torch.int32)
    places[
        [int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % _PLACES for name in names]
    ] = 1
    if (
        ranks.pp.sum_(places.to(ranks.device)).amax() < 2
    ):  # names of two stages may share a place, equal ones do
        return
    texts = everyones_texts(json.dumps([ranks.pp.rank, names]).encode(), ranks.pp, ranks.device)
    seen: dict[str, int] = {}
    for stage, of_stage in map(json.loads, texts):
        for name in of_stage:
            if name in seen:
                raise UserError(
                    f"{name} is the logical name of two parameters, of pipeline ranks "
                    f"{seen[name]} and {stage}: give "
                    "each stage a prefix of its own, megaprec.attach_whole(stage, prefix=...) or "
                    "parallelize(..., prefix=...)"
                )
            seen[name] = stage


def _differ(settings: Mapping[str, str], parameters: Sequence[str], ranks: Ranks) -> bool:
    """Return True on all ranks if two differ in their settings, or two of a stage in their
    parameters."""
    lowest = torch.iinfo(torch.int64).min
    # lowest: of a stage of other ranks
    own = torch.full((1 + ranks.pp.size,), lowest, device=ranks.device)
    own[0], own[1 + ranks.pp.rank] = _digest(settings), _digest(parameters)
    inverse = torch.where(own == lowest, own, ~own)
    largest = ranks.world.max_(own)
    smallest = ~ranks.world.max_(inverse)
    return bool(((largest != smallest) & (largest != lowest)).any())


def _digest(value: object) -> int:
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=7).digest(), "little")


def _said(value: object) -> str:
    """Return a value as text. An object that has none but its address is told by its class and its
    plain attributes."""
    if type(value).__repr__ is not object.__repr__:
        return repr(value)
    plain = {
        name: one for name, one in vars(value).items() if isinstance(one, str | int | float | bool)
    }
    return f"{type(value).__name__} {plain}"


def _fields(plan: PrecisionPlan) -> Iterator[tuple[str, str]]:
    """Yield the fields of a plan as text, without functions, whose text differs from process to
    process."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name == "fp8" and value is not None:
            kept = {one.name: getattr(value, one.name) for one in fields(value)}
            value = {name: one for name, one in kept.items() if not callable(one)}
        if field.name != "origin":
            yield field.name, str(value)


def _parameters(parts: Sequence[nn.Module]) -> Iterator[str]:
    """Yield name and shape of the logical tensors, in order, that every rank of a pipeline stage
    has."""
    for layout in map(layout_of, parameters_of(parts)):
        yield from (f"{part.name} {list(part.shape)}" for part in layout.parts if not layout.expert)


def _differences(said: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each setting, and for the parameters of each stage, that ranks do not
    share."""
    wrong = []
    for name in said[0]["settings"] if said else ():
        values = list(dict.fromkeys(one["settings"].get(name) for one in said))
        if len(values) > 1:
            wrong.append(
                f"{name} = {values[0]} on some ranks and {values[1]} on others: build all "
                "optimizers alike"
            )
    for stage in sorted({one["stage"] for one in said}):
        first, *others = [one["parameters"] for one in said if one["stage"] == stage]
        other = next((one for one in others if one != first), None)
        if other is not None:
            mine, theirs = next(
                (a, b) for a, b in zip([*first, "none"], [*other, "none"], strict=False) if a != b
            )
            wrong.append(
                f"the ranks of stage {stage} hold different parameters: {mine} on some, "
                f"{theirs} on others; build the "
                "same modules, in the same order, on all of them"
            )
    return wrong


def require_same_weights(
    stages: Sequence[nn.Module], ranks: Ranks, axes: Sequence[Axis], verb: str
) -> None:
    """Raise UserError, on every rank, if the replicas of a model have different weights.

    axes: dp, over which every parameter, trained or frozen, is compared; tp, over which replicated
    ones are. Experts on ranks of their own are not compared. verb: what the line says of ranks and
    weights. Collective over the world.
    """
    if ranks.world.size == 1:
        return
    every = dict.fromkeys(
        p for stage in stages for p in stage.parameters() if has_layout(p) and not is_dtensor(p)
    )
    whole = [p for p in every if not layout_of(p).expert]
    wrong: list[str] = []
    for axis in axes:
        mine = [
            p
            for p in whole
            if axis is ranks.dp or all(part.dim is None for part in layout_of(p).parts)
        ]
        if axis.size == 1 or not mine:
            continue
        sums = torch.stack([_bits(p).to(ranks.device) for p in mine])
        apart = (axis.max_(sums.clone()) != ~axis.max_(~sums)).tolist()
        wrong += [
            f"the ranks of axis {axis.name} {verb} different weights, "
            f"{layout_of(p).parts[0].name} first: build or "
            "load the model from the same values on all of them, e.g. after "
            "torch.manual_seed with one seed"
            for p, differs in zip(mine, apart, strict=True)
            if differs
        ][:1]
    if ranks.world.max_(torch.tensor(float(bool(wrong)), device=ranks.device)):
        raise UserError(*(wrong[:1] or [f"other ranks {verb} different weights, and say which"]))


def _bits(parameter: nn.Parameter) -> Tensor:
    """Return the sum of the elements' bits as whole numbers: int64 [], the same in any order of
    addition."""
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_BITS[values.itemsize]).sum(dtype=torch.int64)
