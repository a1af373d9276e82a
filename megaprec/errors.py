"""User-facing errors, and "did you mean" hints for unknown words."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, described in lines that the user can act on.

    Each problem is one line that names the value, the reason why it is refused and a value that would work. All
    problems found are raised together; the command prints them without a traceback and exits with code 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a hint to append to a message: the `known` word closest to the unknown `word`; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""
