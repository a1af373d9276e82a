"""The global batch of Megatron-LM's arguments: constant, a ramp (--rampup-batch-size), or in steps
(--step-batch-size-schedule).

The formulas are those of megatron/core/num_microbatches_calculator.py: that of a ramp until April
2026, for later versions ignore the argument, and that of steps since then. The number of steps of a
run whose length is in samples is that of `update_train_iters` (megatron/training/training.py).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from pydantic import ValidationError

from tools.config.rules.batches import MOST_CHANGES, changes_problems
from tools.config.tables.batch_schedule import BatchSchedule
from tools.config.tables.settings import Train
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.draft import Draft

RAMP = "rampup_batch_size"
IN_STEPS = "step_batch_size_schedule"
MICRO_BATCHES = "num_microbatches_in_minibatch"
DECREASE = "decrease_batch_size_if_needed"
SUFFIXES = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}
RAMP_NOTE = (
    "as Megatron-LM takes it until April 2026; later versions warn, keep the batch constant, and "
    "have --step-batch-size-schedule instead"
)
NO_RANKS_FOR_BATCH = (
    "depends on the number of ranks, which the arguments do not say: give --ranks N"
)
Changes = tuple[tuple[int, int], ...]
"""Numbers of samples of the run, each with the global batch from there on."""


def add_global_batch(arguments: Arguments, data: int | None) -> None:
    """Add the global batch and its changes. data: the replicas; None if their number is not
    known."""
    draft = arguments.draft
    if not draft.needs("train.batch_schedule"):
        return
    if arguments.has(IN_STEPS):
        _add_steps_of_batch(arguments)
    elif arguments.has(RAMP):
        _add_ramp(arguments, data)
    else:
        _add_constant(arguments, data)


def batches_of(draft: Draft, batch: int) -> BatchSchedule:
    """Return the batches of the run file. batch: the last one."""
    changes = draft.value("train.batch_schedule")
    try:
        keys = {"steps": 1, "global_batch": batch, "micro_batch": 1, "seq_length": 1}
        train = Train.model_validate(keys | {"batch_schedule": changes or ()})
    except ValidationError:
        train = None
    # what the user gives beside the arguments is checked with the run file
    if train is None or changes_problems(train):
        return BatchSchedule(((0, batch),))
    return BatchSchedule.of(train)


def iteration_samples(arguments: Arguments) -> int:
    """Return the samples of an iteration by which Megatron-LM counts a schedule of iterations if
    the batch has steps: those of one micro-batch of each replica; 1 if they are not known, which
    other lines report."""
    micro = arguments.get("micro_batch_size")
    data = arguments.draft.value("parallel.data")
    if not isinstance(micro, int) or not isinstance(data, int):
        return 1
    return micro * data


def steps_of_samples(arguments: Arguments, samples: int, batch: int) -> int:
    """Return the steps of a run of so many samples. batch: the last one."""
    draft = arguments.draft
    is_theirs = draft.needs("train.batch_schedule")
    if is_theirs and arguments.has(RAMP):
        return _steps_of_ramp(arguments, samples)
    batches = batches_of(draft, batch)
    steps = batches.steps_until(0, samples)
    # a last batch that is not whole counts as one
    is_cut = batches.after(0, steps) < samples
    if is_theirs and arguments.has(IN_STEPS) and is_cut:
        return steps + 1
    return steps


def _steps_of_ramp(arguments: Arguments, samples: int) -> int:
    """Return the steps of a run whose batch ramps up, by its batches before they are decreased; 0
    if the ramp is refused."""
    batch = arguments.get("global_batch_size") or 0
    ramp = _read_ramp(arguments)
    if not batch or _problem_of_ramp(ramp, batch):
        return 0
    start, increment, ramp_samples = ramp
    batches = BatchSchedule(ramp_changes(start, increment, ramp_samples, batch))
    # a step of the ramp begins as long as no more samples are consumed than it has, or the run
    steps = batches.steps_until(0, min(ramp_samples, samples)) + 1
    samples_left = max(0, samples - batches.after(0, steps))
    return steps + samples_left // batch


def _add_constant(arguments: Arguments, data: int | None) -> None:
    """Add a batch that does not change: the given one, or that of the micro-batches. data: as for
    `add_global_batch`, the replicas."""
    draft = arguments.draft
    micro = draft.value("train.micro_batch", arguments.get("micro_batch_size"))
    if arguments.has("global_batch_size"):
        _put(arguments, ((0, arguments.get("global_batch_size")),), data, "global_batch_size")
    elif not draft.needs("train.global_batch"):
        return
    elif micro is not None and data is not None:
        origin = "--micro-batch-size x replicas, as in Megatron-LM"
        number = arguments.get(MICRO_BATCHES)
        if arguments.has(MICRO_BATCHES):
            origin = f"{arguments.origin(MICRO_BATCHES)}, each of {micro} samples on each replica"
        draft.put("train.global_batch", micro * data * number, origin)
    else:
        draft.missing.append(
            "--global-batch-size is missing, and without it the batch depends on the number of "
            "ranks: give it, or --ranks N beside --micro-batch-size"
        )


def _add_ramp(arguments: Arguments, data: int | None) -> None:
    """Add the batches of --rampup-batch-size. data: as for `add_global_batch`, the replicas."""
    draft = arguments.draft
    if arguments.has("train_iters"):
        arguments.refuse(
            "Megatron-LM itself refuses both: give --train-samples", RAMP, "train_iters"
        )
        return
    if not arguments.has("global_batch_size"):
        draft.missing.append(
            f"{arguments.said[RAMP]}: needs --global-batch-size, the batch at its end"
        )
        return
    ramp = _read_ramp(arguments)
    batch = arguments.get("global_batch_size")
    if problem := _problem_of_ramp(ramp, batch):
        arguments.refuse(problem, RAMP)
        return
    draft.notes.append(f"{arguments.said[RAMP]}: {RAMP_NOTE}")
    start, increment, samples = ramp
    _put(arguments, ramp_changes(start, increment, samples, batch), data, RAMP)


def _read_ramp(arguments: Arguments) -> list[int]:
    """Return the numbers of --rampup-batch-size; a log shows them as a list. Empty if one is no
    whole number."""
    words = " ".join(arguments.get(RAMP)).translate(str.maketrans("[],'\"", "     ")).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        return []


def _problem_of_ramp(ramp: Sequence[int], batch: int) -> str:
    """Return why Megatron-LM cannot ramp the batch up so; "" if it can. batch: that at the end."""
    if len(ramp) != 3:
        return "give three whole numbers: the first batch, an increment and a number of samples"
    start, increment, samples = ramp
    if min(start, increment) < 1 or samples < 0:
        return "Megatron-LM itself refuses it: batch and increment are from 1 on"
    if start > batch or (batch - start) % increment:
        return (
            f"Megatron-LM itself refuses it: whole increments must lead to --global-batch-size "
            f"{batch}"
        )
    if start == batch or not samples:
        return "Megatron-LM itself divides by zero: a ramp has an increment and samples"
    increments = (batch - start) // increment
    if increments >= MOST_CHANGES:
        return f"it has {increments:,} increments: at most {MOST_CHANGES - 1:,} are possible here"
    return ""


def ramp_changes(start: int, increment: int, samples: int, batch: int) -> Changes:
    """Return the changes of a batch that Megatron-LM ramps up, each at the first number of consumed
    samples at which its formula gives the next batch."""
    increments = (batch - start) // increment
    samples_per_increment = samples / increments

    def increments_at(consumed: int) -> int:
        # as Megatron-LM computes it, in floating point
        return increments if consumed > samples else int(consumed / samples_per_increment)

    by_threshold = {0: start}
    for number in range(1, increments + 1):
        threshold = math.ceil(number * samples_per_increment)
        # rounding may have moved it by one
        while threshold > 0 and increments_at(threshold - 1) >= number:
            threshold -= 1
        while increments_at(threshold) < number:
            threshold += 1
        # of several increments at one number of samples the last counts
        by_threshold[threshold] = start + number * increment
    return tuple(by_threshold.items())


def _add_steps_of_batch(arguments: Arguments) -> None:
    """Add the batches of --step-batch-size-schedule, whose thresholds are tokens."""
    for other in ("global_batch_size", DECREASE):
        if arguments.get(other):
            arguments.refuse("Megatron-LM itself refuses both", IN_STEPS, other)
            return
    length = arguments.get("seq_length")
    if length is None:
        return  # another line says that it is missing
    try:
        changes = step_changes(arguments.get(IN_STEPS), length)
    except ValueError:
        arguments.refuse(
            'give "TOKENS:BATCH TOKENS:BATCH ...", numbers with K, M, B or T behind them', IN_STEPS
        )
        return
    thresholds = [threshold for threshold, _ in changes]
    increases = all(earlier < later for earlier, later in pairwise(thresholds))
    if not changes or thresholds[0] or not increases or min(batch for _, batch in changes) < 1:
        arguments.refuse(
            "Megatron-LM itself refuses it: thresholds begin with 0 and increase by whole samples, "
            "and batches are from 1 on",
            IN_STEPS,
        )
        return
    arguments.draft.notes.append(
        f"{arguments.said[IN_STEPS]}: an evaluation takes train.eval_batches of the last batch, in "
        "Megatron-LM of a micro-batch of each replica or --eval-global-batch-size"
    )
    _put(arguments, changes, None, IN_STEPS)


def step_changes(text: str, seq_length: int) -> Changes:
    """Return the changes of a --step-batch-size-schedule in samples, as Megatron-LM reads them.
    Raises ValueError for another grammar."""
    changes: list[tuple[int, int]] = []
    for entry in text.replace(",", " ").split():
        threshold, sign, batch = entry.partition(":")
        if not sign:
            raise ValueError(entry)
        changes.append((_number(threshold) // seq_length, _number(batch)))
    return tuple(sorted(changes, key=lambda change: change[0]))


def _number(text: str) -> int:
    """Return a number with a suffix. Raises ValueError."""
    text = text.strip().upper()
    factor = SUFFIXES.get(text[-1:], 1)
    number = float(text[:-1] if factor > 1 else text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number * factor)


def _put(arguments: Arguments, changes: Changes, data: int | None, name: str) -> None:
    """Set the keys of the batch. data: the replicas. name: of the argument that the changes come
    from."""
    draft = arguments.draft
    if arguments.get(DECREASE):
        micro = arguments.get("micro_batch_size")
        if micro is None or data is None:
            draft.missing.append(f"--decrease-batch-size-if-needed: {NO_RANKS_FOR_BATCH}")
            return
        changes = _decreased(arguments, changes, micro * data)
    changes = _without_repeats(changes)
    if not changes:
        return
    _, last = changes[-1]
    arguments.put("train.global_batch", last, name, DECREASE)
    if len(changes) > 1:
        listed = [[threshold, batch] for threshold, batch in changes]
        arguments.put("train.batch_schedule", listed, name, DECREASE)


def _decreased(arguments: Arguments, changes: Changes, unit: int) -> Changes:
    """Return the changes with each batch as the largest multiple of `unit` that is not above it;
    none, with a problem, if that is 0."""
    rounded = tuple((threshold, batch // unit * unit) for threshold, batch in changes)
    if not all(batch for _, batch in rounded):
        arguments.refuse(
            f"a batch has less than {unit} samples, a micro-batch of each replica", DECREASE
        )
        return ()
    if rounded != changes:
        arguments.draft.notes.append(
            f"--decrease-batch-size-if-needed: batches are multiples of {unit}, a micro-batch of "
            "each replica; another number of replicas has other batches"
        )
    return rounded


def _without_repeats(changes: Changes) -> Changes:
    """Return the changes without those to the batch that is there already."""
    kept: list[tuple[int, int]] = []
    batch_before: int | None = None
    for threshold, batch in changes:
        if batch != batch_before:
            kept.append((threshold, batch))
        batch_before = batch
    return tuple(kept)
