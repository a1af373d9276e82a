"""The values of expressions, computed without running them.

Literals, arithmetic, names, conditions, dicts, f-strings and common methods of dicts and lists are
evaluated. Calls of functions of the file are left to `called_inside`; calls of other functions
become things. A value that cannot be known is a `Thing` with the reason, never a default. An
assumption ("--assume") gives a value to an expression that would otherwise be unknown.
"""

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tools.foreign.memory import PLACEHOLDER, Memory, either
from tools.foreign.values import (
    Class,
    Condition,
    Entry,
    External,
    Function,
    Partial,
    Row,
    Scope,
    Table,
    Thing,
    same,
)

ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
GROWING = (ast.Pow, ast.LShift)
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
PLAIN = (bool, int, float, str, bytes, type(None))
# numbers and texts past these are not worked out
LARGEST = 2.0**128
LONGEST = 1000
STEPS = 100_000  # expressions that are looked at in all; a bound on functions that call each other
ENVIRONMENT = ("os.environ", "environ")


class TooMuch(Exception):
    """A file that needs more work than any configuration does."""


class Expressions(Memory, ABC):
    """Values of expressions in `scope`.

    assumptions: text of an expression -> the expression to use instead. assumed: assumptions that
    were used. things: results of external calls, in order. outside: values assigned to attributes
    of external names and to environment variables. seen: id of a syntax node with a key or a call
    -> its value. assigned: ids of values that were given a name. unreached: (first line, last line,
    reason) of code that never runs.
    """

    def __init__(self, assumptions: Mapping[str, ast.expr]) -> None:
        super().__init__()
        self.scope = Scope()
        self.assumptions = assumptions
        self.assumed = set[str]()
        self.things: list[Thing] = []
        self.outside = Table()
        self.seen: dict[int, Any] = {}
        self.unreached: list[tuple[int, int, str]] = []
        self.assigned = set[int]()
        self._steps = 0

    @abstractmethod
    def called_inside(
        self, function: Function | Class, positional: tuple[Entry, ...], arguments: Table, line: int
    ) -> Any:
        """Return the value of a call of a function or class of the file."""

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression. Raises TooMuch."""
        self._steps += not isinstance(node, ast.Constant)
        if self._steps > STEPS:
            raise TooMuch
        kind = getattr(self, f"_{type(node).__name__.lower()}", None)
        found = self.unknown(node, "is not worked out") if kind is None else kind(node)
        return self.assumed_or(node, found)

    def assumed_or(self, node: ast.expr, found: Any) -> Any:
        """Return `found`, or the assumption if it is unknown."""
        if not self.assumptions or not isinstance(found, Thing | External):
            return found
        text = ast.unparse(node)
        if text not in self.assumptions:
            return found
        self.assumed.add(text)
        # its settings are not asked for
        self.things = [thing for thing in self.things if thing is not found]
        given = self.value(self.assumptions[text])
        if id(node) in self.seen:
            self.seen[id(node)] = given
        return given

    def unknown(self, node: ast.expr, why: str, alternatives: tuple[Any, ...] = ()) -> Thing:
        """Return a thing for an expression whose value cannot be known."""
        return Thing(shortened(node), node.lineno, why, alternatives=alternatives)

    # expressions, by the name of their syntax node

    def _constant(self, node: ast.Constant) -> Any:
        if node.value is ...:
            return self.unknown(node, "stands for something left out")
        return node.value

    def _name(self, node: ast.Name) -> Any:
        scope = self.scope.find(node.id)
        return External(node.id) if scope is None else scope.names[node.id]

    def _attribute(self, node: ast.Attribute) -> Any:
        return self.attribute(self.value(node.value), node.attr, node)

    def attribute(self, base: Any, name: str, node: ast.expr) -> Any:
        """Return the value of base.name."""
        if isinstance(base, External):
            full = f"{base.name}.{name}"
            entry = self.outside.entries.get(full)
            return entry.value if entry else External(full, base.imported)
        if isinstance(base, Class):
            return base.scope.names.get(
                name, self.unknown(node, f"{base.name} has no {name} in this file")
            )
        if isinstance(base, Table) and name in base.entries:
            return self.held(base.entries[name], node)
        if isinstance(base, Thing) and name == "__dict__":
            return self.fields_of(base, node)
        if isinstance(base, Thing):
            entry = base.attributes.get(name) or base.arguments.entries.get(name)
            if entry is None:
                why = "" if base.function else base.why or "is not in the file"
                entry = Entry(
                    Thing(f"{base.text}.{name}", node.lineno, why or "is not in the file"),
                    node.lineno,
                )
                base.attributes[name] = (
                    entry  # to look at it changes nothing, so that no branch takes it back
                )
            return self.held(entry, node)
        return self.unknown(node, "is not worked out")

    def held(self, entry: Entry, node: ast.expr) -> Any:
        """Return the value of an entry, unless something may have set another since."""
        if entry.doubt is None:
            return entry.value
        if isinstance(entry.doubt, Thing):
            text = entry.doubt.text
        else:
            text = getattr(entry.doubt, "name", "a dict")
        return self.unknown(node, f"may be set by `{text}`")

    def fields_of(self, base: Thing, node: ast.expr) -> Table:
        """Return `vars(base)`, or base.__dict__: a change of it is one of a field, and it may have
        other fields."""
        more = self.unknown(node, "may change any field")
        base.arguments.open.append(more)
        return Table(base.attributes, node.lineno, [more])

    def _subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        key = self.value(node.slice)
        if isinstance(base, External):
            if (
                base.name in ENVIRONMENT
                and isinstance(key, str)
                and f"env {key}" in self.outside.entries
            ):
                return self.outside.entries[f"env {key}"].value
            return self.unknown(node, "is not in the file")
        if isinstance(base, Table) and isinstance(key, str) and key in base.entries:
            return self.held(base.entries[key], node)
        if isinstance(base, Row) and type(key) is int and -len(base.items) <= key < len(base.items):
            return base.items[key]
        if isinstance(base, Thing) and isinstance(key, str):
            return self.attribute(base, key, node)
        return self.unknown(node, "is not worked out")

    def _dict(self, node: ast.Dict) -> Table:
        table = Table(line=node.lineno)
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self.merge_into(table, self.value(value))
            elif isinstance(name := self.value(key), str | int | float):
                self.seen[id(key)] = made = self.value(value)
                table.entries[name] = Entry(made, key.lineno, id(key))
            else:
                self.open_up(table, self.unknown(key, "is a key that is not known"))
        return table

    def _row(self, node: ast.List | ast.Tuple | ast.Set) -> Row:
        items: list[Any] = []
        for item in node.elts:
            found = self.value(item.value if isinstance(item, ast.Starred) else item)
            items += (
                found.items if isinstance(item, ast.Starred) and isinstance(found, Row) else [found]
            )
        return Row({"items": tuple(items)})

    _list = _tuple = _row

    def _set(self, node: ast.Set) -> Any:
        """Return a set; one undefined name in braces is a placeholder of documentation for an
        argument of the reader.
        """
        row = self._row(node)
        lone = row.items[0] if len(row.items) == 1 else None
        if isinstance(lone, External) and not lone.imported and lone.name.isupper():
            return Thing(shortened(node), node.lineno, PLACEHOLDER)
        return row

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not) and isinstance(truth := truth_of(value), bool):
            return not truth
        if isinstance(node.op, ast.USub | ast.UAdd) and is_number(value):
            return -value if isinstance(node.op, ast.USub) else value
        return self.unknown(node, reason_of(value))

    def _binop(self, node: ast.BinOp) -> Any:
        left = self.value(node.left)
        right = self.value(node.right)
        if isinstance(node.op, ast.BitOr) and isinstance(left, Table):
            both = Table(dict(left.entries), node.lineno, list(left.open))
            self.merge_into(both, right)
            return both
        if isinstance(node.op, ast.Add) and isinstance(left, Row) and isinstance(right, Row):
            return Row({"items": left.items + right.items})
        worked_out = calculated(node.op, left, right)
        if worked_out is None:
            return self.unknown(node, reason_of(left, right))
        return worked_out

    def _boolop(self, node: ast.BoolOp) -> Any:
        stops = isinstance(node.op, ast.Or)
        for operand in node.values[:-1]:
            value = self.value(operand)
            truth = truth_of(value)
            if truth is None:
                return self.unknown(node, reason_of(value))
            if truth is stops:
                return value
        return self.value(node.values[-1])

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        right = self.value(node.comparators[0])
        if len(node.ops) > 1 or not (isinstance(left, PLAIN) and isinstance(right, (*PLAIN, Row))):
            return self.unknown(node, reason_of(left, right))
        return self._compared(node, left, right)

    def _compared(self, node: ast.Compare, left: Any, right: Any) -> Any:
        kind = node.ops[0]
        try:
            if isinstance(kind, ast.In | ast.NotIn):
                items = right.items if isinstance(right, Row) else right
                if isinstance(right, Row) and not all(isinstance(item, PLAIN) for item in items):
                    return self.unknown(node, reason_of(*items))
                inside = left in items
                return inside is isinstance(kind, ast.In)
            return COMPARISONS[type(kind)](left, right)
        except TypeError:
            return self.unknown(node, "is not worked out")

    def _ifexp(self, node: ast.IfExp) -> Any:
        truth = self.condition(node.test)
        if isinstance(truth, bool):
            dead = node.orelse if truth else node.body
            self.unreached.append(
                (
                    dead.lineno,
                    dead.end_lineno or dead.lineno,
                    f"`{shortened(node.test)}` is {truth}",
                )
            )
            return self.value(node.body if truth else node.orelse)
        made = list[Any]()
        for branch in (node.body, node.orelse):
            self.conditions.append(truth)
            made.append(self.value(branch))
            self.conditions.pop()
        if same(*made):
            return made[0]
        return either(made[0], made[1], truth, shortened(node))

    def condition(self, test: ast.expr) -> bool | Condition:
        """Return the truth of a condition, or the condition itself if it is unknown."""
        truth = truth_of(self.value(test))
        if truth is None:
            return Condition(shortened(test, 200), test.lineno)
        return truth

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        parts = [
            self.value(p.value) if isinstance(p, ast.FormattedValue) else self.value(p)
            for p in node.values
        ]
        known = all(isinstance(part, PLAIN) for part in parts)
        if known:
            return "".join(map(str, parts))
        return self.unknown(node, reason_of(*parts))

    def _namedexpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.write(self.scope.names, node.target.id, value)
        return value

    def _lambda(self, node: ast.Lambda) -> Function:
        return Function("lambda", node, self.scope)

    def _await(self, node: ast.Await) -> Any:
        return self.value(node.value)

    def _starred(self, node: ast.Starred) -> Any:
        return self.value(node.value)


def calculated(kind: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of arithmetic on numbers, or of adding texts; None for anything else or if
    it is too large."""
    calculate = ARITHMETIC.get(type(kind))
    if isinstance(kind, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return left + right if len(left) + len(right) <= LONGEST else None
    if (
        calculate is None
        or not is_number(left)
        or not is_number(right)
        or (type(kind) in GROWING and right > 1024)
    ):
        return None
    try:
        result = calculate(left, right)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return result if is_number(result) else None


def is_number(value: Any) -> bool:
    """Return True for a number of a size that settings have."""
    return type(value) in (int, float) and abs(value) <= LARGEST


def truth_of(value: Any) -> bool | None:
    """Return the truth of a value; None if it is unknown."""
    if isinstance(value, PLAIN):
        return bool(value)
    if isinstance(value, Table):
        certain = any(not _may_lack(entry.value) for entry in value.entries.values())
        if certain:
            return True
        if value.open or value.entries:
            return None
        return False
    if isinstance(value, Row):
        if not all(map(_may_lack, value.items)):
            return True
        if value.items:
            return None
        return False
    return True if isinstance(value, Function | Class | Partial) else None


def _may_lack(value: Any) -> bool:
    """Return True if a value exists only in one of two branches."""
    return (
        isinstance(value, Thing)
        and value.why.startswith("depends on")
        and len(value.alternatives) < 2
    )


def reason_of(*values: Any) -> str:
    """Return the reason why a value made of these is unknown."""
    unknown = next((v for v in values if isinstance(v, Thing)), None)
    if unknown is not None and unknown.why:
        return f"hangs on `{unknown.text}`, which {unknown.why}"
    lone = next((v for v in values if isinstance(v, External)), None)
    if lone is None:
        return "is not worked out"
    return f"hangs on `{lone.name}`, which is not in the file"


def shortened(node: ast.AST, longest: int = 100) -> str:
    """Return an expression as text, truncated if it is long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
