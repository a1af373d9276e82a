"""Tokenizers: a SentencePiece model or a Hugging Face `tokenizer.json`.

Tokenizers add no tokens to a text (no begin, no end); the caller appends `eos` to end a document. A special token
spelled out in a text, such as `<|endoftext|>`, is encoded as ordinary tokens, so no text can end its document. Ids are
those of the original libraries: of `sentencepiece`, and of `tokenizers` and `transformers` with
`split_special_tokens=True`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megaprec.data.encoding import hugging_face_encoder, is_json, sentencepiece_encoder
from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text

USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """The interface of tokenizers for data and generation. `path` is the file that defines the tokenizer completely.

    eos, bos, pad: ids that end a document, begin one and pad; None if the tokenizer has none.
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
        """Return the token ids of `text`, nothing added. `UserError` if it is no Unicode text."""
        return self._encode(_unicode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens have none."""
        return self._processor.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json` file, read with the optional package `tokenizers`.

    `eos`, `bos` and `pad` are the tokens named in `tokenizer_config.json` beside it. If that names no `eos`, `eos` is
    the first of USUAL_EOS in the vocabulary.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._encode, self._tokenizer = hugging_face_encoder(read_text(path))
        except ImportError as problem:
            raise UserError(f"{path} needs tokenizers: pip install tokenizers") from problem
        self.path = path
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.eos, self.bos, self.pad = (
            next((vocabulary[name] for name in (_declared(path, kind), *usual) if name in vocabulary), None)
            for kind, usual in (("eos_token", USUAL_EOS), ("bos_token", ()), ("pad_token", ()))
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, nothing added. `UserError` if it is no Unicode text."""
        return self._encode(_unicode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens have none."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in this file: JSON is Hugging Face's, anything else SentencePiece's.

    Raises UserError if the file is neither.
    """
    if not path.is_file():
        what = " is a folder" if path.is_dir() else ": no such file"
        raise UserError(f"{path}{what}; give a SentencePiece .model or a Hugging Face tokenizer.json")
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


def _declared(path: Path, kind: str) -> str | None:
    """Return the token that `tokenizer_config.json` beside `path` names as `kind`, if any (a string or an added
    token)."""
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = parse_json(read_text(config)).get(kind)
    return token.get("content") if isinstance(token, dict) else token


def _unicode(text: str) -> str:
    """Return `text`. Raises UserError if it contains half of a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError("half of a surrogate pair is no Unicode text; leave it out") from problem
    return text
