"""Keys that earlier run files had, and why a run has no need of them."""

from collections.abc import Iterator, Mapping

from megaprec.errors import Problem
from tools.config.precision_settings import PLAN_ONLY
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


def take_removed(settings: dict[str, Setting]) -> Iterator[Problem]:
    """Take removed keys out of `settings`; yield a problem for each."""
    for key, reason in REMOVED_KEYS.items():
        setting = settings.pop(key, None)
        if setting is not None:
            yield Problem.of(
                "config.key_removed",
                key=key,
                value=toml(setting.value),
                origin=setting.origin,
                reason=reason,
            )
