"""Files of a run folder that are not what a run would write: nothing hangs, nothing is replaced
unsaid."""

import os
import re
from argparse import Namespace
from pathlib import Path

import pytest

from tests.refusals import sentence
from tests.runs import steps, train, write_run
from tools import cli
from tools.training.launched import OURS

QUICK = (
    "model.layers=1",
    "train.global_batch=4",
    "train.micro_batch=4",
    "train.steps=2",
    "checkpoint.every=0",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("odd"))


def test_a_lock_that_is_a_pipe_is_refused_at_once(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / ".lock")
    assert train(file, *QUICK, f"train.folder={tmp_path}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"{tmp_path}/.lock: it is no regular file, but the lock of this folder belongs there"
    )


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_refused_before_ranks_start(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert train(file, *QUICK, f"train.folder={tmp_path}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(sentence("command.name_of_file_taken", path=tmp_path / name), line)


def test_a_file_of_records_that_is_a_link_is_replaced_with_a_word_and_what_it_points_to_stays(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(file, *QUICK, f"train.folder={run}") == 0
    elsewhere = tmp_path / "elsewhere.jsonl"
    (run / "metrics.jsonl").rename(elsewhere)
    (run / "metrics.jsonl").symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    capsys.readouterr()
    assert train(file, *QUICK, f"train.folder={run}", "train.steps=3") == 0
    line = (
        f"note       {run}/metrics.jsonl was a link, and is a file of this run now; {elsewhere} "
        "stays as it is"
    )
    assert line in capsys.readouterr().out.splitlines()
    assert elsewhere.read_bytes() == before
    assert [record["step"] for record in steps(run)] == [1, 2, 3]


def test_a_rank_that_lost_another_leaves_the_telling_to_its_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(args: Namespace) -> int:
        raise RuntimeError(
            "F0.0 failed on pipeline rank 0: Connection closed by peer [127.0.0.1]:26540"
        )

    args = Namespace(command="train", run=lose, json=False)
    with pytest.raises(RuntimeError):
        cli._run(args)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OURS}7")
    assert cli._run(args) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_no_rank_prints_a_traceback_when_rank_0_cannot_open_its_files(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl.part").mkdir()
    assert train(file, *QUICK, f"train.folder={tmp_path}", "parallel.tensor=2") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"rank 0 failed with exit code 2: UserError: {tmp_path}/metrics.jsonl.part: Is a directory"
    )
