"""The parts of a shell script: words, arrays, redirections, operators, here-documents."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megaprec.errors import UserError

NAME = r"\$(?: [A-Za-z_]\w*+ | [0-9@*\#?$!-] | \{ \w++ (?:\[[@*]\])? \} )"
# What a shell would run or change is not followed, so only its end counts.
_RUN = r"""[^()"'`<] | <(?!<-?[ \t]*['"\\]?[A-Za-z_]) | '[^']*' | "[^"()`]*" """
_RUN = rf"{_RUN} | \( (?:{_RUN})*+ \)"
_INNER = r"""\$\{[^{}"'`]*\}"""
ODD = rf"""
    \$\( (?: {_RUN} | \( (?:{_RUN})*+ \) )*+ \)
    | \$\{{ (?: {_INNER} | [^{{}}"'`] | '[^']*' | "(?: {_INNER} | [^"{{}}`] )*+" )*+ \}}
    | `[^`]*`"""
# What a word is made of.
PIECE = rf"""
    (?P<name> {NAME} )
    | (?P<odd> {ODD} | \{{ )
    | '(?P<single> [^']* )'
    | "(?P<double> (?: [^"\\`$] | \\. | {NAME} | {ODD} | \$(?![\w({{]) )*+ )"
    | \\\n
    | \\(?P<escape> . )
    | (?P<text> [^\s;&|()<>'"`\\${{]++ )"""
ITEM = re.sub(r"\?P<\w+>", "?:", f"(?: {PIECE} )++")
# What a script is made of. An operator goes on in the next line, a here-document has its end; a
# string with quotes within quotes is torn.
TOKEN = re.compile(
    rf"""
    (?P<blank> (?: [ \t\r] | \\\n )++ | \#[^\n]* )
    | (?P<newline> \n )
    | (?P<document> <<-?(?!<) [ \t]* ['"\\]? (?P<marker> [A-Za-z_]\w* ) .*? \n\t*(?P=marker)(?=\n) )
    | (?P<redirect> (?: &>>? | \d*(?: >>?[&|]? | <<< | <[&>]?(?!<) ) ) [ \t]* (?: {ITEM} )? )
    | (?P<operator> (?: && | \|\| | \|&? ) (?: \s | \#[^\n]* )*+ | ;;&? | ;& | & )
    | (?P<end> ; )
    | (?P<array> [A-Za-z_]\w*\+?=\( (?: \s | \#[^\n]* | {ITEM} )*+ \) )
    | (?P<word> {ITEM} )
    | (?P<torn> "(?:[^"\\]|\\.)*+" )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
ITEMS = re.compile(rf"\#[^\n]* | {ITEM}", re.VERBOSE | re.DOTALL)
PIECES = re.compile(PIECE, re.VERBOSE | re.DOTALL)
QUOTED = re.compile(
    rf"""(?P<name> {NAME} ) | (?P<odd> {ODD} ) | \\\n | \\(?P<escape> [$`"\\] )""",
    re.VERBOSE | re.DOTALL,
)
ODDITIES = re.compile(ODD, re.VERBOSE | re.DOTALL)
ASSIGNMENT = re.compile(r"(?!IFS\+?=)([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
# What names a variable without setting it: $NAME, and arithmetic that assigns nothing.
_SUM = r"[\w\s$*/%(){}] | \+(?!\+) | -(?!-)"
HARMLESS = re.compile(rf"{NAME} | \$\(\( (?:{_SUM})*? \)\)", re.VERBOSE)
# Commands that may set any variable: its name is in a text that is not known.
_DECLARES = (
    r"export|declare|typeset|local|readonly|read|mapfile|readarray|unset|getopts|printf\s+-v"
)
SETS_ANY = re.compile(
    rf"(?<![\w./-])(?:eval\s|source\s|\.\s|(?:{_DECLARES})(?:\s+-\w+)*\s+[\"']?[$`])"
)


class Token(NamedTuple):
    """A part of a script, as it is written."""

    kind: str
    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """Return the file and line."""
        return f"{self.file}, line {self.line}"


def read_lines(text: str, file: str) -> Iterator[list[Token]]:
    """Yield the lines of a script, each as its parts. One goes on behind a backslash, in quotes, in
    an array and in a here-document. Raises UserError for a quote without its end."""
    tokens = list[Token]()
    number = 1
    for match in TOKEN.finditer(f"{text}\n".replace("\r\n", "\n")):
        token = Token(str(match.lastgroup), match[0], file, number)
        number += token.text.count("\n")
        begin, _, _ = token.text.partition("\n")
        has_two_documents = token.kind == "document" and begin.count("<<") > 1
        if has_two_documents or (token.kind == "other" and begin in "'\"`<"):
            raise UserError.of("import.open_block", place=token.place, sign=begin)
        if token.kind not in ("newline", "blank"):
            tokens.append(token)
        elif token.kind == "newline" and tokens:
            yield tokens
            tokens = []


def commands_of(line: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the words and arrays of each command of a line, without redirections."""
    command = list[Token]()
    for token in line:
        if token.kind in ("word", "array"):
            command.append(token)
        elif token.kind != "redirect" and command:
            yield command
            command = []
    if command:
        yield command


def written_of(tokens: Sequence[Token]) -> str:
    """Return tokens as one text."""
    return " ".join(token.text for token in tokens)
