"""The command line of a shell script, without running it.

Plain assignments are followed, also those of a file beside the script that it takes in with
`source`. All else by which a shell could give a variable another value (conditions, loops,
functions, arithmetic, commands) leaves the variable open: a word of the command line that needs it
is refused by the variable's name and the line, and `--assume NAME=VALUE` gives it.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megaprec.errors import UserError
from megaprec.parsing import read_text

# What stands within `$(...)` and `${...}` is never run, so only its end counts.
_INSIDE = r"""[^(){}'"\\`] | '[^']*+' | "(?:[^"\\]|\\.)*+" | \\. | `[^`]*+`"""
for _ in range(3):  # levels of parentheses and braces within each other
    _INSIDE = rf"(?: {_INSIDE} | \( (?:{_INSIDE} | [{{}}])*+ \) | \{{ (?:{_INSIDE} | [()])*+ \}} )"
_WITHIN = rf"(?:{_INSIDE} | [{{}}])*+"
_EXPANSION = rf"""
    \$?\(\( {_WITHIN} \)\) | [$<>]\( {_WITHIN} \) | \$\{{ (?:{_INSIDE} | [()])*+ \}}
    | `(?:[^`\\]|\\.)*+` | \$'(?:[^'\\]|\\.)*+' | \$[A-Za-z_]\w*+ | \$[0-9@*\#?$!-]"""
# What a script is made of. Its parts have the names of the groups.
TOKEN = re.compile(
    rf"""
    (?P<blank> [ \t\r]+ )
    | (?P<continued> \\\n )
    | (?P<comment> (?<![^\s;&|()]) \# [^\n]* )
    | (?P<expansion> {_EXPANSION} )
    | (?P<document> <<-?(?!<) [ \t]* ['"\\]? (?P<marker> \w+ ) ['"]? )
    | (?P<redirect> &>>? | \d*(?: >>? [&|]? | <<< | <[&>]? ) )
    | (?P<end> \n | ;;& | ;; | ;& | ; | && | \|\| | \|& | [|&()] )
    | '(?P<single> [^']* )'
    | \$?"(?P<double> (?: [^"\\`$] | \\. | {_EXPANSION} | \$ )*+ )"
    | \\(?P<escape> . )
    | (?P<text> (?: [^\s;&|()<>'"`\\$] | \$(?![\w'"({{@*\#?$!-]) )+ )
    """,
    re.VERBOSE | re.DOTALL,
)
QUOTED_TOKEN = re.compile(
    rf"""\\(?P<escape>[$`"\\]) | \\\n | (?P<expansion> {_EXPANSION} ) | (?P<text> [^\\$`]+ | . )""",
    re.VERBOSE | re.DOTALL,
)
DEFAULT = re.compile(r"""(["']?)([^"'\\]*)\1""")
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
VARIABLE = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=?])(.*))?", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
# What a command that is no plain assignment may set: NAME=, NAME[...]=, ${NAME:=}; what stands in
# arithmetic; what the commands name that set variables.
SETS = re.compile(r"(?:(?<![\w$-])|(?<=\$\{))(\w+)(?:\[[^\]]*\])?\s*(?:[-+*/%&|^:]|<<|>>)?=(?!=)")
ARITHMETIC = re.compile(r"\(\(.*\)\)|(?<!\w)let\s.*", re.DOTALL)
COUNTS = re.compile(r"(\w+)(?:\+\+|--)|(?:\+\+|--)(\w+)")
DECLARES = r"for|select|read|mapfile|readarray|getopts|unset|local|declare|typeset|readonly|export"
SETTERS = re.compile(rf"(?<![\w$-])(?:{DECLARES}|printf\s+-v)\s([^;&|\n]*)")
NAMES = re.compile(r"(?<![\w$./-])(?<!\$\{)[A-Za-z_]\w*")
SETS_WITHIN = re.compile(r"\$\{\w+:?=|\(\(.*\)\)", re.DOTALL)  # also where a word is only shown
# commands that may set any variable: nobody knows which name an expansion makes
SETS_ANY = re.compile(rf"(?:\w+=\S*\s+)*(?:eval\b|(?:{DECLARES})\b(?:\s+-\w+)*\s+[\"']?[$`])")
SETS_ARGUMENTS = re.compile(r"shift\b|set (?:[-+]\w*o [a-z]+ |[-+]\w+ )*+(?:-- |[^-+ ])")
PROGRAM = re.compile(r"(\S*/)?\w+\.py")
LOOPS = ("for", "while", "until", "select")
OPENERS = ("if", "case", "{", *LOOPS)
CLOSERS = ("fi", "esac", "done", "}")
BEFORE_COMMANDS = ("then", "do", "else", "elif", "!", "time", "exec", "command", "builtin")
RANKS = re.compile(r"--?(nproc[-_]per[-_]node|nnodes|num_gpus|num_nodes)[= ](\d{1,6})(?!\S)")
# files and commands that set up programs, not a training
ENVIRONMENTS = re.compile(
    r"(?:source|\.) (?:/etc/|.*/init/|(?:.*/)?(?:activate|\.?(?:bash)?(?:rc|_?profile))\b"
    r"|(?:.*/)?(?:conda|setvars|modules?|lmod)\.sh\b)"
    r"|eval .*(?:conda|mamba|pyenv|virtualenv|direnv|ssh-agent|module|lmod|modulecmd|brew|nvm)"
)
OWN_FOLDER = re.compile(r"^\$\(.*dirname.*\)/")  # $(dirname "$0")/ and the like
LARGEST_SOURCED = 256 * 1024  # bytes
MOST_SOURCED = 20
MOST_LETTERS = 100_000
# Characters of Unicode's private use area stand in an expanded text for what a text cannot say: the
# number of something unknown stands between OPEN and CLOSE, QUOTED keeps a word that may be empty,
# and white space behind BREAK ends a word.
OPEN, CLOSE, QUOTED, BREAK = "\ue000\ue001\ue002\ue003"
PRIVATE = re.compile("[\ue000-\ue003]")
SPLITTING = re.compile(f"[{QUOTED}{BREAK}]")
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


@dataclass(frozen=True)
class Word:
    """A word of a command line.

    place: the file and line that it stands in, "train.sh, line 3"; "" for a command line that is
        given as text.
    unknown: why it is not known, with the way to give it; "" if it is.
    defaults: notes on defaults of variables that stand in.
    """

    text: str
    place: str = ""
    unknown: str = ""
    defaults: frozenset[str] = frozenset()


@dataclass
class CommandLine:
    """A program's arguments.

    ranks: what the launcher before it starts; None if that is not said. taken_in: the files that
    the script reads with `source`, and that were read.
    """

    words: list[Word]
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    taken_in: list[str] = field(default_factory=list)


def split_words(text: str, assumed: Mapping[str, str]) -> CommandLine:
    """Return the words of a command line that is given as text. Raises UserError for what is not
    known."""
    return _read(text, None, assumed)


def read_script(text: str, path: Path, assumed: Mapping[str, str]) -> CommandLine:
    """Return the command line of the training program in a script. Raises UserError.

    path: of the script; the files beside it that it takes in with `source` are read too.
    """
    return _read(text, path, assumed)


def _read(text: str, path: Path | None, assumed: Mapping[str, str]) -> CommandLine:
    script = _Script(path, assumed)
    try:
        script.follow(text, script.shown)
    except RecursionError as error:
        raise UserError.of("import.too_deep", name=script.shown) from error
    return script.command_line()


_PIECES = ("text", "single", "double", "escape", "expansion")


class _Token(NamedTuple):
    """A part of a script. start, end: where it stands."""

    kind: str
    text: str
    line: int
    start: int
    end: int


class _Word(NamedTuple):
    """A word as it is written: its pieces. items: of an array, the words within."""

    pieces: list[_Token]
    items: "list[_Word] | None" = None

    @property
    def head(self) -> str:
        """Return the text that the word begins with, unless it is quoted or an expansion."""
        return self.pieces[0].text if self.pieces[0].kind == "text" else ""

    @property
    def plain(self) -> str:
        """Return the text of a word without quotes and expansions; "" for any other."""
        return self.head if len(self.pieces) == 1 and self.items is None else ""


class _Command(NamedTuple):
    """A command, or a here-document, which has no words. written: its text. before, after: the
    separators around it."""

    words: list[_Word]
    line: int
    written: str
    before: str
    after: str


def _tokens(text: str, name: str) -> Iterator[_Token]:
    """Yield the tokens of a text; those of kind "body" are here-documents. Raises UserError for a
    quote or bracket without its end."""
    at = 0
    line = 1
    markers = list[str]()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            sign = text[at : at + 2] if text[at] == "$" else text[at]
            raise UserError.of("import.open_block", name=name, line=line, sign=sign)
        kind = str(match.lastgroup)
        yield _Token(kind, match[kind], line, at, match.end())
        line += match[0].count("\n")
        at = match.end()
        if kind == "document":
            markers.append(match["marker"])
        while markers and match[0] == "\n":
            end = re.compile(rf"^\t*{markers.pop(0)}\n", re.MULTILINE).search(text, at)
            body = text[at : end.end() if end else len(text)]
            yield _Token("body", body, line, at, at + len(body))
            line += body.count("\n")
            at += len(body)


class _Commands:
    """The commands of a text, made of its tokens in order."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._words: list[_Word] = []
        self._pieces: list[_Token] = []
        self._array: _Word | None = None  # the one that is being read
        self._is_target = False  # the word belongs to a redirection
        self._start = 0  # of the command
        self._before = "\n"

    def read(self) -> Iterator[_Command]:
        """Yield the commands. Raises UserError as `_tokens`."""
        for token in _tokens(self._text, self._name):
            if token.kind in _PIECES:
                self._pieces.append(token)
            elif token.kind == "continued":
                continue
            elif token.text == "(" and self._begins_array():
                self._array = _Word(self._pieces, [])
                self._pieces = []
            else:
                self._end_word(token)
                if self._array is not None and token.text == ")":
                    self._words.append(self._array)
                    self._array = None
                elif token.kind == "body" or (token.kind == "end" and self._array is None):
                    yield self._ended(token)
        if self._array is not None:
            line = self._array.pieces[0].line
            raise UserError.of("import.open_block", name=self._name, line=line, sign="(")

    def _begins_array(self) -> bool:
        begin = _Word(self._pieces).plain if self._pieces else ""
        return ARRAY.fullmatch(begin) is not None

    def _end_word(self, token: _Token) -> None:
        """End the word before a token that is no piece of one."""
        if self._pieces and not self._is_target:
            words = self._words
            if self._array is not None and self._array.items is not None:
                words = self._array.items
            words.append(_Word(self._pieces))
        self._is_target = token.kind == "redirect" or (self._is_target and not self._pieces)
        self._pieces = []

    def _ended(self, token: _Token) -> _Command:
        """Return the command that a token ends."""
        line = self._words[0].pieces[0].line if self._words else token.line
        written = self._text[self._start : token.end]
        command = _Command(self._words, line, written, self._before, token.text)
        self._words = []
        self._start = token.end
        self._before = "\n" if token.kind == "body" else token.text
        return command


class _Value(NamedTuple):
    """The words that a variable holds, and the notes on defaults in them."""

    items: list[str]
    defaults: frozenset[str] = frozenset()


class _Script:
    """A script that is followed. path: of its file; None for a command line that is given as
    text."""

    def __init__(self, path: Path | None, assumed: Mapping[str, str]) -> None:
        self.path = path
        self.shown = path.name if path else "the command line"
        self.assumed = assumed
        self.values: dict[str, _Value] = {}
        self.unknown: list[tuple[str, str]] = []  # what each mark shows, and why it is not known
        self.open: dict[str, str] = {}  # why variables are not known from a line on
        self.open_rest = ""  # why a variable that is not set since is not known
        self.open_all = ""  # why no variable is known
        self.defaults = set[str]()  # notes of the words that are being expanded
        self.blocks: list[str] = []
        self.arrays = set[str]()
        self.functions = set[str]()
        self.defines = False  # the next block is that of a function
        self.launches: list[
            tuple[int, list[Word], UserError | None]
        ] = []  # each with why it does not count
        self.notes: list[str] = []
        self.taken_in: list[str] = []
        self.moved = ""  # the line from which on the script is in another folder

    def command_line(self) -> CommandLine:
        """Return the one command that runs a program with arguments."""
        launches = [one for one in self.launches if one[2] or _program(one[1])]
        if self.path is None and not launches:
            launches = self.launches
            if len(launches) != 1:
                raise UserError.of(
                    "import.several_commands", shown=self.shown, num_found=len(launches)
                )
        if not launches:
            raise UserError.of("import.no_program", shown=self.shown)
        if len(launches) > 1:
            lines = ", ".join(str(line) for line, _, _ in launches)
            raise UserError.of(
                "import.several_programs", shown=self.shown, num_found=len(launches), lines=lines
            )
        ((_, words, problem),) = launches
        if problem:
            raise problem
        at = _program(words)
        defaults = set[str]()
        for word in words[at:]:
            defaults |= word.defaults
        notes = [*self.notes, *sorted(defaults)]
        return CommandLine(words[at:], _ranks(words[:at]), notes, self.taken_in)

    def follow(self, text: str, name: str) -> None:
        """Follow the commands of a file."""
        if PRIVATE.search("".join((text, *self.assumed.values()))):
            raise UserError.of("import.private_character", shown=name)
        for command in _Commands(f"{text}\n".replace("\r\n", "\n"), name).read():
            words = self._enter_blocks(command.words)
            certain = not self.blocks and {command.before, command.after} <= {"\n", ";"}
            if certain and words and words[0].plain in ("exit", "return"):
                return
            if words:
                self._command(words, command, certain, name)
            elif not command.words:
                self._open_set_by(command.written, command.line)
            self._enter_brackets(command)

    def _enter_brackets(self, command: _Command) -> None:
        """Keep count of the brackets of subshells, functions and cases around commands."""
        if command.before == "(" and command.after == ")" and not command.words:
            self.blocks.pop()  # it was no subshell, but NAME()
            self.defines = True
        elif command.after == "(":
            self.functions.update(word.plain for word in command.words[-1:])
            self._open_block("(")
        elif command.after == ")" and self.blocks[-1:] in (["("], ["function"]):
            self.blocks.pop()

    def _open_block(self, sign: str) -> None:
        self.blocks.append("function" if self.defines else sign)
        self.defines = False

    def _enter_blocks(self, words: list[_Word]) -> list[_Word]:
        """Keep count of the blocks that words open and close. Return the command behind them."""
        for at, word in enumerate(words):
            if word.plain in OPENERS:
                self._open_block(word.plain)
            elif word.plain in CLOSERS:
                self.blocks = self.blocks[:-1]
            elif word.plain == "function":
                self.functions.update(name.plain for name in words[at + 1 : at + 2])
                self.defines = True
            elif word.plain not in BEFORE_COMMANDS and not self.defines:
                return words[at:]
        return []

    # Variables

    def _command(self, words: list[_Word], command: _Command, certain: bool, file: str) -> None:
        first = words[0].plain
        line = command.line
        if certain and self._assign_all(words, line):
            return
        expanded = list[Word]()
        for word in words:
            expanded += self._expanded(word, file)
        if first in ("echo", "cat"):
            self._open_set_by(" ".join(SETS_WITHIN.findall(command.written)), line)
            return
        self._open_set_by(command.written, line)
        text = " ".join(word.text for word in expanded)
        self._open_arguments(text, line)
        if ENVIRONMENTS.match(text):
            self.notes.append(
                f"{file}, line {line}: {text} is taken for an environment of programs, and is not "
                "read"
            )
        elif first in ("source", "."):
            self._source(text.partition(" ")[2], line, certain)
        elif SETS_ANY.match(command.written.strip()):
            self._open_rest(f"may be set in line {line} by {text}, which is not run")
        elif _leaves_folder(first, text):
            self.moved = f"line {line} moves to another folder"
        self._note_launch(expanded, line)

    def _open_arguments(self, text: str, line: int) -> None:
        """Leave open the script's own arguments if a command sets them; those of a function are its
        own."""
        if SETS_ARGUMENTS.match(f"{text} ") and "function" not in self.blocks:
            for name in ("@", "*", *map(str, range(1, 100))):
                self._open(name, line)

    def _assign_all(self, words: list[_Word], line: int) -> bool:
        """Follow a command of plain assignments; return False for any other."""
        if words[0].plain == "export":
            words = [word for word in words[1:] if not word.plain.isidentifier()]
        if not all(ASSIGNMENT.match(word.head) for word in words):
            return False
        for word in words:
            self._assign(word, line)
        return True

    def _assign(self, word: _Word, line: int) -> None:
        match = ASSIGNMENT.fullmatch(word.head)
        assert match
        name, adds, begin = match.groups()
        self.defaults = set()
        if word.items is not None:
            keeps = adds and (name in self.values or self.open_rest)
            items = [*self._value(name)] if keeps else []
            for item in word.items:
                items += self._fields(item)
            self.arrays.add(name)
        elif name in self.arrays:  # only its first item is set
            self._open(name, line)
            return
        else:
            before = self._value(name)[0] if adds else ""
            behind = SPLITTING.sub("", self._expand(word.pieces[1:]))
            items = [before + begin + behind]
        if sum(map(len, items)) > MOST_LETTERS:
            raise UserError.of("import.value_too_long", shown=self.shown, line=line, name=name)
        if name == "IFS":
            self.open_all = f"may be cut otherwise, for line {line} sets IFS"
        self.values[name] = _Value(items, frozenset(self.defaults))

    def _open_set_by(self, written: str, line: int) -> None:
        """Leave open the variables that a command may set which is no plain assignment."""
        names = SETS.findall(written)
        for arithmetic in ARITHMETIC.findall(written):
            names += [before or behind for before, behind in COUNTS.findall(arithmetic)]
        for named in SETTERS.findall(written):
            names += NAMES.findall(named)
        for name in names:
            self._open(name, line)

    def _open(self, name: str, line: int) -> None:
        self.open[name] = f"is set in line {line} by what is not followed"

    def _open_rest(self, reason: str) -> None:
        """Leave open what all variables hold that are not set from here on."""
        self.open_rest = reason
        self.values.clear()
        if self.blocks:  # it may be done later, or again
            self.open_all = reason

    def _source(self, file: str, line: int, certain: bool) -> None:
        """Follow a file that the script takes in, or leave open what it may set."""
        try:
            text = self._sourced_text(file, certain)
        except (UserError, OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "") or str(error)
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
            self._open_rest(
                f"may be set by {file}, which line {line} takes in and which is not read: {reason}"
            )
            self.notes.append(f"line {line}: what {file} sets is not read: {reason}")
            return
        self.taken_in.append(file)
        self.follow(text, file)

    def _sourced_text(self, said: str, certain: bool) -> str:
        """Return the text of a file that the script takes in. Raises UserError with the reason why
        it is not read, OSError or UnicodeDecodeError."""
        if self.path is None or not certain:
            raise UserError.of("import.source_not_certain")
        folder = self.path.parent
        inside = OWN_FOLDER.sub(f"{folder}/", said)
        path = folder / inside
        if inside.startswith("$"):
            raise UserError.of("import.source_unknown")
        if self.moved and inside == said and not Path(said).is_absolute():
            raise UserError(self.moved)
        if path.resolve().parent != folder.resolve():
            raise UserError.of("import.source_outside")
        if len(self.taken_in) == MOST_SOURCED:
            raise UserError.of("import.too_many_sources", most_sourced=MOST_SOURCED)
        return read_text(path, LARGEST_SOURCED)

    # Expansion

    def _expanded(self, word: _Word, file: str) -> Iterator[Word]:
        """Yield the words that one becomes."""
        self.defaults = set()
        place = f"{file}, line {word.pieces[0].line}" if self.path else ""
        for text in self._fields(word):
            mark = MARK.search(text)
            unknown = self.unknown[int(mark[1])][1] if mark else ""
            yield Word(self._readable(text), place, unknown, frozenset(self.defaults))

    def _fields(self, word: _Word) -> list[str]:
        """Return what a word becomes, cut at the white space of its expansions."""
        fields = re.split(f"(?:{BREAK}\\s)+", self._expand(word.pieces))
        return [text.replace(QUOTED, "") for text in fields if text]

    def _expand(self, pieces: Sequence[_Token]) -> str:
        made = ""
        for kind, text, *_ in pieces:
            if kind == "expansion":
                items = " ".join(self._items(text, False))
                made += re.sub(r"\s", f"{BREAK}\\g<0>", items)
            elif kind == "double":
                made += self._in_quotes(text) if text else QUOTED
            elif kind == "text":
                made += self._to_run(text) if BRACES.search(text) else text
            else:
                made += QUOTED + text
        return made

    def _in_quotes(self, text: str) -> str:
        """Return a text of double quotes with its expansions."""
        made = ""
        for match in QUOTED_TOKEN.finditer(text):
            if match["expansion"]:
                items = self._items(match["expansion"], True)
                made += f"{BREAK} ".join(QUOTED + item for item in items)
            else:
                made += QUOTED + (match["escape"] or match["text"] or "")
        return made

    def _items(self, written: str, quoted: bool) -> list[str]:
        """Return what an expansion stands for; of an array one text for each item."""
        inner = written[2:-1] if written.startswith("${") else written[1:]
        match = VARIABLE.fullmatch(inner) if written.startswith("$") else None
        if match is None:
            return [self._to_run(written)]
        name, whole, sign, default = match.groups()
        items = self._value(name)
        if sign in ("-", ":-") and self._is_left_out(name, sign, items):
            return [self._default(written, name, default, quoted)]
        if not whole and name not in "@*":
            return items[:1] or [""]
        if name in self.assumed:
            items = self.assumed[name].split()
        is_joined = quoted and "*" in f"{whole}{name}"
        return [" ".join(items)] if is_joined else items

    def _is_left_out(self, name: str, sign: str, items: list[str]) -> bool:
        """Return True if a variable has no value, so that its default counts."""
        if self.open_rest:
            return False
        is_set = name in self.assumed or name in self.values or name in self.open
        return not is_set or (sign == ":-" and not "".join(items))

    def _default(self, written: str, name: str, default: str, quoted: bool) -> str:
        """Return the default of a variable, with a note; a mark if it would have to be run."""
        match = DEFAULT.fullmatch(default)
        # quotes within quotes, or around what would be cut, mean more than their text
        if match is None or (match[1] and (quoted or re.search(r"[\s$]", default))):
            return self._to_run(written)
        value = SPLITTING.sub("", self._in_quotes(match[2]))
        shown = self._readable(value)
        self.defaults.add(
            f"${name} is taken as its default, {shown!r}: --assume {name}=VALUE gives another"
        )
        return value

    def _value(self, name: str) -> list[str]:
        """Return the items of a variable."""
        of_script = name in "@*" or name.isdecimal()
        if name in self.assumed and not (of_script and name in self.open):
            return [self.assumed[name]]
        reason = self.open_all or self.open.get(name, "")
        if name in self.values and not reason:
            self.defaults |= self.values[name].defaults
            return self.values[name].items
        reason = reason or self.open_rest or "has no value in the script"
        given = f"'{name}=...'" if name in "@*" else f"{name}=VALUE"
        return [self._mark(f"${name}", f"${name} {reason}: --assume {given} gives it")]

    def _mark(self, shown: str, reason: str) -> str:
        self.unknown.append((shown, reason))
        return f"{OPEN}{len(self.unknown) - 1}{CLOSE}"

    def _to_run(self, written: str) -> str:
        short = textwrap.shorten(self._readable(written), 80, placeholder=" ...)")
        return self._mark(short, f"{short} would have to be run: write its value")

    def _readable(self, text: str) -> str:
        """Return a text with what its marks stand for."""
        return MARK.sub(lambda match: self.unknown[int(match[1])][0], text)

    # The program

    def _note_launch(self, words: list[Word], line: int) -> None:
        """Remember a command that may run a program."""
        texts = [word.text for word in words]
        runs = _program(words)
        problem: UserError | None = None
        if (runs and texts[0] == "eval") or any(re.search(r"\.py\s+-", text) for text in texts):
            problem = UserError.of("import.program_in_text", shown=self.shown, line=line)
        elif runs and not self.functions.isdisjoint(texts):
            problem = UserError.of("import.program_in_function", shown=self.shown, line=line)
        elif runs and not {*LOOPS, "function"}.isdisjoint(self.blocks):
            problem = UserError.of("import.program_in_block", shown=self.shown, line=line)
        self.launches.append((line, words, problem))


def _leaves_folder(command: str, text: str) -> bool:
    """Return True for a command that moves to another folder than the script's own."""
    return command in ("cd", "pushd", "popd") and not OWN_FOLDER.match(f"{text[3:]}/")


def _program(words: Sequence[Word]) -> int:
    """Return the index behind the program among the words of a command, if arguments follow it;
    otherwise 0."""
    for at, word in enumerate(words):
        if PROGRAM.fullmatch(word.text):
            for argument in words[at + 1 :]:
                if argument.unknown or argument.text.startswith("--"):
                    return at + 1
            return 0
    return 0


def _ranks(words: Sequence[Word]) -> int | None:
    """Return the number of ranks that the options of torchrun or deepspeed start; None if they do
    not say it."""
    said = " ".join(word.text for word in words)
    sizes = {name.replace("-", "_"): int(size) for name, size in RANKS.findall(said)}
    local = sizes.get("nproc_per_node") or sizes.get("num_gpus")
    return local * (sizes.get("nnodes") or sizes.get("num_nodes", 1)) if local else None
