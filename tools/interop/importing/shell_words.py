"""Words of a command line, and holes in them: the signs of what is not known.

A hole goes with a text through assignments, strings that hold commands and arrays, and the word
that it ends in is not known.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megaprec.errors import Problem

HOLE = re.compile("\ue000(\\d+)\ue001")
# the letters of a hole in the text of a script itself, which has none
HOLE_SIGNS = str.maketrans("\ue000\ue001", "\ufffd\ufffd")


@dataclass(frozen=True)
class Word:
    """A word of a command line.

    place: the file and line that it stands in; "" for a command line that is given as text.
    unknown: why it is not known, with the way to give it; None if it is.
    """

    text: str
    place: str = ""
    unknown: Problem | None = None


Segment = list[Word] | None
"""A part of a word: the words of an expansion, of which the first and the last join what stands
beside them, or None for the end of a word."""


class Holes:
    """The parts of texts that are not known: how they are written in the script, and why."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._causes: list[Problem] = []

    def add(self, written: str, why: Problem) -> str:
        """Return the sign of what is not known."""
        number = len(self._causes)
        self._written.append(self.shown(written))
        self._causes.append(why)
        return f"\ue000{number}\ue001"

    def shown(self, text: str) -> str:
        """Return a text with its holes as they are written in the script."""
        return HOLE.sub(lambda hole: self._written[int(hole[1])], text)

    def causes(self, text: str) -> list[Problem]:
        """Return why the holes of a text are not known."""
        return [self._causes[int(number)] for number in HOLE.findall(text)]

    def finished(self, word: Word) -> Word:
        """Return a word as it is given to the reader of arguments."""
        causes = self.causes(word.text)
        if not causes:
            return word
        return Word(self.shown(word.text), word.place, causes[0])


def joined_segments(segments: Iterable[Segment]) -> list[Word]:
    """Return the words that segments make."""
    words = list[Word]()
    goes_on = False
    for segment in segments:
        if segment is None:
            goes_on = False
            continue
        for number, word in enumerate(segment):
            if goes_on and number == 0:  # it joins what stands before it
                begin = words.pop()
                words.append(replace(word, text=begin.text + word.text))
            else:
                words.append(word)
            goes_on = True
    return words


def cut_at_blanks(text: str, place: str) -> list[Word]:
    """Return the words of a text."""
    return [Word(part, place) for part in text.split()]


def joined_texts(words: Iterable[Word]) -> str:
    """Return the texts of words, with blanks between them."""
    return " ".join(word.text for word in words)
