"""Ids are those of the libraries that the tokenizers come from, whatever the text."""

import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from transformers import PreTrainedTokenizerFast

from megaprec.errors import UserError
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_hugging_face, train_sentencepiece
from megaprec.text.workers import Chunk, encode_chunks
from tests.refusals import raises, sentence

NASTY = [
    "",
    " ",
    "plain text",
    "  leading, trailing  ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇫🇷",
    "日本語と中文，한국어。",
    "עברית العربية नमस्ते ไทย",
    "e\u0301 versus é, ﬁ, ½, Å",
    "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "a\0b\0\0",
    "one\ntwo\r\nthree\rfour\u2028five\u2029six\x0bseven\x0c",
    "\ufeffBOM at the beginning and \ufeff inside",
    "\u200b\u200e\u202e\u00ad invisible",
    "\uffff\ufffe\U0010ffff\ue000 none and private",
    "tab\tand\u00a0space\u3000",
    "0123456789" * 30,
    "x" * 50_000,
    "words and words " * 2_000,
    "日" * 5_000,
    "def f(x):\n    return {\n        'a': [1, 2],\n    }\n",
]
SPELLED = [
    "a<|endoftext|>b",
    "<|endoftext|>",
    "<s>x</s>",
    "<unk><pad>",
    "<|endoftext|><|endoftext|> <|endoftext|>",
]


def library() -> list[str]:
    return [text for _, text in open_source("python", TextOptions(max_chars=300_000))]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_sentencepiece(library(), tmp_path_factory.mktemp("sp") / "x", 900))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(
        train_hugging_face(library(), tmp_path_factory.mktemp("hf") / "tokenizer.json", 900)
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model that changes what it reads: NFKC, spaces put before and taken away, a
    token of its own."""
    prefix = tmp_path_factory.mktemp("other") / "unigram"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(library()).splitlines()[:4000]),
        model_prefix=str(prefix),
        vocab_size=700,
        model_type="unigram",
        pad_id=3,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.mark.parametrize(
    "text", [*NASTY, *SPELLED, "a<sep>b"], ids=range(len(NASTY) + len(SPELLED) + 1)
)
def test_ids_are_those_of_sentencepiece(pieces: Tokenizer, others: Path, text: str) -> None:
    for path in (pieces.path, others):
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
        ids = load_tokenizer(path).encode(text)
        assert ids == theirs.encode(text)
        assert load_tokenizer(path).decode(ids) == theirs.decode(ids)
    assert pieces.decode(pieces.encode(text)) == text


@pytest.mark.parametrize("text", [*NASTY, *SPELLED], ids=range(len(NASTY) + len(SPELLED)))
def test_ids_are_those_of_transformers(byte_level: Tokenizer, text: str) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(byte_level.path), eos_token="<|endoftext|>", split_special_tokens=True
    )
    ids = byte_level.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert byte_level.decode(ids) == text
    if text in NASTY:
        assert ids == tokenizers.Tokenizer.from_file(str(byte_level.path)).encode(text).ids


@pytest.mark.parametrize("text", SPELLED)
def test_a_text_that_spells_a_special_token_does_not_get_it(
    pieces: Tokenizer, byte_level: Tokenizer, text: str
) -> None:
    for tokenizer in (pieces, byte_level):
        ids = tokenizer.encode(text)
        assert tokenizer.eos is not None and tokenizer.eos not in ids
        assert tokenizer.decode(ids) == text


def of_kind(kind: str, path: Path) -> tokenizers.Tokenizer:
    """Save a tokenizer whose model has the special token </s>, of a kind that finds it in texts."""
    vocab = ["<unk>", "</s>", *"▁abcdxyz<>/s", "▁a", "</", "s>"]
    numbers = {token: number for number, token in enumerate(vocab)}
    bpe = tokenizers.models.BPE
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    models = {
        "unigram": lambda: tokenizers.models.Unigram(
            [(token, -float(n)) for token, n in numbers.items()], unk_id=0
        ),
        "words": lambda: tokenizers.models.WordLevel(numbers, unk_token="<unk>"),
        "pieces of words": lambda: tokenizers.models.WordPiece(numbers, unk_token="<unk>"),
        "merges": lambda: bpe(numbers, merges, unk_token="<unk>"),
        "whole words": lambda: bpe(numbers, merges[:2], unk_token="<unk>", ignore_merges=True),
    }
    made = tokenizers.Tokenizer(models[kind]())
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(str(path))
    return made


@pytest.mark.parametrize("kind", ["unigram", "words", "pieces of words", "merges", "whole words"])
def test_no_kind_of_model_finds_a_special_token_in_a_text(kind: str, tmp_path: Path) -> None:
    original = of_kind(kind, tmp_path / "tokenizer.json")
    original.encode_special_tokens = True
    assert 1 in original.encode("abc </s> a").ids
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    (of_losses,) = tokenizer.notes
    assert "does not give texts back as they were" in of_losses
    assert tokenizer.eos == 1 and tokenizer.vocabulary() == original.get_vocab()
    assert 1 not in tokenizer.encode("abc </s> a")
    for text in ("abc a", "xyz q </ s> <s", ""):
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids
    chunk = Chunk(["</s> a"], [True])
    for workers in (1, 2):
        ((_, (ids, *_)),) = encode_chunks([chunk], tokenizer, workers)
        assert ids.tolist() == [*tokenizer.encode("</s> a"), 1]


@pytest.mark.parametrize("declared", [True, False])
def test_an_end_that_texts_can_hold_is_noted(declared: bool, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if declared:
        made.add_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    _, note = load_tokenizer(tmp_path / "tokenizer.json").notes
    assert f"{tmp_path}/tokenizer.json: '</s>', which ends a document, is no special token" in note


def test_bytes_and_characters_that_are_special_tokens_stay_in_texts(tmp_path: Path) -> None:
    vocab = {
        token: n
        for n, token in enumerate(["!", "a", *(f"<0x{n:02X}>" for n in range(256)), "</s>"])
    }
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], byte_fallback=True, ignore_merges=True)
    )
    made.add_special_tokens([*vocab])
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a!\x02") == [1, 0, 4]


def test_nothing_is_added_or_cut_that_the_file_asks_for(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    asking = tokenizers.Tokenizer.from_file(str(byte_level.path))
    asking.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    asking.enable_truncation(4)
    asking.enable_padding(length=8)
    asking.save(str(tmp_path / "tokenizer.json"))
    text = "a text that is longer than four tokens"
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(text) == byte_level.encode(text)
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a") == byte_level.encode("a")


def test_special_tokens_are_known_by_their_role(
    pieces: Tokenizer, byte_level: Tokenizer, others: Path
) -> None:
    assert (pieces.bos, pieces.eos, pieces.pad) == (1, 2, None)
    assert (byte_level.bos, byte_level.eos, byte_level.pad) == (None, 0, None)
    assert load_tokenizer(others).pad == 3


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_refused(
    pieces: Tokenizer, byte_level: Tokenizer, text: str
) -> None:
    for tokenizer in (pieces, byte_level):
        with raises("data.half_surrogate"):
            tokenizer.encode(text)


def test_learning_gives_the_same_bytes_for_the_same_text(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    again = train_hugging_face(iter(library()), tmp_path / "x.json", 900)
    assert again.read_bytes() == byte_level.path.read_bytes()
    with raises("data.model_exists"):
        train_hugging_face(library(), again, 800)
    assert (
        load_tokenizer(train_hugging_face(library(), again, 800, overwrite=True)).vocab_size == 800
    )


@pytest.mark.parametrize(
    ("size", "why"),
    [(0, "give at least"), (256, "take 257"), (10**6, sentence("data.vocabulary_beyond_text"))],
)
def test_a_size_that_does_not_suit_the_text_is_refused(tmp_path: Path, size: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        train_hugging_face(["a text\n" * 3], tmp_path / "x.json", size)
    assert list(tmp_path.iterdir()) == []
    with raises("data.vocabulary_not_learnable", problem="it has no line"):
        train_hugging_face([""], tmp_path / "x.json", 300)


def test_without_the_package_learning_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises("data.tokenizers_missing"):
        train_hugging_face(["x"], tmp_path / "x.json", 300)
