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
from pathlib import Path

from megaprec.errors import UserError
from tools.interop.importing.shell_blocks import (
    Block,
    Branch,
    branches_of,
    choice_of,
    function_of,
    split_line,
)
from tools.interop.importing.shell_conditions import TESTS, chosen_body, decide
from tools.interop.importing.shell_effects import (
    assignments_of,
    changes_own_arguments,
    makes_read_only,
    may_end_elsewhere,
    name_before_sign,
    oddities_that_may_set,
    part_that_may_set,
)
from tools.interop.importing.shell_expansions import Expander
from tools.interop.importing.shell_files import FilesBeside
from tools.interop.importing.shell_programs import (
    SUBMITS,
    end_of_program,
    index_of_script,
    index_of_text,
    seems_to_run,
    the_training,
)
from tools.interop.importing.shell_ranks import ranks_of, slurm_sizes
from tools.interop.importing.shell_tokens import (
    ASSIGNMENT,
    SETS_ANY,
    Token,
    commands_of,
    read_lines,
    written_of,
)
from tools.interop.importing.shell_variables import Variables
from tools.interop.importing.shell_words import HOLE_SIGNS, Word

# of examples, as NAME=<Specify path>
PLACEHOLDER = re.compile(
    r"^([ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=)(<[^<>\n\"$`]+>[\w./-]*)", re.MULTILINE
)
MOVES = re.compile(r"\b(?:cd|pushd|popd)\b")
FUNCTION = re.compile(r"([\w-]+)\s*\(\s*\)|\b(?:function|alias)\s+([\w-]+)")
DOCUMENT = re.compile(r"<<-?[ \t]*(['\"\\]?)(\w+)[^\n]*\n(.*)\n\t*\2", re.DOTALL)
ENDS = ("exit", "return")
ALL_GIVEN = (['"$@"'], ["$@"], ["$*"], ['"${@}"'])  # all words that a loop is over
DEEPEST = 8  # texts within texts
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

    files: those beside it. commands: the words of those that may run a program. documents: texts of
    here-documents that the script writes, by file. passed: the places of branches that end the
    script and whose conditions hold. seen: the last command that is none of a training.
    unread_functions: names of functions and aliases whose bodies are not known (yet): one before a
    program may change its arguments. bodies: of the other functions, by name.
    has_ended: True after `exit` or `return`. has_exited: True after `exit`.
    depth: how many calls, scripts and texts are being followed within each other. num_calls: how
    many of them are calls of functions.
    """

    def __init__(self, path: Path | None, assumed: Mapping[str, str]) -> None:
        self.path = path
        self.files = FilesBeside(path)
        self.variables = Variables(assumed)
        self.expander = Expander(self.variables)
        self.unread_functions = set[str]()
        self.commands: list[list[Word]] = []
        self.documents: dict[str, str] = {}
        self.seen = ""
        self.passed: dict[str, None] = {}
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
        is_script = self.path is not None
        words = the_training(self.commands, is_script, name, self.seen)
        end = end_of_program(words)
        absent = [name for name in self.variables.absent if name not in self.variables.assumed]
        return CommandLine(
            words=words[end:],
            ranks=ranks_of(words[:end], slurm),
            taken_in=self.files.taken_in,
            absent=absent,
            documents=self.documents,
            passed=[*self.passed],
            guessed=self.files.guessed,
        )

    def follow(self, text: str, file: str, line: int = 1) -> None:
        """Follow the lines of a text up to its end. line: the number of its first."""
        text = PLACEHOLDER.sub(r'\1"\2"', text)
        for of_brackets, of_word in FUNCTION.findall(text):
            self.unread_functions.add(of_brackets or of_word)
        statements = list[list[Token]]()
        for tokens in read_lines(text if line > 1 else text.translate(HOLE_SIGNS), file):
            placed = [token._replace(line=token.line + line - 1) for token in tokens]
            statements += split_line(placed)
        self._follow_all(statements)

    def _follow_all(self, statements: Sequence[list[Token]]) -> None:
        """Follow statements up to one that ends the script or call: those that stand in no block
        one by one, those of a block together."""
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
            self.files.has_moved = True
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
        """Follow `[ ... ] && command` or with `||`. Returns False, and follows nothing, if it is of
        another form or the condition is not known."""
        places = [number for number, token in enumerate(tokens) if token.kind == "operator"]
        last = places[-1]
        sign = tokens[last].text[:2]
        condition = tokens[:last]
        command = [token for token in tokens[last + 1 :] if token.kind in ("word", "array")]
        is_test = bool(condition) and condition[0].text in TESTS
        if not is_test or not command or sign not in ("&&", "||"):
            return False
        result = decide(condition, self.expander)
        if result is None:
            return False
        is_followed = result == (sign == "&&")
        if is_followed and self._ends([command]):
            self.passed[command[0].place] = None
        elif is_followed:
            self._follow_command(command)
        return True

    def _follow_block(self, statements: Sequence[list[Token]]) -> None:
        """Follow the branch of a condition that is known; trust no name of another block."""
        if self._follow_definition(statements) or self._follow_case(statements):
            return
        if self._is_over_nothing(statements[0]):
            return
        branches = branches_of(statements)
        if branches is None:
            self._pass_by_all(statements)
        else:
            self._follow_branches(branches, statements[0][0].place)

    def _follow_branches(self, branches: Sequence[Branch], place: str) -> None:
        """Follow the first branch whose condition holds. Those from one on that is not known are
        passed by. place: of the block."""
        for number, (condition, body) in enumerate(branches):
            holds = decide(condition, self.expander) if condition else True
            if holds is None:
                self._pass_by_branches(branches[number:])
                return
            # a training that ran did not end here
            if holds and not self._ends(body):
                self._follow_all(body)
                return
            if holds:
                self.passed[place] = None

    def _pass_by_branches(self, branches: Sequence[Branch]) -> None:
        for condition, body in branches:
            self._pass_by_all([condition, *body] if condition else body)

    def _follow_definition(self, statements: Sequence[list[Token]]) -> bool:
        """Keep a function, to follow it where it is called. Returns False for another block."""
        function = function_of(statements)
        if function is None:
            return False
        name, body = function
        self.bodies[name] = body
        self.unread_functions.discard(name)
        self.variables.functions[name] = "\n".join(map(written_of, body))
        return True

    def _follow_call(self, command: Sequence[Token]) -> bool:
        """Follow a shell function that the command calls. Returns False if it calls none whose body
        is known, or if calls are nested too deep."""
        words = self.expander.raw_fields(command)
        body = self.bodies.get(words[0].text) if words else None
        if body is None or self.depth == DEEPEST:
            return False
        self.depth += 1
        self.num_calls += 1
        with self.variables.of_call(words[1:]):
            self._follow_all(body)
        self.num_calls -= 1
        self.depth -= 1
        self.has_ended = self.has_exited  # `return` ends the call alone, `exit` the script
        return True

    def _follow_case(self, statements: Sequence[list[Token]]) -> bool:
        """Follow the branch of a `case` whose word is known. Returns False if it is not."""
        choice = choice_of(statements)
        body = chosen_body(choice, self.expander) if choice else None
        if body is None:
            return False
        if self._ends(body):
            self.passed[statements[0][0].place] = None
        else:
            self._follow_all(body)
        return True

    def _ends(self, body: Sequence[Sequence[Token]]) -> bool:
        """Return True if statements end the script. A function may return."""
        ends = ("exit",) if self.num_calls else ENDS
        return any(statement[0].text in ends for statement in body)

    def _is_over_nothing(self, tokens: Sequence[Token]) -> bool:
        """Return True for a loop over the script's own arguments, of which there are none."""
        texts = [token.text for token in tokens]
        if texts[0] == "for" and texts[2:3] == ["in"]:
            is_empty = texts[3:] in ALL_GIVEN
        else:
            is_empty = texts[0] == "while" and decide(tokens[1:], self.expander) is False
        if not is_empty or self.variables.given_unsure:
            return False
        self.variables.absent["$@"] = None
        return True

    def _pass_by_all(self, statements: Sequence[Sequence[Token]]) -> None:
        for statement in statements:
            if MOVES.search(written_of(statement)):
                self.files.has_moved = True
            self._pass_by(statement, is_in_block=True)

    def _pass_by(
        self, tokens: Sequence[Token], is_flat: bool = False, is_in_block: bool = False
    ) -> None:
        """Trust no name of a statement that is not followed. is_flat: its commands stand in no
        block."""
        place = tokens[0].place
        written = written_of([token for token in tokens if token.kind != "document"])
        self.variables.distrust(part_that_may_set(tokens), place)
        # what stands in a block may be done later, or again
        is_done_again = is_in_block and SETS_ANY.search(written) is not None
        if is_done_again or may_end_elsewhere(tokens, written):
            self.variables.unsure_all = place
        if is_flat:
            for command in commands_of(tokens):
                self._follow_run(command)
        elif self.path is None or seems_to_run(written) or self._calls_program(written):
            raise UserError.of("import.program_hidden", place=place)

    def _calls_program(self, written: str) -> bool:
        """Return True for a text with the name of a function that runs a program."""
        bodies = self.variables.functions
        return any(seems_to_run(bodies.get(name, "")) for name in re.findall(r"[\w-]+", written))

    def _follow_document(self, tokens: Sequence[Token], command: Sequence[Token]) -> None:
        """Follow a here-document: one that is run, or one that is written to a file."""
        (document,) = [token for token in tokens if token.kind == "document"]
        self.variables.distrust(document.text, document.place)
        match = DOCUMENT.fullmatch(document.text)
        if match is None:
            return
        is_plain = not match[1]
        text = self.expander.document(match[3], document.place) if is_plain else match[3]
        if command[0].text in SUBMITS and seems_to_run(text):
            self._follow_text(text, document)
        begin, _, _ = document.text.partition("\n")
        targets = [token.text for token in tokens if token.kind == "redirect"]
        targets += re.findall(r"(?<![<>\d])>>?[ \t]*[^\s>|&;]+", begin)
        for target in targets:
            name = self.expander.text(target.lstrip("0123456789>| \t"))
            self.documents[self.variables.holes.shown(name)] = self.variables.holes.shown(text)

    def _follow_command(self, command: Sequence[Token]) -> None:
        """Follow one command that stands in no block."""
        name = command[0].text
        for odd in oddities_that_may_set(command):
            self.variables.distrust(odd, command[0].place)
        if name in ENDS:
            self.has_ended = True
            self.has_exited = name == "exit"
            return
        if changes_own_arguments(command):
            self.variables.given_unsure = True
        assignments = assignments_of(command, is_in_call=self.num_calls > 0)
        if name == ":":
            # its words are made for the defaults that they set
            self.expander.raw_fields(command)
        elif all(ASSIGNMENT.match(word.text) for word in assignments):
            self._assign_all(name, assignments)
            named = {name_before_sign(word) for word in command[1:]}
            if name == "export":
                self.variables.exported |= named
            if makes_read_only(command):
                self.variables.read_only |= named
        elif not self._is_followed(command):
            self.variables.distrust(written_of(command), command[0].place)

    def _assign_all(self, declared_by: str, assignments: Sequence[Token]) -> None:
        """Follow the assignments of a command. declared_by: its first word, such as `local`."""
        for word in assignments:
            name = name_before_sign(word).rstrip("+")
            if name in self.variables.read_only:
                # a shell keeps the value and goes on, or ends
                self.variables.unsure.setdefault(name, word.place)
            if declared_by == "local":
                self.variables.make_local(name)
            self.expander.assign(word)

    def _is_followed(self, command: Sequence[Token]) -> bool:
        """Follow what a command takes in or runs. Returns False if it may set variables."""
        name = command[0].text
        if name == "echo":
            return True
        is_taken_in = name in ("source", ".") and self._take_in(command)
        return is_taken_in or self._follow_run(command)

    def _follow_run(self, command: Sequence[Token]) -> bool:
        """Remember a command that may run a program, or follow the text that it runs. Returns False
        if it may set variables."""
        first = command[0]
        words = self.expander.raw_fields(command)
        if not words:
            return False
        if self._follow_call(command):
            return True
        if first.text == "eval":
            text = " ".join(word.text for word in words[1:])
            return seems_to_run(text) and self._follow_text(text, first)
        number = index_of_text(words)
        if number:
            launcher = words[: number - 2]
            self._follow_shell(launcher, words[number].text, first)
            return True
        if self._follow_script(words):
            return True
        self._note(words, first)
        return False

    def _follow_script(self, words: Sequence[Word]) -> bool:
        """Follow a script beside this one that a command runs, with its words as arguments. Returns
        False if it runs none."""
        number = index_of_script(words)
        if number is None or end_of_program(words):
            return False
        file = self.files.read(self.variables.holes.shown(words[number].text))
        if file is None or self.depth == DEEPEST:
            return False
        name, text = file
        self.files.taken_in.append(name)
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
        known = [self.variables.holes.finished(word) for word in launcher]
        for number, words in enumerate(self.commands[num_before:], num_before):
            self.commands[number] = known + words

    def _follow_text(self, text: str, where: Token) -> bool:
        """Follow a text that a command runs as a script, and return True. Raises UserError if it
        cannot be read."""
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
        is_hidden = any(seems_to_run(word.text) for word in raw_words)
        words = [self.variables.holes.finished(word) for word in raw_words]
        launchers = {word.text for word in words[: end_of_program(words)]}
        if is_hidden or launchers & self.unread_functions:
            raise UserError.of("import.program_hidden", place=first.place)
        self.commands.append(words)
        if not end_of_program(words) and len(words) > 1:
            shown = " ".join(word.text for word in words)
            self.seen = f"`{shown[:LONGEST_SHOWN]}` in {first.place}"

    def _take_in(self, command: Sequence[Token]) -> bool:
        """Follow a file beside the script; return False if it is not followed."""
        if self.path is None or len(command) != 2:
            return False
        written = " ".join(word.text for word in self.expander.fields(command[1]))
        # a folder that nothing in the script names may be any
        named = {name for name in re.findall(r"\w+", written) if self.variables.is_touched(name)}
        file = self.files.read(written, may_guess=bool(named))
        if file is None:
            return False
        name, text = file
        self.files.taken_in.append(name)
        self.follow(text, name)
        self.has_ended = False  # `return` ends that file alone
        return True
