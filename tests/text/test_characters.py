"""The tokenizer of characters has the ids that nanoGPT gives to a text, and no others read it
otherwise."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megaprec.errors import UserError
from megaprec.text.build import prepare
from megaprec.text.characters import CharacterTokenizer, character_file
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.token_bytes import bytes_of_tokens
from megaprec.text.tokenizer import load_tokenizer
from megaprec.text.training import learn_characters
from megaprec.tokens.indexed import IndexedDataset
from tests.refusals import raises

TEXT = "First Citizen:\nÜber e\u0301 \u2581 \x00\x07\r\n\t😀 'a' \"b\" \\ <unk> </s>"
IN_FILES = TEXT.replace("\x00", "")  # of a file with this character nobody knows the encoding
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def plain_ids(text: str, alphabet: str) -> list[int]:
    """nanoGPT's rule: the place of each character in the sorted list of all."""
    places = {character: place for place, character in enumerate(sorted(set(alphabet)))}
    return [places[character] for character in text]


def learned(text: str, folder: Path, name: str = "own.model") -> CharacterTokenizer:
    tokenizer = load_tokenizer(learn_characters([text], folder / name))
    assert isinstance(tokenizer, CharacterTokenizer)
    return tokenizer


@settings(deadline=None, max_examples=100)
@given(text=ANY_TEXT)
def test_ids_are_the_places_of_characters_by_code_point(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    tokenizer = learned(text, tmp_path_factory.mktemp("characters"))
    ids = tokenizer.encode(text)
    assert ids == plain_ids(text, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(set(text))


@settings(deadline=None, max_examples=50)
@given(text=ANY_TEXT)
def test_the_package_tokenizers_reads_the_file_alike(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(character_file(sorted(set(text))).decode())
    assert library.encode(text).ids == plain_ids(text, text)
    assert library.decode(library.encode(text).ids) == text


def test_transformers_reads_the_file_alike(tmp_path: Path) -> None:
    learned(TEXT, tmp_path, "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT, add_special_tokens=False) == plain_ids(TEXT, TEXT)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_data_set_holds_these_ids_and_no_ends(
    tmp_path: Path, workers: int, by_file: bool
) -> None:
    (tmp_path / "a.txt").write_bytes(IN_FILES.encode())
    # long enough for both workers
    text = IN_FILES * 60_000
    (tmp_path / "b.txt").write_bytes(text.encode())
    source = open_source(str(tmp_path), TextOptions())
    file = learn_characters([IN_FILES], tmp_path / "given.json") if by_file else None
    made = prepare(
        source, tmp_path / "out", tokenizer=file, characters=not by_file, workers=workers
    )
    dataset = IndexedDataset(tmp_path / "out")
    assert made.eos is None
    assert dataset.num_documents == 2
    assert dataset.document(0).tolist() == plain_ids(IN_FILES, IN_FILES)
    assert dataset.document(1).tolist() == plain_ids(text, IN_FILES)


def test_a_data_set_is_built_once_and_anew_for_another_kind_of_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line of text\n" * 300)
    source = open_source(str(tmp_path / "a.txt"), TextOptions())
    prepare(source, tmp_path / "out", characters=True)
    assert prepare(source, tmp_path / "out", characters=True).reused
    with raises("data.build_exists"):
        prepare(source, tmp_path / "out", vocab_size=270)
    assert not prepare(source, tmp_path / "out", vocab_size=270, overwrite=True).reused
    assert not prepare(source, tmp_path / "out", characters=True, overwrite=True).reused


@pytest.mark.parametrize("workers", [1, 2])
def test_a_character_that_is_not_known_is_one_line(tmp_path: Path, workers: int) -> None:
    file = learn_characters(["abc"], tmp_path / "t.json")
    (tmp_path / "a.txt").write_text("abc" * 700_000 + "€")
    source = open_source(str(tmp_path / "a.txt"), TextOptions())
    with raises("data.text_not_encodable") as caught:
        prepare(source, tmp_path / "out", tokenizer=file, workers=workers)
    assert "'€'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_characters_and_texts_without_any_are_refused(tmp_path: Path) -> None:
    tokenizer = learned("abc", tmp_path)
    with raises("data.token_missing", wrong=3):
        tokenizer.decode([0, 3])
    with raises("data.token_missing", wrong=-1):
        tokenizer.decode([-1])
    with raises("data.nothing_to_learn_from"):
        learn_characters([""], tmp_path / "no.model")
    with raises("data.half_surrogate"):
        learn_characters(["a\ud800"], tmp_path / "no.model")


def test_bytes_of_characters_are_known(tmp_path: Path) -> None:
    tokenizer = learned(TEXT, tmp_path)
    sizes = bytes_of_tokens(tokenizer, tokenizer.encode(TEXT))
    assert sizes is not None
    assert sizes.tolist() == [len(character.encode()) for character in TEXT]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", {"type": "Lowercase"}),
        ("added_tokens", [{"id": 0, "content": "a", "special": False}]),
        ("decoder", None),
        ("pre_tokenizer", {"type": "Whitespace"}),
    ],
)
def test_a_file_that_says_anything_else_is_read_by_the_library(
    tmp_path: Path, key: str, value: object
) -> None:
    definition = json.loads(character_file(["a", "b"])) | {key: value}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    try:
        tokenizer = load_tokenizer(path)
    except UserError:
        return
    assert not isinstance(tokenizer, CharacterTokenizer)
