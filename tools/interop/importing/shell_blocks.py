"""Blocks of a shell script: conditions, loops, functions."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.interop.importing.shell_tokens import Token

OPENERS = ("if", "while", "until", "for", "select", "case")
CLOSERS = ("fi", "done", "esac", "}")
BEFORE_COMMANDS = ("if", "while", "until", "{", "then", "do", "else", "elif", "!", "time")
BEFORE_STATEMENTS = ("then", "do", "else")
UNREAD = ("other", "torn", "document")  # kinds of tokens that no condition is made of

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
    with torn quotes, or with a sign that is no part of a word and no bracket, stays whole, for it
    may end elsewhere than it seems."""
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
    if statements[0][0].text != "if" or _texts(last) != ["fi"]:
        return None
    branches = list[Branch]()
    inner = Block()
    awaits_then = False
    for number, statement in enumerate(inside):
        word = statement[0].text
        begins_branch = number == 0 or word == "elif"
        if inner.is_outside and begins_branch:
            branches.append((statement[1:], []))
            awaits_then = True
        elif inner.is_outside and word == "else":
            branches.append(([], []))
        elif not awaits_then:
            inner.add(statement)
            _, body = branches[-1]
            body.append(statement)
        elif _texts(statement) == ["then"]:
            awaits_then = False
        else:
            return None
    return None if _has_odd_condition(branches) else branches


def _has_odd_condition(branches: Sequence[Branch]) -> bool:
    """Return True if what is not read stands in a condition."""
    for condition, _ in branches:
        kinds = {token.kind for token in condition}
        if not kinds.isdisjoint(UNREAD):
            return True
    return False


def _texts(statement: Sequence[Token]) -> list[str]:
    return [token.text for token in statement]


class CaseBlock(NamedTuple):
    """A `case`: the word that is looked at, and the patterns of each branch with its statements."""

    word: Token
    branches: list[tuple[list[Token], list[list[Token]]]]


def choice_of(statements: Sequence[list[Token]]) -> CaseBlock | None:
    """Return the branches of a `case`; None for another block, for one within it, and for branches
    that go on in the next one."""
    lines = [[*statement] for statement in statements]
    texts = _texts(lines[0])
    end = lines[-1].pop()
    if texts[:1] != ["case"] or texts[2:3] != ["in"] or end.text != "esac":
        return None
    word = lines[0][1]
    del lines[0][:3]
    reader = _CaseReader(CaseBlock(word, []))
    for line in lines:
        if any(map(_makes_case_odd, line)):
            return None
        reader.add(line)
    return reader.choice


def _makes_case_odd(token: Token) -> bool:
    """Return True for a `case` within another, and for `;&` and `;;&`, behind which the next branch
    follows."""
    return token.text in ("case", "esac") or token.text.startswith((";&", ";;&"))


class _CaseReader:
    """A `case` that is read line by line. choice: what was read."""

    def __init__(self, choice: CaseBlock) -> None:
        self.choice = choice
        self._in_patterns = True
        self._patterns: list[Token] = []

    def add(self, line: Sequence[Token]) -> None:
        """Add a line."""
        statement = list[Token]()
        for token in line:
            if self._in_patterns:
                self._add_to_patterns(token)
            elif token.text.startswith(";;"):
                self._add_statement(statement)
                statement = []
                self._in_patterns = True
            else:
                statement.append(token)
        self._add_statement(statement)

    def _add_to_patterns(self, token: Token) -> None:
        if token.text == ")":
            self.choice.branches.append((self._patterns, []))
            self._patterns = []
            self._in_patterns = False
        elif token.kind == "word":
            self._patterns.append(token)

    def _add_statement(self, statement: list[Token]) -> None:
        if statement:
            _, body = self.choice.branches[-1]
            body.append(statement)


def function_of(statements: Sequence[list[Token]]) -> tuple[str, list[list[Token]]] | None:
    """Return name and body of a function; None for another block."""
    first, *others = statements
    words = [*first]
    if words[0].text == "function":
        del words[0]
    texts = _texts(words)
    opening = 3 if texts[1:3] == ["(", ")"] else 1  # the index of the bracket
    has_bracket = texts[opening : opening + 1] == ["{"]
    if not has_bracket or not others:
        return None
    name = texts[0]
    *body, last = others
    is_name = name.replace("-", "_").isidentifier()
    if not is_name or _texts(last) != ["}"]:
        return None
    begin = words[opening + 1 :]
    if begin:
        body.insert(0, begin)
    return name, body
