"""Changes that make a run fit its device, and what each costs in speed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.analysis.planning.device import DeviceTarget
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import ORIGIN, Planned, least_of_mean_rank, plan_run
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import least_seconds_of_schedule, passes_of
from tools.config.run_file import RunConfig

ZERO_2 = {"parallel.zero": 2}
ZERO_3 = {"parallel.zero": 3}
NARROW = {"precision.gradients": "bf16"}
SELECTIVE = {"parallel.recompute": "selective"}
FULL = {"parallel.recompute": "full"}
OFFLOAD = {"optimizer.offload": "host"}
# Changes that are tried, from the smaller ones on: keys and values.
CHANGES: Sequence[dict[str, Any]] = (
    SELECTIVE,
    ZERO_2,
    NARROW,
    FULL,
    {**ZERO_2, **SELECTIVE},
    {**ZERO_2, **FULL},
    {**NARROW, **FULL},
    ZERO_3,
    {**ZERO_2, **NARROW, **FULL},
    {**ZERO_3, **SELECTIVE},
    {**ZERO_3, **FULL},
    {**ZERO_3, **NARROW, **FULL},
    OFFLOAD,
    {**OFFLOAD, **SELECTIVE},
    {**OFFLOAD, **FULL},
    {**OFFLOAD, **ZERO_2, **FULL},
    {**OFFLOAD, **ZERO_3, **FULL},
    {**OFFLOAD, **ZERO_3, **NARROW, **FULL},
)


@dataclass(frozen=True)
class Remedy:
    """A change with which a run fits. keys: the keys that change. planned: the changed run."""

    keys: dict[str, Any]
    planned: Planned

    def describe(self) -> str:
        """Return the change as it stands on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.keys.items())


def cheapest_remedy(
    config: RunConfig, target: DeviceTarget, assumed: Assumptions | None
) -> Remedy | None:
    """Return the change with which the run fits and is fastest; None if none of `CHANGES` is
    enough."""
    memory = MemoryModel(target.device, target.process)
    best: Remedy | None = None
    # bounds come before what they are bounds of: to build and run hundreds of experts takes long
    for bound, keys, changed in _fastest_first(config, target, assumed):
        if best and bound >= _seconds(best):
            break
        planned = plan_run(changed, memory, assumed)
        if target.verdict(planned.total) == "fits":
            remedy = Remedy(keys, planned)
            best = min(best or remedy, remedy, key=_seconds)
    return best


def _fastest_first(
    config: RunConfig, target: DeviceTarget, assumed: Assumptions | None
) -> list[tuple[tuple[float, int], dict[str, Any], RunConfig]]:
    """Return a lower bound of each change's `_seconds`, its keys, and the changed run, the least
    first; without those that cannot fit."""
    bounded: list[tuple[tuple[float, int], dict[str, Any], RunConfig]] = []
    for keys, changed in _changed_runs(config, target):
        if target.verdict(least_of_mean_rank(changed)) == "does not fit":
            continue
        least = 0.0
        if assumed:
            least = least_seconds_of_schedule(changed, passes_of(changed), assumed)
        bounded.append(((least, len(keys)), keys, changed))
    return sorted(bounded, key=lambda change: change[0])


def _changed_runs(
    config: RunConfig, target: DeviceTarget
) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yield the keys of each change that the run can have, and the changed run."""
    for keys in CHANGES:
        # a CPU's memory is the host's
        if target.device == "cpu" and "optimizer.offload" in keys:
            continue
        changed = config
        try:
            for key, value in keys.items():
                changed = changed.with_value(key, value, ORIGIN)
        except ValueError:
            continue  # a rule forbids it
        yield keys, changed


def _seconds(remedy: Remedy) -> tuple[float, int]:
    """Return the order of changes: by speed if it is known, then by the number of keys."""
    prediction = remedy.planned.prediction
    return prediction.seconds if prediction else 0.0, len(remedy.keys)
