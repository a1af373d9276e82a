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


def origin(differences: Sequence[Difference], theirs: Record) -> Origin:
    """Return the origin of the first failing difference that `compare` found."""
    first = next(difference for difference in differences if difference.fails)
    alike = [
        difference
        for difference in differences
        if difference.step == first.step and difference.quantity == first.quantity
    ]
    phase = OF[first.quantity]
    if phase == "forward":
        place = _locate_forward(first, alike, theirs)
    elif phase == "backward":
        place = _locate_backward(first, alike, theirs)
    elif phase == "loss":
        place = HEAD
    elif phase in ("norm", "decision", "data"):
        place = first.name
    else:
        place = pattern([difference.name for difference in alike if difference.fails], len(alike))
    return Origin(phase, place, first.step, first)


def module_of(border: str) -> str:
    """Return the module of a border."""
    return border.rpartition(">")[0]


def _locate_forward(first: Difference, borders: Sequence[Difference], theirs: Record) -> str:
    """Return the module whose output is wrong; if its input is wrong too, the place between it and
    the module before.
    """
    if ">in" not in first.name:
        return module_of(first.name)
    before = [difference.name for difference in borders[: borders.index(first)]]
    alias = theirs.aliases.get(first.name)
    if alias in before:
        source = alias
    elif before:
        source = before[-1]
    else:
        source = ""
    if source:
        return f"between {module_of(source)} and {module_of(first.name)}"
    return module_of(first.name)


def _locate_backward(first: Difference, borders: Sequence[Difference], theirs: Record) -> str:
    """Return the module whose output's gradient is right and whose input's is not."""
    agreeing = {difference.name for difference in borders if not difference.fails}
    # all borders at which one process saw the same tensor
    tensor = theirs.aliases.get(first.name, first.name)
    names = [difference.name for difference in borders]
    shared = [name for name in names if theirs.aliases.get(name, name) == tensor]
    right = [border for border in shared if border in agreeing]
    if right:
        return f"between {module_of(first.name)} and {module_of(right[0])}"
    consumers = [
        module_of(border)
        for border in shared
        if ">in" in border and border.replace(">in", ">out") in agreeing
    ]
    if consumers:
        return max(consumers, key=len)  # the innermost of nested modules
    if first is borders[0]:
        return HEAD
    return f"after {module_of(first.name)}"


def pattern(names: Sequence[str], total: int) -> str:
    """Return names as a short pattern: "all" if they are nearly all of `total`, otherwise without
    the numbers of several layers.
    """
    if total > 1 and len(names) >= 0.9 * total:
        return "all"
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    patterns = [kind if len(alike) > 1 else alike[0] for kind, alike in kinds.items()]
    listed = ", ".join(patterns[:3])
    if len(patterns) > 3:
        return f"{listed} and {len(patterns) - 3} more"
    return listed
