"""Tokenizers: a SentencePiece model, a Hugging Face `tokenizer.json`, or characters.

Tokenizers add no tokens to a text (no begin, no end); the caller appends `eos` to end a document. A
special token spelled out in a text, such as `<|endoftext|>`, is encoded as ordinary tokens, so no
text can end its document. Ids are those of the original libraries: of `sentencepiece`, and of
`tokenizers` and `transformers` with `split_special_tokens=True`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megaprec.durable import read_whole, why_no_file
from megaprec.errors import UserError
from megaprec.parsing import read_regular
from megaprec.resources import is_for_want_of_resources
from megaprec.text.characters import read_characters
from megaprec.text.encoding import (
    Answers,
    EncodeRendered,
    hugging_face_encoder,
    is_json,
    rendered_encoder,
    sentencepiece_encoder,
)
from megaprec.text.tokenizer_files import (
    CONFIG,
    NAMES,
    TokenizerSettings,
    another_kind,
    not_a_tokenizer,
    read_definition,
    read_settings,
    require_agreeing,
    require_as_written,
    require_whole,
    settings_of,
    unread_keys,
    with_other_names,
)
from megaprec.text.tried_tokenizers import require_tried

# Keys of the record of a data set: digests of the file of its tokenizer, and of what its ids mean.
FILE_DIGEST = "tokenizer_sha256"
TOKENS_DIGEST = "tokens_sha256"

USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# all keys of a tokenizer.json that the package tokenizers knows
_KNOWN_KEYS = {
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
}
RARE = "\U00012000"  # a letter of a script that few texts have
LOST = {  # what a tokenizer may change in a text -> a text that has it
    "capital letters": "aBCd",
    "accents": "a\u00e9b",
    "combining characters": "ae\u0301b",
    "characters that have a plainer form": "a\ufb01b \u00bd",
    "control characters": "a\x07b\x00c",
    "line ends and tabs": "a\r\nb\nc\td",
    "spaces that follow each other": "a   b",
    "spaces at the beginning": " a",
    "spaces at the end": "a ",
    "the sign U+2581": "a\u2581b",
    "rare characters": f"a{RARE}b",
}
PLAIN = "a b"  # a text in which there is nothing to change
PROBE = "".join(LOST.values()) + " The model says: it's 12345, x = [1.5e-3] # naïve 数字 😀"


class Tokenizer(Protocol):
    """The interface of tokenizers for data and generation.

    path: the file that defines the tokenizer completely.
    vocab_size: every id is in [0, vocab_size).
    eos, bos, pad, unk: ids that end a document, begin one, pad, and stand for what is not known;
        None if the tokenizer has none.
    holes: ids below `vocab_size` that no token has.
    notes: lines for the user on what is not followed.
    special: tokens that no text can hold, as they are spelled in a rendered chat.
    encode_rendered: encodes a chat that a template has written; None if the tokenizer cannot.
    """

    path: Path
    vocab_size: int
    eos: int | None
    bos: int | None
    pad: int | None
    unk: int | None
    holes: frozenset[int]
    notes: tuple[str, ...]
    special: frozenset[str]

    @property
    def encode_rendered(self) -> EncodeRendered | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, as they are spelled in the file."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece `.model` file.

    If it is named `tokenizer.model`, the settings of transformers beside it count.
    """

    holes: frozenset[int] = frozenset()
    special: frozenset[str] = frozenset()
    encode_rendered: EncodeRendered | None = None  # it has no spelling for special tokens

    def __init__(self, path: Path) -> None:
        content = read_regular(path)
        self._encode, self._processor = sentencepiece_encoder(content)
        require_whole(path, content)
        self.path = path
        self.vocab_size = self._processor.get_piece_size()
        self.eos = _id_or_none(self._processor.eos_id())
        self.bos = _id_or_none(self._processor.bos_id())
        self.pad = _id_or_none(self._processor.pad_id())
        self.unk = _id_or_none(self._processor.unk_id())
        self.notes: tuple[str, ...] = ()
        if settings_of(path):
            settings = read_settings(path, {})
            vocabulary, renamed = with_other_names(settings, self.vocabulary())
            require_agreeing(path, settings, vocabulary)
            self.eos = _id_of("eos_token", settings, vocabulary, self.eos)
            self.bos = _id_of("bos_token", settings, vocabulary, self.bos)
            self.pad = _id_of("pad_token", settings, vocabulary, self.pad)
            self.notes = (*settings.notes, *renamed)
        self.notes = (*self.notes, *_losses(self))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, nothing added. Raises UserError if it is no Unicode."""
        return self._encode(_require_unicode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none.

        Raises UserError for an id that no token has.
        """
        return self._processor.decode(_checked_ids(self, ids))

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all pieces."""
        return {self._processor.id_to_piece(each): each for each in range(self.vocab_size)}


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json` file, read with the optional package `tokenizers`.

    `eos`, `bos` and `pad` are the tokens named in the settings beside it (`tokenizer_config.json`,
    `special_tokens_map.json`). If they name no `eos`, it is the one of USUAL_EOS among the special
    tokens, or else in the vocabulary.
    """

    def __init__(self, path: Path) -> None:
        text, definition = read_definition(path)
        settings = read_settings(path, definition)
        try:
            self._encode, self._tokenizer = hugging_face_encoder(text)
        except ImportError as problem:
            raise UserError.of("data.tokenizers_missing", path=path) from problem
        except Exception as problem:  # the library raises bare Exception
            unknown_keys = ", ".join(sorted(definition.keys() - _KNOWN_KEYS))
            if unknown_keys:
                reason = f"it does not know {unknown_keys}: give a tokenizer.json without that"
            else:
                reason = str(problem)
            raise UserError.of("data.tokenizer_unreadable", path=path, reason=reason) from problem
        self.path = path
        self._definition = text
        self._encode_rendered: EncodeRendered | None = None
        self.special = settings.special | _special_tokens(definition)
        vocabulary = self.vocabulary()
        require_as_written(path, definition, vocabulary)
        require_agreeing(path, settings, vocabulary)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.holes = frozenset(range(self.vocab_size)) - set(vocabulary.values())
        self.bos = _id_of("bos_token", settings, vocabulary)
        self.pad = _id_of("pad_token", settings, vocabulary)
        self.eos = _id_of("eos_token", settings, vocabulary)
        if self.eos is None:
            self.eos = _usual_eos(path, vocabulary, _special_tokens(definition))
        self.unk = _unknown_id(definition["model"], vocabulary)
        unread = unread_keys(definition, self._tokenizer)
        left_out = []
        if unread:
            left_out.append(f"{path}: {', '.join(unread)}: the package tokenizers does not read it")
        ends = _end_in_texts(path, self.eos, vocabulary, self._encode)
        self.notes = (*settings.notes, *left_out, *_losses(self), *ends)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, nothing added.

        Raises UserError if it is no Unicode text, or if it has what no token is for.
        """
        text = _require_unicode(text)
        try:
            return self._encode(text)
        except Exception as problem:  # the library raises bare Exception
            raise UserError.of(
                "data.text_not_encodable", path=self.path, problem=problem
            ) from problem

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none.

        Raises UserError for an id beyond the vocabulary.
        """
        return self._tokenizer.decode(_checked_ids(self, ids), skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones too."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def encode_rendered(self) -> EncodeRendered | None:
        """The function that encodes a chat as its template has written it: special tokens that it
        spells are these tokens.

        It raises UserError for a text that has what no token is for.
        """
        # few texts are chats, and this reads the whole definition again
        if self._encode_rendered is None:
            self._encode_rendered = self._naming_file(rendered_encoder(self._definition))
        return self._encode_rendered

    def _naming_file(self, encode: EncodeRendered) -> EncodeRendered:
        """Return `encode` with UserError, which names the file, in place of its own errors."""

        def encode_rendered(text: str, answers: Answers) -> tuple[list[int], NDArray[np.bool_]]:
            try:
                return encode(text, answers)
            except Exception as problem:  # the library raises bare Exception
                raise UserError.of(
                    "data.text_not_encodable", path=self.path, problem=problem
                ) from problem

        return encode_rendered


def _id_or_none(number: int) -> int | None:
    """Return an id of SentencePiece's, of which a negative one is none."""
    return number if number >= 0 else None


def _special_tokens(definition: Mapping[str, Any]) -> set[str]:
    added_tokens = definition.get("added_tokens") or ()
    return {added["content"] for added in added_tokens if added.get("special")}


def _unknown_id(model: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int | None:
    """Return the id that a tokenizer.json's model gives to what it does not know."""
    if "unk_id" in model:
        return model["unk_id"]
    return vocabulary.get(model.get("unk_token") or "")


def _losses(tokenizer: Tokenizer) -> list[str]:
    """Return a note if texts do not come back from their tokens as they were."""
    lost = [feature for feature, text in LOST.items() if not _comes_back(tokenizer, text)]
    if not _comes_back(tokenizer, PLAIN):
        detail = f", not even {PLAIN!r}"
    elif lost:
        detail = f": it changes or leaves out {', '.join(lost)}"
    else:
        return []
    if _leaves_out(tokenizer):
        detail += "; it leaves out of texts what it has no token for"
    return [f"{tokenizer.path} does not give texts back as they were{detail}"]


def _leaves_out(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer without an unknown token leaves a rare character out."""
    try:
        return not tokenizer.encode(RARE)
    except UserError:
        return False


def _comes_back(tokenizer: Tokenizer, text: str) -> bool:
    """Return True if a text comes back from its tokens as it was, or is refused."""
    try:
        ids = tokenizer.encode(text)
    except UserError:
        return True
    return tokenizer.decode(ids) == text


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in this file: JSON is Hugging Face's, or one of characters, anything else
    SentencePiece's.

    Raises UserError if the file is neither, or if it and the settings beside it do not fit
    together.
    """
    _require_file(path)
    content: bytes | None = None  # until it is read
    try:
        content = read_regular(path)
        return _tokenizer_of(path, content)
    # that memory is short says nothing of the file
    except (UserError, MemoryError):
        raise
    except OSError as problem:
        if is_for_want_of_resources(problem):
            raise MemoryError(f"{path} cannot be tried: {problem}") from problem
        raise UserError.of(
            "data.tokenizer_file_unknown", path=path, reason=problem.strerror
        ) from problem
    # both libraries raise bare Exception or RuntimeError on a file they cannot read
    except Exception as problem:
        if is_for_want_of_resources(problem):
            raise MemoryError(f"{path} cannot be read: {problem}") from problem
        kind = "" if content is None else another_kind(path, content[:4096])
        reason = kind or " ".join(str(problem).split())
        raise not_a_tokenizer(path, reason) from problem


def _require_file(path: Path) -> None:
    """Raise UserError if a path is no file, and name one in the folder that it is."""
    if path.is_file():
        return
    inside = [path / name for name in NAMES if (path / name).is_file()]
    usual = "a SentencePiece .model or a Hugging Face tokenizer.json"
    raise UserError.of(
        "data.tokenizer_file_unusable",
        path=path,
        problem=why_no_file(path),
        inside=inside[0] if inside else usual,
    )


def _tokenizer_of(path: Path, content: bytes) -> Tokenizer:
    """Return the tokenizer of a file that was read."""
    of_characters = read_characters(path, content)
    if of_characters and not _names_tokens(path):
        return of_characters
    # in a process of its own: an odd file could end this one
    require_tried(path, content)
    if is_json(content):
        return HuggingFaceTokenizer(path)
    return SentencePieceTokenizer(path)


def _names_tokens(path: Path) -> bool:
    """Return True if settings beside a tokenizer.json name tokens."""
    settings = read_settings(path, {})
    return bool(settings.named or settings.added or settings.further)


def same_tokens(first: Path, second: Path) -> bool:
    """Return True if equal ids mean equal tokens in two files of tokenizers, and a text of many
    kinds has equal ids.

    A SentencePiece model and the tokenizer.json that was made of it have the same. Raises
    UserError.
    """
    if read_whole(first) == read_whole(second):
        return True
    return tokens_digest(load_tokenizer(first)) == tokens_digest(load_tokenizer(second))


def tokens_digest(tokenizer: Tokenizer) -> str:
    """Return a SHA-256 of what the ids mean: equal for two tokenizers that `same_tokens` holds for
    the same."""
    meaning = [tokenizer.vocabulary(), _ids_of_probe(tokenizer)]
    # Sorted, for libraries list their tokens in orders of their own.
    content = json.dumps(meaning, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def has_built(tokenizer: Tokenizer, record: Mapping[str, Any]) -> bool | None:
    """Return whether the tokens of a data set are those of `tokenizer`, as the record of its build
    says.

    None: the files differ, and earlier versions recorded nothing else, so the tokens may be the
    same.
    """
    file = hashlib.sha256(read_whole(tokenizer.path)).hexdigest()
    if record.get(FILE_DIGEST) == file:
        return True
    recorded = record.get(TOKENS_DIGEST)
    return None if recorded is None else recorded == tokens_digest(tokenizer)


def _ids_of_probe(tokenizer: Tokenizer) -> list[int] | None:
    try:
        return tokenizer.encode(PROBE)
    except UserError:  # it has what no token is for
        return None


def loaded_once(path: Path) -> Tokenizer | None:
    """Return the tokenizer in this file; None if there is none that can be loaded.

    It is loaded only once while the file and the settings beside it stay the same.
    """
    try:
        contents = tuple(read_whole(file) for file in (path, *settings_of(path)))
        return _load_cached(path, contents)
    except (OSError, UserError):
        return None


@lru_cache(maxsize=2)
def _load_cached(path: Path, contents: tuple[bytes, ...]) -> Tokenizer:
    """Return the tokenizer at `path`; `contents` are only a part of the cache's key."""
    return load_tokenizer(path)


def _id_of(
    role: str,
    settings: TokenizerSettings,
    vocabulary: Mapping[str, int],
    default: int | None = None,
) -> int | None:
    """Return the id of the token that settings name for a role; `default` if they name none."""
    if role not in settings.named:
        return default
    token, _ = settings.named[role]
    return vocabulary[token]


def _usual_eos(
    path: Path,
    vocabulary: Mapping[str, int],
    special: set[str],
) -> int | None:
    """Return the id of the token that ends a document by its usual name.

    Raises UserError if there are several.
    """
    present = [name for name in USUAL_EOS if name in vocabulary]
    # a special token before one that a text may spell
    candidates = [name for name in present if name in special] or present
    if len(candidates) > 1:
        raise UserError.of(
            "data.end_token_ambiguous",
            path=path,
            candidates=" and ".join(candidates),
            config=CONFIG,
            example=candidates[0],
        )
    return vocabulary[candidates[0]] if candidates else None


def _end_in_texts(
    path: Path,
    eos: int | None,
    vocabulary: Mapping[str, int],
    encode: Callable[[str], list[int]],
) -> tuple[str, ...]:
    """Return a note if a text can hold the token that ends a document, which is then no special
    one."""
    token = next((token for token, token_id in vocabulary.items() if token_id == eos), "")
    try:
        is_ordinary = eos in encode(token)
    except Exception:  # the libraries raise bare Exception; such texts are refused
        return ()
    if not is_ordinary:
        return ()
    return (
        f"{path}: {token!r}, which ends a document, is no special token: a text that holds it has "
        "this token, too",
    )


def _checked_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids. Raises UserError for one beyond the vocabulary."""
    token_ids = [int(each) for each in ids]
    vocab_size = tokenizer.vocab_size
    # The libraries leave such ids out, or raise errors without a name.
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise UserError.of(
                "data.token_missing", path=tokenizer.path, wrong=token_id, vocab_size=vocab_size
            )
    return token_ids


def _require_unicode(text: str) -> str:
    """Return `text`.

    Raises UserError if it contains half of a surrogate pair, which no tokenizer can encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError.of("data.half_surrogate") from problem
    return text
