"""Keys of a resumed run that differ from those of the checkpoint's run, and their effect.

Every such key is named. Most may change; the run is then no longer bit for bit the one without the
change, which MARK says, except for keys that no number depends on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.optim.lr import LRSchedule
from megaprec.parsing import parse_toml
from models.computed import TRAINING
from tools.config.checks import lr_schedule
from tools.config.precision_settings import PLAN_ONLY
from tools.config.run_file import RunConfig
from tools.config.settings import LR, Train
from tools.console.toml import toml
from tools.convert.train_state import TrainState, kept
from tools.journal.records import read_metrics

MARK = " (not bit for bit)"
JUMP = 1.5  # ratio of consecutive learning rates above which a note is printed
# Keys that no number depends on. The data is compared by its tokens, the learning rate by its
# schedule.
FREELY = (
    "log.*", "checkpoint.*", "train.folder", "train.eval_*", "train.init_from", "train.steps", "train.restarts",
    "data.source", "data.blend", "data.text_field", "data.tokenizer", "data.vocab_size", "data.max_chars",
    "data.workers", "data.cache", "data.validation", "data.lm_eval*", "parallel.zero", "parallel.zero_size",
    "parallel.recompute*", "parallel.elastic", "parallel.timeout", "train.sentinel",
    "optimizer.validation", "precision.trace_overflows", "precision.patience", "precision.masters_in_checkpoint",
    "fp8.shadow_*", "lr.*",
)  # fmt: skip

# keys that no number depends on either if sums have one order in every layout
LAYOUT = ("parallel.*",)


@dataclass(frozen=True)
class Rates:
    """The learning rates of a run. each: what a step adds to the count that the schedule is a
    function of."""

    schedule: LRSchedule
    each: int
    samples: bool

    @classmethod
    def of(cls, lr: LR, train: Train) -> "Rates":
        """Return the rates of a run with these tables. Raises UserError."""
        samples = lr.unit == "samples"
        return cls(lr_schedule(lr, train), train.global_batch if samples else 1, samples)

    def at(self, progress: TrainState, steps: int = 0) -> float:
        """Return the rate of the next step, or of the one that is `steps` later."""
        return self.schedule.at(self._taken(progress) + steps * self.each)

    def ends(self, progress: TrainState) -> Iterator[int]:
        """Yield the steps, as `at` counts them, before and after each end of a formula of the
        schedule."""
        schedule = self.schedule
        for count in (schedule.warmup, schedule.total - schedule.decay, schedule.total):
            step = (count - self._taken(progress)) // self.each
            yield from (step, step + 1)

    def _taken(self, progress: TrainState) -> int:
        return progress.applied_samples if self.samples else progress.applied


def keys_of(config: RunConfig) -> dict[str, str]:
    """Return the keys that a checkpoint stores as "run", in TOML's grammar: all but tables that it
    stores separately.
    """
    tables = (table for table in config if table[0] not in ("model", "parallel", "precision"))
    return {f"{table}.{key}": toml(value) for table, values in tables for key, value in values}


def changed_keys(store: Store, config: RunConfig, progress: TrainState) -> list[str]:
    """Return a line for each key that differs from the checkpoint. Keys that it does not know are
    omitted."""
    was = saved_keys(store)
    now = _all_keys(config)
    before = _rates(was)
    after = Rates.of(config.lr, config.train)
    canonical = was.get("train.numerics") == now["train.numerics"] == toml("canonical")
    rates = before is not None and not same_rates(before, after, progress)
    lines = []
    for key in was.keys() & now.keys():
        if was[key] != now[key]:
            free = any(
                fnmatchcase(key, pattern) for pattern in (*FREELY, *(LAYOUT if canonical else ()))
            )
            rated = key.startswith("lr.") or (
                key == "train.steps" and config.lr.schedule != "constant"
            )
            lines.append(
                f"{key}: {was[key]} -> {now[key]}{MARK if not free or (rated and rates) else ''}"
            )
    return sorted(lines)


def lr_jump(store: Store, config: RunConfig, progress: TrainState) -> Iterator[str]:
    """Yield a note if changed keys make the learning rate jump, with the ways out."""
    was = saved_keys(store)
    last, rate = rates_around(store, config, progress)
    before = _rates(was)
    if before is None or not progress.applied or before == Rates.of(config.lr, config.train):
        return
    if (
        last is None or not _far(last, rate) or not _far(before.at(progress), rate)
    ):  # or was to come, as in warm-up
        return
    yield (
        f"the learning rate jumps from {last:.3g} in step {progress.step} to {rate:.3g} in step "
        f"{progress.step + 1}{_stretched(was, config)}. Ways out: lr.schedule=constant "
        f"lr.peak={last:.3g} lr.warmup=0 keeps the old rate; train.init_from={store.path} with "
        "another train.folder and lr.warmup starts a new run with "
        'these weights; for runs that may be prolonged use lr.schedule = "constant" or "wsd" '
        "from the start"
    )


def _far(one: float, other: float) -> bool:
    return max(one, other) > JUMP * min(one, other)


def rates_around(
    store: Store, config: RunConfig, progress: TrainState
) -> tuple[float | None, float]:
    """Return the learning rates of the last step before a resume, None if it is not known, and of
    the next one.

    The rate of the last step is the recorded one; without a record that of the last applied step.
    """
    before = _rates(saved_keys(store))
    following = Rates.of(config.lr, config.train).at(progress)
    for record in reversed(read_metrics(Path(config.train.folder))):
        if record["step"] == progress.step and isinstance(record.get("lr"), int | float):
            return record["lr"], following
    return before.at(progress, -1) if before is not None and progress.applied else None, following


def _stretched(was: dict[str, str], config: RunConfig) -> str:
    steps = was.get("train.steps")
    kind = config.lr.schedule
    if steps is None or steps == toml(config.train.steps) or kind == "constant" or config.lr.length:
        return ""
    return f": train.steps {steps} -> {config.train.steps} stretches the {kind} schedule"


def _all_keys(config: RunConfig) -> dict[str, str]:
    tables = {name: dict(getattr(config, name)) for name in ("parallel", "precision")}
    tables["model"] = {
        key: value for key, value in config.model.model_dump().items() if key in TRAINING
    }
    return {
        key: value
        for key, value in (keys_of(config) | _flat(tables)).items()
        if key not in PLAN_ONLY
    }


def saved_keys(store: Store) -> dict[str, str]:
    """Return the keys that the checkpoint stores of its run. Raises UserError if they are
    damaged."""
    run = store.index.get("run", {})
    tables = {
        "parallel": store.index.get("layout", {}),
        "precision": store.index.get("precision", {}),
    }
    tables["model"] = {key: value for key, value in kept(store, "model").items() if key in TRAINING}
    if not all(isinstance(table, dict) for table in (run, *tables.values())) or not all(
        isinstance(value, str) for value in run.values()
    ):
        raise UserError(
            f'{store.path} is damaged: "run" in its checkpoint.json is not as it was written'
        )
    return run | _flat(tables)


def _flat(tables: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {
        f"{name}.{key}": toml(value)
        for name, values in tables.items()
        for key, value in values.items()
    }


def _rates(keys: dict[str, str]) -> Rates | None:
    """Return the learning rates of a run with these keys; None if they are not all known."""
    tables: dict[str, dict[str, Any]] = {"lr": {}, "train": {}}
    try:
        for key, value in keys.items():
            table, name = key.split(".", 1)
            if table in tables:
                tables[table][name] = parse_toml(f"value = {value}")["value"]
        return Rates.of(LR(**tables["lr"]), Train(**tables["train"]))
    except (ValidationError, ValueError, TypeError):
        return None


def same_rates(before: Rates, after: Rates, progress: TrainState) -> bool:
    """Return True if both have the same rates for all steps after `progress`, compared at up to a
    thousand of them and around the ends of warm-up, stable phase and schedule.
    """
    ends = {step for rates in (before, after) for step in rates.ends(progress)}
    last = max(0, *ends)
    steps = {*range(0, last, max(1, last // 1000)), *ends, last}
    return all(before.at(progress, step) == after.at(progress, step) for step in steps if step >= 0)
