"""`data.validation`: named sets, each with a loss of its own beside the held-out loss."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megaprec.checkpoint.reader import Store
from megaprec.text.build import prepare
from megaprec.text.sources import open_source
from megaprec.text.training import train_sentencepiece
from megaprec.tokens.indexed import IndexedDataset
from tests import oracle
from tests.refusals import sentence, shows
from tests.runs import RUN, checkpoint, steps, train, train_on, write_run
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus

# of tests.runs.RUN, and train.eval_batches
LENGTH = 16
BATCH = 8
BATCHES = 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file beside two further texts: counting.txt, and letters, which is a data set of the
    run's tokenizer."""
    path = write_run(tmp_path)
    (tmp_path / "counting.txt").write_text(" ".join(map(str, range(900))), encoding="utf-8")
    (tmp_path / "letters.txt").write_text(
        " ".join(chr(97 + n % 26) * (n % 7 + 1) for n in range(900))
    )
    prepare(
        open_source(f"{tmp_path}/letters.txt"),
        tmp_path / "letters",
        tokenizer=tmp_path / "data" / "text.model",
    )
    return path


def sets(folder: Path) -> str:
    named = (
        (name, folder / file)
        for name, file in (("counting", "counting.txt"), ("letters.1", "letters"))
    )
    listed = (f'{{name="{name}", source="{source}"}}' for name, source in named)
    return f"data.validation=[{', '.join(listed)}]"


def exact(folder: Path) -> list[str]:
    return [
        sets(folder),
        "precision.compute=fp64",
        "train.eval_every=2",
        f"train.eval_batches={BATCHES}",
        "data.held_out_from=end",  # samples in file order
    ]


def plain_loss(checkpoint: Path, prefix: Path) -> float:
    """The mean loss of a plain model on the first samples of a data set, in file order."""
    store = Store(checkpoint)
    tokens = IndexedDataset(prefix).tokens(0, BATCHES * BATCH * LENGTH + 1)
    config = load_run(checkpoint.parent.parent / "run.toml").model.with_vocab(
        store.index["model"]["vocab"]
    )
    weights = {name: store.read("weight", name).double() for name in store.shapes("weight")}
    rows = [
        torch.from_numpy(tokens[n * LENGTH : (n + 1) * LENGTH + 1]) for n in range(BATCHES * BATCH)
    ]
    samples = torch.stack(rows)
    return oracle.mean_loss(config, weights, samples[:, :-1], samples[:, 1:], None)[0].item()


def test_each_set_has_the_loss_of_a_plain_model_in_log_and_metrics(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = file.parent
    capsys.readouterr()
    assert train(file, *exact(here), "train.steps=2") == 0
    last = steps(here / "run")[-1]
    saved = checkpoint(here / "run", 2)
    expected = {"counting": here / "data" / "eval-counting", "letters.1": here / "letters"}
    losses = {name: plain_loss(saved, prefix) for name, prefix in expected.items()}
    assert {name: last[f"eval_loss/{name}"] for name in expected} == pytest.approx(
        losses, rel=1e-11
    )
    assert last["eval_loss"] != last["eval_loss/counting"] != last["eval_loss/letters.1"]
    words = "  ".join(f"{name} loss {loss:.4f}" for name, loss in losses.items())
    assert f"held-out loss {last['eval_loss']:.4f}  {words}\n" in capsys.readouterr().out
    assert all("eval_loss/counting" not in record for record in steps(here / "run")[:-1])


def test_sets_can_be_all_that_is_evaluated_and_may_change_when_a_run_resumes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = file.parent
    every = ("train.eval_every=1", "data.held_out=0")
    assert train(file, *every, "train.steps=1") == 2
    assert shows(capsys.readouterr().err, "config.eval_without_text")
    assert train(file, *every, sets(here), "train.steps=1") == 0
    one = f'data.validation=[{{name="new", source="{here}/letters.txt"}}]'
    capsys.readouterr()
    assert train(file, *every, one, "train.steps=2") == 0
    said = capsys.readouterr().out
    changed = next(
        line for line in said.splitlines() if line.startswith("changed    data.validation: ")
    )
    assert not changed.endswith("(not bit for bit)")
    assert [[key for key in record if "eval" in key] for record in steps(here / "run")] == [
        ["eval_loss/counting", "eval_loss/letters.1"],
        ["eval_loss/new"],
    ]


@pytest.mark.parametrize("given", [True, False])
def test_data_sets_of_other_tokenizers_are_noted(given: bool, file: Path, tmp_path: Path) -> None:
    """Their ids may be possible and mean something else, so that a loss says nothing."""
    other = train_sentencepiece(
        [(tmp_path / "text.txt").read_text(encoding="utf-8")[::-1]], tmp_path / "other", 330
    )
    for name, tokenizer in (("one", tmp_path / "data/text.model"), ("two", other)):
        prepare(open_source(f"{tmp_path}/letters.txt"), tmp_path / name, tokenizer=tokenizer)
    if given:
        sets = f'data.validation=[{{name="two", source="{tmp_path}/two"}}]'
        keys = [
            f"data.source={tmp_path}/one",
            f"data.tokenizer={tmp_path}/data/text.model",
            sets,
            "train.eval_every=1",
        ]
    else:
        parts = (f'{{source="{tmp_path}/{name}", weight=1}}' for name in ("one", "two"))
        keys = [f"data.blend=[{', '.join(parts)}]", "data.source=python", "model.vocab=330"]
    (note,) = open_corpus(load_run(file, keys)).notes
    if given:
        assert note.endswith(
            f"text.model is not the tokenizer that {tmp_path}/two was built with: equal ids "
            "mean other tokens"
        )
    else:
        assert note.startswith(
            f"{tmp_path}/one and {tmp_path}/two were built with different tokenizers"
        )


def test_sets_that_are_never_evaluated_are_noted(file: Path) -> None:
    corpus = open_corpus(load_run(file, [sets(file.parent)]))
    assert corpus.notes == ("data.validation is not evaluated, because train.eval_every is 0",)
    assert not corpus.validation


WRONG = {
    ('{name="a/b", source="letters"}',): sentence("config.validation_name", name="a/b"),
    ('{name="..", source="letters"}',): sentence("config.validation_name", name=".."),
    (
        '{name="a", source="letters"}',
        '{name="a", source="counting.txt"}',
    ): sentence("config.validation_name_twice", count=2, name="a"),
    ('{name="a", source="nowhere"}',): re.escape('data.validation[0].source = "nowhere": ')
    + sentence("data.source_missing", name="nowhere"),
    ('{name="a", source="letters.bin"}',): sentence("training.data_set_prefix", source="letters"),
    ('{name="a"}',): "value 1 lacks source",
    ('{name="a", source="letters", weight=1}',): "value 1 weight is not a key of this table",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_sets_are_refused_by_name(
    given: Sequence[str],
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    assert train(file, f"data.validation=[{', '.join(given)}]", "train.eval_every=1") == 2
    said = capsys.readouterr().err
    assert re.search(WRONG[tuple(given)], said)
    assert said.count("\n") == 1 and "data.validation" in said


def test_a_set_that_is_too_short_for_one_sample_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "short.txt").write_text("a b")
    one = f'data.validation=[{{name="short", source="{file.parent}/short.txt"}}]'
    assert train(file, one, "train.eval_every=1") == 2
    assert 'short.txt": ' in (said := capsys.readouterr().err) and shows(
        said, "data.data_too_short"
    )


@pytest.mark.slow
def test_the_losses_of_sets_do_not_depend_on_the_layout(file: Path) -> None:
    assert "seq_length = 16" in RUN and "global_batch = 8" in RUN
    here = file.parent
    found = []
    for number, axes in enumerate(({}, {"tensor": 2, "data": 2}, {"pipeline": 2})):
        folder = train_on(
            file, *exact(here), f"train.folder={here}/{number}", "train.steps=2", **axes
        )
        found.append(
            {key: value for key, value in steps(folder)[-1].items() if key.startswith("eval_loss")}
        )
    assert found[0].keys() == {"eval_loss", "eval_loss/counting", "eval_loss/letters.1"}
    assert all(one == pytest.approx(found[0], rel=1e-11) for one in found)
