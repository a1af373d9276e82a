"""Marks, in the text of its words, for what a shell script leaves open.

A mark is a number between two characters of Unicode's private use area, so splitting a text at
spaces never cuts one. It stands for a variable without a value, a command that would have to be
run, or a value that depends on one of these.
"""

import re
import textwrap

OPEN = "\ue000"
CLOSE = "\ue001"
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Unknown:
    """The marks of one script, each with what it shows and why that is not known."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, str]] = []

    def mark(self, shown: str, reason: str) -> str:
        """Return a text that stands for `shown`. reason: why it is not known, with the way to give
        it."""
        self._marks.append((shown, reason))
        return f"{OPEN}{len(self._marks) - 1}{CLOSE}"

    def variable(self, name: str) -> str:
        """Return a mark for a variable that the script does not set."""
        if name in ("@", "*"):
            return self.mark(
                f"${name}",
                f"${name} stands for the script's own arguments: --assume '{name}=...' gives them",
            )
        return self.mark(
            f"${name}", f"${name} has no value in the script: --assume {name}=VALUE gives it"
        )

    def command(self, shown: str) -> str:
        """Return a mark for what the shell would have to run."""
        short = textwrap.shorten(shown, 80, placeholder=" ...)")  # on one line
        return self.mark(short, f"{short} would have to be run: write its value")

    def reason(self, text: str) -> str:
        """Return why the text is not known; "" if it is."""
        match = MARK.search(text)
        return self._marks[int(match.group(1))][1] if match else ""

    def shown(self, text: str) -> str:
        """Return the text with what its marks stand for."""
        return MARK.sub(lambda match: self._marks[int(match.group(1))][0], text)

    def names(self, text: str) -> list[str]:
        """Return the variables that the marks of the text stand for."""
        shown = (self._marks[int(number)][0] for number in MARK.findall(text))
        return [one[1:] for one in shown if one[1:].isidentifier()]
