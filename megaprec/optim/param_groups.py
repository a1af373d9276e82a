"""The optimizer's parameter groups in torch's format, in which schedulers read and write learning
rates.

Parameters that share factors of learning rate and weight decay (`megaprec.optim.group_factors`)
form a group. Its "lr" and "weight_decay" are the effective values, including the factors. The
learning rate has one source: these groups if the optimizer was built with `lr`, and the caller of
each step otherwise. In the second case no group has an "lr", and reading it, as a scheduler does,
raises an error that says so.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError
from megaprec.optim.given_numbers import require_clip, require_rates
from megaprec.optim.group_factors import Factors, Group, factors
from megaprec.optim.update_rules import SGD, AdamW, UpdateRule

Rates = tuple[float, float]  # learning rate and weight decay


class ParamGroup(dict[str, Any]):
    """A group as torch.optim has them: "params", "weight_decay" and, if the optimizer was built
    with one, "lr".

    Beside an "lr" it has the option of the update rule that torch's schedulers cycle, see
    `cycled_options`.
    members: the parameters that the optimizer updates by these rates, whatever is done to "params".
    cycled: the rule's own value of that option, by name.
    """

    members: tuple[nn.Parameter, ...] = ()
    cycled: Mapping[str, Any] = MappingProxyType({})

    def __missing__(self, key: str) -> Any:
        if key == "lr":
            raise UserError(
                "the optimizer has no learning rate, because it was built without lr: give "
                "ParallelAMPOptimizer(lr=...) for torch's LR schedulers, or each step its "
                "rate, step(lr=...)"
            )
        raise KeyError(key)


def cycled_options(rule: UpdateRule) -> dict[str, Any]:
    """Return the option of a rule that torch's OneCycleLR and CyclicLR cycle, as torch's optimizers
    call it."""
    if type(rule) is AdamW:
        return {"betas": tuple(rule.betas)}
    if type(rule) is SGD and rule.momentum:
        return {"momentum": rule.momentum}
    return {}


def param_groups(
    parameters: Iterable[nn.Parameter],
    groups: Sequence[Group],
    lr: float | None,
    weight_decay: float,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[Factors, ParamGroup]:
    """Return a group for each pair of factors of learning rate and weight decay. options:
    `cycled_options`.

    The first group has factors 1, even on a rank that has no such parameter. A parameter of several
    logical tensors lies in the group of the first tensor's factors; the groups of the other
    tensors' factors exist too.
    """
    pairs = {
        parameter: [factors(part, groups) for part in layout_of(parameter).parts]
        for parameter in parameters
    }
    made: dict[Factors, ParamGroup] = {}
    for pair in ((1.0, 1.0), *(pair for some in pairs.values() for pair in some)):
        if pair not in made:
            rate = {} if lr is None else {"lr": lr * pair[0], **options}
            made[pair] = ParamGroup(params=[], weight_decay=weight_decay * pair[1], **rate)
            made[pair].cycled = {} if lr is None else options
    for parameter, (first, *_) in pairs.items():
        made[first]["params"].append(parameter)
    for group in made.values():
        group.members = tuple(group["params"])
    return made


def require_own(now: Sequence[object], of: dict[Factors, ParamGroup]) -> None:
    """Raise UserError unless `now`, the list that everybody sees, has the optimizer's own groups as
    they were made."""
    own = list(of.values())
    same = len(now) == len(own) and all(map(is_, now, own))
    if not same or any(
        len(g["params"]) != len(g.members) or not all(map(is_, g["params"], g.members)) for g in own
    ):
        raise UserError(
            "param_groups or their params were replaced, added or removed, but a step reads "
            "only lr and weight_decay "
            'of the groups that the optimizer made: change these, as group["lr"] = ..., or '
            "build a new optimizer with "
            "groups=[megaprec.Group(...)]"
        )


def rates(of: dict[Factors, ParamGroup], lr: float | None) -> dict[Factors, Rates]:
    """Return learning rate and weight decay by factors. lr: of this step, for an optimizer that was
    built without.

    Raises UserError unless the rate is given once, and for an option of the update rule, which is
    none of a group.
    """
    if callable(lr):
        raise UserError(
            "step takes a learning rate, not a closure: run forward and backward before step"
        )
    idle = []
    for group in of.values():
        strange = group.keys() & _options_of_torch() - group.cycled.keys()
        idle += [f"{key} = {group[key]!r}" for key in strange]
    if idle:
        first = next(iter(of.values()))
        read = ", ".join(["lr", "weight_decay", *first.cycled])
        raise UserError(
            f"{min(idle)} in param_groups: a step reads {read} there, nothing else; the other "
            "options are "
            "those of the update rule that the optimizer is built with, like "
            "rule=AdamW(betas=..., eps=...)"
        )
    if lr is not None and any("lr" in group for group in of.values()):
        raise UserError(
            "step(lr=...) of an optimizer that was built with lr: the rate is that of its "
            "param_groups, which LR "
            "schedulers change; give the rate in one place only"
        )
    require_rates(**({} if lr is None else {"lr": lr}))
    for group in of.values():
        require_rates(
            **{
                key: group[key]
                for key in (("weight_decay", "lr") if lr is None else ("weight_decay",))
            }
        )
    if lr is None:
        return {
            pair: (float(group["lr"]), float(group["weight_decay"])) for pair, group in of.items()
        }
    return {pair: (lr * pair[0], float(group["weight_decay"])) for pair, group in of.items()}


def rules(of: dict[Factors, ParamGroup], rule: UpdateRule) -> dict[Factors, UpdateRule]:
    """Return the update rule of each group, with the option that a scheduler has changed. Raises
    UserError for a value that the rule cannot have.
    """
    made = {}
    for pair, group in of.items():
        changed = _changed(group)
        made[pair] = replace(rule, **changed) if changed else rule  # type: ignore[type-var]
        if "momentum" in changed and not changed["momentum"]:
            raise UserError(
                "momentum = 0 in param_groups: build the optimizer with rule=SGD(0.0) for no "
                "momentum"
            )
    return made


def _changed(group: ParamGroup) -> dict[str, Any]:
    """Return the cycled options of a group that are not the rule's own."""
    changed = {}
    for name, own in group.cycled.items():
        now = group.get(name, own)
        now = tuple(now) if isinstance(now, list) else now
        if now != own:
            changed[name] = now
    return changed


def told(of: dict[Factors, ParamGroup], lr: float | None, clip: float) -> list[str]:
    """Return the rates of each group of a step, and the largest norm, as text that all ranks of a
    stage share.

    Raises UserError for a largest norm that a loop has set to none.
    """
    require_clip(clip)
    every = [
        f"lr = {rate:.9g}, weight_decay = {decay:.9g}" for rate, decay in rates(of, lr).values()
    ]
    changed = [
        f"{name} = {value}" for group in of.values() for name, value in _changed(group).items()
    ]
    return [*every, *changed, f"clip = {clip}"]


@cache
def _options_of_torch() -> frozenset[str]:
    """Return the options of torch's optimizers that torch reads from the groups in each step, and
    that are not here."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = {
        name
        for kind in kinds
        if issubclass(kind, torch.optim.Optimizer)
        for name in inspect.signature(kind).parameters
    }
    return frozenset(names - {"params", "lr", "weight_decay", "defaults", "args", "kwargs"})


def saved(of: dict[Factors, ParamGroup]) -> list[dict[str, Any]]:
    """Return the groups that have a learning rate as plain values, with the factors that identify
    each group.

    An option of the rule is among them only where a scheduler has changed it: a resumed run may
    have another rule.
    """
    kept = []
    for pair, group in of.items():
        if "lr" in group:
            unchanged = group.cycled.keys() - _changed(group).keys()
            values = {
                key: value
                for key, value in group.items()
                if key != "params" and key not in unchanged
            }
            kept.append({"factors": list(pair), **values})
    return kept


def take_up(kept: Iterable[dict[str, Any]], of: dict[Factors, ParamGroup]) -> None:
    """Load saved rates, by factors. Groups that are new in this run, and groups without "lr", stay
    unchanged."""
    for values in kept:
        first, second = values["factors"]
        group = of.get((first, second))
        if group is not None and "lr" in group:
            group.update({key: value for key, value in values.items() if key != "factors"})
