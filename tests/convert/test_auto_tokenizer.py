"""An exported tokenizer as AutoTokenizer of transformers reads it: the same ids, whatever class its
settings named."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import train_hugging_face
from tests.other_systems import slow, write_folder
from tests.refusals import shows
from tools.cli import main
from tools.convert.auto_tokenizer import TEXTS, initial_tokenizer_line

transformers: Any = pytest.importorskip(
    "transformers",
    reason="needs the package transformers (pip install transformers)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
LINES = [
    "In 1984 there were 1234567 of 12,345.678, the model learns and the data is good",
    "x = 10  # y",
] * 50
CLASSES = (
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "GemmaTokenizer",
    "NoSuchClass",
)


def one_digit_at_a_time(file: Path) -> None:
    """Put a pre-tokenizer before that of the file, which no class of transformers would put
    there."""
    said = json.loads(file.read_text("utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, said["pre_tokenizer"]]}
    file.write_text(json.dumps(said), encoding="utf-8")


def folder_with(tmp_path: Path, kind: str, settings: dict[str, Any], **changes: Any) -> Path:
    """Write a folder whose tokenizer has these settings beside it."""
    folder = write_folder(tmp_path / "hf", kind, vocab_size=320, **changes)
    one_digit_at_a_time(train_hugging_face(LINES, folder / "tokenizer.json", 300))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.cases(2, sample=6)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "GPT2Tokenizer"),
        ("gemma2", "GemmaTokenizer"),
        *slow(*((k, c) for k in ("llama", "mistral", "gpt2") for c in CLASSES)),
    ],
)
def test_an_exported_tokenizer_has_the_same_ids_whatever_class_was_named(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(
        tmp_path, kind, {"tokenizer_class": name, "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    )
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "hf"]) == 0
    said = capsys.readouterr().out
    assert f"tokenizer_class = {name!r} is written as 'PreTrainedTokenizerFast'" in said
    assert "AutoTokenizer splits" in said
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(folder / "tokenizer.json")
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.eos_token_id == ours.eos


def test_a_family_whose_own_class_wins_is_named_with_a_way_that_gives_the_same_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, "qwen2", {})
    out = str(tmp_path / "out")
    assert main(["convert", str(folder), out, "--to", "hf"]) == 0
    said = capsys.readouterr().out
    ours = load_tokenizer(folder / "tokenizer.json")
    by_itself = transformers.AutoTokenizer.from_pretrained(out)
    same = all(
        by_itself.encode(text, add_special_tokens=False) == ours.encode(text) for text in TEXTS
    )
    assert (f"warning: {out}: AutoTokenizer of transformers" in said) != same
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    assert all(theirs.encode(text, add_special_tokens=False) == ours.encode(text) for text in TEXTS)


def test_a_model_without_a_tokenizer_says_so_and_takes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "hf", "llama", vocab_size=320)
    file = train_hugging_face(LINES, tmp_path / "tokenizer.json", 300)
    assert main(["convert", str(folder), str(tmp_path / "bare"), "--to", "hf", "--no-verify"]) == 0
    assert (
        f"{folder} has no tokenizer that is read, and so {tmp_path / 'bare'} has none"
        in capsys.readouterr().out
    )
    given = ["--to", "hf", "--no-verify", "--tokenizer", str(file)]
    assert main(["convert", str(folder), str(tmp_path / "out"), *given]) == 0
    assert load_tokenizer(tmp_path / "out/tokenizer.json").encode(TEXTS[0]) == load_tokenizer(
        file
    ).encode(TEXTS[0])
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again"), *given]) == 2
    assert shows(capsys.readouterr().err, "command.tokenizer_twice")


def test_a_begin_token_that_the_tokenizer_does_not_have_is_left_to_config_json(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, "llama", {}, bos_token_id=310)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "hf", "--no-verify"]) == 0
    assert "bos_token" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())


def like_llama(folder: Path, prepends: bool) -> Path:
    """A tokenizer.json of the older form of Llama's: its normalizer writes spaces."""
    file = train_hugging_face(LINES, folder / "tokenizer.json", 300)
    said = json.loads(file.read_text("utf-8"))
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prepends else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    said["normalizer"] = {"type": "Sequence", "normalizers": steps}
    said["pre_tokenizer"] = None
    vocabulary = said["model"]["vocab"]
    # Characters as they are, which are tokens of this form, and a sign for those that are none.
    letters = sorted(set("".join(TEXTS)) - vocabulary.keys())
    vocabulary |= {
        letter: len(vocabulary) + place for place, letter in enumerate(["<unk>", "▁", *letters])
    }
    said["model"]["unk_token"] = "<unk>"
    file.write_text(json.dumps(said), encoding="utf-8")
    return file


@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize("prepends", [False, True])
def test_tokens_are_those_of_transformers_or_a_note_says_which_space_is_put(
    flag: bool | None, prepends: bool, tmp_path: Path
) -> None:
    file = like_llama(tmp_path, prepends)
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    if flag is not None:
        settings["add_prefix_space"] = flag
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the text"
    same = theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    noted = any("add_prefix_space" in note for note in ours.notes)
    assert noted == (flag is not None and flag != prepends)
    if flag is not None:
        assert noted or same
    warned = initial_tokenizer_line(tmp_path, file)
    assert warned.startswith("warning: ") or same


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_splits_otherwise_than_the_file_of_first_weights_is_named(
    name: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, "llama", {"tokenizer_class": name})
    file = folder / "tokenizer.json"
    ours = load_tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    try:
        ids = [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    except Exception:  # a class whose own tokens the file does not have
        ids = []
    same = ids == [ours.encode(text) for text in TEXTS]
    warned = initial_tokenizer_line(folder, file)
    assert warned.startswith("warning: ") or same
    assert not warned or "set data.tokenizer to the tokenizer.json" in warned
