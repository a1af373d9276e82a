"""The items of a JSON list, one after the other, from a file that need not fit into memory."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from megaprec.parsing import NESTING, TOO_DEEP, require_few_values, require_shallow
from megaprec.tokens.bounds import MAX_ITEM, MAX_VALUES

READ = 1 << 20  # characters that are read at a time, at least


def once(fields: Sequence[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook by which `json` makes objects.

    It raises ValueError for an object with one of the fields twice, of which one would be lost.
    """

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for field in fields:
            if keys.count(field) > 1:
                raise ValueError(f"field {field!r} is given twice in an object")
        return dict(pairs)

    return make_object


def row_value(text: str | bytes, fields: Sequence[str]) -> Any:
    """Return the value of a row of JSON.

    fields: must not be given twice in an object; without any that is not looked at.
    Raises ValueError, also for more than MAX_VALUES values and for one that is nested too deeply.
    """
    require_few_values(text, MAX_VALUES)
    try:
        value = json.loads(text, object_pairs_hook=once(fields) if fields else None)
    except RecursionError as problem:
        raise ValueError(TOO_DEEP) from problem
    if _num_brackets(text, 0, len(text)) > NESTING:
        require_shallow(value)
    return value


def _num_brackets(text: str | bytes, begin: int, end: int) -> int:
    """Return how many lists and objects may begin in a part of a JSON text."""
    if isinstance(text, bytes):
        return text.count(b"[", begin, end) + text.count(b"{", begin, end)
    return text.count("[", begin, end) + text.count("{", begin, end)


def items(stream: TextIO, fields: Sequence[str]) -> Iterator[Any]:
    """Yield the items of a list.

    fields: must not be given twice in an object.
    Raises ValueError, after the items before it, where the text is no JSON list.
    """
    lookahead = _Lookahead(stream, json.JSONDecoder(object_pairs_hook=once(fields)))
    if lookahead.sign() != "[":
        raise ValueError("it does not begin with [")
    lookahead.skip()
    if lookahead.sign() != "]":
        yield lookahead.value()
        while lookahead.sign() == ",":
            lookahead.skip()
            yield lookahead.value()
    if (sign := lookahead.sign()) != "]":
        raise ValueError(f"{sign!r} where , or ] is expected" if sign else "the list breaks off")
    lookahead.skip()
    if lookahead.sign():
        raise ValueError("there is more after the end of the list")


class _Lookahead:
    """The part of a text that was read but not used yet: `text` from `position` on."""

    def __init__(self, stream: TextIO, decoder: json.JSONDecoder) -> None:
        self.stream = stream
        self.decoder = decoder
        self.text = ""
        self.position = 0

    def sign(self) -> str:
        """Return the next sign that is no space; empty at the end of the text."""
        while True:
            while self.position < len(self.text) and self.text[self.position].isspace():
                self.position += 1
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._read():
                return ""

    def skip(self) -> None:
        """Go on behind the next sign."""
        self.position += 1

    def value(self) -> Any:
        """Return the next value.

        Raises ValueError if there is none, or one of more than `MAX_ITEM` characters.
        """
        self.sign()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.position)
                # A number may go on behind what was read: then it is parsed again.
                if end < len(self.text) or not self._read():
                    if _num_brackets(self.text, self.position, end) > NESTING:
                        require_shallow(value)
                    self.position = end
                    return value
            except json.JSONDecodeError:
                if len(self.text) - self.position > MAX_ITEM:
                    raise ValueError(
                        f"an item is not JSON, or has more than {MAX_ITEM:,} characters"
                    ) from None
                if not self._read():
                    raise

    def _read(self) -> bool:
        """Drop what is used and read on. Return False at the end of the text."""
        unused = self.text[self.position :]
        # at least as much again, so that a long item is not parsed for every READ characters
        following = self.stream.read(max(READ, len(unused)))
        if not following:
            return False
        self.text = unused + following
        # a long item, of which all values are made at once
        if unused:
            require_few_values(self.text, MAX_VALUES)
        self.position = 0
        return True
