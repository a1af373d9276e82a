"""The variables of a script: what its lines give them, and what may have been set where the script
is not followed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from megaprec.errors import Problem
from tools.interop.importing.shell_tokens import HARMLESS, SETS_ANY
from tools.interop.importing.shell_words import Holes, Word, cut_at_blanks

LONGEST = 20_000  # letters of a text, or items of an array
NAME = re.compile(r"[A-Za-z_]\w*")
NAME_OF_FUNCTION = re.compile(r"[A-Za-z_][\w-]*")
# variables that only a cluster, a launcher or a login sets
SET_OUTSIDE = re.compile(
    r"(?:SLURM|PBS|LSB|SGE|OMPI|PMI|PMIX|CUDA|CONDA)\w*|(?:MASTER|HOST)\w*|HOME|USER|PATH|PWD|TMPDIR"
    r"|SHELL|UID|RANDOM|SECONDS|LD_LIBRARY_PATH|(?:LOCAL_|NODE_)?RANK|WORLD_SIZE|LOCAL_WORLD_SIZE"
)

Value = str | list[Word]
"""What a variable holds: a text, or the items of an array."""


class Variables:
    """The variables of a script: what its lines give them.

    assumed: values that count whatever the script says. values: texts and arrays. unsure: the
    places of names that what is not followed may set. unsure_all: that of what may set any variable
    later. absent: names that count as not set, by which a default or a condition was decided.
    given_unsure: True if the script changes its own arguments. given: these arguments, if another
    script runs it with them. read_only: names that no later line can give another value.
    exported: names that a script that it runs gets too. functions: the bodies of those that are
    followed where they are called. of_calls: what the local names of each call that is followed
    held before it. holes: what is not known.
    """

    def __init__(self, assumed: Mapping[str, str]) -> None:
        self.assumed = assumed
        self.values: dict[str, Value] = {"PWD": "."}
        self.unsure: dict[str, str] = {}
        self.unsure_all = ""
        self.absent: dict[str, None] = {}
        self.given_unsure = False
        self.given: list[Word] | None = None
        self.read_only = set[str]()
        self.exported = set[str]()
        self.functions: dict[str, str] = {}
        self.of_calls: list[dict[str, Value | None]] = []
        self.holes = Holes()

    def distrust(self, written: str, place: str) -> None:
        """Trust no variable that a text of the script may set which is not followed."""
        may_set = HARMLESS.sub(" ", written)
        for name in NAME_OF_FUNCTION.findall(may_set):
            # gone meanwhile, for it may call itself
            body = self.functions.pop(name, "")
            if body:
                self.distrust(body, place)
                self.functions[name] = body
        for name in NAME.findall(may_set):
            self.unsure.setdefault(name, place)
        if SETS_ANY.search(written):
            self.values.clear()

    @contextmanager
    def of_child(self, given: Sequence[Word]) -> Iterator[None]:
        """Have the variables of a script that this one runs: those that are exported. given: its
        arguments."""
        values = self.values
        unsure = self.unsure
        unsure_all = self.unsure_all
        exported = self.exported | {"PWD"}
        self.values = {name: value for name, value in values.items() if name in exported}
        self.unsure = {name: place for name, place in unsure.items() if name in exported}
        try:
            with self._with_arguments(given):
                yield
        finally:
            self.values = values
            self.unsure = unsure
            self.unsure_all = unsure_all

    @contextmanager
    def of_call(self, given: Sequence[Word]) -> Iterator[None]:
        """Have the arguments of a function while it is followed."""
        self.of_calls.append({})
        try:
            with self._with_arguments(given):
                yield
        finally:
            self._end_locals(self.of_calls.pop())

    @contextmanager
    def _with_arguments(self, given: Sequence[Word]) -> Iterator[None]:
        """Have other arguments than the script's own."""
        before = self.given
        was_unsure = self.given_unsure
        self.given = [*given]
        self.given_unsure = False
        try:
            yield
        finally:
            self.given = before
            self.given_unsure = was_unsure

    def _end_locals(self, before: Mapping[str, Value | None]) -> None:
        """Give local names what they held before the call."""
        for name, value in before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def make_local(self, name: str) -> None:
        """Have a variable for the call that is followed alone."""
        if self.of_calls:
            before = self.values.get(name)
            self.of_calls[-1].setdefault(name, before)

    def is_touched(self, name: str) -> bool:
        """Return True for a variable that something in the script sets, or may set."""
        may_be_set = name in self.unsure or self.unsure_all != ""
        return may_be_set or name in self.values

    def is_absent(self, name: str, has_default: bool = False) -> bool:
        """Return True for a variable that nothing sets: neither the script nor what runs it.

        name: of a variable, or a number: an argument of the script, from 1 on.
        has_default: True for `${NAME:-default}`: then a variable of a cluster counts as not set.
        """
        is_set_outside = SET_OUTSIDE.fullmatch(name) and not has_default
        if is_set_outside:
            return False
        if name in self.assumed or self.is_touched(name):
            return False
        if not name.isdigit():
            return True
        if self.given is not None:
            return int(name) > len(self.given)
        return not self.given_unsure

    def value(self, name: str, written: str) -> Value:
        """Return the text or the words that a variable holds; a hole if they are not known."""
        if name in self.assumed:
            return self.assumed[name]
        cut = self.unsure.get("IFS")  # it says where words are cut
        place = self.unsure_all or cut or self.unsure.get(name)
        if place:
            return self.holes.add(written, _open(name, place))
        value = self.values.get(name)
        if value is None:
            return self.holes.add(written, unset(name))
        if len(value) > LONGEST:
            return self.not_followed(written)
        return value

    def items(self, name: str, place: str) -> list[Word]:
        """Return the items of an array; those of a text that the user gives are cut at blanks."""
        value = self.value(name, f"${{{name}[@]}}")
        if isinstance(value, list):
            return value
        if name in self.assumed:
            return cut_at_blanks(value, place)
        return [Word(value, place)]

    def all_given(self) -> list[Word]:
        """Return the words of `"$@"`."""
        if self.given is None:
            self.absent["$@"] = None
            return []
        return [*self.given]

    def argument(self, number: int) -> str:
        """Return an argument that the script is run with, from 1 on; "" behind the last one and for
        0, the script itself."""
        words = self.given or []
        return words[number - 1].text if 1 <= number <= len(words) else ""

    def not_followed(self, written: str) -> str:
        """Return a hole for what no name can give."""
        why = Problem.of("import.not_followed", written=written)
        return self.holes.add(written, why)

    def hole_of(self, name: str, place: str) -> str:
        """Return a hole that asks for a variable. place: of what may set it."""
        return self.holes.add(f"${name}", _open(name, place))


def unset(name: str) -> Problem:
    """Return why a variable that nothing sets is not known."""
    return Problem.of("import.variable_unset", name=name)


def _open(name: str, place: str) -> Problem:
    return Problem.of("import.variable_open", name=name, place=place)
