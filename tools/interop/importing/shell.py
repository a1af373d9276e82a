"""The command line of a launch script, which is read and never run.

Few forms are followed: `NAME=value`, `NAME=(...)`, `+=`, `export`, `source` of a file beside the
script, and one command that runs a .py program with arguments. A name that stands in any other line
may have been set there, so no value of it can be trusted, whatever sets it later. An argument that
needs one is refused with the line, and `--assume NAME=VALUE` gives it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import Problem, UserError
from megaprec.parsing import read_text

NAME = r"\$(?: [A-Za-z_]\w*+ | [0-9@*\#?$!-] | \{ \w++ (?:\[[@*]\])? \} )"
# What a shell would run or change is not followed, so only its end counts.
_RUN = r"""[^()"'`<] | <(?!<-?[ \t]*['"\\]?[A-Za-z_]) | '[^']*' | "[^"()`]*" """
_RUN = rf"{_RUN} | \( (?:{_RUN})*+ \)"
ODD = rf"""
    \$\( (?: {_RUN} | \( (?:{_RUN})*+ \) )*+ \)
    | \$\{{ (?: [^{{}}"'`] | '[^']*' | "[^"{{}}`]*" )*+ \}} | `[^`]*`"""
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
WHOLE = re.compile(
    r'\$(?P<bare>[A-Za-z_]\w*)|(?P<quote>"?)\$\{(?P<name>\w+)(?P<all>\[@\])?\}(?P=quote)'
)
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
MOVES = re.compile(r"\b(?:cd|pushd|popd)\b")
FUNCTION = re.compile(r"([\w-]+)\s*\(\s*\)|\b(?:function|alias)\s+([\w-]+)")
OPENERS = ("if", "while", "until", "for", "select", "case")
CLOSERS = ("fi", "done", "esac", "}")
BEFORE_COMMANDS = ("if", "while", "until", "{", "then", "do", "else", "elif", "!", "time")
PROGRAM = re.compile(r"[\w.-]+\.py")
RUNS = re.compile(r"\.py[\"']*\s+[\"']*(?:--|\$)")
RANKS = re.compile(r"--?(nproc[-_]per[-_]node|nnodes|num_gpus|num_nodes)[= ](\S+)")
LARGEST_SOURCED = 256 * 1024  # bytes
LONGEST = 20_000  # letters of a text, or items of an array


@dataclass(frozen=True)
class Word:
    """A word of a command line.

    place: the file and line that it stands in; "" for a command line that is given as text.
    unknown: why it is not known, with the way to give it; None if it is.
    """

    text: str
    place: str = ""
    unknown: Problem | None = None


@dataclass(frozen=True)
class CommandLine:
    """A program's arguments.

    ranks: what the launcher before it starts; None if that is not said. taken_in: the files that
    the script reads with `source`.
    """

    words: list[Word]
    ranks: int | None
    taken_in: list[str]


def split_words(text: str, assumed: Mapping[str, str]) -> CommandLine:
    """Return the words of a command line that is given as text. Raises UserError."""
    command = _Script(None, assumed).read(text)
    words = [replace(word, place="") for word in command.words]
    return replace(command, words=words)


def read_script(text: str, path: Path, assumed: Mapping[str, str]) -> CommandLine:
    """Return the command line of the training program in a script. Raises UserError.

    path: of the script; the files beside it that it takes in with `source` are read too.
    """
    return _Script(path, assumed).read(text)


class _Token(NamedTuple):
    """A part of a script, as it is written."""

    kind: str
    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """Return the file and line."""
        return f"{self.file}, line {self.line}"


def _lines(text: str, file: str) -> Iterator[list[_Token]]:
    """Yield the lines of a script, each as its parts. One goes on behind a backslash, in quotes, in
    an array and in a here-document. Raises UserError for a quote without its end."""
    tokens = list[_Token]()
    number = 1
    for match in TOKEN.finditer(f"{text}\n".replace("\r\n", "\n")):
        token = _Token(str(match.lastgroup), match[0], file, number)
        number += token.text.count("\n")
        begin, _, _ = token.text.partition("\n")
        has_two_documents = token.kind == "document" and begin.count("<<") > 1
        if has_two_documents or (token.kind == "other" and begin in "'\"`<"):
            raise UserError.of("import.open_block", place=token.place, sign=begin)
        if token.kind != "newline":
            tokens += [token] if token.kind != "blank" else []
        elif tokens:
            yield tokens
            tokens = []


def _commands(line: Sequence[_Token]) -> Iterator[list[_Token]]:
    """Yield the words and arrays of each command of a line, without redirections."""
    command = list[_Token]()
    for token in line:
        if token.kind in ("word", "array"):
            command.append(token)
        elif token.kind != "redirect" and command:
            yield command
            command = []
    if command:
        yield command


def _written(tokens: Sequence[_Token]) -> str:
    return " ".join(token.text for token in tokens)


class _Variables:
    """The variables of a script: what plain assignments give them.

    assumed: values that count whatever the script says. values: an error for one that is set to
    what is not known. unsure: the places of names that what is not followed may set. unsure_all:
    that of what may set any variable later.
    """

    def __init__(self, assumed: Mapping[str, str]) -> None:
        self.assumed = assumed
        self.values: dict[str, str | list[Word] | UserError] = {}
        self.unsure: dict[str, str] = {}
        self.unsure_all = ""

    def distrust(self, written: str, place: str) -> None:
        """Trust no variable that a text of the script may set which is not followed."""
        for name in re.findall(r"[A-Za-z_]\w*", HARMLESS.sub(" ", written)):
            self.unsure.setdefault(name, place)
        if SETS_ANY.search(written):
            self.values.clear()

    def assign(self, token: _Token) -> None:
        """Follow `NAME=value`, `NAME=(...)` or one of both with `+=`."""
        match = ASSIGNMENT.fullmatch(token.text)
        assert match
        name, adds, text = match.groups()
        try:
            before: Any = self._value(name) if adds else None
            was_array = isinstance(before or self.values.get(name), list)
            is_array = token.kind == "array"
            if is_array != was_array and (adds or was_array):  # it sets one item
                raise UserError.of("import.not_followed", written=token.text)
            value = self._items_within(token, text) if is_array else self._text(text)
            self.values[name] = before + value if adds else value
        except UserError:
            self.values[name] = UserError.of("import.variable_open", name=name, place=token.place)

    def _items_within(self, token: _Token, text: str) -> list[Word]:
        """Return the words of an array. text: the brackets and what stands in them."""
        words = list[Word]()
        for item in ITEMS.finditer(text, 1, len(text) - 1):
            line = token.line + text.count("\n", 0, item.start())
            if not item[0].startswith("#"):
                words += self.fields(token._replace(text=item[0], line=line))
        return words

    def _value(self, name: str) -> Any:
        """Return the text or the words that a variable holds. Raises UserError if they are not
        known."""
        if name in self.assumed:
            return self.assumed[name]
        value = self.values.get(name)
        cut = self.unsure.get("IFS")  # it says where words are cut
        place = self.unsure_all or cut or self.unsure.get(name)
        if place:
            raise UserError.of("import.variable_open", name=name, place=place)
        if value is None:
            raise UserError.of("import.variable_unset", name=name)
        if isinstance(value, UserError):
            raise value
        if len(value) > LONGEST:
            raise UserError.of("import.not_followed", written=f"${name}")
        return value

    def fields(self, token: _Token) -> list[Word]:
        """Return the words that one becomes: an expansion without quotes is cut at its blanks."""
        whole = WHOLE.fullmatch(token.text)
        try:
            if whole is None or (whole["quote"] and not whole["all"]):
                return [Word(self._uncut(token.text), token.place)]
            name = whole["bare"] or whole["name"]
            value = self._value(name)
            if isinstance(value, list) and not whole["all"]:
                raise UserError.of("import.not_followed", written=token.text)
        except UserError as error:
            return [Word(token.text, token.place, error.problems[0])]
        items = [Word(value, token.place)] if isinstance(value, str) else value
        if whole["quote"] and name not in self.assumed:
            return items
        return _cut_at_blanks(items)

    def _uncut(self, written: str) -> str:
        """Return what a word stands for. Raises UserError if that is not known, or is not one
        word."""
        text = self._text(written)
        has_bare = any(match.lastgroup == "name" for match in PIECES.finditer(written))
        if has_bare and len(text.split()) != 1:
            raise UserError.of("import.not_followed", written=written)
        return text

    def _text(self, written: str) -> str:
        """Return what a word or a value stands for. Raises UserError if it is not known."""
        return PIECES.sub(self._piece, written)

    def _piece(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        if kind == "double":
            return QUOTED.sub(self._piece, match[kind])
        name = match[0].strip("${}")
        if kind == "odd" or (kind == "name" and not name.isidentifier()):
            raise UserError.of("import.not_followed", written=match[0])
        if kind != "name":
            return match[kind] if kind else ""
        value = self._value(name)
        if not isinstance(value, str):  # of an array it would be the first item
            raise UserError.of("import.not_followed", written=match[0])
        return value


def _cut_at_blanks(items: Sequence[Word]) -> list[Word]:
    """Return the words that items become without quotes; what is not known stays whole."""
    words = list[Word]()
    for item in items:
        texts = [item.text] if item.unknown else item.text.split()
        words += [replace(item, text=text) for text in texts]
    return words


class _Script:
    """A script that is followed. path: of its file; None for a command line that is given as text.

    commands: the words of those that may run a program. functions: what may change its arguments.
    """

    def __init__(self, path: Path | None, assumed: Mapping[str, str]) -> None:
        self.path = path
        self.variables = _Variables(assumed)
        self.blocks: list[str] = []
        self.functions = {"eval"}
        self.commands: list[list[Word]] = []
        self.taken_in: list[str] = []
        self.has_moved = False

    def read(self, text: str) -> CommandLine:
        """Return the arguments of the one command that runs a program. Raises UserError."""
        name = self.path.name if self.path else "the command line"
        self.follow(text, name)
        runs = [words for words in self.commands if _program(words)]
        if self.path is None and not runs:
            runs = self.commands
        if len(runs) != 1:
            raise UserError.of("import.not_one_program", source=name, num_found=len(runs))
        (words,) = runs
        at = _program(words)
        return CommandLine(words[at:], _ranks(words[:at]), self.taken_in)

    def follow(self, text: str, file: str) -> None:
        """Follow the lines of a file up to its end."""
        for of_brackets, of_word in FUNCTION.findall(text):
            self.functions.add(of_brackets or of_word)
        for line in _lines(text, file):
            is_outside = self._is_outside_of_blocks(line)
            kinds = {token.kind for token in line} - {"word", "array", "redirect", "end"}
            if MOVES.search(_written(line)):
                self.has_moved = True
            if kinds or not is_outside:
                self._pass_by(line, is_outside and kinds == {"operator"})
                continue
            for command in _commands(line):
                if command[0].text in ("exit", "return"):
                    return
                self._follow_command(command)

    def _is_outside_of_blocks(self, line: Sequence[_Token]) -> bool:
        """Keep count of the blocks that a line opens and closes. Return True if it stands in
        none."""
        is_outside = not self.blocks
        begins = True  # the next word is the first of a command
        for token in line:
            sign = token.text
            if sign in ("(", "{") or (begins and sign in OPENERS):
                self.blocks.append(sign)
                is_outside = False
            elif begins and sign in CLOSERS:
                self.blocks = self.blocks[:-1]
            elif sign == ")" and self.blocks[-1:] == ["("]:
                self.blocks.pop()
            begins_next = token.kind in ("end", "operator", "other")
            begins = begins_next or (begins and sign in BEFORE_COMMANDS)
        return is_outside

    def _pass_by(self, line: Sequence[_Token], is_flat: bool) -> None:
        """Trust no name of a line that is not followed. is_flat: its commands stand in no block."""
        place = line[0].place
        written = _written([token for token in line if token.kind != "document"])
        self.variables.distrust(_written(line), place)
        # a quote within quotes may end elsewhere than it seems, and take in lines
        kinds = {token.kind for token in line}
        is_torn = "torn" in kinds or "other" in kinds
        is_long = "\n" in written
        # what stands in a block may be done later, or again
        if (is_torn and is_long) or (self.blocks and SETS_ANY.search(written)):
            self.variables.unsure_all = place
        if is_flat:
            for command in _commands(line):
                self._note(command)
        elif self.path is None or _runs(written):
            raise UserError.of("import.program_hidden", place=place)

    def _follow_command(self, command: Sequence[_Token]) -> None:
        """Follow one command that stands in no block."""
        first = command[0]
        for odd in ODDITIES.findall(_written(command)):
            self.variables.distrust(odd, first.place)
        assignments = command
        if first.text == "export":
            assignments = [word for word in command[1:] if not word.text.isidentifier()]
        if all(ASSIGNMENT.match(word.text) for word in assignments):
            for word in assignments:
                self.variables.assign(word)
            return
        is_taken_in = first.text in ("source", ".") and self._take_in(command)
        if first.text != "echo" and not is_taken_in:
            self._note(command)
            self.variables.distrust(_written(command), first.place)

    def _note(self, command: Sequence[_Token]) -> None:
        """Remember a command that may run a program. Raises UserError if it runs one in another way
        than by its own words."""
        words = [word for token in command for word in self.variables.fields(token)]
        launchers = {word.text for word in words[: _program(words)]}
        is_hidden = any(_runs(word.text) for word in words)
        if is_hidden or launchers & self.functions:
            raise UserError.of("import.program_hidden", place=command[0].place)
        self.commands.append(words)

    def _take_in(self, command: Sequence[_Token]) -> bool:
        """Follow a file beside the script; return False if it is not followed."""
        if self.path is None or self.has_moved or len(command) != 2:
            return False
        name = " ".join(word.text for word in self.variables.fields(command[1]))
        folder = self.path.parent.resolve()
        path = (folder / name).resolve()
        if path.parent != folder or path.name in self.taken_in:
            return False
        try:
            text = read_text(path, LARGEST_SOURCED)
        except (OSError, ValueError):
            return False
        self.taken_in.append(path.name)
        self.follow(text, path.name)
        return True


def _runs(text: str) -> bool:
    """Return True for a text that seems to run a program with arguments."""
    is_shown = text.startswith("echo ")
    return not is_shown and RUNS.search(text) is not None


def _program(words: Sequence[Word]) -> int:
    """Return the index behind the program among the words of a command, if arguments follow it;
    otherwise 0."""
    at = 0
    for number, word in enumerate(words, 1):
        _, _, file = word.text.strip("\"'").rpartition("/")
        if PROGRAM.fullmatch(file) and not at:
            at = number
        elif at and (word.unknown or word.text.startswith("--")):
            return at
    return 0


def _ranks(words: Sequence[Word]) -> int | None:
    """Return the number of ranks that the options of torchrun or deepspeed start; None if they do
    not say it, or may say it in a word that is not known."""
    said = " ".join(word.text for word in words)
    sizes = {name.replace("-", "_"): size for name, size in RANKS.findall(said)}
    local = sizes.get("nproc_per_node") or sizes.get("num_gpus", "")
    nodes = sizes.get("nnodes") or sizes.get("num_nodes", "1")
    both = re.fullmatch(r"(\d{1,6}) (\d{1,6})", f"{local} {nodes}")
    if both is None or any(word.unknown for word in words):
        return None
    return int(both[1]) * int(both[2])
