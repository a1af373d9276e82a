"""User-facing errors, and "did you mean" hints for unknown words."""

import difflib
from collections.abc import Iterable

LONGEST_LINE = 2000  # characters
LONGEST_WORD = 200  # characters of a word for which a similar one is looked for


class UserError(ValueError):
    """Bad input, described in lines that the user can act on.

    Each problem is one line that names the value, the reason why it is refused and a value that would work. All
    problems found are raised together; the command prints them without a traceback and exits with code 2.
    Line ends and other signs that do not print are escaped, and the middle of a very long line is left out.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(_one_line, problems))
        super().__init__("\n".join(self.problems))


def _one_line(problem: str) -> str:
    """Return a problem as one line of a bounded length that any terminal prints."""
    if not problem.isprintable():
        problem = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in problem)
    if len(problem) > LONGEST_LINE:
        problem = f"{problem[: LONGEST_LINE - 400]} ... {problem[-390:]}"
    return problem


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a hint to append to a message: the `known` word closest to the unknown `word`; empty if none is close."""
    if len(word) > LONGEST_WORD:
        return ""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""
