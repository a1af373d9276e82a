"""The content of a text decides whether it is the text of a checkpoint, not its name or time."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.refusals import shows
from tests.runs import checkpoint, edit_index, rewind, steps, train, write_run

QUICK = (
    "model.layers=1",
    "train.global_batch=4",
    "train.micro_batch=4",
    "checkpoint.every=2",
    "data.cache=",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with a run of four steps, with its own data folder and checkpoints at 2 and 4."""
    file = write_run(tmp_path_factory.mktemp("same"))
    assert train(file, *QUICK, "train.steps=4") == 0
    return file


@pytest.fixture
def run(file: Path, tmp_path: Path) -> Path:
    """The run after two steps."""
    return rewind(file.parent / "run", tmp_path / "run", 2)


def touch(text: Path, run: Path) -> list[str]:
    os.utime(text, (1, 1))
    return []


def move(text: Path, run: Path) -> list[str]:
    text.rename(text.with_name("moved.txt"))
    return [f"data.source={text.with_name('moved.txt')}"]


def touch_and_lose_the_tokens(text: Path, run: Path) -> list[str]:
    shutil.rmtree(run / "data")
    return touch(text, run)


def touch_and_know_no_digest(text: Path, run: Path) -> list[str]:
    """As after a run of an earlier version, with the tokens removed as its refusal advises."""
    edit_index(
        checkpoint(run, 2),
        lambda index: [index["data"]["sets"][0]["text"].pop(k) for k in ("sha256", "chars")],
    )
    shutil.rmtree(run / "data")
    return touch(text, run)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    "change", [touch, move, touch_and_lose_the_tokens, touch_and_know_no_digest]
)
def test_the_same_text_with_another_time_or_name_resumes_bit_for_bit(
    change: Callable[[Path, Path], list[str]], file: Path, run: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(file.parent / "text.txt", text)
    named = [f"data.source={text}", *change(text, run)]
    assert train(file, *QUICK, f"train.folder={run}", "train.steps=4", *named) == 0
    assert steps(run) == steps(file.parent / "run")


def test_a_text_that_was_found_to_be_the_same_is_read_once(
    file: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(file.parent / "text.txt", text)
    given = [*QUICK, f"train.folder={run}", f"data.source={text}"]
    before = (run / "data" / "text.bin").read_bytes()
    said = f'data.source: "{text}" has another name or time and is the same text'
    for steps_more in (3, 4):
        assert train(file, *given, f"train.steps={steps_more}") == 0
        assert (said in capsys.readouterr().err.splitlines()) == (steps_more == 3)
    assert (run / "data" / "text.bin").read_bytes() == before


@pytest.mark.cases(1)
@pytest.mark.parametrize("digest", [True, False], ids=["compared", "of an earlier version"])
@pytest.mark.parametrize("lost", [True, False], ids=["tokens lost", "tokens there"])
def test_a_text_of_the_same_name_and_size_with_another_content_is_refused(
    digest: bool,
    lost: bool,
    file: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = (file.parent / "text.txt").read_text(encoding="utf-8")
    text = tmp_path / "text.txt"
    text.write_text(content.replace("the", "teh"), encoding="utf-8")
    if not digest:
        edit_index(checkpoint(run, 2), lambda index: index["data"]["sets"][0]["text"].pop("sha256"))
        record = run / "data" / "text.json"
        known = json.loads(record.read_text())
        del known["text_sha256"]
        record.write_text(json.dumps(known))
    if lost:
        shutil.rmtree(run / "data")
    before = None if lost else (run / "data" / "text.bin").read_bytes()
    assert train(file, *QUICK, f"train.folder={run}", "train.steps=4", f"data.source={text}") == 2
    message = capsys.readouterr().err
    if lost and not digest:
        # without digest and tokens only the data set that is built anew shows the difference
        assert shows(message, "training.changes_on_resume", flags="--allow data")
    else:
        assert shows(message, "training.other_text")
    assert before is None or (run / "data" / "text.bin").read_bytes() == before
