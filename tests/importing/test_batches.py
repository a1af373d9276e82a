"""Batches of Megatron-LM that ramp up, change in steps or are decreased: the run file has the batch
of each iteration by Megatron's own formulas, which stand here once more."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.importing.test_import import refused, run_of
from tools.config.run_file import RunConfig
from tools.interop.importing.megatron_batches import ramp_changes, step_changes

RANDOM_RAMPS = 1000
BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --data-path tokens/mine "
    "--vocab-size 500 --save runs/mine --lr-decay-style cosine"
)
Formula = Callable[[int], int]


def ramp_of_megatron(start: int, increment: int, ramp_samples: int, batch: int) -> Formula:
    """RampupBatchsizeNumMicroBatchesCalculator.update: the batch after consumed samples."""
    per_increment = ramp_samples / ((batch - start) // increment)

    def at(consumed: int) -> int:
        if consumed > ramp_samples:
            return batch
        return start + int(consumed / per_increment) * increment

    return at


def steps_of_megatron(text: str, seq_length: int) -> Formula:
    """StepBatchsizeNumMicroBatchesCalculator._parse_schedule and _get_batch_size_for_samples."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def number(word: str) -> int:
        if word[-1] in units:
            return int(float(word[:-1]) * units[word[-1]])
        return int(float(word))

    pairs = [entry.split(":") for entry in re.split(r"[ ,]+", text)]
    schedule = [(number(tokens) // seq_length, number(batch)) for tokens, batch in pairs]

    def at(consumed: int) -> int:
        return [batch for threshold, batch in schedule if threshold <= consumed][-1]

    return at


def iterations_of_ramp(at: Formula, ramp_samples: int, samples: int, batch: int) -> int:
    """update_train_iters of versions with --rampup-batch-size."""
    iterations = 0
    consumed = 0
    while consumed <= ramp_samples and consumed <= samples:
        consumed += at(consumed)
        iterations += 1
    if samples > consumed:
        iterations += (samples - consumed) // batch
    return iterations


def iterations_of_steps(at: Formula, samples: int) -> int:
    """update_train_iters of versions with --step-batch-size-schedule."""
    iterations = 0
    consumed = 0
    while consumed < samples:
        consumed += at(consumed)
        iterations += 1
    return iterations


def assert_follows(changes: Sequence[tuple[int, int]], at: Formula, until: int) -> None:
    """Around each change, and at random places, the batch is that of the formula."""
    dice = random.Random(until)
    places = {0, *(dice.randrange(until) for _ in range(50))}
    for threshold, _ in changes:
        places |= {max(0, threshold - 1), threshold, threshold + 1}
    for consumed in places:
        ours = [batch for threshold, batch in changes if threshold <= consumed][-1]
        assert ours == at(consumed), consumed


def test_a_ramp_has_the_batches_of_megatrons_formula() -> None:
    dice = random.Random(1)
    for _ in range(RANDOM_RAMPS):
        increment = dice.randint(1, 32)
        start = dice.randint(1, 64)
        batch = start + increment * dice.randint(1, 60)
        samples = dice.choice(
            [dice.randint(1, 50), dice.randint(50, 10**5), dice.randint(1, 10**9)]
        )
        changes = ramp_changes(start, increment, samples, batch)
        at = ramp_of_megatron(start, increment, samples, batch)
        assert_follows(changes, at, 2 * samples + 2)
        thresholds = [threshold for threshold, _ in changes]
        assert thresholds == sorted(set(thresholds)) and changes[-1][1] == batch


def test_batches_in_steps_are_read_as_megatron_reads_them() -> None:
    dice = random.Random(2)
    for _ in range(RANDOM_RAMPS):
        seq_length = dice.choice([16, 1000, 2048, 4097])
        words = list[str]()
        tokens = 0
        for _ in range(dice.randint(1, 6)):
            unit = dice.choice(["", "", "K", "M"])
            factor = {"": 1, "K": 1000, "M": 10**6}[unit]
            tokens = (tokens // factor + dice.randint(seq_length, 9 * seq_length)) * bool(words)
            words.append(f"{tokens}{unit}:{dice.randint(1, 99)}{dice.choice(['', 'K'])}")
            tokens *= factor
        text = dice.choice([" ", ","]).join(words)
        changes = step_changes(text, seq_length)
        assert_follows(changes, steps_of_megatron(text, seq_length), 2 * changes[-1][0] + 9)


def batches(run: RunConfig, count: int) -> list[int]:
    consumed = [run.batches.after(0, steps) for steps in range(count)]
    return [run.batches.at(place) for place in consumed]


def test_a_ramp_becomes_its_run_with_as_many_steps(tmp_path: Path) -> None:
    dice = random.Random(3)
    for _ in range(40):
        increment = 2 * dice.randint(1, 4)
        start = 2 * dice.randint(1, 4)
        batch = start + increment * dice.randint(1, 6)
        ramp = dice.randint(1, 300)
        samples = dice.randint(1, 800)
        line = (
            f"{BASE} --rampup-batch-size {start} {increment} {ramp} --global-batch-size {batch} "
            f"--train-samples {samples} --lr-warmup-samples {dice.randint(0, samples // 2)}"
        )
        run = run_of(tmp_path, line)
        at = ramp_of_megatron(start, increment, ramp, batch)
        assert run.train.steps == iterations_of_ramp(at, ramp, samples, batch)
        assert run.train.global_batch == batch
        consumed = 0
        for ours in batches(run, min(200, run.train.steps)):
            assert ours == at(consumed)
            consumed += ours
        assert (run.lr.unit, run.lr_schedule.total) == ("samples", samples)


def test_batches_are_decreased_to_what_the_replicas_divide(tmp_path: Path) -> None:
    line = f"{BASE} --train-samples 400 --decrease-batch-size-if-needed"
    ramp = f"{line} --rampup-batch-size 6 4 100 --global-batch-size 22"
    run = run_of(tmp_path, ramp, ranks=2)
    at = ramp_of_megatron(6, 4, 100, 22)
    consumed = 0
    for ours in batches(run, run.train.steps):
        assert ours == at(consumed) // 4 * 4
        consumed += ours
    # Megatron counts its iterations by the batches before they are decreased
    assert run.train.steps == iterations_of_ramp(at, 100, 400, 22)
    assert run_of(tmp_path, f"{line} --global-batch-size 22", ranks=2).train.global_batch == 20
    assert any("--ranks N" in problem for problem in refused(ramp))
    assert refused(f"{line} --global-batch-size 6", ranks=4) == (
        "--decrease-batch-size-if-needed: a batch has less than 8 samples, a micro-batch of each "
        "replica",
    )


def test_batches_in_steps_become_their_run_with_as_many_steps(tmp_path: Path) -> None:
    text = "0:4 1K:8 3K:12"
    at = steps_of_megatron(text, 16)
    for samples in (40, 62, 63, 200, 333):
        line = f"{BASE} --step-batch-size-schedule '{text}' --train-samples {samples}"
        run = run_of(tmp_path, line, ranks=2)
        assert run.train.steps == iterations_of_steps(at, samples)
        assert run.train.batch_schedule == ((0, 4), (62, 8), (187, 12))
        assert run.lr_schedule.total == samples


def test_iterations_beside_batches_in_steps_count_a_micro_batch_of_each_replica(
    tmp_path: Path,
) -> None:
    """As get_optimizer_param_scheduler does: there --global-batch-size has its default."""
    line = (
        f"{BASE} --step-batch-size-schedule 0:4,1K:8 --train-iters 30 --lr-warmup-iters 5 "
        "--lr-decay-iters 20"
    )
    run = run_of(tmp_path, line, ranks=2)
    assert (run.lr.unit, run.lr.warmup, run.lr.length) == ("samples", 5 * 4, 20 * 4)
    assert run.train.steps == 30
    assert any("--ranks N" in problem for problem in refused(line))


def test_a_schedule_of_one_batch_is_a_constant_batch(tmp_path: Path) -> None:
    line = f"{BASE} --step-batch-size-schedule 0:8 --train-samples 80"
    run = run_of(tmp_path, line)
    assert (run.train.global_batch, run.train.batch_schedule, run.train.steps) == (8, (), 10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("--rampup-batch-size 4 2 30 --global-batch-size 8 --train-iters 9", "refuses both"),
        ("--rampup-batch-size 4 3 30 --global-batch-size 8 --train-samples 90", "whole increments"),
        ("--rampup-batch-size 9 1 30 --global-batch-size 8 --train-samples 90", "whole increments"),
        ("--rampup-batch-size 4 2 0 --global-batch-size 8 --train-samples 90", "divides by zero"),
        ("--rampup-batch-size 8 2 9 --global-batch-size 8 --train-samples 90", "divides by zero"),
        ("--rampup-batch-size 0 2 9 --global-batch-size 8 --train-samples 90", "from 1 on"),
        ("--rampup-batch-size 4 2 --global-batch-size 8 --train-samples 90", "three whole numbers"),
        ("--rampup-batch-size 4 2 x --global-batch-size 8 --train-samples 9", "three whole"),
        ("--rampup-batch-size 1 1 9999 --global-batch-size 2000 --train-samples 9", "at most 999"),
        ("--rampup-batch-size 4 2 30 --train-samples 90", "needs --global-batch-size"),
        ("--step-batch-size-schedule 0:4 --global-batch-size 8 --train-samples 90", "refuses both"),
        (
            "--step-batch-size-schedule 0:4 --decrease-batch-size-if-needed --train-samples 90",
            "refuses both",
        ),
        ("--step-batch-size-schedule 1K:4 --train-samples 90", "begin with 0"),
        ("--step-batch-size-schedule 0:4,8:8 --train-samples 90", "whole samples"),
        ("--step-batch-size-schedule 0:0 --train-samples 90", "from 1 on"),
        ("--step-batch-size-schedule 0:4,1Q:8 --train-samples 90", "TOKENS:BATCH"),
        ("--step-batch-size-schedule 0-4 --train-samples 90", "TOKENS:BATCH"),
    ],
)
def test_what_megatron_refuses_is_refused(change: str, why: str) -> None:
    assert any(why in problem for problem in refused(f"{BASE} {change}", ranks=1))


def test_a_schedule_beside_the_arguments_counts(tmp_path: Path) -> None:
    line = f"{BASE} --rampup-batch-size 4 2 30 --global-batch-size 8 --train-samples 90"
    run = run_of(
        tmp_path, line, keys=["train.batch_schedule=[[0,2],[10,8]]", "train.global_batch=8"]
    )
    assert run.train.batch_schedule == ((0, 2), (10, 8))
    assert run.train.steps == run.batches.steps_until(0, 90)
