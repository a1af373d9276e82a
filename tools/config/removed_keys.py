"""Keys that earlier run files had, and why a run has no need of them."""

from collections.abc import Mapping

from megaprec.errors import Problem
from tools.config.tables.precision_settings import PLAN_ONLY
from tools.console.toml import Setting, toml

REMOVED_KEYS: Mapping[str, str] = {
    **PLAN_ONLY,
    "fp8.reduce_over": (
        "the scales are the same over the world and over a pipeline stage, for no two stages share "
        "a tensor"
    ),
    "optimizer.native": "AdamW is torch's, and has no kernels in C",
    "optimizer.validation": "all ranks agree on a step before its update",
}
# The defaults, in TOML's grammar, of those with which a run worked otherwise.
FORMER_DEFAULTS: Mapping[str, str] = {
    "optimizer.native": "false",
    "optimizer.validation": '"before"',
}


def take_removed(
    settings: dict[str, Setting], saved_origin: str = ""
) -> tuple[list[Problem], list[str]]:
    """Take removed keys out of `settings`. Return a problem for each, and notes in their place on
    those of a resolved run.

    saved_origin: the origin of keys that an earlier megaprec has written down: it wrote all keys,
        so those that had their defaults are passed over.
    """
    problems = list[Problem]()
    notes = list[str]()
    for key, reason in REMOVED_KEYS.items():
        setting = settings.pop(key, None)
        if setting is None:
            continue
        value = toml(setting.value)
        if setting.origin != saved_origin:
            problem = Problem.of(
                "config.key_removed", key=key, value=value, origin=setting.origin, reason=reason
            )
            problems.append(problem)
        elif value != FORMER_DEFAULTS.get(key, value):
            notes.append(f"{key} = {value} ({setting.origin}): without effect, for {reason}")
    return problems, notes
