"""What a run says of skipped steps, and when it stops because of them."""

from pathlib import Path

import pytest

from tests.runs import checkpoint, steps, tensors, train, write_run
from tools import cli
from tools.journal import read_events

TOO_HIGH = ("precision.compute=fp16", "precision.loss_scale=1e30", "precision.patience=3", "train.steps=9")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("overflow"))


def explain(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["explain-overflow", str(folder), *more])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_run_that_cannot_recover_saves_its_last_good_state_and_stops_with_code_3(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(run_file, *TOO_HIGH, f"train.folder={folder}") == 3
    assert "stopped after step 3, state saved: 3 in a row" in capsys.readouterr().err
    assert [record["outcome"] for record in steps(folder)] == ["skipped_overflow"] * 3
    saved = tensors(checkpoint(folder, 3))
    assert all(t.isfinite().all() for t in saved.values())
    assert not any(t.any() for name, t in saved.items() if name.startswith("exp_avg")), "no step was ever applied"


def test_each_skipped_step_is_an_event_that_names_offenders_and_says_whether_to_care(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(run_file, *TOO_HIGH, f"train.folder={folder}")
    events = read_events(folder)
    assert [(e["step"], e["first_sample"], e["num_samples"]) for e in events] == [(1, 0, 8), (2, 8, 8), (3, 16, 8)]
    assert all(e["offenders"] for e in events)
    code, said = explain(folder, capsys, "--last", "2")
    assert code == 0
    assert "step 1 " not in said
    assert "step 3 skipped at loss scale 1e+30, samples 16 to 23" in said
    assert events[-1]["offenders"][0]["name"] in said
    assert "3 in a row and there is no scale to lower: this will not recover" in said


def test_skips_in_a_row_are_counted_on_after_a_resume_but_one_who_starts_a_hopeless_run_again_has_new_patience(
    run_file: Path, tmp_path: Path
) -> None:
    run = (*TOO_HIGH, f"train.folder={tmp_path}")
    assert train(run_file, *run, "train.steps=2") == 0
    assert train(run_file, *run) == 3
    assert train(run_file, *run) == 3
    assert [event["skipped_in_a_row"] for event in read_events(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_searching_scale_is_said_to_be_normal_and_the_run_goes_on(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    high = ("precision.compute=fp16", "precision.initial_scale=67108864.0", "precision.hysteresis=1", "train.steps=20")
    assert train(run_file, *high, f"train.folder={folder}") == 0
    outcomes = [record["outcome"] for record in steps(folder)]
    assert outcomes[0] == "skipped_overflow"
    assert outcomes[-1] == "applied"
    assert "normal, the scale is searching" in explain(folder, capsys)[1]


def test_a_run_without_skips_says_so_and_another_folder_is_refused(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(run_file, f"train.folder={folder}")
    assert explain(folder, capsys) == (0, f"{folder}: no step was skipped\n")
    for last in ("0", "-1"):
        assert explain(folder, capsys, f"--last={last}") == (2, f"--last {last}: give at least 1\n")
    code, said = explain(tmp_path, capsys)
    assert code == 2
    assert said == f"{tmp_path} is not a run directory: it has no metrics.jsonl\n"
