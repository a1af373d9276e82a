"""The variables of a script, and what words become by them.

What is not known stays a hole in a text: it goes with the text through assignments, strings that
hold commands and arrays, and the word that it ends in is not known.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megaprec.errors import Problem
from tools.interop.importing.shell_sums import sum_of
from tools.interop.importing.shell_tokens import (
    ASSIGNMENT,
    HARMLESS,
    ITEMS,
    PIECES,
    QUOTED,
    SETS_ANY,
    Token,
)

HOLE = re.compile("\ue000(\\d+)\ue001")
PLACEHOLDER = re.compile(r"(?<![<\w])<[A-Za-z][\w '/.,-]*>[\w./-]*")
HOLE_SIGNS = str.maketrans("\ue000\ue001", "\ufffd\ufffd")
LONGEST = 20_000  # letters of a text, or items of an array
WITH_DEFAULT = re.compile(r"\$\{(\w+)(:?)([-=+?])(.*)\}", re.DOTALL)
REPLACED = re.compile(r"\$\{([A-Za-z_]\w*)//([\w.,:-]+)/?([\w.,:-]*)\}")
SUM = re.compile(r"\$\(\((.*)\)\)|\$\(expr ([\w\s$*/%+{}\\-]*)\)", re.DOTALL)
FILE_PATTERN = re.compile(r"[*?]")
NAME_IN_SUM = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|(?<![\w$])([A-Za-z_]\w*)")
OPERAND = re.compile(r"-?\d{1,18}")
# every word of a command line, of which a training has none of its own
ALL_GIVEN = frozenset({"@", "*"})
# variables that only a cluster, a launcher or a login sets
SET_OUTSIDE = re.compile(
    r"(?:SLURM|PBS|LSB|SGE|OMPI|PMI|PMIX|CUDA|CONDA)\w*|(?:MASTER|HOST)\w*|HOME|USER|PATH|PWD|TMPDIR"
    r"|SHELL|UID|RANDOM|SECONDS|LD_LIBRARY_PATH|(?:LOCAL_|NODE_)?RANK|WORLD_SIZE|LOCAL_WORLD_SIZE"
)


@dataclass(frozen=True)
class Word:
    """A word of a command line.

    place: the file and line that it stands in; "" for a command line that is given as text.
    unknown: why it is not known, with the way to give it; None if it is.
    """

    text: str
    place: str = ""
    unknown: Problem | None = None


Segment = str | list[Word] | None
"""A part of a word: a text that is not cut, the words of an expansion, of which the first and the
last join what stands beside them, or the end of a word."""


class Variables:
    """The variables of a script: what its lines give them.

    assumed: values that count whatever the script says. values: texts and arrays. unsure: the
    places of names that what is not followed may set. unsure_all: that of what may set any variable
    later. absent: names that count as not set, by which a default or a condition was decided.
    given_unsure: True if the script changes its own arguments. given: these arguments, if another
    script runs it with them. exported: names that a script that it runs gets too.
    functions: the bodies of those that are followed where they are called. of_calls: what the local
    names of each call that is followed held before it.
    """

    def __init__(self, assumed: Mapping[str, str]) -> None:
        self.assumed = assumed
        self.values: dict[str, str | list[Word]] = {"PWD": "."}
        self.unsure: dict[str, str] = {}
        self.unsure_all = ""
        self.absent: dict[str, None] = {}
        self.given_unsure = False
        self.given: list[Word] | None = None
        self.exported = set[str]()
        self.functions: dict[str, str] = {}
        self.of_calls: list[dict[str, str | list[Word] | None]] = []
        self._holes: list[tuple[str, Problem]] = []

    def distrust(self, written: str, place: str) -> None:
        """Trust no variable that a text of the script may set which is not followed."""
        for name in re.findall(r"[A-Za-z_][\w-]*", HARMLESS.sub(" ", written)):
            if body := self.functions.pop(name, ""):
                self.distrust(body, place)
                self.functions[name] = body
        for name in re.findall(r"[A-Za-z_]\w*", HARMLESS.sub(" ", written)):
            self.unsure.setdefault(name, place)
        if SETS_ANY.search(written):
            self.values.clear()

    @contextmanager
    def of_child(self, given: Sequence[Word]) -> Iterator[None]:
        """Have the variables of a script that this one runs: those that are exported. given: its
        arguments."""
        before = self.values, self.unsure, self.unsure_all, self.given, self.given_unsure
        exported = self.exported | {"PWD"}
        self.values = {name: value for name, value in self.values.items() if name in exported}
        self.unsure = {name: place for name, place in self.unsure.items() if name in exported}
        self.given = [*given]
        self.given_unsure = False
        try:
            yield
        finally:
            self.values, self.unsure, self.unsure_all, self.given, self.given_unsure = before

    @contextmanager
    def of_call(self, given: Sequence[Word]) -> Iterator[None]:
        """Have the arguments of a function while it is followed."""
        before = self.given, self.given_unsure
        self.given = [*given]
        self.given_unsure = False
        self.of_calls.append({})
        try:
            yield
        finally:
            self.given, self.given_unsure = before
            for name, value in self.of_calls.pop().items():
                if value is None:
                    self.values.pop(name, None)
                else:
                    self.values[name] = value

    def make_local(self, name: str) -> None:
        """Have a variable for the call that is followed alone."""
        if self.of_calls:
            self.of_calls[-1].setdefault(name, self.values.get(name))

    def _given_as_text(self, base: str) -> str:
        """Return `$@`, `$*` or `$#`."""
        words = self.given or []
        return str(len(words)) if base == "#" else " ".join(word.text for word in words)

    def assign(self, token: Token) -> None:
        """Follow `NAME=value`, `NAME=(...)` or one of both with `+=`."""
        match = ASSIGNMENT.fullmatch(token.text)
        assert match
        name, adds, text = match.groups()
        before = self._value(name, f"${name}") if adds and name in self.values else None
        was_array = isinstance(self.values.get(name), list)
        is_array = token.kind == "array"
        if was_array and not is_array:  # it sets one item
            self.values[name] = self.hole(f"${name}", _open(name, token.place))
        elif is_array:
            items = self._items_within(token, text)
            first = [Word(before, token.place)] if isinstance(before, str) else before or []
            self.values[name] = [*first, *items]
        else:
            value = self._without_placeholders(name, self.text(text, token.place))
            if self._is_asked_by_name(value):
                value = self.hole(f"${name}", _open(name, token.place))
            self.values[name] = f"{before or ''}{value}"

    def _without_placeholders(self, name: str, value: str) -> str:
        """Return a value in which `<Specify path>` of an example is not known."""

        def hole(match: re.Match[str]) -> str:
            shown = match[0]
            return self.hole(f"${name}", Problem.of("import.placeholder", name=name, written=shown))

        return PLACEHOLDER.sub(hole, value)

    def _is_asked_by_name(self, value: str) -> bool:
        """Return True for one word of which a part has no name, such as what a command prints."""
        if re.search(r"\s", value):
            return False
        causes = [self._holes[int(number)][1] for number in HOLE.findall(value)]
        return any(
            why.code == "import.not_followed" or str(why.fields["name"]).isdigit() for why in causes
        )

    def _items_within(self, token: Token, text: str) -> list[Word]:
        """Return the words of an array. text: the brackets and what stands in them."""
        words = list[Word]()
        for item in ITEMS.finditer(text, 1, len(text) - 1):
            line = token.line + text.count("\n", 0, item.start())
            if not item[0].startswith("#"):
                words += self._raw_fields(Token("word", item[0], token.file, line))
        return words

    def hole(self, written: str, why: Problem) -> str:
        """Return the sign of what is not known."""
        self._holes.append((self.shown(written), why))
        return f"\ue000{len(self._holes) - 1}\ue001"

    def shown(self, text: str) -> str:
        """Return a text with its holes as they are written in the script."""
        return HOLE.sub(lambda match: self._holes[int(match[1])][0], text)

    def finished(self, word: Word) -> Word:
        """Return a word as it is given to the reader of arguments."""
        found = HOLE.search(word.text)
        if found is None:
            return word
        _, why = self._holes[int(found[1])]
        return Word(self.shown(word.text), word.place, why)

    def _value(self, name: str, written: str) -> str | list[Word]:
        """Return the text or the words that a variable holds."""
        if name in self.assumed:
            return self.assumed[name]
        cut = self.unsure.get("IFS")  # it says where words are cut
        place = self.unsure_all or cut or self.unsure.get(name)
        if place:
            return self.hole(written, _open(name, place))
        value = self.values.get(name)
        if value is None:
            return self.hole(written, Problem.of("import.variable_unset", name=name))
        if len(value) > LONGEST:
            return self.hole(written, Problem.of("import.not_followed", written=written))
        return value

    def is_touched(self, name: str) -> bool:
        """Return True for a variable that something in the script sets, or may set."""
        return bool(self.unsure_all) or name in self.values or name in self.unsure

    def is_absent(self, name: str, has_default: bool = False) -> bool:
        """Return True for a variable that nothing sets: neither the script nor what runs it.
        has_default: the script says what counts without a cluster."""
        is_given = name in self.assumed or name in self.values or name in self.unsure
        is_set_outside = SET_OUTSIDE.fullmatch(name) and not has_default
        if self.unsure_all or is_given or is_set_outside:
            return False
        if name.isdigit() and self.given is not None:
            return int(name) > len(self.given)
        return not (name.isdigit() and self.given_unsure)

    def fields(self, token: Token) -> list[Word]:
        """Return the words that one becomes: an expansion without quotes is cut at its blanks."""
        return [self.finished(word) for word in self._raw_fields(token)]

    def raw_fields(self, tokens: Sequence[Token]) -> list[Word]:
        """Return the words of a command, with holes."""
        return [word for token in tokens for word in self._raw_fields(token)]

    def _raw_fields(self, token: Token) -> list[Word]:
        if token.kind == "array":
            return [Word(token.text, token.place)]
        words = list[Word]()
        current: Word | None = None
        for segment in self._segments(token):
            if isinstance(segment, str):
                begin = current.text if current else ""
                current = Word(begin + segment, token.place)
            elif segment is None:
                words += [current] if current else []
                current = None
            else:
                for number, item in enumerate(segment):
                    if number and current:
                        words.append(current)
                    is_joined = number == 0 and current is not None
                    begin = current.text if is_joined and current else ""
                    current = replace(item, text=begin + item.text)
        return [*words, current] if current else words

    def _segments(self, token: Token) -> Iterator[Segment]:
        """Yield the parts of a word."""
        for match in PIECES.finditer(token.text):
            kind = match.lastgroup
            if kind is None:  # a line that goes on
                continue
            if kind == "name" or (kind == "odd" and not match[0].startswith("{")):
                yield from self._bare(match[0], token.place)
            elif kind == "double" and (array := _is_array_alone(match[kind])):
                yield self._words_of(array, token.place)
            elif kind == "double" and match[kind] in ("$@", "${@}"):
                yield self._all_given()
            elif kind == "text" and "/" in token.text and FILE_PATTERN.search(match[0]):
                # the names of the files that it fits are not known
                yield self.hole(match[0], _not_followed(token.text))
            else:
                yield self._piece(match, token.place)

    def _bare(self, written: str, place: str) -> Iterator[Segment]:
        """Yield the words of an expansion without quotes."""
        name = written.strip("${}")
        base = re.sub(r"\[[@*]\]$", "", name)
        if base in ALL_GIVEN:
            yield [part for word in self._all_given() for part in _cut(word.text, place)]
        elif base != name:
            items = self._words_of(base, place)
            yield [part for item in items for part in _cut(item.text, item.place)]
        else:
            text = self._expanded(written, place)
            if text[:1].isspace():
                yield None
            yield _cut(text, place)
            if text[-1:].isspace():
                yield None

    def _words_of(self, name: str, place: str) -> list[Word]:
        """Return the items of an array; those of a text that the user gives are cut at blanks."""
        value = self._value(name, f"${{{name}[@]}}")
        if isinstance(value, list):
            return value
        return _cut(value, place) if name in self.assumed else [Word(value, place)]

    def text(self, written: str, place: str = "") -> str:
        """Return what a word or a value stands for, uncut."""
        return PIECES.sub(lambda match: self._piece(match, place), written)

    def document(self, written: str, place: str) -> str:
        """Return the text of a here-document whose marker has no quotes."""
        return QUOTED.sub(lambda match: self._piece(match, place), written)

    def _piece(self, match: re.Match[str], place: str) -> str:
        kind = match.lastgroup
        if kind == "double":
            return self.document(match[kind], place)
        if kind in ("name", "odd"):
            return self._expanded(match[0], place)
        return match[kind] if kind else ""

    def _expanded(self, written: str, place: str) -> str:
        """Return what an expansion stands for, as one text."""
        if sum_match := SUM.fullmatch(written):
            of_expr = (sum_match[2] or "").replace("\\*", "*")
            return self._sum(sum_match[1] or of_expr, written)
        if replaced := REPLACED.fullmatch(written):
            value = self._value(replaced[1], written)
            return value.replace(replaced[2], replaced[3]) if isinstance(value, str) else ""
        if default := WITH_DEFAULT.fullmatch(written):
            return self._with_default(default, written, place)
        name = written.strip("${}")
        base = re.sub(r"\[[@*]\]$", "", name)
        if base in ALL_GIVEN or base == "#":
            if self.given is None:
                self.absent["$@"] = None
            is_open = self.given_unsure
            return (
                self.hole(written, _not_followed(written)) if is_open else self._given_as_text(base)
            )
        if base.isdigit() and base != "0" and written.startswith("$"):
            if base in self.assumed:
                return self.assumed[base]
            if self.given is not None and not self.given_unsure:
                return self._argument(int(base))
            return self.hole(written, Problem.of("import.variable_unset", name=base))
        if not base.isidentifier():
            return self.hole(written, _not_followed(written))
        value = self._value(base, written)
        if isinstance(value, str):
            return value
        items = [item.text for item in value]
        return " ".join(items) if base != name else next(iter(items), "")

    def _all_given(self) -> list[Word]:
        """Return the words of `"$@"`."""
        if self.given is None:
            self.absent["$@"] = None
        return [*(self.given or [])]

    def _argument(self, number: int) -> str:
        """Return an argument that the script is run with; "" behind the last one."""
        words = self.given or []
        return words[number - 1].text if number <= len(words) else ""

    def _sum(self, written_sum: str, written: str) -> str:
        """Return the value of arithmetic."""

        def operand(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            value = self._value(name, f"${name}")
            is_plain = isinstance(value, str) and bool(
                OPERAND.fullmatch(value) or HOLE.fullmatch(value)
            )
            return str(value) if is_plain else "?"

        text = NAME_IN_SUM.sub(operand, written_sum)
        if hole := HOLE.search(text):
            _, why = self._holes[int(hole[1])]
            return self.hole(written, why)
        value = sum_of(text)
        return self.hole(written, _not_followed(written)) if value is None else str(value)

    def _with_default(self, match: re.Match[str], written: str, place: str) -> str:
        """Return the value of `${NAME:-default}` and its kin."""
        name, colon, sign, other = match.groups()
        is_absent = self.is_absent(name, sign in "-=")
        value = self.assumed.get(name, "") if name.isdigit() else ""
        if name.isdigit() and self.given is not None and not value:
            value = self._argument(int(name))
        elif not is_absent and not value:
            found = self._value(name, f"${name}")
            value = found if isinstance(found, str) else " ".join(item.text for item in found)
        if is_absent:
            self.absent[name] = None
        has_value = not is_absent and bool(value or not colon)
        if sign == "+":
            if HOLE.search(value):
                return value
            return self.text(other, place) if has_value else ""
        if has_value:
            return value
        if sign == "?":
            self.absent.pop(name, None)
            return self.hole(written, Problem.of("import.variable_unset", name=name))
        default = self._default(other, name, place)
        if sign == "=":
            self.values[name] = default
        return default

    def _default(self, written: str, name: str, place: str) -> str:
        """Return a default, or a hole that asks for the variable that it stands in for."""
        text = self.text(written, place)
        if HOLE.fullmatch(text) and not name.isdigit():
            return self.hole(f"${name}", _open(name, place))
        return text


def _open(name: str, place: str) -> Problem:
    return Problem.of("import.variable_open", name=name, place=place)


def _not_followed(written: str) -> Problem:
    return Problem.of("import.not_followed", written=written)


def _is_array_alone(text: str) -> str:
    """Return the name in `${NAME[@]}`; "" for another text."""
    match = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
    return match[1] if match else ""


def _cut(text: str, place: str) -> list[Word]:
    return [Word(part, place) for part in text.split()]
