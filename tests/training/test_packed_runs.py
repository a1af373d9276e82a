"""A run on packed documents reads the same ones in every layout and after every resume, and goes
over to them only where that is asked for."""

import json
import re
from pathlib import Path

import pytest

from megaprec.checkpoint.reader import Store
from megaprec.tokens.blend import Blend, WeightedStretch
from megaprec.tokens.packed_samples import PADDING
from megaprec.tokens.samples import Samples
from tests.refusals import shows
from tests.runs import checkpoint, rewind, steps, tensors, train, train_on, write_run
from tools.config.run_file import load_run
from tools.training.corpus import open_corpus
from tools.training.packing_notes import padding_fields

QUICK = (
    "data.pack=best_fit",
    "data.reset_attention_mask=true",
    "data.reset_position_ids=true",
    "model.layers=1",
    "train.global_batch=4",
    "train.steps=4",
    "checkpoint.every=1",
    "precision.compute=fp32",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with a run of four steps, and a checkpoint after each."""
    file = write_run(tmp_path_factory.mktemp("packed"))
    rows = list[str]()
    for number, line in enumerate((file.parent / "text.txt").read_text("utf-8").splitlines()):
        # documents of different lengths, some of which are longer than a sample
        text = " ".join(line.split()[: 1 + number % 9])
        rows.append(json.dumps({"text": text}))
    (file.parent / "rows.jsonl").write_text("\n".join(rows))
    of_rows = file.read_text().replace("text.txt", "rows.jsonl").replace('/data"', '/rows"')
    file.write_text(of_rows)
    assert train(file, *QUICK) == 0
    return file


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def test_a_run_has_the_same_packed_samples_in_other_layouts(file: Path, tmp_path: Path) -> None:
    whole = losses(file.parent / "run")
    layout = {"tensor": 2, "data": 2}
    run = train_on(file, *QUICK, f"train.folder={tmp_path / 'ranks'}", "train.steps=2", **layout)
    assert losses(run) == pytest.approx(whole[:2], rel=1e-5)
    tiled = (*QUICK, "data.pack=none", "train.steps=2", f"train.folder={tmp_path / 'tiled'}")
    assert train(file, *tiled) == 0
    assert losses(tmp_path / "tiled") != pytest.approx(whole[:2], rel=1e-3)


def test_a_step_says_how_many_of_its_tokens_are_padding(file: Path, tmp_path: Path) -> None:
    said = [step["padding"] for step in steps(file.parent / "run")]
    assert all(0 <= share < 1 for share in said) and any(said)
    corpus = open_corpus(load_run(file, QUICK))
    for number, share in enumerate(said):
        batch = corpus.train.batch(4 * number, 4)
        # a document of the text has no token that is the id of padding
        assert share == (batch.tokens == PADDING).double().mean().item()
    tiled = (*QUICK, "data.pack=none", "train.steps=1", f"train.folder={tmp_path / 'run'}")
    assert train(file, *tiled) == 0
    assert "padding" not in steps(tmp_path / "run")[0]


def test_notes_on_a_data_set_of_a_blend_call_it_by_its_source(file: Path, tmp_path: Path) -> None:
    row = {"prompt": "the model learns", "completion": "to say what"}
    sources = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for source in sources:
        source.write_text(f"{json.dumps(row)}\n" * 60)
    blend = ", ".join(f'{{source = "{source}", weight = 1}}' for source in sources)
    keys = ["data.pack=best_fit", f"data.blend=[{blend}]", "data.chat_template=plain"]
    keys += ["data.tokenizer=characters", "model.vocab=0", f"data.cache={tmp_path / 'cache'}"]
    keys.append(f"train.folder={tmp_path / 'run'}")
    blended = tmp_path / "blend.toml"
    blended.write_text(re.sub(r"^source = .*\n", "", file.read_text(), flags=re.MULTILINE))
    notes = open_corpus(load_run(blended, keys)).notes
    for source in sources:
        about = [note for note in notes if f" of {source} " in note]
        assert len(about) == 2, "what counts in the loss, and what packing does"
    assert not any("cache" in note for note in notes)


def test_a_step_of_a_blend_has_the_padding_of_its_samples_of_each_data_set(file: Path) -> None:
    samples = open_corpus(load_run(file, QUICK)).train
    assert isinstance(samples, Samples)
    blend = Blend([samples, samples], [WeightedStretch.first([0.7, 0.3])], ["one", "another"])
    for step in (range(3), range(5, 17)):
        padding = blend.batch(step.start, len(step)).tokens == PADDING
        assert padding_fields(blend, step, 16) == {"padding": padding.double().mean().item()}


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_that_resumes_reads_the_samples_of_the_run_that_went_on(
    step: int, file: Path, tmp_path: Path
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", step)
    assert train(file, *QUICK, f"train.folder={run}") == 0
    assert steps(run) == steps(file.parent / "run")
    before = tensors(checkpoint(file.parent / "run", 4))
    after = tensors(checkpoint(run, 4))
    assert all((before[name] == after[name]).all() for name in before)


def test_a_resume_with_another_packing_is_refused_unless_that_is_allowed(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Store(checkpoint(file.parent / "run", 3)).index["data"]["pack"] == "best_fit"
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    changed = (*QUICK, f"train.folder={run}", "data.pack=none")
    assert train(file, *changed) == 2
    said = capfd.readouterr().err
    assert 'data.pack: "best_fit" -> "none": samples are made of other documents' in said
    assert shows(said, "training.changes_on_resume", flags="--allow pack")
    assert train(file, *changed, "--allow", "pack") == 0
    assert 'changed    data.pack: "best_fit" -> "none": ' in capfd.readouterr().out
    # as checkpoints of earlier versions, which knew of no packing
    assert "pack" not in Store(checkpoint(run, 4)).index["data"]


def test_samples_of_another_length_are_packed_anew_if_that_is_allowed(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rewind(file.parent / "run", tmp_path / "run", 3)
    changed = (*QUICK, f"train.folder={run}", "train.seq_length=24", "data.shuffle=false")
    assert train(file, *changed, "--allow", "shuffle") == 2
    assert "documents are packed anew, so text of this epoch comes twice" in capfd.readouterr().err
    assert train(file, *changed, "--allow", "shuffle", "--allow", "seq_length") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "documents are packed anew into samples of 24 tokens" in said


def test_a_start_says_how_many_documents_are_cut(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *QUICK, "train.steps=1", f"train.folder={tmp_path / 'run'}") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert 'data.pack = "best_fit": ' in said and "% padding" in said


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("data.windows", "random", "config.pack_windows"),
        ("train.seq_schedule", "[[0, 8], [4, 16]]", "config.pack_seq_schedule"),
    ],
)
def test_what_cuts_documents_is_refused_beside_packing(
    key: str, value: str, code: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *QUICK, f"{key}={value}") == 2
    assert shows(capsys.readouterr().err, code)
