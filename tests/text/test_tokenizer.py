"""A tokenizer trained on the spot is deterministic and gives every text back."""

import json
import re
import string
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megaprec.errors import UserError
from megaprec.text import training as module
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_hugging_face, train_sentencepiece
from tests.refusals import raises, sentence

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2581\x10_. \n"))


def library(chars: int) -> list[str]:
    return [text for _, text in open_source("python", TextOptions(max_chars=chars))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    prefix = tmp_path_factory.mktemp("tokenizer") / "py"
    return load_tokenizer(train_sentencepiece(library(300_000), prefix, 1000))


@pytest.mark.slow
def test_python_source_comes_back_exactly(trained: Tokenizer) -> None:
    text = "".join(library(2_000_000))
    assert trained.decode(trained.encode(text)) == text


@settings(deadline=None, max_examples=300)
@given(text=ANY_TEXT)
def test_any_text_comes_back_exactly(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        " a",
        "a ",
        "  ",
        "\n\n",
        "\t\tx\n",
        "a\r\nb\r",
        "\0",
        "\ufeffx",
        "</s><unk><0x0A>",
        "ﬁ½Å e\u0301 日本 😀",
        "\u2581",
        "a\u2581 b",
        "\x10_\x10.\x10",
    ],
)
def test_nothing_is_normalised_or_mistaken_for_a_special_token(
    trained: Tokenizer, text: str
) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.eos not in ids


def test_indentation_and_line_ends_cost_one_token_each(trained: Tokenizer) -> None:
    assert len(trained.encode("\n")) == 1
    assert len(trained.encode(" " * 8)) == 1


def test_the_vocabulary_has_the_size_asked_for_and_an_end(trained: Tokenizer) -> None:
    assert trained.vocab_size == 1000
    assert trained.eos is not None
    assert max(trained.encode("".join(library(100_000)))) < 1000


def test_training_gives_the_same_bytes_for_the_same_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = library(200_000)
    one = train_sentencepiece(texts, tmp_path / "one", 600).read_bytes()
    two = train_sentencepiece(iter(texts), tmp_path / "elsewhere" / "two", 600).read_bytes()
    assert one == two
    assert train_sentencepiece(texts[1:], tmp_path / "three", 600).read_bytes() != one
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("*.part"))


def test_a_large_text_is_sampled_evenly_and_always_alike() -> None:
    texts = [f"line {i}\n" * 10 for i in range(2000)]
    sample = module.sample_lines(texts, 20_000)
    assert sample == module.sample_lines(texts, 20_000)
    assert 5_000 < sum(map(len, sample)) <= 20_000
    numbers = [int(line.split()[1]) for line in sample]
    assert abs(sum(numbers) / len(numbers) - 1000) < 100


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (0, "give at least"),
        (100, "give at least"),
        (
            100_000,
            sentence(
                "data.vocabulary_not_learnable",
                problem=re.compile("give at most that, or more text$"),
            ),
        ),
    ],
)
def test_a_size_that_does_not_suit_the_text_is_refused_with_one_that_does(
    tmp_path: Path, size: int, why: str
) -> None:
    texts = library(20_000)
    with pytest.raises(UserError, match=why) as error:
        train_sentencepiece(texts, tmp_path / "x", size)
    assert list(tmp_path.iterdir()) == []
    possible = re.search(r"(?:take|only) (\d+)", str(error.value))
    assert possible
    train_sentencepiece(texts, tmp_path / "x", int(possible[1]))


@pytest.mark.parametrize("texts", [[], ["", "\n\n"]])
def test_a_text_without_lines_trains_nothing(tmp_path: Path, texts: list[str]) -> None:
    with raises("data.nothing_to_learn_from"):
        train_sentencepiece(texts, tmp_path / "x", 300)


def test_another_model_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    texts = library(50_000)
    before = train_sentencepiece(texts, tmp_path / "x", 500).read_bytes()
    assert train_sentencepiece(texts, tmp_path / "x", 500).read_bytes() == before
    with raises("data.model_exists"):
        train_sentencepiece(texts, tmp_path / "x", 501)
    assert (tmp_path / "x.model").read_bytes() == before
    assert train_sentencepiece(texts, tmp_path / "x", 501, overwrite=True).read_bytes() != before


def hugging_face(path: Path) -> Path:
    """A character tokenizer with a gap in its ids and an end-of-document token."""
    vocabulary = {letter: i for i, letter in enumerate(string.ascii_lowercase)} | {
        "<|endoftext|>": 40,
        "<unk>": 41,
    }
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(path))
    return path


def test_a_hugging_face_file_is_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(hugging_face(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abz") == [0, 1, 25]
    assert tokenizer.decode([0, 1, 25]) == "abz"
    assert (tokenizer.vocab_size, tokenizer.eos) == (42, 40)


@pytest.mark.parametrize("declared", ["z", {"content": "z"}])
def test_the_configuration_beside_a_hugging_face_file_names_its_end(
    tmp_path: Path, declared: object
) -> None:
    hugging_face(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    assert load_tokenizer(tmp_path / "tokenizer.json").eos == 25


def test_without_the_package_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hugging_face(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises("data.tokenizers_missing"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"{", b'{"model": 3}', b"hello", b"\xff\xfe\x00", b"\x00" * 100]
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with raises("data.not_a_tokenizer"):
        load_tokenizer(tmp_path / "x.model")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises("data.tokenizer_file_unusable", problem=": no such file"):
        load_tokenizer(tmp_path / "nothing.model")


LOSSY: dict[str, tuple[dict[str, object], str]] = {
    "lower case": ({"type": "Lowercase"}, "capital letters"),
    "NFKC": ({"type": "NFKC"}, "combining characters, characters that have a plainer form"),
    "accents": (
        {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
        "accents",
    ),
    "BERT": (
        {"type": "BertNormalizer", "clean_text": True, "lowercase": False},
        "control characters",
    ),
    "spaces": (
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "},
        "spaces that follow each other",
    ),
    "ends": (
        {"type": "Strip", "strip_left": True, "strip_right": True},
        "spaces at the beginning, spaces at the end",
    ),
}


@pytest.mark.parametrize("case", LOSSY)
def test_what_a_tokenizer_loses_is_said_where_it_is_loaded(case: str, tmp_path: Path) -> None:
    path = train_hugging_face(library(20_000), tmp_path / "tokenizer.json", 270)
    assert load_tokenizer(path).notes == ()
    normalizer, what = LOSSY[case]
    defaults = {"handle_chinese_chars": False, "strip_accents": False} if case == "BERT" else {}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer | defaults})
    )
    (note,) = load_tokenizer(path).notes
    assert note.startswith(
        f"{path} does not give texts back as they were: it changes or leaves out "
    )
    assert what in note
