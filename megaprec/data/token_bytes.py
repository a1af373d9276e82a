"""The bytes of text that each token stands for, where a tokenizer has such a number.

The bytes of a text are then the sum over its tokens, also of a part that begins or ends within a
word or a character. A tokenizer that changes texts, such as one that lowers capital letters, has no
such numbers, and neither has a token for what is unknown.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megaprec.data.characters import CharacterTokenizer
from megaprec.data.tokenizer import LOST, PROBE, Tokenizer

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ANCHOR = "a"  # a text before a token, so that a space at its beginning is not taken away
SPACE_SIGN = "\u2581"
NOT_KNOWN = -1
# of a tokenizer, the spellings of its tokens by id, and one id
_Count = Callable[[Tokenizer, dict[int, str], int], int]


def bytes_of_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> NDArray[np.int64] | None:
    """Return the bytes of the tokens with these ids, int64 [ids], NOT_KNOWN for an unknown one;
    None if the tokenizer has no such numbers.
    """
    if isinstance(tokenizer, CharacterTokenizer):
        bytes_of_characters = [len(character.encode()) for character in tokenizer.vocabulary()]
        return np.array([bytes_of_characters[number] for number in ids], np.int64)
    spellings = {number: spelled for spelled, number in tokenizer.vocabulary().items()}
    for count in (_by_letters, _by_text):
        if _holds(tokenizer, spellings, count):
            return np.array([count(tokenizer, spellings, number) for number in ids], np.int64)
    return None


def _holds(tokenizer: Tokenizer, spellings: dict[int, str], count: _Count) -> bool:
    """Return True if numbers of tokens add up to the bytes of texts that are hard to keep."""
    for text in (PROBE, *LOST.values()):
        # SentencePiece spells a space with this sign, which itself may be spelled in other bytes.
        text = text.replace(SPACE_SIGN, "")
        numbers = [count(tokenizer, spellings, number) for number in tokenizer.encode(text)]
        if NOT_KNOWN in numbers or sum(numbers) != len(text.encode()):
            return False
    return True


def _by_letters(tokenizer: Tokenizer, spellings: dict[int, str], number: int) -> int:
    """Return the bytes of a token of a byte-level tokenizer, which spells each byte as a letter."""
    if not tokenizer.decode([number]):  # a special token has no text
        return 0
    return len(spellings.get(number, ""))


def _by_text(tokenizer: Tokenizer, spellings: dict[int, str], number: int) -> int:
    """Return the bytes of a token's text, of which some tokens spell a single byte in words."""
    if number == tokenizer.unk:
        return NOT_KNOWN
    if BYTE_PIECE.fullmatch(spellings.get(number, "")):
        return 1
    anchor = tokenizer.encode(ANCHOR)
    before = tokenizer.decode(anchor)
    text = tokenizer.decode([*anchor, number])
    return len(text.encode()) - len(before.encode())
