"""The items of a JSON list, one after the other, from a file that need not fit into memory."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TextIO

READ = 1 << 20  # characters that are read at least
MOST_ITEM = 1 << 26  # characters of an item, which is parsed whole


def once(field: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook that makes objects; it raises ValueError for one with the field twice, of which
    one is lost."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if sum(key == field for key, _ in pairs) > 1:
            raise ValueError(f"field {field!r} is given twice in an object")
        return dict(pairs)

    return made


def items(stream: TextIO, field: str) -> Iterator[Any]:
    """Yield the items of a list. Raises ValueError, after the items before it, where the text is no
    JSON list.

    field: must not be given twice in an object.
    """
    ahead = _Ahead(stream, json.JSONDecoder(object_pairs_hook=once(field)))
    if ahead.sign() != "[":
        raise ValueError("it does not begin with [")
    ahead.skip()
    if ahead.sign() != "]":
        yield ahead.value()
        while ahead.sign() == ",":
            ahead.skip()
            yield ahead.value()
    if (sign := ahead.sign()) != "]":
        raise ValueError(f"{sign!r} where , or ] is expected" if sign else "the list breaks off")
    ahead.skip()
    if ahead.sign():
        raise ValueError("there is more after the end of the list")


class _Ahead:
    """The part of a text that was read but not used yet: `text` from `at` on."""

    def __init__(self, stream: TextIO, decoder: json.JSONDecoder) -> None:
        self.stream = stream
        self.decoder = decoder
        self.text = ""
        self.at = 0

    def sign(self) -> str:
        """Return the next sign that is no space; empty at the end of the text."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Go on behind the next sign."""
        self.at += 1

    def value(self) -> Any:
        """Return the next value. Raises ValueError if there is none, or one of more than
        `MOST_ITEM` characters."""
        self.sign()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                if (
                    end < len(self.text) or not self._read()
                ):  # a number may go on behind what is read
                    self.at = end
                    return value
            except json.JSONDecodeError:
                if len(self.text) - self.at > MOST_ITEM:
                    raise ValueError(
                        f"an item is not JSON, or has more than {MOST_ITEM:,} characters"
                    ) from None
                if not self._read():
                    raise

    def _read(self) -> bool:
        """Drop what is used and read at least as much as is left. Returns False at the end of the
        text."""
        left = self.text[self.at :]
        more = self.stream.read(max(READ, len(left)))
        if more:
            self.text = left + more
            self.at = 0
        return bool(more)
