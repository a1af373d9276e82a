"""SentencePiece models on their way to a tokenizer.json: the same ids, and the same text but for unknown characters."""

import io
from pathlib import Path

import pytest
import sentencepiece

from megaprec.data.tokenizer import load_tokenizer
from tools.convert.hf.vocabulary import write_tokenizer

pytest.importorskip("tokenizers", reason="needs the package tokenizers (pip install tokenizers)")
LINES = ["the model learns quickly and the data is good <sep> more text [MASK] here", "words, numbers 123 456"] * 50
SYMBOLS = ["<sep>", "[MASK]", "<se", "a b"]  # one within another, one that is no word
TEXTS = ["<sep>", "the<sep>model", "a b a b", "<sep> x", "[MASK][MASK]", "  the ", "the", "data is", "<se<sep>"]


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
    one, other = load_tokenizer(file), load_tokenizer(tmp_path / "hf/tokenizer.json")
    for text in [*TEXTS, *LINES[:2], "unseen Ü 漢"]:
        ids = one.encode(text)
        assert other.encode(text) == ids, text
        if fallback or "unseen" not in text:
            assert other.decode(ids) == one.decode(ids), text
    assert not symbols or one.encode("the<sep>model") != one.encode("the<sop>model")
