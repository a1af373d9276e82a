"""The one kind of error that is the user's to mend, and the hint at what he may have meant."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, said in lines that a user can act on.

    Each problem is one line that names what was given, why it cannot be and what would do. All problems
    found are raised together; the command prints them without a traceback and exits with code 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """The end of a message about an unknown `word`: the known one that is most like it; empty if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""
