"""Text to token ids and back: a SentencePiece model or a Hugging Face `tokenizer.json`.

A model can also be trained on the spot, in a second: byte-pair encoding with byte fallback over a bounded sample of
lines, with every character kept as it is. Runs of spaces become pieces, so indentation is cheap; a newline is never
in a training line, so it is the byte piece <0x0A>, one token. Every text comes back exactly, but for the character
U+2581, which SentencePiece itself uses for the space and turns into one.

Tokenizers add nothing of their own (no begin, no end); who wants an end of document writes `eos`. Text is only text:
one that spells a special token, such as `<|endoftext|>`, has it in ordinary tokens, so no text can end its document.
"""

import io
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megaprec.data.encoding import hugging_face_encoder, is_json, sentencepiece_encoder
from megaprec.data.files import beside, write_whole
from megaprec.errors import UserError

SAMPLE_CHARS = 4_000_000  # what a vocabulary is learned from; ten times more changes tokens per text by some 1 %
FIXED_PIECES = 3 + 256  # unknown, begin, end; bytes
LONGEST_LINE = 1 << 16  # bytes; SentencePiece leaves out longer lines
USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What data and generation need of a tokenizer. `path` is the file that defines it whole.

    eos ends a document, bos begins one and pad fills up; each None if the tokenizer has none.
    """

    path: Path
    vocab_size: int  # every id is in [0, vocab_size)
    eos: int | None
    bos: int | None
    pad: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece `.model` file."""

    def __init__(self, path: Path) -> None:
        self._encode, self._processor = sentencepiece_encoder(path.read_bytes())
        self.path = path
        self.vocab_size = self._processor.get_piece_size()
        self.eos, self.bos, self.pad = (
            id if id >= 0 else None
            for id in (self._processor.eos_id(), self._processor.bos_id(), self._processor.pad_id())
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. `UserError` if it is no Unicode text."""
        return self._encode(_unicode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens have none."""
        return self._processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json` file, read with the optional package `tokenizers`.

    `eos` is what `tokenizer_config.json` beside it names, else the first of the usual names that it knows;
    `bos` and `pad` are what it names.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._encode, self._tokenizer = hugging_face_encoder(path.read_text("utf-8"))
        except ImportError as problem:
            raise UserError(f"{path} needs tokenizers: pip install 'megaprec[hf]'") from problem
        self.path = path
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.eos, self.bos, self.pad = (
            next((vocabulary[name] for name in (_declared(path, kind), *usual) if name in vocabulary), None)
            for kind, usual in (("eos_token", USUAL_EOS), ("bos_token", ()), ("pad_token", ()))
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. `UserError` if it is no Unicode text."""
        return self._encode(_unicode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens have none."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in this file: JSON is Hugging Face's, anything else SentencePiece's. `UserError` if neither."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a SentencePiece .model or a Hugging Face tokenizer.json")
    with open(path, "rb") as file:
        kind = HuggingFaceTokenizer if is_json(file.read(64)) else SentencePieceTokenizer
    try:
        return kind(path)
    except UserError:
        raise
    except Exception as problem:  # both libraries raise bare Exception or RuntimeError on a file they cannot read
        reason = " ".join(str(problem).split())
        raise UserError(
            f"{path} is neither a SentencePiece .model nor a Hugging Face tokenizer.json ({reason})"
        ) from problem


def train_sentencepiece(texts: Iterable[str], prefix: Path, vocab_size: int, overwrite: bool = False) -> Path:
    """Learn `vocab_size` pieces from `texts` and write `PREFIX.model`, whole or not at all; returns its path.

    A pure function of the texts and the size: the same model bytes every time. Reads all texts once and holds
    about `SAMPLE_CHARS` characters of them. `UserError` if the size does not suit the text, or if another model is
    there and may not be overwritten.
    """
    lines = _sample_lines(texts)
    if not lines:
        raise UserError("a tokenizer cannot be learned from a text without a line; give a text of some length")
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=content,  # a file name would be recorded in the model and change its bytes
            vocab_size=max(vocab_size, FIXED_PIECES),  # so that 0 is answered like any other size too small
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=LONGEST_LINE,
            num_threads=1,  # recorded in the model too
            minloglevel=2,
        )
    except RuntimeError as problem:
        reason = _why_untrainable(str(problem))
        raise UserError(f"a vocabulary of {vocab_size} cannot be learned from this text: {reason}") from problem
    path = beside(prefix, ".model")
    if path.exists() and path.read_bytes() != content.getvalue() and not overwrite:
        raise UserError(f"{path} exists and is another model; choose another prefix or remove it")
    write_whole(path, content.getvalue())
    return path


def _sample_lines(texts: Iterable[str], limit: int = SAMPLE_CHARS) -> list[str]:
    """A sample of the lines of `texts`, at most `limit` characters, spread evenly over all of them.

    Whenever it grows too large, each line is dropped with probability one half, and later lines are taken with
    half the probability of before. The dice are seeded: the sample is a function of the texts.
    """
    dice = random.Random(0)
    kept: list[str] = []
    chars, probability = 0, 1.0
    for line in (line for text in texts for line in text.split("\n")):
        if line and dice.random() < probability:
            kept.append(line)
            chars += len(line)
        while chars > limit:
            kept = [line for line in kept if dice.random() < 0.5]
            chars, probability = sum(map(len, kept)), probability / 2
    return kept


def _why_untrainable(problem: str) -> str:
    """SentencePiece's reason in the user's terms; it speaks of options that nobody can set here."""
    if found := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return f"the bytes and the common characters alone take {found[1]}; give at least that"
    if found := re.search(r"value <= (\d+)", problem):
        return f"there are only {found[1]} pieces in it; give at most that, or more text"
    return " ".join(problem.split())


def _declared(path: Path, kind: str) -> str | None:
    """The token that `tokenizer_config.json` beside `path` names as `kind`, if any (a string or an added token)."""
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = json.loads(config.read_text("utf-8")).get(kind)
    return token.get("content") if isinstance(token, dict) else token


def _unicode(text: str) -> str:
    """The text, or `UserError` if half of a surrogate pair is in it, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError("half of a surrogate pair is no Unicode text; leave it out") from problem
    return text
