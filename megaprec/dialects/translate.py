"""The five dialects by name, and translation of a plan to another system's configuration.

A dialect is two functions: `resolve`, from its system's configuration to a plan, and `express`,
back to configurations that approximate a plan. Losses in translation are found by resolving the
nearest configuration again: every field in which the result differs from the plan is one that the
system cannot express.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from pydantic import BaseModel

from megaprec.dialects import colossalai, internevo, nemo, nxd, smp
from megaprec.dialects.reading import Resolved
from megaprec.errors import Problem, UserError
from megaprec.precision.plan import FIELDS, PrecisionPlan, dtype_name


class Dialect(Protocol):
    """The interface of each dialect's module."""

    @property
    def SYSTEM(self) -> str: ...
    @property
    def PREFIX(self) -> str: ...
    def resolve(
        self, config: Mapping[str, Any] | None, sources: Mapping[str, str] | None = None
    ) -> Resolved: ...
    def express(self, plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]: ...


DIALECTS: Mapping[str, Dialect] = {
    "nxd": nxd,
    "smp": smp,
    "colossalai": colossalai,
    "internevo": internevo,
    "nemo": nemo,
}
RELATED_KEYS = ("parallel.zero", "parallel.zero_size", "optimizer.clip")
"""Run-file keys that belong to mixed precision in some system."""


@dataclass(frozen=True)
class Translation:
    """A configuration of another system and its losses.

    config: the configuration. losses: a line for each field that it cannot express, with the value
        that it has instead.
    """

    config: Mapping[str, Any]
    losses: tuple[str, ...]


def translate(plan: PrecisionPlan, settings: Mapping[str, Any], to: str) -> Translation:
    """Return the plan and the run-file keys in `settings` as a configuration of the dialect `to`,
    as exact as possible.

    Of the run-file keys that a system lacks, only those of ZeRO and clipping are listed as losses.

    Raises UserError if no configuration of that system is valid.
    """
    dialect = DIALECTS[to]
    translations: list[Translation] = []
    problems: list[str] = []
    for config in dialect.express(plan, settings):
        try:
            resolved = dialect.resolve(config)
        except UserError as error:
            # the system refuses this candidate; another one may be valid
            problems += error.problems
        else:
            losses = (*differences(plan, resolved.plan), *_lost_settings(settings, resolved))
            translations.append(Translation(config, losses))
    if not translations:
        raise UserError(
            Problem.of("dialect.plan_not_expressible", system=dialect.SYSTEM),
            *dict.fromkeys(problems),  # candidates share keys, and so their problems
        )
    # the nearest one; of equal ones the first
    return min(translations, key=lambda translation: len(translation.losses))


def differences(plan: PrecisionPlan, expressed: PrecisionPlan) -> list[str]:
    """Return a line for each field in which a plan differs from what a system expresses of it."""
    lines: list[str] = []
    for name in FIELDS:
        value = getattr(plan, name)
        expressed_value = getattr(expressed, name)
        if value != expressed_value:
            lines.append(f"{name} = {format_value(value)}; it has {format_value(expressed_value)}")
    return lines


def _lost_settings(settings: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """Return a line for each run-file key that a configuration lacks, changes or adds."""
    wanted = {key: _without_defaults(value) for key, value in settings.items()}
    expressed = {key: decision.value for key, decision in resolved.settings.items()}
    missing: list[str] = []
    for key, value in wanted.items():
        # of keys that a system lacks, only those that it might be expected to have
        if key not in expressed and key in RELATED_KEYS:
            missing.append(f"{key} = {format_value(value)}; it has no key for it")
    changed: list[str] = []
    added: list[str] = []
    for key, value in expressed.items():
        text = format_value(value)
        if key not in wanted:
            # what the configuration decides beyond what was asked for
            added.append(f"{key} would become {text}")
        elif wanted[key] != value:
            changed.append(f"{key} = {format_value(wanted[key])}; it has {text}")
    return missing + changed + added


def _without_defaults(value: Any) -> Any:
    """Return a table as the keys in it that are not at their defaults; any other value
    unchanged."""
    # a run file's tables, such as model.init, are filled models; dialects decide plain dicts
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_defaults=True)
    return value


def format_value(value: Any) -> str:
    """Return a value of a plan as a few words."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if value in (None, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if is_dataclass(value):
        return _format_changes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _format_changes(settings: Any) -> str:
    """Return the kind and the non-default fields of a LossScaling or an FP8Recipe: "dynamic,
    initial 65536, hysteresis 1"."""
    words = [settings.kind]
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if settings.kind == "nvfp4" and setting.name == "format":
            continue  # of which it has one
        if setting.name != "kind" and value != setting.default:
            words.append(f"{setting.name} {format_value(value)}")
    return ", ".join(words)
