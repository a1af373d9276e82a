"""User-facing errors, and "did you mean" hints for unknown words."""

import difflib
from collections.abc import Iterable

LONGEST_LINE = 2000  # characters
# characters that stay of a longer line
BEGIN_OF_LINE = 1600
END_OF_LINE = 390
LONGEST_WORD = 200  # characters of a word for which a similar one is looked for
# of a word that is suggested: twice the letters in common, as a share of the letters of both
LEAST_LIKENESS = 0.75
SHORT_WORD = 4  # letters; one slip changes much of it
LEAST_LIKENESS_OF_SHORT = 0.6


class UserError(ValueError):
    """Bad input, described in lines that the user can act on.

    Each problem is one line that names the value, the reason why it is refused and a value that
    would work. All problems found are raised together; the command prints them without a traceback
    and exits with code 2. Line ends and other signs that do not print are escaped, and the middle
    of a very long line is left out.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(_one_line, problems))
        super().__init__("\n".join(self.problems))


def _one_line(problem: str) -> str:
    """Return a problem as one line of a bounded length that any terminal prints."""
    if not problem.isprintable():
        problem = "".join(
            sign if sign.isprintable() else sign.encode("unicode_escape").decode()
            for sign in problem
        )
    if len(problem) > LONGEST_LINE:
        problem = f"{problem[:BEGIN_OF_LINE]} ... {problem[-END_OF_LINE:]}"
    return problem


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
    return by_letters[matches[0]] if matches else ""


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a hint to append to a message: the `known` word closest to the unknown `word`; empty
    if none is close."""
    suggestion = closest(word, known)
    return f"; did you mean {form.format(suggestion)}?" if suggestion else ""
