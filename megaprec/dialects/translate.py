"""The five dialects by name, and translation of a plan to another system's configuration.

A dialect is two functions: `resolve`, from its system's configuration to a plan, and `express`,
back to configurations that approximate a plan. Losses in translation are found by resolving the
nearest configuration again: every field in which the result differs from the plan is one that the
system cannot express.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from pydantic import BaseModel

from megaprec.dialects import colossalai, internevo, nemo, nxd, smp
from megaprec.dialects.reading import Resolved
from megaprec.errors import UserError
from megaprec.precision.plan import PrecisionPlan, dtype_name


class Dialect(Protocol):
    """The interface of each dialect's module."""

    @property
    def SYSTEM(self) -> str: ...
    @property
    def PREFIX(self) -> str: ...
    def resolve(
        self, config: Mapping[str, Any] | None, places: Mapping[str, str] | None = None
    ) -> Resolved: ...
    def express(self, plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]: ...


DIALECTS: Mapping[str, Dialect] = {
    "nxd": nxd,
    "smp": smp,
    "colossalai": colossalai,
    "internevo": internevo,
    "nemo": nemo,
}
FIELDS = tuple(f.name for f in fields(PrecisionPlan) if f.name != "origin")
BESIDE = ("parallel.zero", "parallel.zero_size", "optimizer.clip")
"""Run-file keys that belong to mixed precision in some system."""


@dataclass(frozen=True)
class Translation:
    """A configuration of another system and its losses.

    config: the configuration. unsaid: a line for each field that it cannot express, with the value
        that it has instead.
    """

    config: Mapping[str, Any]
    unsaid: tuple[str, ...]


def translate(plan: PrecisionPlan, settings: Mapping[str, Any], to: str) -> Translation:
    """Return the plan and the run-file keys in `settings` as a configuration of the dialect `to`,
    as exact as possible.

    Of the run-file keys that a system lacks, only those of ZeRO and clipping are listed as unsaid.

    Raises UserError if no configuration of that system is valid.
    """
    dialect = DIALECTS[to]
    tried = list[Translation]()
    problems: list[str] = []
    for config in dialect.express(plan, settings):
        try:
            resolved = dialect.resolve(config)
        except UserError as error:
            problems += error.problems
        else:
            tried.append(
                Translation(
                    config, (*differences(plan, resolved.plan), *_settings(settings, resolved))
                )
            )
    if not tried:
        raise UserError(f"{dialect.SYSTEM} cannot express this plan:", *dict.fromkeys(problems))
    return min(tried, key=lambda translation: len(translation.unsaid))


def differences(asked: PrecisionPlan, said: PrecisionPlan) -> list[str]:
    """Return a line for each field in which two plans differ."""
    pairs = ((name, getattr(asked, name), getattr(said, name)) for name in FIELDS)
    return [f"{name} = {shown(a)}; it has {shown(b)}" for name, a, b in pairs if a != b]


def _settings(given: Mapping[str, Any], resolved: Resolved) -> list[str]:
    asked = {key: _keys(value) for key, value in given.items()}
    said = {key: decision.value for key, decision in resolved.settings.items()}
    lines = [
        f"{key} = {shown(value)}; it has no key for it"
        for key, value in asked.items()
        if key not in said and key in BESIDE
    ]
    lines += [
        f"{k} = {shown(asked[k])}; it has {shown(v)}"
        for k, v in said.items()
        if k in asked and asked[k] != v
    ]
    return lines + [
        f"{key} would become {shown(value)}" for key, value in said.items() if key not in asked
    ]


def _keys(value: Any) -> Any:
    """Return a table as the keys in it that are not at their defaults; any other value
    unchanged."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    return value


def shown(value: Any) -> str:
    """Return a value of a plan as a few words."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if value in (None, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if hasattr(value, "__dataclass_fields__"):
        return _changed(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed(value: Any) -> str:
    """Return the non-default fields of a small frozen value: "dynamic, initial 65536, hysteresis
    1"."""
    defaults = {f.name: f.default for f in fields(value)}
    parts = [
        f"{name} {shown(getattr(value, name))}"
        for name in defaults
        if getattr(value, name) != defaults[name]
    ]
    return ", ".join([value.kind, *(part for part in parts if not part.startswith("kind "))])
