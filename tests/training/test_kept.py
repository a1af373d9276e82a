"""A run says what its saves will delete, and deletes nothing else; imports keep what the other
system keeps."""

import json
import shutil
from pathlib import Path

import pytest

from megaprec.checkpoint.keeping import RECORD
from tests.checkpoint.test_keeping import steps_in
from tests.importing.test_import import BASE, refused, run_of
from tests.refusals import shows
from tests.runs import checkpoint, rewind, steps, train, write_run
from tools.cli import main
from tools.config.resolved_run import resolve_run

QUICK = ("model.layers=1", "train.global_batch=2", "train.micro_batch=2", "checkpoint.every=1")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run has been trained for three steps, with checkpoints at 2 and 3."""
    file = write_run(tmp_path_factory.mktemp("kept"))
    assert train(file, *QUICK, "train.steps=3") == 0
    return file


def kept_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("keeps ")]


def test_a_run_says_at_its_start_what_its_saves_will_delete_and_nothing_else_goes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 1))  # which no save of this folder has made
    index = checkpoint(run, 1) / "checkpoint.json"
    index.write_bytes(index.read_bytes().replace(b'"step": 2', b'"step": 1'))
    given = [
        *QUICK,
        f"train.folder={run}",
        "train.steps=6",
        "checkpoint.keep=1",
        "checkpoint.keep_every=4",
    ]
    capsys.readouterr()
    assert train(file, *given) == 0
    assert kept_lines(capsys.readouterr().out) == [
        "keeps      the newest checkpoint and those of each multiple of 4 steps that it "
        "saves; older ones are deleted, "
        "step_00000002 and step_00000003 too; step_00000001 stays, for no save into this "
        "folder made it"
    ]
    assert steps_in(run / "checkpoints") == [1, 4, 6]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("checkpoint.keep=3",), []),
        (('checkpoint.keep="all"',), []),
        (("checkpoint.keep_every=1",), []),
        (("checkpoint.every=0",), []),
        ((), ["keeps      the newest 2 checkpoints that it saves; older ones are deleted"]),
    ],
)
def test_a_run_that_will_delete_nothing_says_nothing(
    keys: tuple[str, ...],
    said: list[str],
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert train(file, *QUICK, f"train.folder={tmp_path}", "train.steps=3", *keys) == 0
    assert kept_lines(capsys.readouterr().out) == said
    first = checkpoint(tmp_path, 1).exists()
    assert first == (not said and keys != ("checkpoint.every=0",))


def test_a_damaged_line_of_the_record_of_saves_is_named_by_all_who_read_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    keys = [*QUICK, f"train.folder={run}"]
    best = ["checkpoint.keep_best=eval_loss", "train.eval_every=1", "train.eval_batches=1"]
    assert train(file, *keys, *best, "train.steps=3") == 0
    record = run / "checkpoints" / RECORD
    record.write_bytes(b"{\n" + record.read_bytes())
    note = (
        f"{record}: line 1 is no record of a save: kept, not used; a checkpoint without a record "
        "is never removed, and never the best"
    )
    for command in (
        ["inspect", str(run), "--json"],
        ["report", str(run), "-o", str(tmp_path / "page.html")],
    ):
        capsys.readouterr()
        assert main(command) == 0
        if command[0] == "inspect":
            assert note in json.loads(capsys.readouterr().out)["notes"]
    assert note in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert train(file, *keys, *best, "train.steps=4") == 0
    assert capsys.readouterr().out.count(f"note       {note}\n") == 1


def evaluated(run: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in steps(run) if "eval_loss" in record}


@pytest.mark.slow
def test_the_best_checkpoint_survives_saves_and_resumes_and_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate is so high after step 3 that the loss grows."""
    run = tmp_path / "run"
    keys = [
        *QUICK,
        f"train.folder={run}",
        "checkpoint.keep=1",
        "checkpoint.keep_best=eval_loss",
        "train.eval_every=1",
        "train.eval_batches=1",
    ]
    assert train(file, *keys, "train.steps=3") == 0
    capsys.readouterr()
    rate = "lr.peak=5.0"
    assert train(file, *keys, rate, "train.steps=5") == 0
    said = capsys.readouterr().out
    losses = evaluated(run)
    assert min(losses, key=losses.__getitem__) == 3
    assert f"best       step_00000003 has the lowest eval_loss so far, {losses[3]:.4f}" in said
    assert kept_lines(said) == [
        "keeps      the newest checkpoint and the one with the lowest eval_loss that it saves; "
        "older ones are deleted"
    ]
    assert steps_in(run / "checkpoints") == [3, 5]
    # the steps after the resume are evaluated too, and none is better
    assert train(file, *keys, rate, "train.steps=7", "train.eval_every=2") == 0
    assert steps_in(run / "checkpoints") == [3, 7]
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 0
    assert "best       step_00000003, with the lowest eval_loss here" in capsys.readouterr().out
    assert main(["inspect", str(checkpoint(run, 3))]) == 0
    assert "best       this one" in capsys.readouterr().out
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert f"step_00000003, eval_loss {losses[3]:.4f}" in page

    # without the key it is one of the older ones again
    assert train(file, *keys, rate, "train.steps=8", "checkpoint.keep_best=") == 0
    assert steps_in(run / "checkpoints") == [8]


@pytest.mark.slow
def test_the_best_checkpoint_of_several_sets_is_that_of_their_weighted_mean(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    texts = {"digits": "1 2 3 4 5 6 7 8 9 0 " * 90, "words": "the model learns to say what " * 60}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    sets = ", ".join(f'{{name = "{name}", source = "{tmp_path}/{name}.txt"}}' for name in texts)
    keys = [
        *QUICK,
        f"train.folder={run}",
        f"data.validation=[{sets}]",
        "checkpoint.keep=1",
        "checkpoint.keep_best={eval_loss = 1, digits = 6, words = 2}",
        "train.eval_every=1",
        "train.steps=6",
        "lr.peak=0.3",
    ]
    assert train(file, *keys) == 0
    said = capsys.readouterr().out
    lowest = "mean of 1 eval_loss, 6 eval_loss/digits and 2 eval_loss/words"
    assert f"the one with the lowest {lowest} that it saves" in said
    means = {
        record["step"]: (
            record["eval_loss"] + 6 * record["eval_loss/digits"] + 2 * record["eval_loss/words"]
        )
        / 9
        for record in steps(run)
    }
    best = min(means, key=means.__getitem__)
    assert steps_in(run / "checkpoints") == sorted({best, 6})
    assert main(["inspect", str(run)]) == 0
    assert f"with the lowest {lowest} here, {means[best]:.4f}" in capsys.readouterr().out
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert f"{lowest} {means[best]:.4f}" in (tmp_path / "page.html").read_text()


def test_a_checkpoint_of_a_step_without_an_evaluation_is_never_the_best(
    file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = [*QUICK, f"train.folder={run}", "checkpoint.keep=1", "checkpoint.keep_best=eval_loss"]
    keys += ["train.eval_batches=1", "train.eval_every=4", "checkpoint.every=3", "lr.peak=5.0"]
    assert train(file, *keys, "train.steps=8") == 0
    assert steps_in(run / "checkpoints") == [8]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (("checkpoint.keep_best=loss", "train.eval_every=1"), "keep_best_unknown"),
        (("checkpoint.keep_best=eval_loss/new", "train.eval_every=1"), "keep_best_unknown"),
        (
            ("checkpoint.keep_best=eval_loss", "data.held_out=0.0", "train.eval_every=0"),
            "keep_best_unknown",
        ),
        (("checkpoint.keep_best=eval_loss",), "keep_best_never_evaluated"),
        (("checkpoint.keep_best={new = 1.0}", "train.eval_every=1"), "keep_best_unknown"),
        (("checkpoint.keep_best={eval_loss = 0.5}",), "keep_best_never_evaluated"),
    ],
)
def test_a_best_checkpoint_that_cannot_be_is_refused_in_a_line(
    keys: tuple[str, ...], code: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train(file, *keys, "train.steps=6") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert shows(line, f"config.{code}")


def test_the_last_step_has_both_an_evaluation_and_a_checkpoint(file: Path) -> None:
    for keys in (
        ["train.eval_every=4", "checkpoint.every=6", "train.steps=12"],
        ["train.eval_every=4", "checkpoint.every=0", "train.steps=7"],
        ["train.eval_every=4", "checkpoint.every=3", "train.steps=7"],
    ):
        assert resolve_run(file, [*keys, "checkpoint.keep_best=eval_loss"])


@pytest.mark.parametrize("value", ["0", "none", "1.5", "true"])
def test_a_number_of_checkpoints_that_is_none_is_refused_by_its_key(
    value: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, f"checkpoint.keep={value}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint.keep = ")
    assert "'all'" in line


@pytest.mark.parametrize(
    ("words", "keep", "every"),
    [("", "all", 0), (" --save-retain-interval 20", 1, 20)],
    ids=["all", "every 20"],
)
def test_an_imported_run_keeps_what_megatron_keeps(
    words: str, keep: object, every: int, tmp_path: Path
) -> None:
    settings = run_of(tmp_path, f"{BASE} --save-interval 10{words}").checkpoint
    assert (settings.every, settings.keep, settings.keep_every) == (10, keep, every)


def test_an_interval_of_megatron_that_keeps_nothing_is_refused() -> None:
    (line,) = refused(f"{BASE} --save-interval 10 --save-retain-interval 0")
    assert line.startswith("--save-retain-interval 0: give a number of iterations from 1 on")
