"""The update rules by their names, with what others must know of each: one row a rule."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megaprec.errors import Problem, UserError
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.torch_rule import TorchRule
from megaprec.optim.rules.update_rules import SGD, AdamW, Lion, UpdateRule

# arguments of torch's optimizers that come with each step
OF_EACH_STEP = ("params", "lr", "weight_decay")
# of AdamW, also as a part of muon
OF_ADAMW = ("betas", "eps")


@dataclass(frozen=True)
class RuleKind:
    """An update rule as a run file names it.

    make: makes the rule of its options.
    options: the names of its options.
    own_keys: those that are keys of [optimizer] themselves, and not of optimizer.options.
    patterns: options that are patterns of logical names of parameters.
    decays: whether it has a weight decay.
    elsewhere: names that Megatron-LM, DeepSpeed and torch have for it, in lower case.
    """

    make: Callable[..., UpdateRule]
    options: tuple[str, ...]
    own_keys: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    decays: bool = True
    elsewhere: tuple[str, ...] = ()


def _options_of(make: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a class."""
    return tuple(inspect.signature(make).parameters)


def _muon(**options: Any) -> Muon:
    """Return Muon, with its AdamW's options among those of the rule."""
    adamw_options = {key: options.pop(key) for key in OF_ADAMW if key in options}
    return Muon(**options, adamw=AdamW(**adamw_options))


RULES: Mapping[str, RuleKind] = {
    "adamw": RuleKind(AdamW, _options_of(AdamW), own_keys=OF_ADAMW, elsewhere=("adam", "adamw")),
    "sgd": RuleKind(SGD, _options_of(SGD), elsewhere=("sgd",)),
    "lion": RuleKind(Lion, _options_of(Lion), elsewhere=("lion",)),
    "muon": RuleKind(
        _muon,
        tuple(name for name in _options_of(Muon) if name != "adamw"),
        own_keys=OF_ADAMW,
        patterns=("by_adamw",),
    ),
}
"""The rules of this project. A class of torch.optim is a rule too (`rule_kind`)."""
NAMES = ", ".join(RULES)


def rule_kind(name: str) -> RuleKind:
    """Return the row of a rule: one of `RULES` in any case, or of a class of torch.optim.

    Raises UserError for an unknown name.
    """
    kind = RULES.get(name.lower())
    if kind is not None:
        return kind
    member = getattr(torch.optim, name, None)
    base = torch.optim.Optimizer  # itself no rule
    if not (isinstance(member, type) and issubclass(member, base) and member is not base):
        raise UserError.of("optimizer.rule_unknown", name=name, names=NAMES)

    def make(**options: Any) -> TorchRule:
        return TorchRule(member, options)

    arguments = _options_of(member)
    options = tuple(argument for argument in arguments if argument not in OF_EACH_STEP)
    return RuleKind(make, options, decays="weight_decay" in arguments)


def rule(name: str, options: Mapping[str, Any] | None = None) -> UpdateRule:
    """Return the rule of that name: one of `RULES`, or an optimizer class of torch.optim.

    Options of muon are the fields of `Muon`, and betas and eps of its AdamW.

    Raises UserError for an unknown name, and for options that the rule does not have.
    """
    kind = rule_kind(name)
    given = dict(options or {})
    _require_known(name, kind, given)
    return kind.make(**given)


def _require_known(name: str, kind: RuleKind, options: Iterable[str]) -> None:
    """Raise UserError for options that a rule does not have."""
    accepted = {*kind.options, *kind.own_keys}
    if name.lower() not in RULES:
        # `TorchRule` says of these why they are no options
        accepted.update(OF_EACH_STEP)
    unknown = [option for option in options if option not in accepted]
    if unknown:
        known = ", ".join(kind.options)
        raise UserError(
            *(
                Problem.of("optimizer.rule_options", name=name, option=option, known=known)
                for option in unknown
            )
        )


def name_here(foreign_name: str) -> str:
    """Return the name here of a rule of Megatron-LM, DeepSpeed or torch; "" if there is none."""
    for name, kind in RULES.items():
        if foreign_name.lower() in kind.elsewhere:
            return name
    return ""
