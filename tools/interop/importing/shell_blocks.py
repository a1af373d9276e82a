"""Blocks of a shell script: conditions, loops, functions."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.interop.importing.shell_tokens import Token

OPENERS = ("if", "while", "until", "for", "select", "case")
CLOSERS = ("fi", "done", "esac", "}")
BEFORE_COMMANDS = ("if", "while", "until", "{", "then", "do", "else", "elif", "!", "time")
BEFORE_STATEMENTS = ("then", "do", "else")

Branch = tuple[list[Token], list[list[Token]]]
"""The condition of a branch, empty for `else`, and the statements that follow it."""


class Block:
    """Statements up to the end of the block that the first of them opens.

    statements: those since the block began. has_opened: True if one of them opened a block.
    """

    def __init__(self) -> None:
        self.statements: list[list[Token]] = []
        self.has_opened = False
        self._open: list[str] = []

    @property
    def is_outside(self) -> bool:
        """True if no block is open."""
        return not self._open

    def clear(self) -> None:
        """Begin anew."""
        self.statements = []
        self.has_opened = False

    def add(self, statement: list[Token]) -> None:
        """Add a statement, and keep count of the blocks that it opens and closes."""
        self.statements.append(statement)
        begins = True  # the next word is the first of a command
        for token in statement:
            sign = token.text
            if sign in ("(", "{") or (begins and sign in OPENERS):
                self._open.append(sign)
                self.has_opened = True
            elif begins and sign in CLOSERS:
                self._open = self._open[:-1]
            elif sign == ")" and self._open[-1:] == ["("]:
                self._open.pop()
            begins_next = token.kind in ("end", "operator", "other")
            begins = begins_next or (begins and sign in BEFORE_COMMANDS)


def split_line(line: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the statements of a line. `then`, `do` and `else` are statements of their own. A line
    with torn quotes stays whole, for it may end elsewhere than it seems."""
    is_odd = any(
        token.kind == "torn" or (token.kind == "other" and token.text not in "()") for token in line
    )
    if is_odd:
        yield list(line)
        return
    statement = list[Token]()
    for token in line:
        is_keyword = not statement and token.text in BEFORE_STATEMENTS
        if token.kind != "end":
            statement.append(token)
        if (token.kind == "end" or is_keyword) and statement:
            yield statement
            statement = []
    if statement:
        yield statement


def branches_of(statements: Sequence[list[Token]]) -> list[Branch] | None:
    """Return the branches of an `if`; None for another block, and for conditions of several
    commands."""
    *inside, last = statements
    if statements[0][0].text != "if" or [token.text for token in last] != ["fi"]:
        return None
    branches = list[Branch]()
    inner = Block()
    is_condition = False
    for number, statement in enumerate(inside):
        word = statement[0].text
        if inner.is_outside and (number == 0 or word == "elif"):
            branches.append((statement[1:], []))
            is_condition = True
        elif inner.is_outside and word == "else":
            branches.append(([], []))
        elif is_condition:
            if word != "then" or len(statement) > 1:
                return None
            is_condition = False
        else:
            inner.add(statement)
            branches[-1][1].append(statement)
    is_odd = any(
        token.kind in ("other", "torn", "document")
        for condition, _ in branches
        for token in condition
    )
    return None if is_odd else branches


class CaseBlock(NamedTuple):
    """A `case`: the word that is looked at, and the patterns of each branch with its statements."""

    word: Token
    branches: list[tuple[list[Token], list[list[Token]]]]


def choice_of(statements: Sequence[list[Token]]) -> CaseBlock | None:
    """Return the branches of a `case`; None for another block, for one within it, and for branches
    that go on in the next one."""
    lines = [[*statement] for statement in statements]
    texts = [token.text for token in lines[0]]
    end = lines[-1].pop()
    if texts[:1] != ["case"] or texts[2:3] != ["in"] or end.text != "esac":
        return None
    choice = CaseBlock(lines[0][1], [])
    del lines[0][:3]
    in_patterns = True
    patterns = list[Token]()
    for line in lines:
        statement = list[Token]()
        for token in line:
            sign = token.text[:2]
            if token.text in ("case", "esac") or sign == ";&" or token.text[:3] == ";;&":
                return None
            if in_patterns and token.text == ")":
                choice.branches.append((patterns, []))
                patterns = []
                in_patterns = False
            elif in_patterns:
                patterns += [token] if token.kind == "word" else []
            elif sign == ";;":
                if statement:
                    choice.branches[-1][1].append(statement)
                statement = []
                in_patterns = True
            else:
                statement.append(token)
        if statement:
            choice.branches[-1][1].append(statement)
    return choice


def function_of(statements: Sequence[list[Token]]) -> tuple[str, list[list[Token]]] | None:
    """Return name and body of a function; None for another block."""
    first, *others = statements
    words = [*first]
    if words[0].text == "function":
        del words[0]
    texts = [token.text for token in words]
    opening = 3 if texts[1:3] == ["(", ")"] else 1
    is_whole = bool(others) and [token.text for token in others[-1]] == ["}"]
    if texts[opening : opening + 1] != ["{"] or not texts[0].replace("-", "_").isidentifier():
        return None
    begin = words[opening + 1 :]
    return (texts[0], [*([begin] if begin else []), *others[:-1]]) if is_whole else None
