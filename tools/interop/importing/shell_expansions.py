"""Expansions of a script: what its words and assignments become by its variables.

What is not known stays a hole in a text.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from megaprec.errors import Problem
from tools.interop.importing.shell_sums import sum_of
from tools.interop.importing.shell_tokens import ASSIGNMENT, ITEMS, PIECES, QUOTED, Token
from tools.interop.importing.shell_variables import Value, Variables, unset
from tools.interop.importing.shell_words import (
    HOLE,
    Segment,
    Word,
    cut_at_blanks,
    joined_segments,
    joined_texts,
)

PLACEHOLDER = re.compile(r"(?<![<\w])<[A-Za-z][\w '/.,-]*>[\w./-]*")
WITH_DEFAULT = re.compile(r"\$\{(\w+)(:?)([-=+?])(.*)\}", re.DOTALL)
REPLACED = re.compile(r"\$\{([A-Za-z_]\w*)//([\w.,:-]+)/?([\w.,:-]*)\}")
SUM = re.compile(r"\$\(\((.*)\)\)|\$\(expr ([\w\s$*/%+{}\\-]*)\)", re.DOTALL)
BLANK = re.compile(r"\s")
FILE_PATTERN = re.compile(r"[*?]")
NAME_IN_SUM = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|(?<![\w$])([A-Za-z_]\w*)")
OPERAND = re.compile(r"-?\d{1,18}")
ALL_ITEMS = re.compile(r"\[[@*]\]$")
ARRAY_ALONE = re.compile(r"\$\{(\w+)\[@\]\}")
# every word of a command line, of which a training has none of its own
ALL_GIVEN = frozenset({"@", "*"})


class Expander:
    """The words and assignments of a script on their way to texts, by its variables."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self._holes = variables.holes

    def assign(self, token: Token) -> None:
        """Follow `NAME=value`, `NAME=(...)` or one of both with `+=`."""
        match = ASSIGNMENT.fullmatch(token.text)
        assert match  # the caller has looked
        name, adds, text = match.groups()
        values = self.variables.values
        before: Value | None = None
        if adds and name in values:
            before = self.variables.value(name, f"${name}")
        was_array = isinstance(values.get(name), list)
        if token.kind == "array":
            items_before = _items_of(before, token.place)
            items = self._items_within(token, text)
            values[name] = items_before + items
        elif was_array:  # it sets one item
            values[name] = self.variables.hole_of(name, token.place)
        else:
            value = self._assigned_text(name, text, token.place)
            values[name] = f"{before or ''}{value}"

    def _assigned_text(self, name: str, text: str, place: str) -> str:
        """Return the text that an assignment gives a variable. If it is one word with a part that
        is not known and has no name to ask for, it is one hole, which asks for the variable."""
        written = self.text(text, place)
        value = self._without_placeholders(name, written)
        if self._is_asked_by_name(value):
            return self.variables.hole_of(name, place)
        return value

    def _without_placeholders(self, name: str, value: str) -> str:
        """Return a value in which `<Specify path>` of an example is not known."""

        def hole(match: re.Match[str]) -> str:
            why = Problem.of("import.placeholder", name=name, written=match[0])
            return self._holes.add(f"${name}", why)

        return PLACEHOLDER.sub(hole, value)

    def _is_asked_by_name(self, value: str) -> bool:
        """Return True for one word of which a part has no name, such as what a command prints."""
        if BLANK.search(value):
            return False
        causes = self._holes.causes(value)
        return any(map(_has_no_name, causes))

    def _items_within(self, token: Token, text: str) -> list[Word]:
        """Return the words of an array. text: the brackets and what stands in them."""
        words = list[Word]()
        end = len(text) - 1
        for item in ITEMS.finditer(text, 1, end):
            if item[0].startswith("#"):
                continue
            num_lines_before = text.count("\n", 0, item.start())
            line = token.line + num_lines_before
            word = Token("word", item[0], token.file, line)
            words += self._raw_fields(word)
        return words

    def fields(self, token: Token) -> list[Word]:
        """Return the words that one becomes: an expansion without quotes is cut at its blanks."""
        words = self._raw_fields(token)
        return [self._holes.finished(word) for word in words]

    def raw_fields(self, tokens: Sequence[Token]) -> list[Word]:
        """Return the words of a command, with holes."""
        words = list[Word]()
        for token in tokens:
            words += self._raw_fields(token)
        return words

    def _raw_fields(self, token: Token) -> list[Word]:
        if token.kind == "array":
            return [Word(token.text, token.place)]
        segments = self._segments(token)
        return joined_segments(segments)

    def _segments(self, token: Token) -> Iterator[Segment]:
        """Yield the parts of a word."""
        place = token.place
        is_path = "/" in token.text
        for match in PIECES.finditer(token.text):
            written = match[0]
            kind = match.lastgroup
            in_quotes = match[kind] if kind == "double" else ""
            array = ARRAY_ALONE.fullmatch(in_quotes)
            is_brace = kind == "odd" and written.startswith("{")
            if kind is None:  # a line that goes on
                continue
            if kind in ("name", "odd") and not is_brace:
                yield from self._bare(written, place)
            elif array:
                yield self.variables.items(array[1], place)
            elif in_quotes in ("$@", "${@}"):
                yield self.variables.all_given()
            elif kind == "text" and is_path and FILE_PATTERN.search(written):
                # the names of the files that it fits are not known
                why = Problem.of("import.not_followed", written=token.text)
                hole = self._holes.add(written, why)
                yield [Word(hole, place)]
            else:
                text = self._piece(match, place)
                yield [Word(text, place)]

    def _bare(self, written: str, place: str) -> Iterator[Segment]:
        """Yield the words of an expansion without quotes."""
        name = written.strip("${}")
        base = ALL_ITEMS.sub("", name)
        if base in ALL_GIVEN:
            given = self.variables.all_given()
            cut = [cut_at_blanks(word.text, place) for word in given]
            yield [*chain.from_iterable(cut)]
        elif base != name:
            items = self.variables.items(base, place)
            cut = [cut_at_blanks(item.text, item.place) for item in items]
            yield [*chain.from_iterable(cut)]
        else:
            text = self._expanded(written, place)
            if text[:1].isspace():
                yield None
            yield cut_at_blanks(text, place)
            if text[-1:].isspace():
                yield None

    def text(self, written: str, place: str = "") -> str:
        """Return what a word or a value stands for, uncut."""

        def replaced(match: re.Match[str]) -> str:
            return self._piece(match, place)

        return PIECES.sub(replaced, written)

    def document(self, written: str, place: str) -> str:
        """Return the text of a here-document whose marker has no quotes."""

        def replaced(match: re.Match[str]) -> str:
            return self._piece(match, place)

        return QUOTED.sub(replaced, written)

    def _piece(self, match: re.Match[str], place: str) -> str:
        kind = match.lastgroup
        if kind == "double":
            return self.document(match[kind], place)
        if kind in ("name", "odd"):
            return self._expanded(match[0], place)
        return match[kind] if kind else ""

    def _expanded(self, written: str, place: str) -> str:
        """Return what an expansion stands for, as one text."""
        if match := SUM.fullmatch(written):
            return self._sum(match, written)
        if match := REPLACED.fullmatch(written):
            return self._with_replaced(match, written)
        if match := WITH_DEFAULT.fullmatch(written):
            return self._with_default(match, written, place)
        name = written.strip("${}")
        base = ALL_ITEMS.sub("", name)
        if base in ALL_GIVEN or base == "#":
            return self._given_as_text(base, written)
        is_argument = base.isdigit() and base != "0"
        if is_argument and written.startswith("$"):
            return self._argument_as_text(base, written)
        if not base.isidentifier():
            return self.variables.not_followed(written)
        value = self.variables.value(base, written)
        if isinstance(value, str):
            return value
        has_all_items = base != name
        words = value if has_all_items else value[:1]
        return joined_texts(words)

    def _given_as_text(self, sign: str, written: str) -> str:
        """Return `$@`, `$*` or `$#`."""
        words = self.variables.all_given()
        if self.variables.given_unsure:
            return self.variables.not_followed(written)
        if sign == "#":
            return str(len(words))
        return joined_texts(words)

    def _argument_as_text(self, number: str, written: str) -> str:
        """Return `$1` and so on."""
        variables = self.variables
        if number in variables.assumed:
            return variables.assumed[number]
        if variables.given is not None and not variables.given_unsure:
            return variables.argument(int(number))
        return self._holes.add(written, unset(number))

    def _sum(self, match: re.Match[str], written: str) -> str:
        """Return the value of arithmetic."""
        of_expr = match[2] or ""
        written_sum = match[1] or of_expr.replace("\\*", "*")
        text = NAME_IN_SUM.sub(self._operand, written_sum)
        causes = self._holes.causes(text)
        if causes:
            return self._holes.add(written, causes[0])
        value = sum_of(text)
        if value is None:
            return self.variables.not_followed(written)
        return str(value)

    def _operand(self, match: re.Match[str]) -> str:
        """Return the value of a name in arithmetic, or its hole; "?" for what is no number."""
        name = match[1] or match[2]
        value = self.variables.value(name, f"${name}")
        if isinstance(value, list):
            return "?"
        is_number = OPERAND.fullmatch(value) is not None
        is_hole = HOLE.fullmatch(value) is not None
        return value if is_number or is_hole else "?"

    def _with_replaced(self, match: re.Match[str], written: str) -> str:
        """Return `${NAME//old/new}`."""
        name, old, new = match.groups()
        value = self.variables.value(name, written)
        if isinstance(value, list):
            return ""
        return value.replace(old, new)

    def _with_default(self, match: re.Match[str], written: str, place: str) -> str:
        """Return the value of `${NAME:-default}` and its kin."""
        variables = self.variables
        name, colon, sign, other = match.groups()
        has_default = sign in "-="
        is_absent = variables.is_absent(name, has_default)
        value = self._value_if_set(name, is_absent)
        if is_absent:
            variables.absent[name] = None
        has_value = not is_absent and (value != "" or not colon)
        if sign == "+" and HOLE.search(value):
            return value
        if sign == "+":
            return self.text(other, place) if has_value else ""
        if has_value:
            return value
        if sign == "?":
            variables.absent.pop(name, None)
            return self._holes.add(written, unset(name))
        default = self._default(other, name, place)
        if sign == "=":
            variables.values[name] = default
        return default

    def _value_if_set(self, name: str, is_absent: bool) -> str:
        """Return the value of a variable, or of an argument of the script; "" without any."""
        assumed = self.variables.assumed.get(name, "")
        if name.isdigit() and assumed:
            return assumed
        if name.isdigit() and self.variables.given is not None:
            return self.variables.argument(int(name))
        if is_absent:
            return ""
        value = self.variables.value(name, f"${name}")
        if isinstance(value, list):
            return joined_texts(value)
        return value

    def _default(self, written: str, name: str, place: str) -> str:
        """Return a default, or a hole that asks for the variable that it stands in for."""
        text = self.text(written, place)
        is_hole = HOLE.fullmatch(text) is not None
        if is_hole and not name.isdigit():
            return self.variables.hole_of(name, place)
        return text


def _items_of(value: Value | None, place: str) -> list[Word]:
    """Return the items of an array that goes on; a text is the first of them."""
    if value is None:
        return []
    return [Word(value, place)] if isinstance(value, str) else value


def _has_no_name(why: Problem) -> bool:
    """Return True for what --assume cannot give by a name of its own."""
    if why.code == "import.not_followed":
        return True
    name = str(why.fields["name"])
    return name.isdigit()
