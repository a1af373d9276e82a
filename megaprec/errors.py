"""User-facing errors, and "did you mean" hints for unknown words.

The sentences of errors stand in messages.toml, each under a code that stays the same when its
sentence is reworded. docs/errors.md lists them.
"""

import difflib
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Self

from megaprec.url_secrets import masked

SENTENCES = Path(__file__).with_name("messages.toml")

LONGEST_LINE = 2000  # characters
# characters that stay of a longer line
BEGIN_OF_LINE = 1600
END_OF_LINE = 390
LONGEST_WORD = 200  # characters of a word for which a similar one is looked for
# of a word that is suggested: twice the letters in common, as a share of the letters of both
LEAST_LIKENESS = 0.75
SHORT_WORD = 4  # letters; one slip changes much of it
LEAST_LIKENESS_OF_SHORT = 0.6


class Problem(str):
    """A sentence about bad input that knows its code and the values that it names.

    code: like "data.no_room"; "" for a sentence without one.
    fields: what the sentence names, by name. Numbers, texts, truth values and None are themselves,
        all others their text.
    Neither says secrets of URLs (`url_secrets`).
    """

    code: str
    fields: dict[str, Any]

    def __new__(cls, sentence: str, code: str = "", fields: dict[str, Any] | None = None) -> Self:
        problem = super().__new__(cls, masked(sentence))
        problem.code = code
        problem.fields = fields or {}
        return problem

    @classmethod
    def of(cls, code: str, /, **fields: Any) -> Self:
        """Return the sentence of a code, with the values of its fields filled in."""
        area, _, name = code.partition(".")
        told = {key: _told(value) for key, value in fields.items()}
        template = sentences()[area][name]
        sentence = template.format(**told)
        plain_fields = {key: _plain(value) for key, value in told.items()}
        return cls(sentence, code, plain_fields)

    def within(self, before: str = "", after: str = "") -> "Problem":
        """Return the problem with text put before and after its sentence. The code stays."""
        sentence = f"{before}{self}{after}"
        return Problem(sentence, self.code, self.fields)


def _told(value: Any) -> Any:
    """Return a value as a sentence tells it: of an error of the system, whose text is Python's, the
    reason alone. The sentence names the file."""
    if isinstance(value, OSError) and value.strerror:
        return value.strerror
    if isinstance(value, UnicodeDecodeError):
        return f"not {value.encoding} text at byte {value.start:,}: {value.reason}"
    return value


def _plain(value: Any) -> Any:
    """Return a value that JSON can say, without secrets of URLs."""
    return value if isinstance(value, int | float | None) else masked(str(value))


@cache
def sentences() -> dict[str, dict[str, str]]:
    """Return the sentences of all errors, by area and name; "area.name" is a code."""
    text = SENTENCES.read_text(encoding="utf-8")
    return tomllib.loads(text)


class UserError(ValueError):
    """Bad input, described in lines that the user can act on.

    Each problem is one line that names the value, the reason why it is refused and a value that
    would work. All problems found are raised together; the command prints them without a traceback
    and exits with code 2. Line ends and other signs that do not print are escaped, and the middle
    of a very long line is left out.

    problems: the lines. A line whose sentence stands in messages.toml is a `Problem` with a code.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(_one_line, problems))
        super().__init__("\n".join(self.problems))

    @classmethod
    def of(cls, code: str, /, **fields: Any) -> Self:
        """Return an error of one problem: the sentence of `code` in messages.toml, with `fields`
        filled in."""
        return cls(Problem.of(code, **fields))

    @property
    def codes(self) -> tuple[str, ...]:
        """The code of each problem; "" for one without."""
        return tuple(problem.code for problem in self.problems)


def _one_line(problem: str) -> Problem:
    """Return a problem as one line of a bounded length that any terminal prints."""
    line = str(problem)
    if not line.isprintable():
        line = "".join(map(_printed, line))
    if len(line) > LONGEST_LINE:
        begin = line[:BEGIN_OF_LINE]
        end = line[-END_OF_LINE:]
        line = f"{begin} ... {end}"
    if isinstance(problem, Problem):
        return Problem(line, problem.code, problem.fields)
    return Problem(line)


def _printed(sign: str) -> str:
    r"""Return a sign as it is; its escape, as \n, if it does not print."""
    if sign.isprintable():
        return sign
    escape = sign.encode("unicode_escape")
    return escape.decode()


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like an unknown one; "" if none is like it. Leading dashes
    are no part of a word.
    """
    if len(word) > LONGEST_WORD:
        return ""
    by_letters = {name.lstrip("-"): name for name in known}
    letters = word.lstrip("-")
    cutoff = LEAST_LIKENESS_OF_SHORT if len(letters) <= SHORT_WORD else LEAST_LIKENESS
    matches = difflib.get_close_matches(letters, by_letters, n=1, cutoff=cutoff)
    if not matches:
        return ""
    (most_like,) = matches
    return by_letters[most_like]


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a hint to append to a message: the `known` word closest to the unknown `word`; empty
    if none is close."""
    suggestion = closest(word, known)
    return f"; did you mean {form.format(suggestion)}?" if suggestion else ""
