"""Losses by counts are those of the formulas, written plainly; bytes of tokens are those of text."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaprec.text.token_bytes import NOT_KNOWN, TokensOfText, bytes_of_tokens
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_sentencepiece
from tools.analysis.verdict.counts import Counts

VOCABULARY = 7
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=60)


@given(texts, texts)
def test_losses_by_counts_are_those_of_the_formulas(
    trained: list[int], held_out: list[int]
) -> None:
    counts = Counts.of(np.array(trained[:-1]), np.array(trained[1:]), VOCABULARY)
    singles = Counter(trained[1:])
    pairs = Counter(pairwise(trained))

    def single(token: int) -> float:
        return (singles[token] + 1) / (len(trained) - 1 + VOCABULARY)

    def pair(before: int, token: int) -> float:
        begun = sum(count for (first, _), count in pairs.items() if first == before)
        followers = sum(first == before for first, _ in pairs)
        if not begun:
            return single(token)
        return (pairs[before, token] + followers * single(token)) / (begun + followers)

    before = held_out[:-1]
    tokens = held_out[1:]
    expected = [-math.log(single(token)) for token in tokens]
    assert counts.single_losses(np.array(tokens)) == pytest.approx(expected)
    expected = [-math.log(pair(*both)) for both in zip(before, tokens, strict=True)]
    assert counts.pair_losses(np.array(before), np.array(tokens)) == pytest.approx(expected)


def test_the_probabilities_of_all_tokens_add_up_to_one() -> None:
    dice = np.random.default_rng(0)
    trained = dice.integers(0, 5, 200)
    counts = Counts.of(trained[:-1], trained[1:], VOCABULARY)
    every = np.arange(VOCABULARY)
    assert np.exp(-counts.single_losses(every)).sum() == pytest.approx(1)
    for before in every:
        losses = counts.pair_losses(np.full(VOCABULARY, before), every)
        assert np.exp(-losses).sum() == pytest.approx(1)


def test_bytes_of_tokens_add_up_to_those_of_any_text(tmp_path: Path) -> None:
    text = "the model says: what it has seen in this text, und Öl 数字 \n" * 40
    path = train_sentencepiece([text], tmp_path / "mine", 330)
    tokenizer = load_tokenizer(path)
    for written in (text, " two  spaces\t\nand 😀 über", "\n\n", "aBC \U00012000"):
        ids = tokenizer.encode(written)
        sizes = bytes_of_tokens(tokenizer, [*ids, tokenizer.eos or 0])
        assert sizes is not None
        assert sizes.sum() == len(written.encode())
    # Also a beginning within a character has as many bytes as its tokens.
    ids = tokenizer.encode("数字")
    sizes = bytes_of_tokens(tokenizer, ids)
    assert sizes is not None and NOT_KNOWN not in sizes


def characters(path: Path, text: str, **parts: Any) -> Tokenizer:
    """Write a tokenizer.json of the characters of a text, and load it."""
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    single = {
        "type": "Split",
        "pattern": {"Regex": ".|\\n"},
        "behavior": "Isolated",
        "invert": False,
    }
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    definition = {"model": model, "pre_tokenizer": single, "decoder": {"type": "Fuse"}, **parts}
    path.write_text(json.dumps(definition))
    return load_tokenizer(path)


@pytest.mark.parametrize("text", ["a model learns\n" * 9, "3141592653\n", "数字 und Öl\n"])
def test_a_tokenizer_of_characters_has_the_bytes_of_the_text_at_hand(
    text: str, tmp_path: Path
) -> None:
    tokenizer = characters(tmp_path / "tokenizer.json", text)
    ids = tokenizer.encode(text)
    at_hand = TokensOfText.of(np.array(ids), len(text.encode()))
    sizes = bytes_of_tokens(tokenizer, ids, [at_hand])
    assert sizes is not None
    assert sizes.tolist() == [len(character.encode()) for character in text]
    # of any text they are not known
    assert bytes_of_tokens(tokenizer, ids) is None


def test_a_tokenizer_that_changes_the_text_at_hand_has_no_bytes_of_it(tmp_path: Path) -> None:
    plain = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}
    tokenizer = characters(tmp_path / "tokenizer.json", "Ol und Arger\n", normalizer=plain)
    text = "Öl und Ärger\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "Ol und Arger\n"
    at_hand = TokensOfText.of(np.array(ids), len(text.encode()))
    assert bytes_of_tokens(tokenizer, ids, [at_hand]) is None
