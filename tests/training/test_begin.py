"""One token stands before documents, from a folder through training to evaluation, harness, export
and back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaprec.text.tokenizer import load_tokenizer
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.samples import Samples
from tests.families import CASES
from tests.published import (
    BOS,
    EOS,
    TEXTS,
    folder_of,
    loss_of,
    model_of,
    transformers,
    written,
)
from tests.refusals import raises, sentence
from tests.runs import losses, train, write_run
from tools.cli import main
from tools.config.resolved_run import resolve_run
from tools.training.corpus import open_corpus, requested_begin_token

FAMILIES = [name for name in CASES if "kv1" not in name]


def evaluated(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", str(model), "--data", str(data), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["gemma3", *(name for name in FAMILIES if name != "gemma3")])
def test_a_family_has_one_begin_token_and_one_loss_from_folder_to_run_to_export_and_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(name, tmp_path / "hf")
    file = written(tmp_path, folder)
    # the loads of experts move it, whatever the learning rate
    still = ["model.router_correction_speed=0"]
    assert main(["train", str(file), *still, "--no-verify"]) == 0
    assert f"data.begin = {BOS} ({folder}/config.json): this token is put before each document" in (
        capsys.readouterr().out
    )
    export = tmp_path / "export"
    assert main(["convert", str(tmp_path / "run"), str(export), "--no-verify"]) == 0
    texts = tmp_path / "texts.jsonl"
    places = (folder, tmp_path / "run", export)
    found = [evaluated(place, texts, capsys) for place in places]
    assert [one["begin_token"] for one in found] == [BOS] * 3
    losses = [one["sets"][0]["loss"] for one in found]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (BOS, EOS)
    ours = load_tokenizer(folder / "tokenizer.json")
    assert [theirs(text, add_special_tokens=False).input_ids for text in TEXTS] == [
        ours.encode(t) for t in TEXTS
    ]
    assert json.loads((export / "config.json").read_text())["bos_token_id"] == BOS
    corpus = open_corpus(resolve_run(file))
    stream = corpus.train.batch(0, len(corpus.train)).tokens
    assert corpus.documents.begin == BOS, "what the harness puts before a document"
    assert (stream == BOS).sum() in (len(corpus.train), len(TEXTS) - 1, len(TEXTS), len(TEXTS) - 2)
    for again in (tmp_path / "run", export):
        assert (
            resolve_run(
                file, [f"train.init_from={again}", f"train.folder={tmp_path}/next"]
            ).data.begin
            == BOS
        )


def test_documents_begin_with_the_token_in_training_as_transformers_reads_them(
    tmp_path: Path,
) -> None:
    file = written(
        tmp_path, folder_of("gemma3", tmp_path / "hf"), "[precision]", 'compute = "fp64"'
    )
    corpus = open_corpus(resolve_run(file, ["data.shuffle=false", "data.held_out=0"]))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    expected = [
        id for text in TEXTS for id in (BOS, *theirs(text, add_special_tokens=False).input_ids, EOS)
    ]
    read = corpus.train.batch(0, len(corpus.train)).tokens.flatten().tolist()
    assert read == expected[: len(read)]
    assert len(read) > 100


def test_the_first_loss_is_that_of_transformers_on_ids_with_the_begin_token(
    tmp_path: Path,
) -> None:
    folder = folder_of("gemma3", tmp_path / "hf")
    file = written(tmp_path, folder, "[precision]", 'compute = "fp64"')
    assert train(file, "--no-verify") == 0
    batch = open_corpus(resolve_run(file)).train.batch(0, 2)
    assert (batch.tokens == BOS).any()
    expected = loss_of(model_of(folder), batch)
    assert losses(tmp_path / "run") == [pytest.approx(expected, rel=1e-10)]


@pytest.mark.slow
def test_weights_with_a_begin_token_are_not_trained_without_it_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, folder_of("gemma3", tmp_path / "hf"))
    assert main(["train", str(file), "data.begin=none", "--no-verify"]) == 0
    said = (
        f'data.begin = "none": the weights of train.init_from were trained with token {BOS} '
        "before documents"
    )
    assert said in capsys.readouterr().out
    assert evaluated(tmp_path / "run", tmp_path / "texts.jsonl", capsys)["begin_token"] == EOS, (
        "as trained here"
    )


@pytest.mark.slow
def test_a_run_is_resumed_with_the_begin_token_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, folder_of("gemma3", tmp_path / "hf"))
    assert main(["train", str(file), "--no-verify"]) == 0
    without = tmp_path / "without.toml"
    text = file.read_text().replace(f'init_from = "{tmp_path}/hf"\n', "")
    model = (tmp_path / "run" / "run.toml").read_text()
    kept = model[model.index("[model]") :].partition("\n\n")[0]
    tokenizer = f'[data]\ntokenizer = "{tmp_path}/hf/tokenizer.json"'
    without.write_text(f"{kept}\n{text.replace('[data]', tokenizer)}")
    capsys.readouterr()
    assert train(without, "train.steps=2") == 0
    assert open_corpus(resolve_run(without)).begin_token == BOS
    assert train(without, "train.steps=3", "data.begin=none") == 2
    assert f'data.begin: {BOS} -> "none"' in capsys.readouterr().err


def test_a_run_that_leaves_the_begin_token_open_has_that_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path)
    assert requested_begin_token(resolve_run(file)) is None
    assert train(file, "model.layers=1", "train.steps=1", "data.begin=7") == 0
    assert requested_begin_token(resolve_run(file)) == 7
    assert requested_begin_token(resolve_run(file, ["data.begin=none"])) is None
    assert requested_begin_token(resolve_run(file, ["data.begin=8"])) == 8
    with raises("training.begin_token", begin=330, ids=330):
        open_corpus(resolve_run(file, ["data.begin=330"]))


def test_a_run_whose_documents_do_not_end_is_evaluated_without_a_token_that_it_never_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("llama", tmp_path / "hf", bos_token_id=None, eos_token_id=None)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with IndexedWriter(tmp_path / "tokens", 300) as writer:
        for text in TEXTS:
            writer.add_document(tokenizer.encode(text))
    file = written(tmp_path, folder)
    assert main(["train", str(file), f"data.source={tmp_path}/tokens", "--no-verify"]) == 0
    assert f"documents do not end with token {EOS}" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "export"), "--no-verify"]) == 0
    for place in (tmp_path / "run", tmp_path / "export"):
        assert evaluated(place, tmp_path / "texts.jsonl", capsys)["begin_token"] is None


@pytest.mark.slow
def test_a_data_set_whose_documents_have_the_token_gets_no_second_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("gemma3", tmp_path / "hf")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with IndexedWriter(tmp_path / "tokens", 300) as writer:
        for text in TEXTS:
            writer.add_document([BOS, *tokenizer.encode(text), EOS])
    file = written(tmp_path, folder)
    assert main(["train", str(file), f"data.source={tmp_path}/tokens", "--no-verify"]) == 0
    assert (
        f"documents of {tmp_path}/tokens begin after this token already; none is added"
        in capsys.readouterr().out
    )
    corpus = open_corpus(resolve_run(file, [f"data.source={tmp_path}/tokens"]))
    assert isinstance(corpus.train, Samples)
    assert corpus.train.dataset.num_tokens == IndexedDataset(tmp_path / "tokens").num_tokens
    assert evaluated(tmp_path / "run", tmp_path / "texts.jsonl", capsys)["begin_token"] == BOS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("300", sentence("training.begin_token", begin=300, ids=300)),
        ("-1", "data.begin = -1"),
        ("x", "none"),
    ],
)
def test_a_begin_that_is_no_token_is_refused(
    value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, folder_of("gemma3", tmp_path / "hf"))
    assert main(["train", str(file), f"data.begin={value}", "--no-verify"]) == 2
    assert re.search(told, capsys.readouterr().err)
