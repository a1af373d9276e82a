"""Numbers of a run are of what counts: steps without a token, evaluations in any batch, schedules
that skips cut."""

import math
import re
from pathlib import Path

import pytest

from megaprec.tokens.indexed import IndexedWriter
from tests.refusals import shows
from tests.runs import train, train_each_on, train_on, write_run
from tools import cli
from tools.journal.records import read_events, read_metrics

# of the run file of `write_run`
SEQ = 16
BATCH = 8


def data_set(prefix: Path, *lengths: int) -> Path:
    with IndexedWriter(prefix, 330) as writer:
        for number, length in enumerate(lengths):
            writer.add_document([(7 * number + token) % 330 for token in range(length)])
    return prefix


def run_on(file: Path, prefix: Path, *more: str) -> tuple[str, ...]:
    return (
        f"data.source={prefix}",
        "model.vocab=330",
        "data.held_out=0",
        "data.eod_mask_loss=true",
        *more,
    )


def test_a_step_without_a_token_that_counts_is_skipped_with_an_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    prefix = data_set(tmp_path / "ones", *[1] * (SEQ * BATCH + 1), *[40] * 40)
    keys = run_on(file, prefix, "data.shuffle=false", "train.steps=3", "lr.schedule=linear")
    assert train(file, *keys) == 0
    said = capsys.readouterr().out
    records = read_metrics(tmp_path / "run")
    assert [record["outcome"] for record in records] == ["skipped_no_tokens", "applied", "applied"]
    assert math.isnan(records[0]["loss"])
    assert [record["lr"] for record in records] == pytest.approx([1e-2, 1e-2, 1e-2 * 2 / 3])
    assert [record["tokens"] for record in records] == [128, 256, 384]
    assert [record["learned_tokens"] for record in records] == [0, 128, 256]
    (event,) = read_events(tmp_path / "run", "no_tokens")
    assert (event["step"], event["first_sample"], event["num_samples"]) == (1, 0, BATCH)
    assert read_events(tmp_path / "run") == []
    assert "skipped_no_tokens (1 so far)" in said
    assert "skipped    1 of 3 steps: 256 of 384 tokens were learned" in said
    assert "ended at 0.00667, not at 0.00333" in said
    (end,) = read_events(tmp_path / "run", "end")
    assert (end["applied"], end["why"]) == (2, "all steps are taken, but 1 of 3 were skipped")


def test_a_schedule_that_skips_cut_short_goes_on_to_its_end_as_the_line_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    prefix = data_set(tmp_path / "ones", *[1] * (SEQ * BATCH + 1), *[40] * 40)
    keys = run_on(file, prefix, "data.shuffle=false", "lr.schedule=linear")
    assert train(file, *keys, "train.steps=3") == 0
    advice = re.search(r"(train\.steps=\d+) (lr\.length=\d+)", capsys.readouterr().out)
    assert advice is not None
    assert train(file, *keys, *advice.groups()) == 0
    rates = [
        record["lr"] for record in read_metrics(tmp_path / "run") if record["outcome"] == "applied"
    ]
    assert rates == pytest.approx([1e-2, 1e-2 * 2 / 3, 1e-2 / 3])


def test_data_in_which_nothing_counts_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    ones = data_set(tmp_path / "ones", *[1] * 400)
    ends = data_set(tmp_path / "ends", *[40] * 40, *[1] * 400)
    last = ("data.held_out_from=end", "train.eval_every=1")
    named = f'data.validation=[{{name="v", source="{ones}"}}]'
    for keys, part in (
        (run_on(file, ones), "training samples"),
        (run_on(file, ends, "data.held_out=0.1", *last), "held-out samples"),
        (run_on(file, ends, named, "train.eval_every=1"), "evaluated samples"),
    ):
        capsys.readouterr()
        assert cli.main(["train", str(file), *keys]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert shows(line, "data.no_token_counts", what=part)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert train(file, *run_on(file, ends, "data.held_out=0.1", "train.steps=1")) == 0, (
        "nothing is evaluated"
    )


@pytest.mark.slow
def test_a_held_out_loss_is_the_same_in_every_batch_and_layout(tmp_path: Path) -> None:
    """The first step has rate 0, so all of these evaluate the same weights, on all of the held-out
    text."""
    file = write_run(tmp_path)
    keys = (
        "train.steps=1",
        "train.eval_every=1",
        "lr.warmup=1",
        "precision.compute=fp64",
        "model.dropout=0.0",
    )
    keys += ("train.eval_batches=1000",)
    found = []
    for number, (batch, micro, data) in enumerate(
        ((1, 1, 1), (3, 3, 1), (8, 2, 1), (400, 50, 1), (6, 1, 2))
    ):
        sizes = (
            f"train.global_batch={batch}",
            f"train.micro_batch={micro}",
            f"train.folder={tmp_path}/{number}",
        )
        folder = train_on(file, *keys, *sizes, data=data)
        found.append(read_metrics(folder)[0]["eval_loss"])
    assert found == pytest.approx([found[0]] * len(found), rel=1e-12)


EVALUATED = ("train.steps=1", "train.eval_every=1", "lr.warmup=1", "model.dropout=0.0")
LAYOUTS: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2},
    {"tensor": 2, "data": 2},
    {"tensor": 2, "pipeline": 2},
)


def evaluated(folder: Path) -> float:
    (record,) = read_metrics(folder)
    return record["eval_loss"]


@pytest.mark.slow
def test_train_eval_samples_gives_one_loss_for_every_batch_and_layout(tmp_path: Path) -> None:
    """13 samples, which no batch divides; the weights are those that were drawn."""
    file = write_run(tmp_path)
    keys = (*EVALUATED, "train.eval_samples=13", "precision.compute=fp64")
    batches = range(1, 9)
    train_each_on(
        file,
        [
            [
                *keys,
                f"train.global_batch={batch}",
                f"train.micro_batch={batch}",
                f"train.folder={tmp_path}/{batch}",
            ]
            for batch in batches
        ],
    )
    losses = [evaluated(tmp_path / f"{batch}") for batch in batches]
    for number, layout in enumerate(LAYOUTS):
        folder = train_on(file, *keys, f"train.folder={tmp_path}/layout{number}", **layout)
        losses.append(evaluated(folder))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)
    whole = train_on(file, *keys, "train.eval_samples=20", f"train.folder={tmp_path}/whole")
    assert evaluated(whole) != losses[0]  # other samples, so the number is of those 13


@pytest.mark.slow
def test_canonical_evaluations_have_the_same_bits_in_every_batch_and_layout(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path)
    keys = (*EVALUATED, "train.eval_samples=13", 'train.numerics="canonical"')
    sizes = [*(({}, batch) for batch in (2, 6, 8)), *((layout, 8) for layout in LAYOUTS)]
    losses = []
    for number, (layout, batch) in enumerate(sizes):
        folder = f"train.folder={tmp_path}/{number}"
        losses.append(
            evaluated(train_on(file, *keys, f"train.global_batch={batch}", folder, **layout))
        )
    assert losses == [losses[0]] * len(losses)
