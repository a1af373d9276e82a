"""The bytes of text that each token stands for, where a tokenizer has such a number.

The bytes of a text are then the sum over its tokens, also of a part that begins or ends within a
word or a character. A tokenizer that changes texts, such as one that lowers capital letters, has no
such numbers, and neither has a token for what is unknown. A tokenizer that changes other texts, as
one of the characters of a text does, may have them for the text at hand.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.tokenizer import LOST, PROBE, Tokenizer

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ANCHOR = "a"  # a text before a token, so that a space at its beginning is not taken away
SPACE_SIGN = "\u2581"
NOT_KNOWN = -1
# Returns the bytes of text that a token stands for, or NOT_KNOWN: of a tokenizer, the spellings of
# its tokens by id, and the id of the token.
_Count = Callable[[Tokenizer, dict[int, str], int], int]


@dataclass(frozen=True)
class TokensOfText:
    """The tokens of a text: the ids that it has, how often it has each, and its bytes."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    nbytes: int

    @staticmethod
    def of(tokens: NDArray[np.integer], nbytes: int) -> "TokensOfText":
        """Count the tokens of a text of so many bytes."""
        ids, counts = np.unique(tokens, return_counts=True)
        return TokensOfText(ids.astype(np.int64), counts, nbytes)


def bytes_of_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], texts: Sequence[TokensOfText] = ()
) -> NDArray[np.int64] | None:
    """Return the bytes of the tokens with these ids, int64 [ids], NOT_KNOWN for an unknown one;
    None if the tokenizer has no such numbers.

    texts: those at hand. Numbers that add up to their bytes are right for them, whatever becomes of
        other texts.
    """
    vocabulary = tokenizer.vocabulary()
    if isinstance(tokenizer, CharacterTokenizer):
        bytes_of_characters = [len(character.encode()) for character in vocabulary]
        return np.array([bytes_of_characters[number] for number in ids], np.int64)
    spellings = {number: spelled for spelled, number in vocabulary.items()}
    # nothing says how a tokenizer spells bytes: the first way whose sums are right is its own
    for count in (_by_letters, _by_text):
        if _holds(tokenizer, spellings, count) or _holds_for(texts, tokenizer, spellings, count):
            numbers = [count(tokenizer, spellings, number) for number in ids]
            return np.array(numbers, np.int64)
    return None


def _holds(tokenizer: Tokenizer, spellings: dict[int, str], count: _Count) -> bool:
    """Return True if the bytes that `count` gives to tokens add up to the bytes of the text, for
    texts of many kinds."""
    for text in (PROBE, *LOST.values()):
        # SentencePiece spells a space with this sign, and the sign itself with other bytes.
        text = text.replace(SPACE_SIGN, "")
        try:
            ids = tokenizer.encode(text)
        except UserError:  # it has characters that no token is for
            return False
        bytes_of_ids = [count(tokenizer, spellings, number) for number in ids]
        nbytes = len(text.encode())
        if NOT_KNOWN in bytes_of_ids or sum(bytes_of_ids) != nbytes:
            return False
    return True


def _holds_for(
    texts: Sequence[TokensOfText], tokenizer: Tokenizer, spellings: dict[int, str], count: _Count
) -> bool:
    """Return True if there are texts, and the bytes that `count` gives to tokens add up to the
    bytes of each text."""
    for text in texts:
        ids = text.ids.tolist()
        bytes_of_ids = [count(tokenizer, spellings, number) for number in ids]
        if NOT_KNOWN in bytes_of_ids:
            return False
        nbytes = int(text.counts @ np.array(bytes_of_ids, np.int64))
        if nbytes != text.nbytes:
            return False
    return bool(texts)


def _by_letters(tokenizer: Tokenizer, spellings: dict[int, str], number: int) -> int:
    """Return the bytes of a token of a byte-level tokenizer, which spells each byte as a letter."""
    if not tokenizer.decode([number]):  # a special token has no text
        return 0
    return len(spellings.get(number, ""))


def _by_text(tokenizer: Tokenizer, spellings: dict[int, str], number: int) -> int:
    """Return the bytes that a token adds to a text when it is decoded; 1 for a token that stands
    for a single byte, such as <0x0A>."""
    if number == tokenizer.unk:
        return NOT_KNOWN
    spelling = spellings.get(number, "")
    if BYTE_PIECE.fullmatch(spelling):
        return 1
    try:
        anchor = tokenizer.encode(ANCHOR)
    except UserError:  # its texts have no such letter
        anchor = []
    text_before = tokenizer.decode(anchor)
    text_after = tokenizer.decode([*anchor, number])
    return len(text_after.encode()) - len(text_before.encode())
