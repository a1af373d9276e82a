"""What a run says of itself at its end, in `evaluate`, `report`, `compare` and the picture, is made
of the same numbers."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from megaprec.checkpoint.reader import Store
from tests import oracle
from tests.refusals import shows
from tests.runs import checkpoint, train, write_run
from tools import cli
from tools.analysis.plots.training_plot import pictures
from tools.analysis.verdict.trend import Kind
from tools.analysis.verdict.verdict import Verdict, describe_yardsticks, read_verdict
from tools.config.run_file import load_run
from tools.journal.records import (
    EVALUATIONS,
    EVENTS,
    METRICS,
    read_evaluations,
    read_events,
    read_metrics,
)
from tools.journal.yardsticks import YARDSTICKS, Yardsticks, read_yardsticks
from tools.training.corpus import open_run_data

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
SAMPLES = 13
WORDS = ("held-out", "measured", "amount", "verdict", "twice")
KEYS = (
    "precision.compute=fp64",
    "train.eval_every=1",
    f"train.eval_samples={SAMPLES}",
    'log.sample="the model"',
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps."""
    file = write_run(tmp_path_factory.mktemp("verdict"))
    assert train(file, *KEYS) == 0
    return file.parent / "run"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_bits_per_byte_are_those_of_a_plain_model_and_the_decoded_text(run: Path) -> None:
    config = load_run(run / "run.toml")
    corpus = open_run_data(config)
    assert corpus.held_out is not None and corpus.tokenizer is not None
    batch = corpus.held_out.batch(0, SAMPLES)
    store = Store(checkpoint(run, 6))
    weights = {name: store.read("weight", name).double() for name in store.shapes("weight")}
    losses = oracle.mean_loss(corpus.model, weights, batch.tokens, batch.targets, None)
    loss = losses[0].item()
    text = "".join(corpus.tokenizer.decode([0, *row])[1:] for row in batch.targets.tolist())
    verdict = read_verdict(run)
    assert verdict is not None
    assert verdict.loss == pytest.approx(loss, rel=1e-11)
    assert verdict.perplexity == pytest.approx(math.exp(loss), rel=1e-11)
    sizes = verdict.yardsticks
    assert sizes is not None and sizes.nbytes is not None
    assert verdict.bits_per_byte == pytest.approx(
        loss * batch.targets.numel() / math.log(2) / sizes.nbytes, rel=1e-11
    )
    # A character that a sample cuts is decoded as another one.
    assert abs(sizes.nbytes - len(text.encode())) <= 4 * SAMPLES
    assert sizes.guessing == math.log(corpus.tokenizer.vocab_size)
    assert sizes.bigram < sizes.unigram < sizes.guessing


def test_groups_of_an_evaluation_add_up_to_its_loss(run: Path) -> None:
    losses = [record["eval_loss"] for record in read_metrics(run)]
    evaluations = read_evaluations(run)
    assert [record["step"] for record in evaluations] == [1, 2, 3, 4, 5, 6]
    for record, loss in zip(evaluations, losses, strict=True):
        assert len(record["losses"]) == record["samples"] == SAMPLES
        mean = torch.tensor(record["losses"]).sum() / sum(record["tokens"])
        assert mean.item() == pytest.approx(loss, rel=1e-6)


def test_the_same_lines_end_a_run_and_answer_evaluate(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert train(run.parent / "my.toml", *KEYS) == 0  # no step is left
    ended = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split()[0] for line in ended] == [*WORDS]
    told = said(capsys, "evaluate", str(run))
    assert " ".join(told.split()) == " ".join(" ".join(ended).split())
    document = json.loads(said(capsys, "evaluate", str(run), "--json"))
    assert document["verdict"] in get_args(Kind)
    assert document["not_predicted"] and document["after_twice_the_steps"] is None
    assert document["loss"] == read_metrics(run)[-1]["eval_loss"]
    explained = GLOSSARY.split("\n## verdict\n")[1].split("\n## ")[0]
    assert {f"`{name}`" for name in document} <= {*re.findall("`[a-z_]+`", explained)}
    page = run.parent / "page.html"
    said(capsys, "report", str(run), "-o", str(page))
    html = page.read_text()
    for line in ended[:3]:
        assert " ".join(line.split()[1:]) in html
    (sample,) = read_events(run, "sample")
    (end,) = read_events(run, "end")
    for shown in (sample["date"], end["began"], end["date"], "<pre>the model"):
        assert shown in html


def test_a_run_whose_checkpoints_are_elsewhere_is_told_by_its_own_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (*KEYS, f"checkpoint.folder={tmp_path / 'other'}", f"train.folder={tmp_path / 'own'}")
    assert train(run.parent / "my.toml", *keys) == 0
    capsys.readouterr()
    document = json.loads(said(capsys, "evaluate", str(tmp_path / "own"), "--json"))
    assert document["loss"] == read_metrics(tmp_path / "own")[-1]["eval_loss"]
    text = str(run.parent / "text.txt")
    scored = said(capsys, "evaluate", str(tmp_path / "own"), "--data", text, "--json")
    assert json.loads(scored)["model"] == str(tmp_path / "own")


def test_yardsticks_are_lines_of_the_chart_and_are_made_once(run: Path) -> None:
    sizes = read_yardsticks(run)
    assert sizes is not None
    chart = pictures(read_metrics(run), yardsticks=sizes).charts[0]
    assert chart.levels[-1].y == sizes.bigram
    assert [level.label for level in chart.levels][-1] == "counts of pairs"
    made = (run / YARDSTICKS).stat().st_mtime_ns
    assert train(run.parent / "my.toml", *KEYS) == 0
    assert read_yardsticks(run) == sizes
    (run / YARDSTICKS).write_text('{"of": 1}')
    assert read_yardsticks(run) is None
    assert train(run.parent / "my.toml", *KEYS) == 0
    assert read_yardsticks(run) == sizes
    assert (run / YARDSTICKS).stat().st_mtime_ns > made


@pytest.mark.parametrize("name", [METRICS, EVENTS, EVALUATIONS])
def test_lines_that_are_no_records_are_named_by_all_who_judge(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / name).write_bytes(b"{\n" + (folder / name).read_bytes())
    note = f"{folder / name}: line 1 is no record: kept, not used"
    for command in (["evaluate", str(folder)], ["compare", str(folder)]):
        assert f"note       {note}\n" in said(capsys, *command)
        assert json.loads(said(capsys, *command, "--json"))["notes"] == [note]
    said(capsys, "report", str(folder), "-o", str(tmp_path / "page.html"))
    assert f"Note: {note}" in (tmp_path / "page.html").read_text()


def test_a_folder_without_a_held_out_loss_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(tmp_path)]) == 2
    assert shows(capsys.readouterr().err.strip(), "command.no_held_out_loss", model=tmp_path)


def test_an_option_of_texts_beside_a_verdict_is_refused_and_none_is_forgotten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {
        "--window": "8", "--stride": "8", "--compute": "bf16", "--ema": "", "--text-field": "a",
        "--encoding": "latin-1", "--exclude": "*.md", "--max-chars": "9", "--tokenizer": "a.json",
        "--tensor": "2", "--pipeline": "2", "--device": "cpu",
    }  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    all_options = {*re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)}
    assert all_options - {"--data", "--json", "--help"} == given.keys()
    for option, value in given.items():
        assert cli.main(["evaluate", "a run", option, *filter(None, [value])]) == 2
        said_of_it = capsys.readouterr().err.strip()
        assert shows(said_of_it, "command.option_without_data", option=option, model="a run")


def test_losses_of_other_text_are_left_out_unless_bits_per_byte_are_known(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8").replace("model", "nodule")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    other = tmp_path / "foreign"
    keys = (f"train.folder={other}", f"data.cache={other}/data", "train.steps=2", "lr.peak=2e-2")
    assert train(file, *keys, "train.eval_every=2", "train.eval_samples=13") == 0
    together = said(capsys, "compare", str(run), str(other))
    assert "differs    lr.peak is 0.01 in run; 0.02 in foreign" in together
    loss = f"{read_metrics(other)[-1]['eval_loss']:.4f}"
    assert loss in together
    (other / YARDSTICKS).unlink()
    again = said(capsys, "compare", str(run), str(other))
    assert loss in again  # made of the data once more
    (other / "data" / "text.idx").unlink()
    apart = said(capsys, "compare", str(run), str(other))
    assert loss not in apart
    assert "losses are left out of the table" in apart


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (5.4, "worse than guessing"),
        (5.2, "better than guessing"),
        (5.0, "better than counts of pairs"),
    ],
)
def test_what_a_model_is_better_than_it_is_better_than_all_before(loss: float, said: str) -> None:
    """Also where counts of a text without order are worse than guessing."""
    sizes = Yardsticks(
        of="",
        guessing=5.3,
        unigram=5.1,
        bigram=5.8,
        counted_tokens=1,
        samples=0,
        tokens=1,
        nbytes=None,
        no_bytes="",
        parameters=1,
        epoch_tokens=1,
    )
    nothing: dict[str, Any] = {
        "tokens": 0,
        "learned": 0,
        "trend": None,
        "after_twice": None,
        "invariants": {},
    }
    verdict = Verdict(step=1, loss=loss, margin=0.0, samples=0, yardsticks=sizes, **nothing)
    assert describe_yardsticks(verdict).endswith(f": the model is {said}")
