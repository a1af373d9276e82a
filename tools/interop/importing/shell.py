"""The command line of a launch script, which is read and never run.

Followed are assignments, defaults, arithmetic, conditions of what is known, `source` of a file
beside the script, commands in strings (`eval`, `bash -c`), and one command that runs a .py program
with arguments. A name that stands in any other line may have been set there, so no value of it can
be trusted, whatever sets it later. An argument that needs one is refused with the line, and
`--assume NAME=VALUE` gives it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import read_text
from tools.interop.importing.shell_blocks import (
    Block,
    branches_of,
    choice_of,
    function_of,
    split_line,
)
from tools.interop.importing.shell_ranks import ranks_of, slurm_sizes
from tools.interop.importing.shell_sums import holds
from tools.interop.importing.shell_tokens import (
    ASSIGNMENT,
    ODDITIES,
    SETS_ANY,
    Token,
    commands_of,
    read_lines,
    written_of,
)
from tools.interop.importing.shell_variables import HOLE, HOLE_SIGNS, WITH_DEFAULT, Variables, Word

# of examples, as NAME=<Specify path>
PLACEHOLDER = re.compile(
    r"^([ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=)(<[^<>\n\"$`]+>[\w./-]*)", re.MULTILINE
)
MOVES = re.compile(r"\b(?:cd|pushd|popd)\b")
FUNCTION = re.compile(r"([\w-]+)\s*\(\s*\)|\b(?:function|alias)\s+([\w-]+)")
PROGRAM = re.compile(r"[\w.-]+\.py")
# programs that are installed as commands, with those of their commands that train
COMMANDS = {"swift": ("pt", "sft"), "megatron": ("pt", "sft")}
RUNS = re.compile(r"\.py[\"']*\s+[\"']*(?:--|\$|\ue000)")
SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
OF_A_TEXT = re.compile(r"-\w*c")  # bash -c TEXT
SUBMITS = ("sbatch", "qsub", "bsub", "bash", "sh")
SCRIPT = re.compile(r"[\w.-]+\.(?:sh|bash|slurm|sbatch)")
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"\\]?)(\w+)[^\n]*\n(.*)\n\t*\2", re.DOTALL)
# the folder of the script, as scripts write it
OWN_FOLDER = re.compile(
    r"^(?:`pwd`|\$\(pwd\)|\$\{?(?:PWD|\w*(?:DIR|ROOT|HOME))\}?|\$\([^()]*dirname[^()]*\))/+"
)
DECLARES = ("export", "declare", "typeset", "readonly", "local")
HARMLESS_FLAGS = re.compile(r"-[xragA]+")
TESTS = ("[", "[[", "test")
OF_A_TRAINING = {"--num-layers", "--micro-batch-size", "--train-iters", "--train-samples"}
LARGEST_SOURCED = 256 * 1024  # bytes
DEEPEST = 8  # texts within texts
LONGEST_NAME = 250  # letters of a file with its folders
LONGEST_SHOWN = 60  # letters of a command


@dataclass(frozen=True)
class CommandLine:
    """A program's arguments.

    ranks: what the launcher before it starts; None if that is not said. taken_in: the files that
    the script reads with `source` or runs. absent: names that count as not set. documents: files
    that the script writes, by name. passed: the places of branches that end the script. guessed:
    files whose folders are not known, and those that were read for them.
    """

    words: list[Word]
    ranks: int | None
    taken_in: list[str]
    absent: list[str] = field(default_factory=list)
    documents: Mapping[str, str] = field(default_factory=dict)
    passed: Sequence[str] = ()
    guessed: Mapping[str, str] = field(default_factory=dict)


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


class _Script:
    """A script that is followed. path: of its file; None for a command line that is given as text.

    commands: the words of those that may run a program. passed: the places of branches that end the
    script and whose conditions hold. guessed: files that were read, by how they are written.
    functions: what may change its arguments.
    seen: the last command that is none of a training. has_ended: True after `exit` or `return`.
    has_exited: True after `exit`. bodies: of functions that are followed. num_calls: of those that
    are being followed.
    """

    def __init__(self, path: Path | None, assumed: Mapping[str, str]) -> None:
        self.path = path
        self.variables = Variables(assumed)
        self.functions = set[str]()
        self.commands: list[list[Word]] = []
        self.taken_in: list[str] = []
        self.documents: dict[str, str] = {}
        self.seen = ""
        self.passed: dict[str, None] = {}
        self.guessed: dict[str, str] = {}
        self.has_moved = False
        self.has_ended = False
        self.has_exited = False
        self.depth = 0
        self.num_calls = 0
        self.bodies: dict[str, list[list[Token]]] = {}

    def read(self, text: str) -> CommandLine:
        """Return the arguments of the one command that runs a program. Raises UserError."""
        name = self.path.name if self.path else "the command line"
        slurm = slurm_sizes(text)
        self.variables.values.update(slurm)
        self.follow(text, name)
        runs = list[list[Word]]()
        for words in self.commands:
            if _program(words) and words not in runs:
                runs.append(words)
        if self.path is None and not runs:
            runs = self.commands
        if len(runs) > 1:  # others prepare the data or the environment
            runs = [
                words for words in runs if OF_A_TRAINING & {word.text for word in words}
            ] or runs
        if len(runs) != 1:
            seen = f" (the last other command is {self.seen})" if self.seen and not runs else ""
            raise UserError.of(
                "import.not_one_program", source=name, num_found=len(runs), seen=seen
            )
        (words,) = runs
        at = _program(words)
        ranks = ranks_of(words[:at], slurm)
        absent = [name for name in self.variables.absent if name not in self.variables.assumed]
        passed = [*self.passed]
        return CommandLine(
            words[at:], ranks, self.taken_in, absent, self.documents, passed, self.guessed
        )

    def follow(self, text: str, file: str, line: int = 1) -> None:
        """Follow the lines of a text up to its end. line: the number of its first."""
        text = PLACEHOLDER.sub(r'\1"\2"', text)
        for of_brackets, of_word in FUNCTION.findall(text):
            self.functions.add(of_brackets or of_word)
        statements = list[list[Token]]()
        for tokens in read_lines(text if line > 1 else text.translate(HOLE_SIGNS), file):
            placed = [token._replace(line=token.line + line - 1) for token in tokens]
            statements += split_line(placed)
        self._follow_all(statements)

    def _follow_all(self, statements: Sequence[list[Token]]) -> None:
        block = Block()
        for statement in statements:
            if self.has_ended:
                return
            was_outside = block.is_outside
            block.add(statement)
            if block.is_outside and was_outside and not block.has_opened:
                block.clear()
                self._follow_statement(statement)
            elif block.is_outside:
                whole = block.statements
                block.clear()
                self._follow_block(whole)
        for statement in block.statements:  # a block without its end
            self._pass_by(statement, is_in_block=True)

    def _follow_statement(self, tokens: list[Token]) -> None:
        """Follow a statement that stands in no block."""
        if MOVES.search(written_of(tokens)):
            self.has_moved = True
        kinds = {token.kind for token in tokens} - {"word", "array", "redirect"}
        commands = list(commands_of(tokens))
        if kinds == {"document"} and commands:
            self._follow_document(tokens, commands[0])
        elif kinds == {"operator"} and self._follow_choice(tokens):
            return
        elif kinds:
            self._pass_by(tokens, is_flat=kinds == {"operator"})
        else:
            for command in commands:
                self._follow_command(command)

    def _follow_choice(self, tokens: Sequence[Token]) -> bool:
        """Follow `[ ... ] && command` or with `||`. Returns False if it is of another form."""
        at = [number for number, token in enumerate(tokens) if token.kind == "operator"]
        last = at[-1]
        sign = tokens[last].text[:2]
        begin = tokens[:last]
        command = [token for token in tokens[last + 1 :] if token.kind in ("word", "array")]
        is_condition = begin and begin[0].text in TESTS and sign in ("&&", "||") and command
        result = self._decide(begin) if is_condition else None
        if result is None:
            return False
        ends = self._ends([command])
        if result == (sign == "&&") and ends:
            self.passed[command[0].place] = None
        elif result == (sign == "&&"):
            self._follow_command(command)
        return True

    def _follow_block(self, statements: Sequence[list[Token]]) -> None:
        """Follow the branch of a condition that is known; trust no name of another block."""
        if self._follow_definition(statements) or self._follow_case(statements):
            return
        branches = branches_of(statements)
        first = statements[0][0].text
        if first in ("for", "while", "until") and self._is_over_nothing(statements[0]):
            return
        if branches is None:
            self._pass_by_all(statements)
            return
        for number, (condition, body) in enumerate(branches):
            result = self._decide(condition) if condition else True
            if result is None:
                rest = [part for one in branches[number:] for part in ([*one[0]], *one[1])]
                self._pass_by_all([part for part in rest if part])
                return
            # a training that ran did not end here
            if result and not self._ends(body):
                self._follow_all(body)
                return
            if result:
                self.passed[statements[0][0].place] = None

    def _follow_definition(self, statements: Sequence[list[Token]]) -> bool:
        """Keep a function, to follow it where it is called. Returns False for another block."""
        found = function_of(statements)
        if found is None:
            return False
        name, body = found
        self.bodies[name] = body
        self.functions.discard(name)
        self.variables.functions[name] = "\n".join(map(written_of, body))
        return True

    def _follow_call(self, command: Sequence[Token]) -> bool:
        """Follow a function that is called. Returns False if the command calls none."""
        words = self.variables.raw_fields(command)
        body = self.bodies.get(words[0].text) if words else None
        if body is None or self.depth == DEEPEST:
            return False
        self.depth += 1
        self.num_calls += 1
        with self.variables.of_call(words[1:]):
            self._follow_all(body)
        self.num_calls -= 1
        self.depth -= 1
        self.has_ended = self.has_exited
        return True

    def _follow_case(self, statements: Sequence[list[Token]]) -> bool:
        """Follow the branch of a `case` whose word is known. Returns False if it is not."""
        choice = choice_of(statements)
        value = self._operand(choice.word) if choice else None
        if choice is None or value is None:
            return False
        for patterns, body in choice.branches:
            texts = [self._operand(pattern) for pattern in patterns]
            quoted = [re.search(r"[\"'\\]", pattern.text) for pattern in patterns]
            has_both = any(
                quote and re.search(r"[*?\[]", str(text))
                for quote, text in zip(quoted, texts, strict=True)
            )
            if None in texts or has_both:
                return False
            if any(fnmatchcase(value, str(text)) for text in texts):
                if self._ends(body):
                    self.passed[statements[0][0].place] = None
                else:
                    self._follow_all(body)
                break
        return True

    def _ends(self, body: Sequence[Sequence[Token]]) -> bool:
        """Return True if statements end the script. A function may return."""
        ends = ("exit",) if self.num_calls else ("exit", "return")
        return any(statement[0].text in ends for statement in body)

    def _is_over_nothing(self, tokens: Sequence[Token]) -> bool:
        """Return True for a loop over the script's own arguments, of which there are none."""
        texts = [token.text for token in tokens]
        is_open = self.variables.given_unsure
        if texts[0] == "for" and texts[2:3] == ["in"]:
            is_empty = texts[3:] in (['"$@"'], ["$@"], ["$*"], ['"${@}"'])
        else:
            is_empty = texts[0] == "while" and self._decide(tokens[1:]) is False
        if not is_empty or is_open:
            return False
        self.variables.absent["$@"] = None
        return True

    def _decide(self, tokens: Sequence[Token]) -> bool | None:
        """Return whether conditions hold, joined by && and ||; None if one is not known."""
        result: bool | None = True
        sign = "&&"
        parts = list[list[Token]]([[]])
        signs = list[str]()
        for token in tokens:
            if token.kind == "operator":
                signs.append(token.text[:2])
                parts.append([])
            else:
                parts[-1].append(token)
        for sign, part in zip(["&&", *signs], parts, strict=True):
            if sign not in ("&&", "||"):
                return None
            if result == (sign == "||"):
                continue
            result = self._holds(part)
            if result is None:
                return None
        return result

    def _holds(self, tokens: Sequence[Token]) -> bool | None:
        """Return whether one condition holds; None if that is not known."""
        texts = [token.text for token in tokens]
        is_negated = texts[:1] == ["!"]
        inner = list(tokens[1:] if is_negated else tokens)
        if texts[:1] == ["true"] or texts[:1] == ["false"]:
            return texts[0] == "true"
        begins = bool(inner) and inner[0].text in TESTS
        if begins:
            del inner[0]
        if inner and inner[-1].text in ("]", "]]"):
            del inner[-1]
            begins = True
        if not begins or not inner or any(token.kind != "word" for token in inner):
            return None
        if any(re.search(r"(?<!\$)[*?]", token.text) for token in inner[2:]):  # a pattern
            return None
        if any(odd.startswith(("$(", "`")) for odd in ODDITIES.findall(written_of(inner))):
            return None
        operands = [self._operand(token) for token in inner]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return None
        result = holds(known)
        return result if result is None or not is_negated else not result

    def _operand(self, token: Token) -> str | None:
        """Return a word of a condition; None if it is not known. A variable that nothing sets is
        empty."""
        variables = self.variables
        bare = re.fullmatch(r"\"?\$\{?(\w+)\}?\"?", token.text)
        if bare and variables.is_absent(bare[1]):
            variables.absent[bare[1]] = None
            return ""
        text = variables.text(token.text, token.place)
        return None if HOLE.search(text) else text

    def _pass_by_all(self, statements: Sequence[Sequence[Token]]) -> None:
        for statement in statements:
            if MOVES.search(written_of(statement)):
                self.has_moved = True
            self._pass_by(statement, is_in_block=True)

    def _pass_by(
        self, tokens: Sequence[Token], is_flat: bool = False, is_in_block: bool = False
    ) -> None:
        """Trust no name of a statement that is not followed. is_flat: its commands stand in no
        block."""
        place = tokens[0].place
        written = written_of([token for token in tokens if token.kind != "document"])
        may_set = written_of(tokens)
        if _sets_nothing(tokens):
            may_set = " ".join(ODDITIES.findall(may_set))
        self.variables.distrust(may_set, place)
        # a quote within quotes may end elsewhere than it seems, and take in lines
        kinds = {token.kind for token in tokens}
        is_torn = "torn" in kinds or "other" in kinds
        is_long = "\n" in written
        # what stands in a block may be done later, or again
        if (is_torn and is_long) or (is_in_block and SETS_ANY.search(written)):
            self.variables.unsure_all = place
        if is_flat:
            for command in commands_of(tokens):
                self._follow_run(command)
        elif self.path is None or _runs(written) or self._calls_program(written):
            raise UserError.of("import.program_hidden", place=place)

    def _calls_program(self, written: str) -> bool:
        """Return True for a text with the name of a function that runs a program."""
        bodies = self.variables.functions
        return any(_runs(bodies.get(name, "")) for name in re.findall(r"[\w-]+", written))

    def _follow_document(self, tokens: Sequence[Token], command: Sequence[Token]) -> None:
        """Follow a here-document: one that is run, or one that is written to a file."""
        (document,) = [token for token in tokens if token.kind == "document"]
        self.variables.distrust(document.text, document.place)
        match = DOCUMENT.fullmatch(document.text)
        if match is None:
            return
        is_plain = not match[1]
        text = self.variables.document(match[3], document.place) if is_plain else match[3]
        if command[0].text in SUBMITS and _runs(text):
            self._follow_text(text, document)
        begin, _, _ = document.text.partition("\n")
        targets = [token.text for token in tokens if token.kind == "redirect"]
        targets += re.findall(r"(?<![<>\d])>>?[ \t]*[^\s>|&;]+", begin)
        for target in targets:
            name = self.variables.text(target.lstrip("0123456789>| \t"))
            self.documents[self.variables.shown(name)] = self.variables.shown(text)

    def _follow_command(self, command: Sequence[Token]) -> None:
        """Follow one command that stands in no block."""
        first = command[0]
        self._distrust_oddities(command)
        if first.text in ("exit", "return"):
            self.has_ended = True
            self.has_exited = first.text == "exit"
            return
        if first.text == "set" and not written_of(command[1:2]).startswith(("-", "+")):
            self.variables.given_unsure = True
        if first.text == "shift" or written_of(command[:2]) == "set --":
            self.variables.given_unsure = True
        if first.text == ":":
            self.variables.raw_fields(command)
            return
        assignments = list(command)
        if first.text in DECLARES and (first.text != "local" or self.num_calls):
            assignments = [word for word in command[1:] if not word.text.isidentifier()]
            while assignments and HARMLESS_FLAGS.fullmatch(assignments[0].text):
                del assignments[0]
        if all(ASSIGNMENT.match(word.text) for word in assignments):
            for word in assignments:
                if first.text == "local":
                    self.variables.make_local(word.text.partition("=")[0].rstrip("+"))
                self.variables.assign(word)
            if first.text == "export":
                self.variables.exported |= {word.text.partition("=")[0] for word in command[1:]}
            return
        is_taken_in = first.text in ("source", ".") and self._take_in(command)
        if first.text != "echo" and not is_taken_in and not self._follow_run(command):
            self.variables.distrust(written_of(command), first.place)

    def _distrust_oddities(self, command: Sequence[Token]) -> None:
        """Trust no name that an expansion in a command may set."""
        for odd in ODDITIES.findall(written_of(command)):
            is_default = WITH_DEFAULT.fullmatch(odd) is not None
            if not is_default and (not odd.startswith("${") or re.search(r"=|\+\+|--", odd)):
                self.variables.distrust(odd, command[0].place)

    def _follow_run(self, command: Sequence[Token]) -> bool:
        """Remember a command that may run a program, or follow the text that it runs. Returns False
        if it may set variables."""
        first = command[0]
        words = self.variables.raw_fields(command)
        if not words:
            return False
        if self._follow_call(command):
            return True
        if first.text == "eval":
            text = " ".join(word.text for word in words[1:])
            return _runs(text) and self._follow_text(text, first)
        for number, word in enumerate(words[:-1]):
            before = words[number - 1].text if number else ""
            is_shell = SHELLS.fullmatch(before) or before.startswith("-")
            if OF_A_TEXT.fullmatch(word.text) and is_shell:
                self._follow_shell(words[: number - 1], words[number + 1].text, first)
                return True
        if self._follow_script(words):
            return True
        self._note(words, first)
        return False

    def _follow_script(self, words: Sequence[Word]) -> bool:
        """Follow a script beside this one that a command runs, with its words as arguments. Returns
        False if it runs none."""
        submits = words[0].text.rpartition("/")[2] in SUBMITS
        number = 0
        if submits:
            names = [SCRIPT.fullmatch(word.text.rpartition("/")[2]) for word in words]
            number = next((n for n, name in enumerate(names) if name and n), 0)
        if submits != bool(number) or _program(words):
            return False
        found = self._read_beside(self.variables.shown(words[number].text))
        if found is None or self.depth == DEEPEST:
            return False
        name, text = found
        self.taken_in.append(name)
        self.depth += 1
        with self.variables.of_child(words[number + 1 :]):
            self.follow(text, name)
        self.depth -= 1
        self.has_ended = False  # `exit` ends that script alone
        return True

    def _follow_shell(self, launcher: Sequence[Word], text: str, first: Token) -> None:
        """Follow the text of `bash -c TEXT`, which sets no variable of the script. launcher: the
        words before it."""
        num_before = len(self.commands)
        values = dict(self.variables.values)
        self._follow_text(text, first)
        self.variables.values = values
        known = [self.variables.finished(word) for word in launcher]
        for number, words in enumerate(self.commands[num_before:], num_before):
            self.commands[number] = known + words

    def _follow_text(self, text: str, where: Token) -> bool:
        """Follow a text that a command runs as a script. Raises UserError if it cannot be read."""
        if self.depth == DEEPEST:
            raise UserError.of("import.program_hidden", place=where.place)
        self.depth += 1
        try:
            self.follow(text, where.file, max(2, where.line))
        except UserError as error:
            if error.codes == ("import.program_hidden",):
                raise
            raise UserError.of("import.program_hidden", place=where.place) from error
        finally:
            self.depth -= 1
        return True

    def _note(self, raw_words: Sequence[Word], first: Token) -> None:
        """Remember a command that may run a program. Raises UserError if it runs one in another way
        than by its own words."""
        is_hidden = any(_runs(word.text) for word in raw_words)
        words = [self.variables.finished(word) for word in raw_words]
        launchers = {word.text for word in words[: _program(words)]}
        if is_hidden or launchers & self.functions:
            raise UserError.of("import.program_hidden", place=first.place)
        self.commands.append(words)
        if not _program(words) and len(words) > 1:
            shown = " ".join(word.text for word in words)
            self.seen = f"`{shown[:LONGEST_SHOWN]}` in {first.place}"

    def _take_in(self, command: Sequence[Token]) -> bool:
        """Follow a file beside the script; return False if it is not followed."""
        if self.path is None or len(command) != 2:
            return False
        written = " ".join(word.text for word in self.variables.fields(command[1]))
        # a folder that nothing in the script names may be any
        named = {name for name in re.findall(r"\w+", written) if self.variables.is_touched(name)}
        found = self._read_beside(written, may_guess=bool(named))
        if found is None:
            return False
        name, text = found
        self.taken_in.append(name)
        self.follow(text, name)
        self.has_ended = False  # `return` ends that file alone
        return True

    def _read_beside(self, written: str, may_guess: bool = True) -> tuple[str, str] | None:
        """Return name and text of a file in the folder of the script, or below it; None if it is
        not there or has been read.

        may_guess: a file whose folder is not known may be the only one of its name there.
        """
        # no words of a command, and no text
        if self.path is None or len(written) > LONGEST_NAME or re.search(r"[\s\0]", written):
            return None
        folder = self.path.parent.resolve()
        own_name = OWN_FOLDER.sub("", written)
        _, _, file = own_name.rpartition("/")
        path = (folder / own_name).resolve()
        is_open = may_guess and "$" in written and SCRIPT.fullmatch(file)
        if is_open and not path.exists():
            found = [*folder.glob(file), *folder.glob(f"*/{file}")]
            if len(found) == 1:
                path = found[0].resolve()
                self.guessed[written] = str(found[0].relative_to(folder))
        is_elsewhere = self.has_moved and own_name == written
        is_read = path.name in self.taken_in or path.name == self.path.name
        if is_elsewhere or not path.is_relative_to(folder) or is_read:
            return None
        try:
            return path.name, read_text(path, LARGEST_SOURCED)
        except (OSError, ValueError):
            return None


def _sets_nothing(tokens: Sequence[Token]) -> bool:
    """Return True for words that are printed and for conditions in brackets, in which only an
    expansion may set a variable."""
    if {token.kind for token in tokens} - {"word", "redirect", "operator"}:
        return False
    begins = list[str]()
    for command in commands_of(tokens):
        texts = [token.text for token in command]
        if texts[0] in ("if", "elif", "!"):
            del texts[0]
        begins.append(next(iter(texts), ""))
    return set(begins) <= {"echo", *TESTS}


def _runs(text: str) -> bool:
    """Return True for a text that seems to run a program with arguments."""
    is_shown = text.startswith("echo ")
    return not is_shown and RUNS.search(text) is not None


def _program(words: Sequence[Word]) -> int:
    """Return the index behind the program among the words of a command, if arguments follow it;
    otherwise 0."""
    at = 0
    before = ""
    for number, word in enumerate(words, 1):
        _, _, file = word.text.strip("\"'").rpartition("/")
        is_command = word.text in COMMANDS.get(before, ())
        before = file
        if (PROGRAM.fullmatch(file) or is_command) and not at:
            at = number
        elif at and (word.unknown or word.text.startswith("--")):
            return at
    return 0
