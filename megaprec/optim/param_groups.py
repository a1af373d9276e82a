"""The optimizer's parameter groups as torch knows them, from which schedulers read rates and into which they write.

Parameters that share factors of learning rate and weight decay (`megaprec.optim.group_factors`) are a group; its
"lr" and "weight_decay" are the numbers really used, factors included. The learning rate comes from one place: from here
if the optimizer was built with `lr`, and from the caller of each step otherwise. Then no group has an "lr", and whoever
asks for one, as a scheduler does, is told so.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.optim.group_factors import Factors, Group, factors

Rates = tuple[float, float]  # learning rate and weight decay


class ParamGroup(dict[str, Any]):
    """A group as torch.optim has them: "params", "weight_decay" and, if the optimizer was built with one, "lr"."""

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise UserError(
                "the optimizer has no learning rate of its own, for it was built without lr: give "
                "ParallelAMPOptimizer(lr=...) for torch's LR schedulers, or each step its rate, step(lr=...)"
            )
        raise KeyError(key)


def param_groups(
    parameters: Iterable[nn.Parameter], groups: Sequence[Group], lr: float | None, weight_decay: float
) -> dict[Factors, ParamGroup]:
    """A group for each pair of factors of learning rate and weight decay. The first one is that of factors 1, also on a
    rank that has no such parameter.

    A parameter of several logical tensors lies in the group of the first one's factors; the others' are there too.
    """
    pairs = {parameter: [factors(part, groups) for part in layout_of(parameter).parts] for parameter in parameters}
    made: dict[Factors, ParamGroup] = {}
    for pair in ((1.0, 1.0), *(pair for some in pairs.values() for pair in some)):
        if pair not in made:
            rate = {} if lr is None else {"lr": lr * pair[0]}
            made[pair] = ParamGroup(params=[], weight_decay=weight_decay * pair[1], **rate)
    for parameter, (first, *_) in pairs.items():
        made[first]["params"].append(parameter)
    return made


def rates(of: dict[Factors, ParamGroup], lr: float | None) -> dict[Factors, Rates]:
    """Learning rate and weight decay by factors. lr: of this step, for an optimizer that was built without.

    Raises UserError unless the rate is given once.
    """
    if callable(lr):
        raise UserError("step takes a learning rate, not a closure: run forward and backward before")
    if lr is not None and any("lr" in group for group in of.values()):
        raise UserError(
            "step(lr=...) of an optimizer that was built with lr: the rate is that of its param_groups, which LR "
            "schedulers change; leave one of the two out"
        )
    if lr is None:
        return {pair: (float(group["lr"]), float(group["weight_decay"])) for pair, group in of.items()}
    return {pair: (lr * pair[0], float(group["weight_decay"])) for pair, group in of.items()}


def saved(of: dict[Factors, ParamGroup]) -> list[dict[str, Any]]:
    """What is to be kept of groups that have a learning rate: plain values, with the factors that name the group."""
    return [
        {"factors": list(pair), **{key: value for key, value in group.items() if key != "params"}}
        for pair, group in of.items()
        if "lr" in group
    ]


def take_up(kept: Iterable[dict[str, Any]], of: dict[Factors, ParamGroup]) -> None:
    """Takes up saved rates, by factors. Groups that are new in this run keep their own; none has one without `lr`."""
    for values in kept:
        first, second = values["factors"]
        group = of.get((first, second))
        if group is not None and "lr" in group:
            group.update({key: value for key, value in values.items() if key != "factors"})
