"""SentencePiece models on their way to a tokenizer.json: the same ids, and the same text but for
unknown characters."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_hugging_face
from tests.other_systems import write_folder
from tools.cli import main
from tools.convert.hf.vocabulary import folder_notes, write_tokenizer

pytest.importorskip("tokenizers", reason="needs the package tokenizers (pip install tokenizers)")
LINES = [
    "the model learns quickly and the data is good <sep> more text [MASK] here",
    "words, numbers 123 456",
] * 50
SYMBOLS = ["<sep>", "[MASK]", "<se", "a b"]  # one within another, one that is no word
TEXTS = [
    "<sep>",
    "the<sep>model",
    "a b a b",
    "<sep> x",
    "[MASK][MASK]",
    "  the ",
    "the",
    "data is",
    "<se<sep>",
]


def trained(folder: Path, symbols: list[str], fallback: bool, prefix: bool) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe",
        vocab_size=330 if fallback else 75,
        hard_vocab_limit=False,
        byte_fallback=fallback,
        user_defined_symbols=symbols,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "text.model").write_bytes(model.getvalue())
    return folder / "text.model"


@pytest.mark.parametrize("symbols", [[], SYMBOLS], ids=["plain", "symbols"])
@pytest.mark.parametrize("fallback", [True, False], ids=["bytes", "no bytes"])
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no prefix"])
def test_ids_are_the_same_with_symbols_of_ones_own_and_without_bytes(
    symbols: list[str], fallback: bool, prefix: bool, tmp_path: Path
) -> None:
    file = trained(tmp_path, symbols, fallback, prefix)
    (tmp_path / "hf").mkdir()
    write_tokenizer([file], tmp_path / "hf")
    one = load_tokenizer(file)
    other = load_tokenizer(tmp_path / "hf/tokenizer.json")
    for text in [*TEXTS, *LINES[:2], "unseen Ü 漢"]:
        ids = one.encode(text)
        assert other.encode(text) == ids, text
        if fallback or "unseen" not in text:
            assert other.decode(ids) == one.decode(ids), text
    assert not symbols or one.encode("the<sep>model") != one.encode("the<sop>model")


def test_two_tokenizers_in_a_folder_that_disagree_are_noted_by_the_first_token(
    tmp_path: Path,
) -> None:
    shutil.copy(trained(tmp_path, [], fallback=True, prefix=True), tmp_path / "tokenizer.model")
    files = [tmp_path / "tokenizer.json", tmp_path / "tokenizer.model"]
    write_tokenizer(files[1:], tmp_path)
    said = json.loads(files[0].read_text("utf-8"))
    assert [*folder_notes(tmp_path, files)] == []
    said["added_tokens"].append(
        said["added_tokens"][0] | {"content": "<|im_end|>", "id": len(said["model"]["vocab"])}
    )
    files[0].write_text(json.dumps(said))  # tokens that only the one has are no disagreement
    assert [*folder_notes(tmp_path, files)] == []
    vocabulary = said["model"]["vocab"]
    vocabulary["<0x41>"], vocabulary["<0x42>"] = vocabulary["<0x42>"], vocabulary["<0x41>"]
    files[0].write_text(json.dumps(said))
    (note,) = folder_notes(tmp_path, files)
    assert (
        "tokenizer.json is read, not tokenizer.model beside it, which disagrees: token 68 is "
        "'<0x42>' in"
    ) in note
    files[1].write_text("IQ== 0")
    (note,) = folder_notes(tmp_path, files)
    assert note.endswith(
        "tokenizer.json is read, not tokenizer.model beside it, which is no SentencePiece model"
    )


@pytest.mark.parametrize("ways", [["megaprec"], ["megaprec", "megatron"], ["megatron", "megaprec"]])
@pytest.mark.parametrize("ids", [[5, 7], -1])
@pytest.mark.usefixtures("torch_files_read_here")
def test_the_tokens_that_end_a_document_come_back_through_every_format(
    ids: object, ways: list[str], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "hf", "llama")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"eos_token_id": ids}))
    for number, to in enumerate([*ways, "hf"]):
        assert (
            main(["convert", str(folder), str(tmp_path / f"{number}"), "--to", to, "--no-verify"])
            == 0
        )
        folder = tmp_path / f"{number}"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == ids


END_OF: dict[str, dict[str, dict[str, str]]] = {
    "nothing beside": {},
    "only a map": {"special_tokens_map.json": {"eos_token": "t", "bos_token": "h"}},
    "a configuration": {"tokenizer_config.json": {"eos_token": "t"}},
    "both": {
        "tokenizer_config.json": {"eos_token": "t"},
        "special_tokens_map.json": {"eos_token": "t"},
    },
}


@pytest.mark.parametrize("plain", [False, True], ids=["added", "in the vocabulary"])
@pytest.mark.parametrize("case", END_OF)
def test_an_exported_tokenizer_ends_documents_as_it_did_also_for_transformers(
    case: str, plain: bool, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="needs transformers: the extra hf"
    )
    file = train_hugging_face(LINES, tmp_path / "tokenizer.json", 270)
    if plain:  # a token of the model that nothing calls special
        said = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps(said | {"added_tokens": []}), encoding="utf-8")
    for name, said in END_OF[case].items():
        (tmp_path / name).write_text(json.dumps(said))
    tokenizer = load_tokenizer(file)
    (tmp_path / "hf").mkdir()
    write_tokenizer(
        [file, *(tmp_path / name for name in END_OF[case])], tmp_path / "hf", begin=tokenizer.eos
    )
    exported = load_tokenizer(tmp_path / "hf/tokenizer.json")
    assert exported.eos == tokenizer.eos
    assert all("'t', which ends a document, is no special token" in note for note in exported.notes)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == tokenizer.eos
