"""The update rule that a name and options ask for."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megaprec.errors import Problem, UserError
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.torch_rule import Torch
from megaprec.optim.rules.update_rules import SGD, AdamW, UpdateRule

# arguments of torch's optimizers that have keys of their own
OF_ALL_RULES = {"params", "lr", "weight_decay"}
# options of muon that are those of its AdamW; keys of their own in a run file
OF_MUONS_ADAMW = ("betas", "eps")


def rule(name: str, options: dict[str, Any] | None = None) -> UpdateRule:
    """Return the rule of that name: adamw, sgd, muon, or an optimizer class of torch.optim.

    Options of muon are the fields of `Muon`, and betas and eps of its AdamW.

    Raises UserError for an unknown name, and for options that the rule does not have.
    """
    options = options or {}
    makers = {"adamw": AdamW, "sgd": SGD, "muon": _muon}
    make = makers.get(name.lower())
    if make is not None:
        _require_known(name, make, options)
        return make(**options)
    member = getattr(torch.optim, name, None)
    base = torch.optim.Optimizer  # itself no rule
    if isinstance(member, type) and issubclass(member, base) and member is not base:
        _require_known(name, member, options)
        return Torch(member, options)
    raise UserError.of("optimizer.rule_unknown", name=name)


def _require_known(name: str, make: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise UserError for options that a rule does not have."""
    known = _options_of(make)
    accepted = {*known}
    if make is _muon:
        accepted.update(OF_MUONS_ADAMW)
    elif isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        # `Torch` says of these why they are no options
        accepted.update(OF_ALL_RULES)
    names = ", ".join(known)
    unknown = [option for option in options if option not in accepted]
    if unknown:
        raise UserError(
            *(
                Problem.of("optimizer.rule_options", name=name, option=option, known=names)
                for option in unknown
            )
        )


def _options_of(make: Callable[..., Any]) -> list[str]:
    """Return the names of the options of a rule that have no keys of their own in a run file."""
    if make is _muon:
        return [name for name in inspect.signature(Muon).parameters if name != "adamw"]
    return [name for name in inspect.signature(make).parameters if name not in OF_ALL_RULES]


def _muon(**options: Any) -> Muon:
    """Return Muon, with its AdamW's options among those of the rule."""
    adamw_options: dict[str, Any] = {}
    for key in OF_MUONS_ADAMW:
        if key in options:
            adamw_options[key] = options.pop(key)
    return Muon(**options, adamw=AdamW(**adamw_options))
