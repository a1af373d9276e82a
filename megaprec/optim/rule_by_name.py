"""The update rule that a name and options ask for."""

import inspect
from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.optim.muon.rule import Muon
from megaprec.optim.torch_rule import Torch
from megaprec.optim.update_rules import SGD, AdamW, UpdateRule

# arguments of torch's optimizers that have keys of their own
OF_ALL_RULES = {"params", "lr", "weight_decay"}


def rule(name: str, options: dict[str, Any] | None = None) -> UpdateRule:
    """Return the rule of that name: adamw, sgd, muon, or an optimizer class of torch.optim.

    Options of muon are the fields of `Muon`, and betas and eps of its AdamW.

    Raises UserError for an unknown name, and for options that the rule does not have.
    """
    makers = {"adamw": AdamW, "sgd": SGD, "muon": _muon}
    make = makers.get(name.lower())
    member = getattr(torch.optim, name, None)
    base = torch.optim.Optimizer  # itself no rule
    try:
        if make is not None:
            return make(**(options or {}))
        if isinstance(member, type) and issubclass(member, base) and member is not base:
            return Torch(member, options)
    except TypeError as error:  # of an option that the rule does not have
        known = ", ".join(_options_of(make or member))
        raise UserError.of("optimizer.rule_options", name=name, error=error, known=known) from error
    raise UserError.of("optimizer.rule_unknown", name=name)


def _options_of(make: Any) -> list[str]:
    """Return the names of the options of a rule."""
    if make is _muon:
        own = [name for name in inspect.signature(Muon).parameters if name != "adamw"]
        return [*own, "betas", "eps"]
    return [name for name in inspect.signature(make).parameters if name not in OF_ALL_RULES]


def _muon(**options: Any) -> Muon:
    """Return Muon, with its AdamW's options among those of the rule."""
    adamw_options: dict[str, Any] = {}
    for key in ("betas", "eps"):
        if key in options:
            adamw_options[key] = options.pop(key)
    return Muon(**options, adamw=AdamW(**adamw_options))
