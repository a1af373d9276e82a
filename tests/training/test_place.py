"""A run that resumes with samples of another length goes on in its text where it was, or is
refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megaprec.checkpoint.reader import Store
from megaprec.tokens.samples import Batch, Samples
from tests.refusals import shows
from tests.runs import checkpoint, rewind, train, write_run
from tools.saved.train_state import read_progress

QUICK = (
    "data.held_out_from=end",
    "model.layers=1",
    "train.global_batch=4",
    "train.micro_batch=4",
    "checkpoint.every=0",
    "model.dropout=0.0",
)
LENGTH = 16
READ = 2 * 4 * LENGTH  # tokens of two steps


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with two runs of two steps: `ordered`, and `shuffled`."""
    file = write_run(tmp_path_factory.mktemp("place"))
    for name, shuffle in (("ordered", "false"), ("shuffled", "true")):
        folder = f"train.folder={file.parent / name}"
        assert train(file, *QUICK, folder, "train.steps=2", f"data.shuffle={shuffle}") == 0
    return file


@pytest.fixture
def first_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The number of the first token of each batch that a run reads in the training data."""
    seen = list[int]()
    inner = Samples.batch

    def batch(self: Samples, position: int, count: int) -> Batch:
        made = inner(self, position, count)
        seen.append(int(made.ids[0]) * made.tokens.shape[1])
        return made

    monkeypatch.setattr(Samples, "batch", batch)
    return lambda: seen


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("length", [12, 32, 8, 64, 48])
def test_a_run_in_the_order_of_its_text_goes_on_where_it_was_with_samples_of_any_length(
    length: int,
    file: Path,
    tmp_path: Path,
    first_tokens: Callable[[], list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = rewind(file.parent / "ordered", tmp_path / "run", 2)
    changed = (
        f"train.folder={run}",
        "train.steps=3",
        f"train.seq_length={length}",
        "data.shuffle=false",
    )
    assert train(file, *QUICK, *changed) == 0
    again = READ % length
    assert first_tokens()[0] == READ - again
    out = capsys.readouterr().out
    assert f"the place in the data is kept: {READ} tokens are read" in " ".join(out.split())
    assert (f"its first {again} tokens come again" in " ".join(out.split())) == (again > 0)
    progress = read_progress(Store(checkpoint(run, 3)))
    assert progress.samples == READ // length + 4
    assert progress.tokens == READ + 4 * length
    assert progress.learned_tokens == progress.tokens, "no step was skipped"


@pytest.mark.slow
def test_a_later_epoch_is_gone_on_with_too(
    file: Path,
    tmp_path: Path,
    first_tokens: Callable[[], list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = rewind(file.parent / "ordered", tmp_path / "run", 2)
    batch = 4
    given = (*QUICK, f"train.folder={run}", "data.shuffle=false")
    assert train(file, *given, "train.steps=4", "train.global_batch=140") == 0
    read = 2 * batch + 2 * 140
    of_an_epoch = next(
        int(line.split(" samples an epoch")[0].split()[-1])
        for line in capsys.readouterr().out.splitlines()
        if "samples an epoch" in line
    )
    assert read > of_an_epoch
    before = len(first_tokens())
    assert train(file, *given, "train.steps=5", "train.seq_length=8") == 0
    assert first_tokens()[before] == (read - of_an_epoch) * LENGTH


def test_a_shuffled_run_is_refused_with_samples_of_another_length_unless_that_is_allowed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "shuffled", tmp_path / "run", 2)
    changed = (*QUICK, f"train.folder={run}", "train.steps=3", "train.seq_length=32")
    assert train(file, *changed) == 2
    said = capsys.readouterr().err
    why = "its samples come in another order, so text of this epoch comes twice or not at all"
    assert f"train.seq_length: 16 -> 32: {why}" in said
    assert shows(said, "training.changes_on_resume", flags="--allow seq_length")
    assert train(file, *changed, "--allow", "seq_length") == 0
    assert "changed    train.seq_length: 16 -> 32: " in capsys.readouterr().out
    assert read_progress(Store(checkpoint(run, 3))).samples == READ // 32 + 4


def test_tokens_that_were_learned_are_known_of_checkpoints_that_do_not_say_it(file: Path) -> None:
    store = Store(checkpoint(file.parent / "ordered", 2))
    del store.index["progress"]["skipped_tokens"]
    assert read_progress(store).learned_tokens == READ
    store.index["progress"]["applied"] = 1
    store.index["progress"]["applied_samples"] = 4
    assert read_progress(store).learned_tokens == READ // 2
