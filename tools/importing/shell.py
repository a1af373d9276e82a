"""The command line of a shell script, without running it.

Variables that the script assigns are followed, arrays, functions and `if` with plain comparisons
too. What it would run, read from its environment or from its own arguments is not known: a word of
the command line that needs it is refused by the name of the variable, and `--assume NAME=VALUE`
gives it.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import read_text
from tools.importing.launcher import program, ranks
from tools.importing.shell_flow import LOOPS, MOST_DEPTH, Flow
from tools.importing.shell_functions import definition
from tools.importing.shell_unknown import CLOSE, MARK, OPEN, Unknown
from tools.importing.shell_words import Command, Lexer, Part, Raw

ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[[^\]]*\]\+?=")
COUNTED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
DECLARE = ("export", "declare", "local", "readonly", "typeset")
NOT_PLAIN = set("ilunAc")  # options of `declare` with which a value is not what is written
SETTERS = ("read", "mapfile", "readarray", "getopts", "unset")
SUCCEED = [
    "cd",
    "pushd",
    "popd",
    "mkdir",
    "source",
    ".",
    "module",
    "conda",
    "set",
    "ulimit",
    "echo",
    "printf",
    "true",
    ":",
]
EXPANSION = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?])(.*))?", re.DOTALL)
MOST_WORDS = 20_000
MOST_SOURCED = 20
MOST_CALLS = 1_000
LARGEST_SOURCED = 256 * 1024  # bytes
# files that set up programs, not a training
ENVIRONMENTS = re.compile(
    r"(^|/)(activate|\.?(bash)?(rc|_?profile)|conda\.sh|setvars\.sh|modules?\.sh|lmod\.sh)$|^/etc/|/init/|^activate "
)
ENVIRONMENT_COMMANDS = re.compile(
    r"conda|mamba|pyenv|virtualenv|direnv|ssh-agent|\bmodule|lmod|modulecmd|brew|nvm"
)
OWN_FOLDER = re.compile(r"^\$\(.*dirname.*\)/")  # $(dirname "$0")/ and the like
MATHS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Word:
    """A word of a command line.

    place: the file and line that it stands in, "train.sh, line 3"; "" for a command line that is
        given as text.
    unknown: why it is not known, with the way to give it; "" if it is. reads: the variables that it
        was made of.
    """

    text: str
    place: str = ""
    unknown: str = ""
    reads: frozenset[str] = frozenset()


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
    try:
        return _Script(text, path, assumed).command_line(any_command=path is None)
    except RecursionError as error:
        raise UserError.of(
            "import.too_deep", name=path.name if path else "the command line"
        ) from error


class _Script:
    """A script that is followed. values: what is known of its variables, each a list of words."""

    def __init__(self, text: str, path: Path | None, assumed: Mapping[str, str]) -> None:
        self.folder = path.parent if path else None
        self.name = name = path.name if path else ""
        self.assumed = assumed
        self.values: dict[str, list[str]] = {}
        self.defaults: dict[str, str] = {}
        self.uses: dict[str, set[str]] = {}
        self.reading: set[str] = set()
        self.unknown = Unknown()
        self.condition = ""
        self.sourced: list[str] = []
        self.taken_in: list[str] = []
        self.unread = (
            ""  # the last file that the script takes in and that is not read, with its line and why
        )
        self.left_to_source = MOST_SOURCED
        self.moved = ""  # the line from which on the script is in another folder
        self.functions: dict[
            str, tuple[list[Command], bool]
        ] = {}  # and whether it is certain that it is this one
        self.called: set[str] = set()
        self.left_to_call = MOST_CALLS
        self.arguments: list[str] | None = (
            None  # of the function that is followed; None: the script's own
        )
        self.shifted: int | None = (
            0  # how many of the script's arguments `shift` took off; None: not known
        )
        self.locals: list[dict[str, list[str] | None]] = []  # of each function, what it hides
        self.stop = ""  # "return" or "exit", once it was met
        self.may_have_left = False  # a `return` that may have ended these commands
        self.flow = Flow(self._shown())
        self.found: list[tuple[int, list[Word]]] = []
        if set(text) & {OPEN, CLOSE}:
            raise UserError.of("import.private_character", shown=self._shown())
        self._follow(Lexer(text, name or "the command line").commands(), 0)
        self._follow_uncalled()

    def command_line(self, any_command: bool) -> CommandLine:
        """Return the one command that runs a program with arguments."""
        found = [
            (line, words)
            for line, words in self.found
            if program([word.text for word in words]) is not None
        ]
        found = found or [
            (line, words) for line, words in self.found if program(_as_options(words)) is not None
        ]
        if any_command and not found:
            found = self.found[:1] if len(self.found) == 1 else []
            if not found:
                raise UserError.of(
                    "import.several_commands", shown=self._shown(), num_found=len(self.found)
                )
        if not found:
            raise UserError.of("import.no_program", shown=self._shown())
        if len(found) > 1:
            lines = ", ".join(str(line) for line, _ in found)
            raise UserError.of(
                "import.several_programs", shown=self._shown(), num_found=len(found), lines=lines
            )
        words = found[0][1]
        at = program(_as_options(words))
        arguments = words if at is None else words[at + 1 :]
        read = self._all_read(arguments)
        notes = [*self.sourced]
        notes += [
            f"${name} is taken as its default, {value!r}: --assume {name}=VALUE gives another"
            for name, value in sorted(self.defaults.items())
            if name in read
        ]
        started = None if at is None else ranks([word.text for word in words[:at]])
        return CommandLine(arguments, started, notes, self.taken_in)

    def _all_read(self, words: Sequence[Word]) -> set[str]:
        """Return the variables that words are made of, and those that these are made of."""
        found = set[str]()
        left = [name for word in words for name in word.reads]
        while left:
            name = left.pop()
            if name not in found and name not in self.assumed:
                found.add(name)
                left += self.uses.get(name, ())
        return found

    def _shown(self) -> str:
        return self.name or "the command line"

    # following

    def _follow(self, commands: Sequence[Command], depth: int) -> None:
        if depth > MOST_DEPTH:
            raise UserError.of(
                "import.commands_too_deep", shown=self._shown(), most_depth=MOST_DEPTH
            )
        condition: list[Command] | None = None
        at = 0
        while at < len(commands) and not self.stop:
            defined = definition(commands, at) if condition is None else None
            if defined:
                name, body, at = defined
                self._define(name, body)
                continue
            command = commands[at]
            condition = self._step(command, condition, depth)
            self.values = self.flow.end(command, self.values)
            at += 1

    def _define(self, name: str, body: list[Command]) -> None:
        if self.flow.mode() is not False:
            self.functions[name] = body, self.flow.mode() is True
        self.flow.link = ""

    def _call(self, name: str, arguments: list[str], depth: int) -> None:
        """Follow the commands of a function."""
        self.left_to_call -= 1
        if self.left_to_call < 0:
            raise UserError.of("import.too_many_calls", shown=self._shown(), most_calls=MOST_CALLS)
        self.called.add(name)
        body, certain = self.functions[name]
        before = self.arguments
        self.arguments = arguments
        self.locals.append({})
        self._inside(body, certain, depth)
        self.arguments = before
        for hidden, value in self.locals.pop().items():
            if value is None:
                self.values.pop(hidden, None)
            else:
                self.values[hidden] = value

    def _inside(self, commands: Sequence[Command], certain: bool, depth: int) -> None:
        """Follow the commands of a function or of a file that is taken in, which `return` ends."""
        doubt = self.may_have_left
        kept = self.flow.enter(certain)
        self._follow(commands, depth + 1)
        self.flow.leave(kept)
        self.may_have_left = doubt
        if self.stop == "return":
            self.stop = ""

    def _follow_uncalled(self) -> None:
        """Follow functions that nothing calls by name, if no other command runs a program."""
        if any(program(_as_options(words)) is not None for _, words in self.found):
            return
        for name in [name for name in self.functions if name not in self.called]:
            self.stop = ""
            self._call(name, [self.unknown.variable("@")], 0)

    def _mode(self) -> bool | None:
        """Return True where commands run, False where they do not, None where that is not known."""
        mode = self.flow.mode()
        return None if mode and self.may_have_left else mode

    def _step(
        self, command: Command, condition: list[Command] | None, depth: int
    ) -> list[Command] | None:
        """Follow one command; returns the commands of a condition that is being read."""
        words = list(command.words)
        first = words[0].plain if words else ""
        if condition is not None:
            if first != "then":
                return [*condition, command]
            if self.flow.asks():
                self._leave_open_in(condition)
            self.flow.decide(self._holds(condition))
            words = words[1:]
            first = words[0].plain if words else ""
        negated = False
        while first in (
            "do",
            "else",
            "elif",
            "if",
            "fi",
            "done",
            "esac",
            "{",
            "}",
            "!",
            "time",
            "exec",
        ):
            if first in ("if", "elif"):
                self.flow.open(first)
                return [Command(tuple(words[1:]), command.line, command.end)]
            self.flow.keyword(first)
            negated ^= first == "!"
            words = words[1:]
            first = words[0].plain if words else ""
        if first in LOOPS:
            self._leave_open_in([Command(tuple(words), command.line, command.end)])
            self.flow.loops.append(LOOPS[first])
        elif words:
            runs = self.flow.runs()
            subshell = "|" in (self.flow.link, command.end) or command.end == "&"
            before = dict(self.values)
            succeeded = self._run(words, command, depth)
            if subshell:
                self.values = before
            self.flow.note(runs, not succeeded if negated and succeeded is not None else succeeded)
        return None

    def _leave_open_in(self, commands: Sequence[Command]) -> None:
        """Leave open what the conditions of an `if` or loop set, and the variable of a loop."""
        if self.flow.mode() is False:
            return
        for command in commands:
            words = list(command.words)
            while words and words[0].plain in ("!", "while", "until", "if"):
                words = words[1:]
            for name in self._set_by(words):
                self._leave_open(name, f"is set in line {command.line} by what is not followed")

    def _run(self, words: list[Raw], command: Command, depth: int) -> bool | None:
        """Follow a command of at least one word. Returns True if it succeeds, None if that is not
        known."""
        mode = self._mode()
        line = command.line
        if mode is False:
            return None
        if (
            words[0].plain in ("command", "builtin")
            and len(words) > 1
            and words[1].start[:1] != "-"
        ):
            words = words[1:]
        first = words[0].plain
        if first in ("exit", "return"):
            self._end(first, words[1].plain if len(words) > 1 else "", mode, depth)
            return None
        if first in DECLARE:
            self._declare(first, words[1:], mode, line)
            return True
        if first == "shift":
            self._shift(words[1].plain if len(words) > 1 else "1", mode)
            return True
        if words and all(ASSIGN.match(word.start) for word in words):
            for word in words:
                self._assign(word, mode)
            return True
        if names := self._set_by(words):
            for name in names:
                self._leave_open(name, f"is set in line {line} by what is not followed")
            return None
        while words and ASSIGN.match(words[0].start):
            words = words[1:]
        expanded = [word for raw in words for word in self._words_of(raw)]
        if len(expanded) > MOST_WORDS:
            raise UserError.of("import.too_many_words", shown=self._shown(), line=line)
        if not expanded:
            return True
        if expanded[0].text in self.functions:
            self._call(
                expanded[0].text, [text for raw in words[1:] for text in self._expanded(raw)], depth
            )
            return None
        if expanded[0].text in ("cd", "pushd", "popd"):
            self._move([word.text for word in expanded], line)
        if expanded[0].text in ("source", ".") and len(expanded) > 1:
            self._source(expanded[1].text, line, depth)
        elif (
            expanded[0].text == "eval"
            and len(expanded) > 1
            and MARK.match("".join(self._expanded(words[1])[:1]))
        ):
            self._set_anything(f"eval {expanded[1].text}", line)
        elif expanded[0].text == "eval":
            self._again(" ".join(word.text for word in expanded[1:]), line, depth)
        elif inner := [
            word.text for word in expanded[1:] if " " in word.text and ".py " in word.text
        ]:
            self._again(inner[-1], line, depth)
        elif expanded[0].text not in ("echo", "cat", "printf"):
            self.found.append((line, expanded))
        return self._outcome(words, line)

    def _end(self, first: str, code: str, mode: bool | None, depth: int) -> None:
        """Take note of `exit` or `return`."""
        if (first == "return" and depth == 0) or self.flow.shells():
            return
        if mode:
            self.stop = first
        elif first == "return" and code in ("", "0") and self.flow.link != "||":
            self.may_have_left = (
                True  # other ends are of a failure: what follows is of scripts that do not fail
            )

    def _declare(self, first: str, words: list[Raw], mode: bool | None, line: int) -> None:
        """Follow `export`, `declare` and the like."""
        options = ""
        while words and words[0].start[:1] in ("-", "+"):
            options += words[0].start
            words = words[1:]
        not_plain = first != "export" and bool(NOT_PLAIN & set(options))
        for word in words:
            match = ASSIGN.match(word.start)
            name = match.group(1) if match else word.plain
            if (
                first not in ("export", "readonly")
                and "g" not in options
                and self.locals
                and name.isidentifier()
            ):
                self.locals[-1].setdefault(name, self.values.pop(name, None))
            if match and not_plain:
                target = "".join(part.text for part in word.parts).partition("=")[2]
                for one in [name, *([target] if target.isidentifier() else [])]:
                    self._leave_open(one, f"is set in line {line} by what is not followed")
            elif match:
                self._assign(word, mode)
            elif not name.isidentifier():
                for text in self._expanded(word):
                    self._declare_text(text, mode, line)

    def _declare_text(self, text: str, mode: bool | None, line: int) -> None:
        """Follow an assignment that is known once its word is expanded, as of `export
        "$NAME=1"`."""
        match = ASSIGN.match(text)
        if match:
            rest = Part("text", text, False)
            self._assign(Raw((rest,), line), mode)
        elif MARK.match(text):
            self._set_anything(self.unknown.shown(text), line)

    def _shift(self, count: str, mode: bool | None) -> None:
        known = int(count) if mode and count.isdecimal() and len(count) < 4 else None
        if self.arguments is None:
            if None in (known, self.shifted):
                self.shifted = None
            else:
                self.shifted = (self.shifted or 0) + (known or 0)
        elif known is None:
            self.arguments = [self.unknown.command("$@")]
        else:
            self.arguments = self.arguments[known:]

    def _move(self, words: list[str], line: int) -> None:
        """Take note of another folder, in which files that are taken in by a relative path are
        other files."""
        said = words[1] if len(words) > 1 else ""
        if said not in (".", "./") and not OWN_FOLDER.match(f"{said}/"):
            self.moved = f"line {line} moves to another folder"

    def _set_anything(self, said: str, line: int) -> None:
        """Leave open all variables, which a command that is not run may set."""
        if ENVIRONMENT_COMMANDS.search(said):
            where = f"{self._shown()}, line {line}"
            self.sourced.append(
                f"{where}: {said} is taken for an environment of programs, and is not run"
            )
            return
        self.unread = f"may be set in line {line} by {said}, which is not run"
        for name in list(self.values):
            self._leave_open(name, self.unread)

    def _source(self, said: str, line: int, depth: int) -> None:
        """Follow a file that the script takes in, or leave open what it may set."""
        where = f"{self._shown()}, line {line}"
        if ENVIRONMENTS.search(said):
            self.sourced.append(
                f"{where}: {said} is taken for an environment of programs, and is not read"
            )
            return
        try:
            text = self._sourced_text(said)
        except UserError as error:
            self.unread = (
                f"may be set by {said}, which line {line} takes in and which is not read: {error}"
            )
            self.sourced.append(f"{where}: what {said} sets is not read: {error}")
            for name in list(self.values):
                self._leave_open(name, self.unread)
            return
        self.taken_in.append(said)
        self._inside(Lexer(text, said).commands(), True, depth)

    def _sourced_text(self, said: str) -> str:
        """Return the text of a file that the script takes in. Raises UserError with the reason why
        it is not read."""
        if self.folder is None:
            raise UserError.of("import.source_of_command_line")
        inside = OWN_FOLDER.sub(f"{self.folder}/", said)
        path = self.folder / inside
        if inside.startswith("$"):
            raise UserError.of("import.source_unknown")
        if self.moved and inside == said and not Path(said).is_absolute():
            raise UserError(self.moved)
        if path.resolve().parent != self.folder.resolve():
            raise UserError.of("import.source_outside")
        if self.left_to_source == 0:
            raise UserError.of("import.too_many_sources", most_sourced=MOST_SOURCED)
        self.left_to_source -= 1
        try:
            return read_text(path, LARGEST_SOURCED)
        except OSError as error:
            raise UserError(error.strerror or "it cannot be read") from error
        except UnicodeDecodeError as error:
            raise UserError.of("import.source_not_utf8") from error

    def _outcome(self, words: list[Raw], line: int) -> bool | None:
        first = words[0].plain
        if first in ("[", "[[", "test"):
            texts = [text for raw in words for text in self._expanded_test(raw)]
            return self._test(texts if first != "test" else ["[", *texts[1:], "]"], line)
        if first == "false":
            return False
        if first in SUCCEED:
            return True
        return None

    def _set_by(self, words: list[Raw]) -> list[str]:
        """Return the variables that a command sets to what is not followed."""
        if not words:
            return []
        while len(words) > 1 and ASSIGN.match(words[0].start):  # IFS= read -r LINE
            words = words[1:]
        if words[0].plain in ("for", "select"):
            counter = words[1].plain if len(words) > 1 else ""
            if counter != "((":
                return [counter] if counter.isidentifier() else []
            words = words[1:]
        first = words[0].plain
        texts = ["".join(part.text for part in word.parts) for word in words[1:]]
        if first in ("((", "let"):
            return [one or other for one, other in COUNTED.findall(" ".join(texts))]
        if element := ELEMENT.match(words[0].start):
            return [element.group(1)]
        if first == "printf" and texts[:1] == ["-v"]:
            return [text.lstrip('"') for text in texts[1:2]]
        if first not in SETTERS:
            return []
        # unset "ARGS[0]" changes ARGS
        named = [text.partition("[")[0].lstrip('"') for text in texts]
        return [name for name in named if name.isidentifier()]

    def _leave_open(self, name: str, why: str) -> None:
        self.values[name] = [self._open(name, why)]

    def _open(self, name: str, why: str) -> str:
        return self.unknown.mark(f"${name}", f"${name} {why}: --assume {name}=VALUE gives it")

    def _words_of(self, raw: Raw) -> list[Word]:
        self.reading = set()
        texts = self._expanded(raw)
        reads = frozenset(self.reading)
        place = f"{self.name}, line {raw.line}" if self.name else ""
        return [
            Word(self.unknown.shown(text), place, self.unknown.reason(text), reads)
            for text in texts
        ]

    def _again(self, text: str, line: int, depth: int) -> None:
        self._follow(Lexer(text, self._shown(), line).commands(), depth + 1)

    def _assign(self, word: Raw, mode: bool | None) -> None:
        match = ASSIGN.match(word.start)
        assert match
        name = match.group(1)
        adds = bool(match.group(2))
        self.reading = self.uses.get(name, set()) if adds else set()
        if word.array is not None:
            value = [text for raw in word.array for text in self._expanded(raw)]
        else:
            rest = Part("text", word.parts[0].text[match.end() :], False)
            value = [self._joined(Raw((rest, *word.parts[1:]), word.line))]
        before = self.values.get(name, [])
        if adds:
            if word.array is not None:
                value = [*before, *value]
            else:
                value = ["".join([*before[:1], *value]), *before[1:]]
        if mode is None and value != before:
            why = (
                f"${name} depends on {self.condition or 'a loop or case'}; --assume {name}=VALUE "
                "gives it"
            )
            value = [self.unknown.mark(f"${name}", why)]
        if sum(map(len, value)) > 1_000_000:
            raise UserError.of(
                "import.value_too_long", shown=self._shown(), line=word.line, name=name
            )
        self.values[name] = value
        self.uses[name] = self.reading

    # expansion

    def _joined(self, raw: Raw) -> str:
        return " ".join(self._expanded(raw, split=False))

    def _expanded(self, raw: Raw, split: bool = True) -> list[str]:
        """Return the words that a word becomes; `split` at the spaces of what is not quoted."""
        if raw.array is not None:
            return [raw.start]
        words = list[str]()
        open_word = ""
        any_part = False
        for part in raw.parts:
            pieces, whole = self._pieces(part)
            if split and not whole:
                joined = " ".join(pieces)
                fields = joined.split()
                if joined[:1].isspace() and (open_word or any_part):
                    words = [*words, open_word]
                    open_word = ""
                    any_part = False
                for i, piece in enumerate(fields):
                    if i:
                        words.append(open_word)
                        open_word = ""
                    open_word = open_word + piece
                    any_part = True
                if fields and joined[-1:].isspace():
                    words = [*words, open_word]
                    open_word = ""
                    any_part = False
                continue
            for i, piece in enumerate(pieces):
                if i:
                    words.append(open_word)
                    open_word = ""
                open_word = open_word + piece
                any_part = True
        return [*words, open_word] if any_part else words

    def _pieces(self, part: Part) -> tuple[list[str], bool]:
        """Return the texts of a part, and whether they are left whole."""
        if part.kind == "text":
            braces = None if part.quoted else BRACES.search(part.text)
            return [self.unknown.command(part.text) if braces else part.text], True
        if part.kind == "run":
            return [self.unknown.command(part.text)], True
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text)], True
        if part.text.startswith('"'):
            return self._of_quotes(part.text[1:]), True
        return self._variable(part.text), part.quoted

    def _of_quotes(self, inside: str) -> list[str]:
        words = [""]
        for part in Lexer(inside, self._shown()).inside():
            values = self._variable(part.text) if part.kind == "expand" else self._pieces(part)[0]
            if part.kind == "expand" and not part.text.endswith("[@]") and part.text != "@":
                values = [" ".join(values)]
            if values:
                words = [*words[:-1], words[-1] + values[0], *values[1:]]
            elif len(words) == 1 and inside in (f"${{{part.text}}}", f"${part.text}"):
                return []
        return words

    def _variable(self, text: str) -> list[str]:
        """Return the words of `${text}`."""
        match = EXPANSION.fullmatch(text)
        if not match:
            return [self.unknown.command(f"${{{text}}}")]
        name, whole, sign, default = match.groups()
        if (name.isdecimal() and name != "0") or name in "@*#":
            if self.arguments is not None:
                return self._argument(name, sign, default)
            if self.shifted is None:
                return [self.unknown.command(f"${name} after a shift")]
            name = str(int(name) + self.shifted) if name.isdecimal() else name
        self.reading.add(name)
        if name in self.assumed:
            if name in "@*":
                return self.assumed[name].split()[self.shifted :]
            return self.assumed[name].split() if whole else [self.assumed[name]]
        value = self.values.get(name)
        if value is not None and (not sign or "".join(value) or sign[0] != ":"):
            return value if whole or len(value) < 2 else value[:1]
        if self.unread:
            return [self._open(name, self.unread)]
        if sign and sign[-1] != "?":
            chosen = self._joined(Raw(tuple(Lexer(default, self._shown()).inside()), 0)).strip(
                "\"'"
            )
            self.defaults[name] = self.unknown.shown(chosen)
            if sign[-1] == "=" and self._mode():
                self.values[name] = [chosen]
                self.uses[name] = {name}
            return [chosen]
        return [self.unknown.variable(name)]

    def _argument(self, name: str, sign: str | None, default: str | None) -> list[str]:
        """Return the words of `$1`, `$@` or `$#` within a function."""
        arguments = self.arguments or []
        own = [i for i, text in enumerate(arguments) if self.unknown.shown(text) in ("$@", "$*")]
        if (
            name.isdecimal() and own and int(name) > own[0]
        ):  # of those that the script itself is given
            name = str(int(name) - own[0])
            self.reading.add(name)
            return [self.assumed.get(name) or self.unknown.variable(name)]
        if name == "#":
            if any(map(MARK.search, arguments)):
                return [self.unknown.command("$#")]
            return [str(len(arguments))]
        if name in "@*":
            return arguments
        value = arguments[int(name) - 1 : int(name)]
        if sign and sign[-1] in "-=" and (not value or (sign[0] == ":" and not value[0])):
            return [
                self._joined(Raw(tuple(Lexer(default or "", self._shown()).inside()), 0)).strip(
                    "\"'"
                )
            ]
        return value

    def _arithmetic(self, text: str) -> str:
        known = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: " ".join(self._variable(m.group(1))), text
        )
        unknown = self.unknown.command(f"$(({text.strip()}))")
        if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", known):
            return unknown
        try:
            return str(_computed(ast.parse(known.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return unknown

    # conditions

    def _holds(self, commands: Sequence[Command]) -> bool | None:
        """Return the outcome of a condition of plain comparisons, from the left; None if it is not
        known."""
        holds = True
        sign = "&&"
        result: bool | None = holds
        for command in commands:
            one = self._test(
                [text for raw in command.words for text in self._expanded_test(raw)], command.line
            )
            if sign == "&&":
                if False in (result, one):
                    result = False
                elif None in (result, one):
                    result = None
                else:
                    result = True
            else:
                if True in (result, one):
                    result = True
                elif None in (result, one):
                    result = None
                else:
                    result = False
            sign = command.end
        return result

    def _expanded_test(self, raw: Raw) -> list[str]:
        return self._expanded(raw, split=False) or [""]

    def _test(self, words: list[str], line: int) -> bool | None:
        unknown = [name for word in words for name in self.unknown.names(word)]
        self.condition = f"the condition in line {line}"
        if unknown:
            self.condition += f", on ${unknown[0]}: --assume {unknown[0]}=VALUE decides it"
        if (
            len(words) < 3
            or words[0] not in ("[", "[[")
            or any(MARK.search(word) for word in words)
        ):
            return None
        inner = words[1:-1]
        if len(inner) == 2 and inner[0] in ("-n", "-z"):
            return bool(inner[1]) == (inner[0] == "-n")
        if len(inner) == 3 and inner[1] in ("-eq", "-ne"):
            if not (
                inner[0].isdecimal() and inner[2].isdecimal() and len(inner[0] + inner[2]) < 20
            ):
                return None
            return (int(inner[0]) == int(inner[2])) == (inner[1] == "-eq")
        if len(inner) == 3 and inner[1] in ("=", "==", "!=") and not set(inner[2]) & set("*?["):
            return (inner[0] == inner[2]) == (inner[1] != "!=")
        return None


def _as_options(words: Sequence[Word]) -> list[str]:
    """Return the texts of words, of which those that are open may be options."""
    return [f"--{word.text}" if word.unknown else word.text for word in words]


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in MATHS:
        return MATHS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError
