"""The commands of a shell script that run: branches of `if`, lists of `&&` and `||`, groups, loops and subshells.

Each has three values: it runs, it does not, or that is not known.
"""

from megaprec.errors import UserError
from tools.importing.shell_words import Command

LOOPS = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done"}
MOST_DEPTH = 20


class Flow:
    """The place in a script of the given name. link: what ended the command before. loops: the ends
    of open loops."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.link = ""
        self.loops = list[str]()
        self._branches = list[bool | None]()
        self._taken = list[bool | None]()
        self._shells = list[dict[str, list[str]]]()  # values before each subshell that is open
        self._status: bool | None = True  # outcome of the commands so far that && and || join

    def open(self, word: str) -> None:
        """Begin the condition of an `if` or `elif`."""
        self.link = ""
        if word == "if":
            self._branches.append(None)
            self._taken.append(False)

    def decide(self, holds: bool | None) -> None:
        """Begin the branch of a condition. holds: its outcome, None if not known."""
        if not self._branches:
            return
        before = self._taken[-1]
        if before is True:
            self._branches[-1] = False
        elif before is False:
            self._branches[-1] = holds
        elif holds is False:
            self._branches[-1] = False
        else:
            self._branches[-1] = None
        if before is True or holds is True:
            self._taken[-1] = True
        elif None in (before, holds):
            self._taken[-1] = None
        else:
            self._taken[-1] = False

    def keyword(self, word: str) -> None:
        """Take note of a word that begins or ends a branch, a group or a loop."""
        if word == "else":
            if self._branches:
                self._branches[-1] = None if self._taken[-1] is None else not self._taken[-1]
        elif word == "fi":
            if self._branches:
                self._branches.pop()
                self._taken.pop()
        elif word == "{":
            self._branches.append(self.runs())
            self._taken.append(True)
            self.link = ""
        elif word == "}":
            if self._branches:
                self._branches.pop()
                self._taken.pop()
        elif self.loops and word == self.loops[-1]:
            self.loops.pop()

    def enter(self, certain: bool) -> tuple[int, int, int]:
        """Begin the commands of a function or file that is taken in; returns what `leave` takes."""
        kept = len(self._branches), len(self.loops), len(self._shells)
        self._branches.append(self.runs() if certain else None)
        self._taken.append(True)
        self.link = ""
        return kept

    def leave(self, kept: tuple[int, int, int]) -> None:
        """End the commands of a function or file, also within a branch or loop of it."""
        branches, loops, shells = kept
        del self._branches[branches:]
        del self._taken[branches:]
        del self.loops[loops:]
        del self._shells[shells:]

    def shells(self) -> int:
        """Return how many subshells are open."""
        return len(self._shells)

    def asks(self) -> bool:
        """Return False where the condition of an `if` is not asked, because of what is around
        it."""
        return False not in self._branches[:-1]

    def runs(self) -> bool | None:
        """Return True if the next command runs after those before it in a list of && and ||, None if not known."""
        if self.link not in ("&&", "||"):
            return True
        if self.link == "&&" or self._status is None:
            return self._status
        return not self._status

    def mode(self) -> bool | None:
        """Return True where commands run, False where they do not, None where that is not known."""
        runs = (*self._branches, self.runs())
        if False in runs:
            return False
        return None if None in runs or self.loops else True

    def note(self, ran: bool | None, succeeded: bool | None) -> None:
        """Take note of a command that ran, did not, or may have (None), and of whether it
        succeeded."""
        if ran is not False:
            self._status = succeeded if ran or succeeded is self._status else None

    def end(self, command: Command, values: dict[str, list[str]]) -> dict[str, list[str]]:
        """Take note of the end of a command, and return the values after it.

        A subshell, `(`, begins with a copy of the values, and those before it count again after its
        end.
        """
        self.link = command.end
        if "esac" in self.loops[-1:]:
            return values  # the parentheses of a case are none
        if command.end == "(":
            self._shells.append(values)
            if len(self._shells) > MOST_DEPTH:
                raise UserError.of(
                    "import.commands_too_deep", shown=self._name, most_depth=MOST_DEPTH
                )
            return dict(values)
        return self._shells.pop() if command.end == ")" and self._shells else values
