"""The character tokenizer: each character of a text is a token, and ids follow the code points.

Its file is a `tokenizer.json` of a list of words, each of one character, so that the package
`tokenizers` and transformers split texts alike. This module needs neither. There is no token for
the end of a document, and none for a character that the text does not have: such a text is refused.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.text.encoding import (
    EACH_CHARACTER,
    CharacterMissing,
    EncodeRendered,
    character_encoder,
    characters_of,
)

CHARACTERS = "characters"
"""The value of data.tokenizer that asks for this tokenizer."""


class CharacterTokenizer:
    """A tokenizer of characters. characters: all that it knows, in the order of their ids."""

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    unk: int | None = None
    holes: frozenset[int] = frozenset()
    special: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    encode_rendered: EncodeRendered | None = None  # no text is a special token

    def __init__(self, path: Path, characters: Sequence[str]) -> None:
        self.path = path
        self.vocab_size = len(characters)
        self._characters = characters
        self._encode = character_encoder(characters)

    def encode(self, text: str) -> list[int]:
        """Return an id for each character. Raises UserError for a character that has none."""
        try:
            return self._encode(text)
        except CharacterMissing as problem:
            raise UserError.of(
                "data.text_not_encodable", path=self.path, problem=problem
            ) from problem

    def decode(self, ids: Sequence[int]) -> str:
        """Return the characters of ids. Raises UserError for an id that no character has."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise UserError.of(
                    "data.token_missing",
                    path=self.path,
                    wrong=int(token_id),
                    vocab_size=self.vocab_size,
                )
        return "".join(self._characters[token_id] for token_id in ids)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each character."""
        return {character: token_id for token_id, character in enumerate(self._characters)}


def distinct_characters(texts: Iterable[str]) -> list[str]:
    """Return the characters of texts, each once, in the order of their code points.

    Raises UserError for half of a surrogate pair, which is no character.
    """
    found = set[str]()
    for text in texts:
        found.update(text)
    characters = sorted(found)
    try:
        "".join(characters).encode()
    except UnicodeEncodeError as problem:
        raise UserError.of("data.half_surrogate") from problem
    return characters


def character_file(characters: Sequence[str]) -> bytes:
    """Return the content of the file of a character tokenizer."""
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": EACH_CHARACTER},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # the library asks for the name of an unknown token, which the list does not have
        "model": {
            "type": "WordLevel",
            "vocab": {character: token_id for token_id, character in enumerate(characters)},
            "unk_token": "<unk>",
        },
    }
    return f"{json.dumps(definition, indent=1)}\n".encode()


def read_characters(path: Path, content: bytes) -> CharacterTokenizer | None:
    """Return the tokenizer of a file if it is one of characters. content: of the file."""
    characters = characters_of(content)
    return None if characters is None else CharacterTokenizer(path, characters)
