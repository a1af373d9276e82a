"""The update rule that a name and options ask for."""

from typing import Any

import torch

from megaprec.errors import UserError
from megaprec.optim.muon.rule import Muon
from megaprec.optim.torch_rule import Torch
from megaprec.optim.update_rules import SGD, AdamW, UpdateRule


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
        raise UserError.of("optimizer.rule_options", name=name, error=error) from error
    raise UserError.of("optimizer.rule_unknown", name=name)


def _muon(**options: Any) -> Muon:
    """Return Muon, with its AdamW's options among those of the rule."""
    adamw_options: dict[str, Any] = {}
    for key in ("betas", "eps"):
        if key in options:
            adamw_options[key] = options.pop(key)
    return Muon(**options, adamw=AdamW(**adamw_options))
