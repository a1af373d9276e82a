"""Values that the names of a configuration file can have, as far as they are known without running
it.

Numbers, text, True, False and None are themselves. A dict is a `Table` and a list a `Row`. A name
from outside of the file is an `External`, with import aliases resolved: torch.bfloat16. A `Thing`
is any object that the file does not spell out: the result of an external call, a function's
argument, a value that depends on an unknown condition. A thing remembers the call that made it and
later assignments to its attributes, for recipes are changed that way: `recipe.trainer.plugins.fp8 =
"hybrid"`.
"""

import ast
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class External:
    """A name from outside of the file. imported: the file imports it; otherwise it is not defined
    there."""

    name: str
    imported: bool = False

    @property
    def last(self) -> str:
        """The part of the name after the last dot."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Entry:
    """A value under a key, and the place where it was given.

    node: id of the syntax node of the key, by which it is accounted for; 0: none. doubt: what may
    have set the key since, such as a dict that is not known; None: nothing.
    """

    value: Any
    line: int = 0
    node: int = 0
    doubt: Any = None


@dataclass(eq=False)
class Table:
    """A dict. open: things that were merged into it, whose keys are unknown."""

    entries: dict[Hashable, Entry] = field(default_factory=dict)
    line: int = 0
    open: list[Any] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """Return the value under `key`; None if there is none."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value


@dataclass(eq=False)
class Row:
    """A list, tuple or set: `slots["items"]` is a tuple of its values."""

    slots: dict[Hashable, tuple[Any, ...]]

    @property
    def items(self) -> tuple[Any, ...]:
        """The values."""
        return self.slots["items"]


@dataclass(frozen=True)
class Condition:
    """An unknown condition of a statement."""

    text: str
    line: int


@dataclass(eq=False)
class Thing:
    """An object that the file does not spell out.

    text: source text. why: reason why it is unknown; empty for the result of an external call.
        function, positional,
    arguments: of the call that made it. attributes: assigned later, or accessed. conditions:
    unknown conditions under which it is made. alternatives: possible values, if they are known.
    """

    text: str
    line: int
    why: str = ""
    function: External | None = None
    positional: tuple[Entry, ...] = ()
    arguments: Table = field(default_factory=Table)
    attributes: dict[Hashable, Entry] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    alternatives: tuple[Any, ...] = ()
    node: int = 0


@dataclass(eq=False)
class Scope:
    """The names of a module, function or class.

    path: its name for messages, empty for the module's. declared: names that are global or nonlocal
        there.
    """

    path: str = ""
    parent: "Scope | None" = None
    names: dict[Hashable, Any] = field(default_factory=dict)
    is_class: bool = False
    declared: dict[str, "Scope"] = field(default_factory=dict)

    def find(self, name: str) -> "Scope | None":
        """Return the innermost scope that defines `name`; a class scope is visible only from
        itself."""
        scope: Scope | None = self.declared.get(name, self)
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


@dataclass(eq=False)
class Function:
    """A function of the file, or a lambda. owner: the instance whose method it is. defaults: their
    values at its definition.
    """

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: "Thing | None" = None
    called: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Class:
    """A class of the file. prototype: an instance with unknown arguments, for methods that are
    never called."""

    name: str
    scope: Scope
    prototype: Thing


@dataclass(eq=False)
class Partial:
    """A function of the file with some arguments: functools.partial(build,
    dtype=torch.bfloat16)."""

    function: "Function | Class"
    positional: tuple[Entry, ...]
    arguments: Table


def same(a: Any, b: Any) -> bool:
    """Return True if two values are certainly the same."""
    if isinstance(a, Entry) and isinstance(b, Entry):
        return a.doubt is b.doubt and same(a.value, b.value)
    if isinstance(a, Row) and isinstance(b, Row):
        return len(a.items) == len(b.items) and all(map(same, a.items, b.items))
    return a is b or (
        type(a) is type(b) and not isinstance(a, Table | Thing | Function | Class) and bool(a == b)
    )
