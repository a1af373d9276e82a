"""One odd line in metrics.jsonl or events.jsonl ends nothing: it stays, it is named, and the rest
is used."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaprec.errors import Problem
from megaprec.optim.decision.step_report import StepReport
from tests.runs import checkpoint, rewind, steps, train, write_run
from tools.analysis.report.run import Run
from tools.cli import main
from tools.journal.journal import Journal
from tools.journal.records import (
    EVALUATIONS,
    EVENTS,
    FINITE_NUMBERS,
    METRICS,
    NUMBERS,
    TOLD_WITH_STEP,
    lost_steps,
    odd_lines,
    odd_records,
    read_events,
    read_lines,
    read_metrics,
)
from tools.training.step_records import add_said

OVERFLOWS = ("precision.compute=fp16", "precision.initial_scale=4294967296.0")
"""Each of a few steps overflows."""
ODD = (
    b"\xff\xfe", b"5", b"[]", b"{}", b"null", b'"x"', b"[" * 100_000, b'{"step": "three"}', b'{"step": 3}', b"{",
    b'{"step": true, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1}', b"\x00\x00\x00",
    b'{"step": 3, "outcome": "applied", "loss": "low", "grad_norm": 1, "loss_scale": 1}',
    b'{"step": 3, "outcome": "applied", "loss": true, "grad_norm": 1, "loss_scale": 1}',
    b'{"step": 3, "outcome": [], "loss": 1, "grad_norm": 1, "loss_scale": 1}',
    b'{"event": ["x"], "step": 1}', b'{"event": "overflow", "step": 1}',
    b'{"step": 3, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1, "seconds": null}',
    b'{"step": 3, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1, "lr": "inf"}',
    b'{"step": 3, "outcome": "applied", "loss": 1, "grad_norm": 1, "loss_scale": 1, "tokens_per_s": [1]}',
    b'{"event": "overflow", "step": 1, "loss_scale": 1, "first_sample": 0, "num_samples": "4", "advice": "", "offenders": []}',
    b'{"event": "overflow", "step": 1, "loss_scale": 1, "first_sample": 0, "num_samples": 4, "advice": "", "offenders": [1]}',
    b'{"event": "overflow", "step": 1, "loss_scale": 1, "first_sample": 0, "num_samples": 4, "advice": "", "offenders": [{}]}',
    b'{"event": "digest", "step": 1, "state": "a", "numbers": {}, "progress": {}, tensors": {"weight": {"a": 1}}}',
    b'{"event": "digest", "step": 1, "state": 1, "numbers": {}, "progress": {}, "tensors": {}}',
    b'{"event": "evaluation", "step": 1, "set": "eval_loss", "samples": 1, "losses": [1], "tokens": [1, 2]}',
    b'{"event": "evaluation", "step": 1, "set": "eval_loss", "samples": 1, "losses": ["x"], "tokens": [1]}',
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained for six steps, with checkpoints at 3 and 6; each step
    is skipped."""
    file = write_run(tmp_path_factory.mktemp("records"))
    assert train(file, *OVERFLOWS) == 3
    return file


def spoil(path: Path) -> list[bytes]:
    """Puts each odd line behind the first line; returns the good ones."""
    good = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([good[0], *ODD, *good[1:]]) + b"\n")
    return good


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_odd_lines_are_kept_named_and_not_used(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    good = spoil(run / name)
    note = f"note       {run / name}: lines 2 to {len(ODD) + 1} are no records: kept, not used\n"
    assert train(file, *OVERFLOWS, f"train.folder={run}", "log.plot=true") == 3
    assert capsys.readouterr().out.count(note) == 1
    lines = read_lines(run / name)
    assert [line.content for line in lines if line.record is None] == [*ODD]
    assert len(lines) - len(ODD) == len(good) + (name == EVENTS), "a resume is an event"
    (run / METRICS).with_suffix(".good").write_bytes(b"")
    assert [r["step"] for r in (read_metrics if name == METRICS else read_events)(run)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    if name == METRICS:
        pytest.importorskip("matplotlib")
        assert main(["compare", str(run), "-o", str(tmp_path / "x.png")]) == 0
    else:
        assert main(["explain-overflow", str(run)]) == 0
    assert note in capsys.readouterr().out


def test_of_lines_after_the_last_checkpoint_the_whole_ones_are_taken_again_and_one_cut_off_goes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    lines = (run / METRICS).read_bytes().splitlines()
    (run / METRICS).write_bytes(b"\n".join(lines[:4]) + b"\n" + lines[4][:30])
    assert odd_lines(run / METRICS) == f"{run / METRICS}: line 5, the last, is cut off: not used"
    assert train(file, *OVERFLOWS, f"train.folder={run}") == 3
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    again = f"{run / METRICS}: step 4 is taken again, so the line of this step goes"
    gone = f"{run / METRICS}: line 5, the last, is cut off: removed"
    assert notes == [f"note       {again}", f"note       {gone}"]
    assert steps(run) == steps(file.parent / "run")


@pytest.mark.parametrize("name", [METRICS, EVENTS, EVALUATIONS])
def test_a_last_line_that_is_cut_off_is_told_by_readers_and_by_the_run_that_goes_on(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    evaluation = '{"event": "evaluation", "step": 1, "set": "eval_loss", "samples": 1, '
    (run / EVALUATIONS).write_text(evaluation + '"losses": [1], "tokens": [1]}\n')
    whole = (run / name).read_bytes()
    number = whole.count(b"\n") + 1
    (run / name).write_bytes(whole + whole.splitlines()[-1][:-1])
    said = f"{run / name}: line {number}, the last, is cut off"
    assert odd_records(run) == [f"{said}: not used"]
    assert Run.read(run).notes == [f"{said}: not used"]
    assert train(file, *OVERFLOWS, f"train.folder={run}", "train.steps=7") == 3
    assert capsys.readouterr().out.count(f"note       {said}: removed\n") == 1
    assert (run / name).read_bytes().startswith(whole)
    assert odd_records(run) == []


def test_steps_that_left_no_line_are_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(b"".join([lines[0], *lines[3:5]]))
    assert train(file, *OVERFLOWS, f"train.folder={run}", "train.steps=7") == 3
    assert (
        f"note       {run / METRICS} has no record of steps 2 to 3 and 6\n"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_every_step_counts_once_and_what_is_missing_or_repeated_is_named_by_all_who_count(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(
        b"".join([lines[0].replace(b"1,", b"0,", 1), *lines[1:4], *lines[2:3], lines[5], lines[4]])
    )
    assert [record["step"] for record in read_metrics(run)] == [2, 3, 4, 6]
    notes = [
        f"{run / METRICS}: lines 1, 5 and 7 are of no later step than those before: kept, not used",
        f"{run / METRICS} has no record of steps 1 and 5",
    ]
    assert main(["compare", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["runs"][0]["steps"], said["notes"]) == (4, notes)
    assert main(["compare", str(run)]) == 0
    assert capsys.readouterr().out.startswith("".join(f"note       {note}\n" for note in notes))
    assert Run.read(run).notes == notes
    content = (run / METRICS).read_bytes()
    assert train(file, *OVERFLOWS, f"train.folder={run}", "train.steps=7") == 3
    assert (run / METRICS).read_bytes().startswith(content), "no line of the past is changed"
    assert all(f"note       {note}\n" in capsys.readouterr().out for note in notes[:1])


def test_a_step_of_any_size_is_told_at_once(tmp_path: Path) -> None:
    record = (
        '{"step": 100000000000000000000, "outcome": "applied", "loss": 1, "grad_norm": 1, '
        '"loss_scale": 1}\n'
    )
    (tmp_path / METRICS).write_text(record)
    assert (
        lost_steps(tmp_path / METRICS)
        == f"{tmp_path / METRICS} has no record of steps 1 to 99999999999999999999"
    )
    assert lost_steps(tmp_path / METRICS, 1) == f"{tmp_path / METRICS} has no record of step 1"
    assert lost_steps(tmp_path / "none") == ""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_what_is_no_file_is_found_at_the_start(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 6)
    (run / name).unlink()
    (run / name).mkdir()
    assert train(file, *OVERFLOWS, f"train.folder={run}", "train.steps=7") == 2
    line = Problem.of("command.name_of_file_taken", path=run / name, content="the records of steps")
    assert capsys.readouterr().err == f"{line}\n"
    assert not checkpoint(run, 7).exists()


def test_the_time_left_has_room_for_evaluations_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 1 s, and a pause of 3 s after each second one."""
    now = 100.0
    monkeypatch.setattr("tools.journal.journal.time", SimpleNamespace(monotonic=lambda: now))
    record = {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "loss_scale": 1.0, "outcome": "applied"}
    record |= {"skipped_total": 0, "seconds": 1.0, "tokens_per_s": 2.0}
    with Journal(tmp_path, 0, 100, 1, False) as journal:
        for number in range(1, 42):
            now += 1.0
            journal.write({**record, "step": number})
            if number % 2 == 1:
                now += 3.0
        assert journal._seconds_left() == pytest.approx(59 * 2.5)


def test_every_number_of_a_steps_report_is_known_to_be_finite_or_not() -> None:
    of_report = {field.name for field in fields(StepReport) if field.type in (float, float | None)}
    always_finite = {"zero_ratio", *FINITE_NUMBERS}
    assert of_report <= {*NUMBERS} | always_finite


@pytest.mark.parametrize("kind", TOLD_WITH_STEP)
def test_the_record_of_a_step_has_what_all_its_events_of_a_kind_say(kind: str) -> None:
    record = {"step": 3}
    add_said(record, [{"event": kind, "said": "rank 1 is slow"}, {"event": "end"}])
    add_said(record, [{"event": kind, "said": "rank 2 is slow"}])
    assert record == {"step": 3, kind: "rank 1 is slow; rank 2 is slow"}
