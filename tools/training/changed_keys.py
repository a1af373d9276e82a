"""Differences of a resumed run from the checkpoint's: its keys, torch, and the processor.

Every key that differs is named. Most may change; the run is then no longer bit for bit the one
without the change, which NOT_EXACT_MARK says, except for keys that no number depends on.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.optim.rules.lr import SCHEDULES
from megaprec.parsing import parse_toml
from megaprec.url_secrets import masked, masked_inside
from models.equivalence import TRAINING_ONLY_KEYS
from tools.config.removed_keys import FORMER_DEFAULTS
from tools.config.run_file import RunConfig
from tools.config.tables.settings import LR, Train
from tools.console.toml import toml
from tools.console.units import counted, enumerated
from tools.journal.records import read_metrics
from tools.saved.train_state import TrainState, stored_value
from tools.training.learning_rates import LearningRates

LENGTH_KEY = "train.seq_length"

NOT_EXACT_MARK = " (not bit for bit)"
JUMP = 1.5  # ratio of consecutive learning rates above which a note is printed
BATCH_KEYS = ("train.global_batch", "train.batch_schedule")
COMPARED_RATES = 1000  # of two schedules, beside those around their ends
Table = dict[str, Any]  # of a run file: keys with their values
# Keys that no number depends on. The data is compared by its tokens, the learning rate by its
# schedule.
KEYS_WITHOUT_EFFECT = (
    "log.*",
    "checkpoint.*",
    "train.folder",
    "train.eval_*",
    "train.init_from",
    "train.branch_from",
    "train.grow_vocabulary",
    "train.steps",
    "train.restarts",
    "train.sentinel",
    "data.source",
    "data.blend*",
    "data.text_field",
    "data.chat_template",
    "data.begin",
    "data.encoding",
    "data.exclude",
    "data.skip_bad",
    "data.tokenizer",
    "data.vocab_size",
    "data.max_chars",
    "data.workers",
    "data.cache",
    "data.validation",
    "data.lm_eval*",
    "parallel.zero",
    "parallel.zero_size",
    "parallel.zero_keep",
    "optimizer.offload",
    "parallel.recompute*",
    "parallel.elastic",
    "parallel.timeout",
    "precision.trace_overflows",
    "precision.patience",
    "precision.masters_in_checkpoint",
    "fp8.shadow_*",
    "lr.*",
)
# keys that no number depends on either if sums have one order in every layout
LAYOUT_KEYS = ("parallel.*",)


def keys_of(config: RunConfig) -> dict[str, str]:
    """Return the keys that a checkpoint stores as "run", in TOML's grammar and without secrets of
    URLs: all but those of tables that it stores separately.
    """
    keys = dict[str, str]()
    for table, values in config:
        if table not in ("model", "parallel", "precision"):
            keys |= {f"{table}.{key}": masked(toml(value)) for key, value in values}
    return keys


def changed_keys(checkpoint: Store, config: RunConfig, progress: TrainState) -> list[str]:
    """Return a line for each key that differs from the checkpoint, of those that it knows."""
    saved_values = saved_keys(checkpoint)
    # A run goes on as though a removed key had its default.
    current_values = {**FORMER_DEFAULTS, **_all_keys(config)}
    # what is compiled is compared by its names (`compile_leaves`)
    exact_patterns = (*KEYS_WITHOUT_EFFECT, "optimizer.validation", "train.compile")
    if saved_values.get("train.numerics") == current_values["train.numerics"] == toml("canonical"):
        exact_patterns = (*exact_patterns, *LAYOUT_KEYS)
    rates_change = _rates_change(saved_values, config, progress)

    none = toml("none")
    without_fp8 = saved_values.get("fp8.kind") == current_values["fp8.kind"] == none

    lines = list[str]()
    for key in saved_values.keys() & current_values.keys():
        if saved_values[key] == current_values[key]:
            continue
        if without_fp8 and key.startswith("fp8."):  # whose defaults have changed
            continue
        is_exact = any(fnmatchcase(key, pattern) for pattern in exact_patterns)
        if reorders_sums(key, saved_values[key], current_values[key]):
            is_exact = False
        if rates_change and _decides_rates(key, config):
            is_exact = False
        mark = "" if is_exact else NOT_EXACT_MARK
        lines.append(f"{key}: {saved_values[key]} -> {current_values[key]}{mark}")
    return sorted(lines)


def reorders_sums(key: str, *values: object) -> bool:
    """Return True if the key changes between ZeRO-2 or 3 and less: these add gradients over ranks
    after each micro-batch, others once, after the sum of micro-batches.

    values: the two of the key, as they are or in TOML's grammar.
    """
    if key != "parallel.zero":
        return False
    reduces_each_microbatch = [str(value) in ("2", "3") for value in values]
    return any(reduces_each_microbatch) and not all(reduces_each_microbatch)


def _rates_change(saved: dict[str, str], config: RunConfig, progress: TrainState) -> bool:
    """Return True if the steps to come have other learning rates than with the saved keys."""
    old_rates = _rates_of_keys(saved)
    new_rates = LearningRates.of(config.lr, config.train)
    return old_rates is not None and not same_rates(old_rates, new_rates, progress)


def _decides_rates(key: str, config: RunConfig) -> bool:
    if key == "train.steps":
        return SCHEDULES[config.lr.schedule].ends
    return key.startswith("lr.")


def lr_jump(checkpoint: Store, config: RunConfig, progress: TrainState) -> Iterator[str]:
    """Yield a note if changed keys make the learning rate jump, with the ways out."""
    saved = saved_keys(checkpoint)
    last_rate, next_rate = rates_around(checkpoint, config, progress)
    old_rates = _rates_of_keys(saved)
    unchanged = old_rates == LearningRates.of(config.lr, config.train)
    if old_rates is None or unchanged or not progress.applied:
        return
    if last_rate is None or not _is_jump(last_rate, next_rate):
        return
    # A jump that the saved keys would have had too, as in warm-up, is no effect of a change.
    if not _is_jump(old_rates.at(progress), next_rate):
        return
    yield (
        f"the learning rate jumps from {last_rate:.3g} in step {progress.step} to {next_rate:.3g} "
        f"in step {progress.step + 1}{_describe_causes(checkpoint, config, progress)}. Ways out: "
        f"lr.schedule=constant lr.peak={last_rate:.3g} lr.warmup=0 keeps the old rate; "
        f"train.init_from={checkpoint.path} with another train.folder and lr.warmup starts a new "
        "run with these weights; for runs that may be prolonged use lr.schedule = "
        '"constant" or "wsd" from the start'
    )


def other_length(checkpoint: Store, config: RunConfig, progress: TrainState) -> Iterator[str]:
    """Yield a note if changed batches make the schedule of the learning rate longer or shorter in
    samples."""
    saved = saved_keys(checkpoint)
    old_rates = _rates_of_keys(saved)
    current = keys_of(config)
    batches_change = any(saved.get(key, current[key]) != current[key] for key in BATCH_KEYS)
    if old_rates is None or not batches_change or not SCHEDULES[config.lr.schedule].ends:
        return
    new_rates = LearningRates.of(config.lr, config.train)
    old_total = old_rates.schedule.total
    new_total = new_rates.schedule.total
    if old_rates.batches and new_rates.batches and old_total != new_total:
        yield (
            f"the schedule of the learning rate is {new_total:,} samples long, not {old_total:,}: "
            "without lr.length it has those of all steps of the run with these batches; "
            f"lr.length={old_total} keeps its length"
        )
    steps_left = new_total - progress.applied
    if not old_rates.batches and not new_rates.batches and steps_left > 0:
        yield (
            f"the {counted(steps_left, 'step')} that are left of the schedule of the learning rate "
            f"have train.global_batch = {config.train.global_batch} samples, not "
            f'{saved["train.global_batch"]}: only with lr.unit = "samples" and lr.length does it '
            "keep its length in samples"
        )


def _is_jump(first_rate: float, second_rate: float) -> bool:
    return max(first_rate, second_rate) > JUMP * min(first_rate, second_rate)


def rates_around(
    checkpoint: Store, config: RunConfig, progress: TrainState
) -> tuple[float | None, float]:
    """Return the learning rates of the last step before a resume, None if it is not known, and of
    the next one.

    The rate of the last step is the recorded one; without a record that of the last applied step.
    """
    old_rates = _rates_of_keys(saved_keys(checkpoint))
    next_rate = LearningRates.of(config.lr, config.train).at(progress)
    # From the end, where the record of the last step is.
    for record in reversed(read_metrics(Path(config.train.folder))):
        if record["step"] == progress.step and isinstance(record.get("lr"), int | float):
            return record["lr"], next_rate
    if old_rates is None or not progress.applied:
        return None, next_rate
    return old_rates.of_last(progress), next_rate


def _describe_causes(checkpoint: Store, config: RunConfig, progress: TrainState) -> str:
    """Return the changed keys that make the learning rate jump, in words: those of which one alone,
    with its old value, would leave no jump; all changed ones if none would."""
    saved = saved_keys(checkpoint)
    current = keys_of(config)
    last_rate, _ = rates_around(checkpoint, config, progress)
    of_rates = [key for key in current if _may_decide_rates(key)]
    changed = [key for key in of_rates if saved.get(key, current[key]) != current[key]]
    decisive = list[str]()
    for key in changed:
        rates = _rates_or_none({**current, key: saved[key]})
        if rates and last_rate is not None and not _is_jump(last_rate, rates.at(progress)):
            decisive.append(key)
    causes = decisive or changed
    if causes == ["train.steps"]:
        change = f"{saved['train.steps']} -> {config.train.steps}"
        return f": train.steps {change} stretches the {config.lr.schedule} schedule"
    changes = [f"{key} {saved[key]} -> {current[key]}" for key in causes]
    return f", by {enumerated(changes)}" if changes else ""


def _rates_or_none(keys: dict[str, str]) -> LearningRates | None:
    """Return the learning rates of a run with these keys, None if there is no such run."""
    try:
        return _rates_of_keys(keys)
    except UserError:
        return None


def _may_decide_rates(key: str) -> bool:
    return key.startswith("lr.") or key in ("train.steps", *BATCH_KEYS)


def _all_keys(config: RunConfig) -> dict[str, str]:
    """Return the keys of the run that `saved_keys` may have, in TOML's grammar."""
    tables = {
        "parallel": dict(config.parallel),
        "precision": dict(config.precision),
        "model": _training_keys(config.model.model_dump()),
    }
    return keys_of(config) | _flatten_tables(tables)


def _training_keys(model: Table) -> Table:
    """Return the keys of [model] that concern training, not the model's function."""
    return {key: value for key, value in model.items() if key in TRAINING_ONLY_KEYS}


def saved_length(checkpoint: Store, config: RunConfig) -> int:
    """Return the length of the samples of the checkpoint's run; the run's own if it is not
    known.
    """
    saved = saved_keys(checkpoint).get(LENGTH_KEY, "")
    if saved.isdecimal() and int(saved):
        return int(saved)
    return config.train.seq_length


def saved_keys(checkpoint: Store) -> dict[str, str]:
    """Return the keys that the checkpoint stores of its run. Raises UserError if they are
    damaged.
    """
    run = checkpoint.index.get("run", {})
    tables = {
        "parallel": checkpoint.index.get("layout", {}),
        "precision": checkpoint.index.get("precision", {}),
        "model": _training_keys(stored_value(checkpoint, "model")),
    }
    all_tables = all(isinstance(table, dict) for table in (run, *tables.values()))
    if not all_tables or not all(isinstance(value, str) for value in run.values()):
        raise UserError.of("training.run_record_damaged", path=checkpoint.path)
    # checkpoints of earlier versions may have secrets of URLs
    return masked_inside(run) | _flatten_tables(tables)


def _flatten_tables(tables: dict[str, Table]) -> dict[str, str]:
    """Return the keys of all tables as "table.key", their values in TOML's grammar."""
    keys = dict[str, str]()
    for table, keys_of_table in tables.items():
        keys |= {f"{table}.{key}": toml(value) for key, value in keys_of_table.items()}
    return keys


def _rates_of_keys(keys: dict[str, str]) -> LearningRates | None:
    """Return the learning rates of a run with these keys; None if they are not all known."""
    tables: dict[str, Table] = {"lr": {}, "train": {}}
    try:
        for key, toml_value in keys.items():
            table, name = key.split(".", 1)
            if table in tables:
                tables[table][name] = parse_toml(f"value = {toml_value}")["value"]
        return LearningRates.of(LR(**tables["lr"]), Train(**tables["train"]))
    # the checkpoint is of another version, which had other keys or values
    except (ValidationError, ValueError, TypeError):
        return None


def same_rates(old_rates: LearningRates, new_rates: LearningRates, progress: TrainState) -> bool:
    """Return True if both have the same rates for all steps after `progress`, as far as a thousand
    of them and those around the ends of warm-up, stable phase and schedule tell.
    """
    # Between the ends both are smooth, so few steps tell.
    ends = {*old_rates.ends(progress), *new_rates.ends(progress)}
    last_step = max(0, *ends)
    stride = max(1, last_step // COMPARED_RATES)
    steps = {*range(0, last_step, stride), *ends, last_step}
    for step in steps:
        # An end may lie in the past.
        if step >= 0 and old_rates.at(progress, step) != new_rates.at(progress, step):
            return False
    return True


def arithmetic() -> dict[str, str]:
    """Return what the bits of a run depend on besides its keys: the version of torch and the
    processor.

    Another version of torch or another instruction set computes products and functions by other
    code, and the last bits of the results differ. A checkpoint records both.
    """
    return {"torch": torch.__version__, "processor": processor()}


def processor() -> str:
    """Return the GPU, if this process uses one; otherwise the CPU's instruction set for torch."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    instructions = [torch.backends.cpu.get_cpu_capability()]
    if torch.cpu._is_avx512_bf16_supported():
        instructions.append("AVX512_BF16")
    if torch.cpu._is_amx_tile_supported():
        instructions.append("AMX")
    return ", ".join(instructions)


def arithmetic_changes(checkpoint: Store) -> Iterator[str]:
    """Yield a line for each entry of `arithmetic` of which the checkpoint records another value."""
    for name, now in arithmetic().items():
        before = checkpoint.index.get(name, now)
        if before != now:
            yield f"{name}: {before} -> {now}"
