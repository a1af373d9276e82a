"""The place of the first difference between two runs.

A step goes forward through the modules to the loss, back through them to the gradients of weights,
and on to their norm and the update. The first difference is caused where it arises: in a module
whose input agrees and whose output does not; in a module whose output's gradient agrees and whose
input's does not; or, if all of these agree, in the handling of gradients outside of the model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tools.parity.borders import BACKWARD, FORWARD
from tools.parity.compare import Difference
from tools.parity.gather import Record

Phase = Literal[
    "model",
    "initial weights",
    "data",
    "forward",
    "loss",
    "backward",
    "gradients",
    "norm",
    "decision",
    "update",
    "copies",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
OF: dict[str, Phase] = {
    "tensors": "model",
    "initial weights": "initial weights",
    "sample ids": "data",
    FORWARD: "forward",
    "loss": "loss",
    BACKWARD: "backward",
    "gradient": "gradients",
    "each element counted once": "norm",
    "zero count": "norm",
    "gradient norm": "norm",
    "found_inf": "decision",
    "scaler": "decision",
    "ranks agree": "decision",
    "weights": "update",
    "moments": "update",
    "copies": "copies",
}
HEAD = "head and loss"  # everything after the last module, up to the loss


@dataclass(frozen=True)
class Origin:
    """The place of the first difference. phase: part of a step.

    place: the module, or the tensors by pattern ("layers.*.mlp.down.bias"), "all" if they are
    nearly all. step: from 1, 0 before the first. difference: the first one.
    """

    phase: Phase
    place: str
    step: int
    difference: Difference


def origin(found: Sequence[Difference], theirs: Record) -> Origin:
    """Return the origin of the first failing difference that `compare` found."""
    first = next(d for d in found if d.fails)
    same = [d for d in found if d.step == first.step and d.quantity == first.quantity]
    phase = OF[first.quantity]
    if phase == "forward":
        place = _forward(first, same, theirs)
    elif phase == "backward":
        place = _backward(first, same, theirs)
    elif phase in ("loss", "norm", "decision", "data"):
        place = HEAD if phase == "loss" else first.name
    else:
        place = pattern([d.name for d in same if d.fails], len(same))
    return Origin(phase, place, first.step, first)


def module(border: str) -> str:
    """Return the module of a border."""
    return border.rpartition(">")[0]


def _forward(first: Difference, seen: Sequence[Difference], theirs: Record) -> str:
    """Return the module whose output is wrong; if its input is wrong too, the place between it and
    the module before.
    """
    if ">in" not in first.name:
        return module(first.name)
    before = [d.name for d in seen[: seen.index(first)]]
    root = theirs.same.get(first.name)
    if root in before:
        source = root
    elif before:
        source = before[-1]
    else:
        source = ""
    if source:
        return f"between {module(source)} and {module(first.name)}"
    return module(first.name)


def _backward(first: Difference, seen: Sequence[Difference], theirs: Record) -> str:
    """Return the module whose output's gradient is right and whose input's is not."""
    agree = {d.name for d in seen if not d.fails}
    root = theirs.same.get(first.name, first.name)
    group = [d.name for d in seen if theirs.same.get(d.name, d.name) == root]
    if right := [border for border in group if border in agree]:
        return f"between {module(first.name)} and {module(right[0])}"
    takers = [
        module(border)
        for border in group
        if ">in" in border and border.replace(">in", ">out") in agree
    ]
    if takers:
        return max(takers, key=len)
    if first is seen[0]:
        return HEAD
    return f"after {module(first.name)}"


def pattern(names: Sequence[str], of: int) -> str:
    """Return names as a short pattern: "all" if they are nearly all `of` them, otherwise without
    the numbers of several layers.
    """
    if of > 1 and len(names) >= 0.9 * of:
        return "all"
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    some = [kind if len(alike) > 1 else alike[0] for kind, alike in kinds.items()]
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if some[3:] else "")
