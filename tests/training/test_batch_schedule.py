"""Batches that change: each step has the batch of Megatron-LM's formula, all samples are taken once
in order, and a run goes on in the middle of a ramp bit for bit."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis
from megaprec.diagnose.position import Position
from megaprec.tokens.samples import Batch, Samples
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import checkpoint, rewind, steps, tensors, train, train_on, write_run
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.search import Planned, plan_run, run_seconds, steps_within
from tools.analysis.planning.speed import Assumptions
from tools.config.resolved_run import resolve_run
from tools.config.rules.all_rules import cross_problems
from tools.config.run_file import RunConfig
from tools.config.tables.batch_schedule import BatchSchedule
from tools.journal.journal import Journal
from tools.journal.records import read_events
from tools.journal.timeline_file import TIMELINE, read_trace_of
from tools.saved.train_state import TrainState
from tools.training.batches import Batches
from tools.training.changed_keys import keys_of, other_length
from tools.training.corpus import open_corpus
from tools.training.learning_rates import LearningRates
from tools.training.trainer import Trainer
from tools.verify.replay.overflow import replay

RANDOM_SCHEDULES = 1000
SMALL = {"layers": 2, "hidden": 16, "heads": 4}
# Changes within a step, some of which no step begins after.
RAMP = "train.batch_schedule=[[0,4],[6,8],[17,12],[18,4],[23,8],[40,16]]"
KEYS = (
    RAMP,
    "train.global_batch=16",
    "train.steps=8",
    "lr.unit=samples",
    "lr.schedule=cosine",
    "lr.warmup=10",
    "lr.final=0.001",
    "checkpoint.every=3",
    "checkpoint.keep=all",
)
BATCHES = [4, 4, 8, 8, 8, 8, 16, 16]


def random_changes(dice: random.Random) -> tuple[tuple[int, int], ...]:
    """Changes at distances from less than a batch to many."""
    thresholds = [0]
    for _ in range(dice.randrange(8)):
        thresholds.append(thresholds[-1] + dice.choice([1, 3, dice.randint(1, 500)]))
    return tuple((threshold, dice.randint(1, 40)) for threshold in thresholds)


def megatrons_batch(changes: Sequence[tuple[int, int]], consumed: int) -> int:
    """The last batch whose threshold is reached, as a loop over all of them."""
    found = changes[0][1]
    for threshold, batch in changes:
        if consumed < threshold:
            break
        found = batch
    return found


def ends_of_steps(changes: Sequence[tuple[int, int]], first: int, count: int) -> list[int]:
    """Consumed samples after each of `count` steps, one step at a time."""
    ends = list[int]()
    consumed = first
    for _ in range(count):
        consumed += megatrons_batch(changes, consumed)
        ends.append(consumed)
    return ends


def test_each_step_has_the_batch_of_megatrons_formula() -> None:
    dice = random.Random(1)
    for _ in range(RANDOM_SCHEDULES):
        changes = random_changes(dice)
        schedule = BatchSchedule(changes)
        first = dice.choice([0, dice.randrange(1, 1500)])
        count = dice.randrange(1, 120)
        ends = ends_of_steps(changes, first, count)
        assert all(schedule.at(end) == megatrons_batch(changes, end) for end in ends)
        assert schedule.after(first, count) == ends[-1]
        assert schedule.after(first, 0) == first

        batches = list[int]()
        for stretch in schedule.stretches(first):
            batches += [stretch.batch] * (count if stretch.steps is None else stretch.steps)
        assert batches[:count] == [end - start for start, end in pairwise([first, *ends])]


def test_the_steps_until_a_number_of_samples_are_those_that_end_before_it() -> None:
    dice = random.Random(2)
    for _ in range(RANDOM_SCHEDULES):
        changes = random_changes(dice)
        schedule = BatchSchedule(changes)
        first = dice.choice([0, dice.randrange(1, 1500)])
        ends = ends_of_steps(changes, first, 80)
        target = dice.randrange(first, ends[-1])
        assert schedule.steps_until(first, target) == sum(end <= target for end in ends)
        assert schedule.steps_until(first, first - 1) == 0


def test_the_batch_of_the_last_step_is_known_from_its_end() -> None:
    dice = random.Random(3)
    for _ in range(RANDOM_SCHEDULES):
        increasing = sorted(random_changes(dice), key=lambda change: change[1])
        thresholds = sorted(threshold for threshold, _ in increasing)
        changes = tuple(zip(thresholds, (batch for _, batch in increasing), strict=True))
        first, second = ends_of_steps(changes, 0, 40)[-2:]
        assert BatchSchedule(changes).before(second) == second - first


def test_all_steps_are_counted_by_their_batch() -> None:
    dice = random.Random(4)
    for _ in range(RANDOM_SCHEDULES):
        changes = random_changes(dice)
        count = dice.randrange(1, 90)
        ends = [0, *ends_of_steps(changes, 0, count)]
        batches = [end - start for start, end in pairwise(ends)]
        counts = {batch: batches.count(batch) for batch in batches}
        assert BatchSchedule(changes).steps_by_batch(count) == counts


class Numbers(Samples):
    """Samples of one token, their own position."""

    def __init__(self) -> None:
        pass

    def batch(self, position: int, count: int) -> Batch:
        ids = torch.arange(position, position + count)
        return Batch(ids[:, None], ids[:, None], ids)


def config_of(changes: Sequence[tuple[int, int]], data: int = 1, **tables: Any) -> RunConfig:
    train = {
        "steps": 50,
        "global_batch": changes[-1][1],
        "batch_schedule": [[*change] for change in changes],
        "micro_batch": 1,
        "seq_length": 8,
        **tables.pop("train", {}),
    }
    lr = {"unit": "samples", **tables.pop("lr", {})}
    return RunConfig.model_validate(
        {"model": SMALL, "train": train, "lr": lr, "parallel": {"data": data}, **tables}
    )


@pytest.mark.slow
def test_the_shares_of_all_steps_and_replicas_are_the_data_in_its_order() -> None:
    dice = random.Random(5)
    for _ in range(60):
        data = dice.randint(1, 4)
        changes = [(first, batch * data) for first, batch in random_changes(dice)]
        config = config_of(changes, data)
        replicas = [
            Batches(config, Numbers(), replica_of(data, rank), Position()) for rank in range(data)
        ]
        taken = list[int]()
        while len(taken) < 600:
            first = len(taken)
            for batches in replicas:
                share = batches.take(first, is_last=dice.random() < 0.5)
                assert share.first == len(taken) - first
                taken += share.tokens.flatten().tolist()
            # as the sentinel reads the share of another replica
            again = [replicas[0].share(first, rank).tokens for rank in range(data)]
            assert taken[first:] == torch.cat(again).flatten().tolist()
        assert taken == list(range(len(taken)))


def replica_of(size: int, rank: int) -> Axis:
    return Axis("dp", size=size, rank=rank)


@dataclass
class PlainRun:
    """A training loop that counts for itself: samples that were consumed, and those of applied
    steps."""

    changes: Sequence[tuple[int, int]]
    consumed: int = 0
    applied: int = 0

    def take_step(self, is_applied: bool = True) -> None:
        batch = megatrons_batch(self.changes, self.consumed)
        self.consumed += batch
        self.applied += batch * is_applied


def cosine(done: int, warmup: int, total: int, peak: float, final: float) -> float:
    if done <= warmup and warmup:
        return peak * done / warmup
    if done > total:
        return final
    fraction = (done - warmup) / (total - warmup)
    return final + (peak - final) * (math.cos(math.pi * fraction) + 1) / 2


def test_rates_to_come_are_those_of_a_plain_loop_over_samples() -> None:
    dice = random.Random(6)
    for _ in range(200):
        changes = random_changes(dice)
        config = config_of(changes, lr={"schedule": "cosine", "warmup": 30, "length": 700})
        rates = LearningRates.of(config.lr, config.train)
        run = PlainRun(changes)
        for _ in range(dice.randrange(30)):
            run.take_step(is_applied=dice.random() < 0.8)
        progress = TrainState(samples=run.consumed, applied_samples=run.applied)
        for later in range(40):
            expected = cosine(run.applied, 30, 700, config.lr.peak, 0.0)
            assert rates.at(progress, later) == pytest.approx(expected, rel=1e-12)
            run.take_step()


def test_a_schedule_without_length_is_as_long_as_the_samples_of_the_run() -> None:
    dice = random.Random(7)
    for _ in range(200):
        changes = random_changes(dice)
        config = config_of(changes)
        assert config.lr_schedule.total == config.total_samples
        assert config.total_samples == ends_of_steps(changes, 0, config.train.steps)[-1]


@pytest.mark.parametrize(
    ("tables", "code", "fields"),
    [
        ({"batch_schedule": [[1, 8]]}, "begin", {"samples": 1}),
        ({"batch_schedule": [[0, 4], [9, 6], [9, 8]]}, "order", {"earlier": 9, "later": 9}),
        ({"batch_schedule": [[0, 4], [9, 6]]}, "last", {"last": 6, "global_batch": 8}),
        ({"batch_schedule": [[n, 8] for n in range(1001)]}, "long", {"count": 1001, "most": 1000}),
    ],
    ids=str,
)
def test_changes_that_are_none_are_refused_by_name(
    tables: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    sound = config_of([(0, 8)])
    train = sound.train.model_copy(
        update={**tables, "batch_schedule": tuple(map(tuple, tables["batch_schedule"]))}
    )
    (problem,) = cross_problems({**dict(sound), "train": train})
    assert shows(problem, f"config.batch_schedule_{code}", **fields)


def problems_of(config: RunConfig, **tables: dict[str, Any]) -> list[str]:
    changed = {
        table: getattr(config, table).model_copy(update=keys) for table, keys in tables.items()
    }
    return cross_problems({**dict(config), **changed})


def test_the_first_batch_that_the_replicas_do_not_divide_is_named_with_its_pair() -> None:
    config = config_of([(0, 8), (100, 12), (200, 20), (300, 16)])
    (problem,) = problems_of(config, parallel={"data": 8})
    assert shows(
        problem,
        "config.batch_schedule_undivided",
        samples=100,
        batch=12,
        others=", and 1 more",
        micro_batch=1,
        data=8,
        product=8,
        possible="8 or 16",
    )


def test_rates_in_steps_are_refused_where_the_unit_matters() -> None:
    config = config_of([(0, 4), (100, 8)], lr={"schedule": "constant", "warmup": 5})
    assert not problems_of(config, lr={"unit": "steps", "warmup": 0})
    (problem,) = problems_of(config, lr={"unit": "steps"})
    assert shows(problem, "config.batch_schedule_rates")
    (problem,) = problems_of(config, lr={"unit": "steps", "warmup": 0, "schedule": "linear"})
    assert shows(problem, "config.batch_schedule_rates")


def test_a_pipeline_schedule_of_a_file_has_one_number_of_micro_batches(tmp_path: Path) -> None:
    config = config_of([(0, 4), (100, 8)])
    file = str(tmp_path / "plan.txt")
    problems = problems_of(config, parallel={"schedule_file": file})
    assert any(
        shows(problem, "config.batch_schedule_file", schedule_file=file) for problem in problems
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("ramp"))


@pytest.fixture(scope="module")
def canonical(file: Path) -> Path:
    """The folder of a run of one process, with a checkpoint in the middle of the ramp."""
    assert train(file, *KEYS, "train.numerics=canonical", "log.digests=1") == 0
    return file.parent / "run"


@pytest.mark.slow
def test_a_run_counts_samples_tokens_and_rates_by_the_batch_of_each_step(canonical: Path) -> None:
    records = steps(canonical)
    assert [record["global_batch"] for record in records] == BATCHES
    samples = [sum(BATCHES[:done]) for done in range(len(BATCHES) + 1)]
    assert [record["tokens"] for record in records] == [16 * count for count in samples[1:]]
    assert [record["learned_tokens"] for record in records] == [16 * n for n in samples[1:]]
    rates = [cosine(done, 10, samples[-1], 1e-2, 0.001) for done in samples[:-1]]
    assert [record["lr"] for record in records] == pytest.approx(rates, rel=1e-12)


LAYOUTS = [{}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ramp_goes_on_in_any_layout_with_the_bits_of_the_straight_run(
    file: Path, canonical: Path, layout: dict[str, int], tmp_path: Path
) -> None:
    resumed = rewind(canonical, tmp_path / "resumed", 3)
    keys = (*KEYS, "train.numerics=canonical", "log.digests=1", f"train.folder={resumed}")
    train_on(file, *keys, **layout)
    assert_same_end(resumed, canonical)


def without_stages(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in r.items() if key != "stage_zeros"} for r in records]


def assert_same_end(folder: Path, other: Path) -> None:
    assert without_stages(steps(folder)) == without_stages(steps(other))
    ours = tensors(checkpoint(folder, 8))
    theirs = tensors(checkpoint(other, 8))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)


@pytest.mark.slow
def test_a_branch_in_the_middle_of_a_ramp_goes_on_as_the_run_itself(
    file: Path, canonical: Path, tmp_path: Path
) -> None:
    keys = (*KEYS, "train.numerics=canonical", f"train.branch_from={checkpoint(canonical, 3)}")
    assert train(file, *keys, f"train.folder={tmp_path / 'branch'}") == 0
    assert steps(tmp_path / "branch") == steps(canonical)[3:]


FAST = ("train.sentinel=1", "log.timeline=3", "train.eval_every=4", "parallel.zero=true")


@pytest.mark.slow
def test_checks_timelines_and_evaluations_know_the_batch_of_their_step(
    file: Path, tmp_path: Path
) -> None:
    keys = (*KEYS, *FAST, f"train.folder={tmp_path / 'run'}")
    folder = train_on(file, *keys, pipeline=2, data=2)
    records = steps(folder)
    assert [record["sentinel"] for record in records] == ["clean"] * 8
    assert [record["global_batch"] for record in records] == BATCHES
    # every evaluation is of the same samples, whatever the batch of the step is
    assert all(math.isfinite(records[step - 1]["eval_loss"]) for step in (4, 8))
    config = resolve_run(file, [*keys, "parallel.pipeline=2", "parallel.data=2"])
    # step 3 has the first larger batch: two micro-batches of each replica
    recorded = config.with_batch_of_timeline.schedule
    assert recorded.microbatches == 2
    assert read_trace_of(folder / TIMELINE, recorded)


def test_a_schedule_that_never_changes_trains_as_a_constant_batch(
    file: Path, tmp_path: Path
) -> None:
    shared = ("train.steps=3", "lr.unit=samples", "checkpoint.every=0")
    assert train(file, *shared, f"train.folder={tmp_path / 'constant'}") == 0
    changes = "train.batch_schedule=[[0,8]]"
    assert train(file, *shared, changes, f"train.folder={tmp_path / 'schedule'}") == 0
    scheduled = [
        {key: value for key, value in record.items() if key != "global_batch"}
        for record in steps(tmp_path / "schedule")
    ]
    assert scheduled == steps(tmp_path / "constant")


@pytest.mark.slow
def test_a_skipped_step_is_repeated_with_its_batch_and_the_rate_waits(
    file: Path, tmp_path: Path
) -> None:
    scale = (
        "precision.compute=fp16",
        "precision.initial_scale=268435456.0",
        "precision.hysteresis=1",
    )
    keys = (*KEYS, *scale, "train.steps=12", f"train.folder={tmp_path / 'run'}")
    train(file, *keys)
    records = steps(tmp_path / "run")
    run = PlainRun(((0, 4), (6, 8), (17, 12), (18, 4), (23, 8), (40, 16)))
    outcomes = [record["outcome"] == "applied" for record in records]
    assert not any(outcomes[:3]) and any(outcomes)
    total = ends_of_steps(run.changes, 0, 12)[-1]
    for record, is_applied in zip(records, outcomes, strict=True):
        assert record["lr"] == pytest.approx(cosine(run.applied, 10, total, 1e-2, 0.001))
        run.take_step(is_applied)
        assert record["tokens"] == 16 * run.consumed
        assert record["learned_tokens"] == 16 * run.applied
    events = read_events(tmp_path / "run")
    skipped = [event for event in events if event["event"] == "overflow"]
    ends = [0, *ends_of_steps(run.changes, 0, 12)]
    for event in skipped:
        first, end = ends[event["step"] - 1 : event["step"] + 1]
        assert (event["first_sample"], event["num_samples"]) == (first, end - first)
    # one process takes the step again, with the batch that it had
    assert replay(tmp_path / "run", skipped[3]).step == skipped[3]["step"]


@pytest.mark.parametrize(
    ("keys", "change", "said"),
    [
        (["lr.unit=samples"], ["train.global_batch=4"], "is 24 samples long, not 48"),
        (["lr.unit=samples", "lr.length=48"], ["train.global_batch=4"], ""),
        (
            ["lr.unit=samples"],
            ["train.batch_schedule=[[0,4],[16,8]]"],
            "is 32 samples long, not 48",
        ),
        ([], ["train.global_batch=4"], "the 4 steps that are left"),
        (["lr.length=2"], ["train.global_batch=4"], ""),
        (["lr.schedule=constant"], ["train.global_batch=4"], ""),
    ],
    ids=str,
)
def test_other_batches_on_a_resume_keep_the_length_of_the_schedule_or_say_that_they_do_not(
    keys: list[str], change: list[str], said: str, file: Path, tmp_path: Path
) -> None:
    before = resolve_run(file, ["lr.schedule=cosine", *keys])
    after = resolve_run(file, ["lr.schedule=cosine", *keys, *change])
    progress = TrainState(step=2, applied=2, samples=16, applied_samples=16)
    store = cast(Store, SimpleNamespace(index={"run": keys_of(before), "model": {}}, path=tmp_path))
    notes = [*other_length(store, after, progress)]
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)
    if "lr.length=48" in keys:
        assert before.lr_schedule == after.lr_schedule


def test_the_time_left_is_that_of_the_tokens_left(tmp_path: Path) -> None:
    record = {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "loss_scale": 1.0, "outcome": "applied"}
    record |= {"skipped_total": 0}
    batches = [4, 4, 8, 8]
    read = 0
    with Journal(tmp_path, 0, 6, 1, False, total_tokens=24 + 2 * 16) as journal:
        for number, batch in enumerate(batches, 1):
            read += batch
            seconds = {"seconds": 0.5 * batch, "tokens_per_s": 2.0}
            journal.write({**record, "step": number, "tokens": read, **seconds})
            assert journal._seconds_left() == pytest.approx((24 + 32 - read) / 2)


def test_a_plan_adds_up_steps_of_all_batches_and_has_room_for_the_largest(file: Path) -> None:
    keys = ["train.steps=9", "train.micro_batch=1", "parallel.pipeline=2"]
    ramp = ["train.batch_schedule=[[0,4],[10,16],[60,8]]", "train.global_batch=8"]
    config = resolve_run(file, [*keys, *ramp])
    assumed = Assumptions(1.0, 0.5, 100.0, 50.0, 8, "cpu")

    def planned(batch: int) -> Planned:
        constant = resolve_run(file, [*keys, f"train.global_batch={batch}"])
        return plan_run(constant, MemoryModel("cpu"), assumed)

    whole = plan_run(config, MemoryModel("cpu"), assumed)
    assert whole.total == planned(16).total
    steps_of = {4: 3, 16: 3, 8: 3}
    assert config.batches.steps_by_batch(9) == steps_of
    seconds = 0.0
    for batch, count in steps_of.items():
        prediction = planned(batch).prediction
        assert prediction is not None
        seconds += count * prediction.seconds
    assert whole.prediction is not None
    assert run_seconds(whole, whole.prediction, assumed) == pytest.approx(seconds, rel=1e-9)
    # so many seconds, and some that are too few for one more step, are those of these nine steps
    afforded = steps_within(whole, whole.prediction, assumed, 1.001 * seconds)
    assert afforded.steps == 9
    assert afforded.samples == sum(batch * count for batch, count in steps_of.items())
    assert afforded.seconds == pytest.approx(seconds, rel=1e-9)


OTHERS = {
    "zero-2": (["parallel.zero=2"], {"data": 2}),
    "interleaved": (["model.layers=4", "parallel.schedule=interleaved"], {"pipeline": 2}),
    "zero bubbles": (["parallel.schedule=zb-h1"], {"pipeline": 2}),
    "cut sequences": (["parallel.context=2", "model.dropout=0.0"], {}),
    "shadow": (["fp8.kind=current", "fp8.shadow_every=2"], {"data": 2}),
}


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("name", OTHERS)
def test_what_counts_micro_batches_trains_as_one_process(
    name: str, file: Path, tmp_path: Path
) -> None:
    keys, layout = OTHERS[name]
    alone = [key for key in keys if not key.startswith("parallel")]
    assert train(file, *KEYS, *alone, f"train.folder={tmp_path / 'one'}") == 0
    if "parallel.context=2" in keys:
        run_ranks(_train_cut, {"cp": 2}, file=file, keys=[*KEYS, *keys], folder=tmp_path / "many")
    else:
        train_on(file, *KEYS, *keys, f"train.folder={tmp_path / 'many'}", **layout)
    ours = steps(tmp_path / "many")
    theirs = steps(tmp_path / "one")
    assert len(ours) == len(theirs) == 8
    for our, their in zip(ours, theirs, strict=True):
        assert our["loss"] == pytest.approx(their["loss"], rel=1e-4)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-2)
        assert our["lr"] == their["lr"]


def _train_cut(mesh: DeviceMesh, file: Path, keys: list[str], folder: Path) -> None:
    config = resolve_run(file, [*keys, f"train.folder={folder}"])
    Trainer(config, open_corpus(config), mesh).run()
