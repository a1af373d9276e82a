"""A Python file, read as text from top to bottom: the values of its names, dicts and calls, without
running it.

A name counts that is assigned once in the file, with import aliases, literals, arithmetic, dicts
and calls. Keys and attributes that are set later belong to the dict or object if they are set
beside its assignment and before its first use. All else makes a value `UnknownValue`, with the
reason: a condition, a function's argument or result, a name that is assigned again.
"""

import ast
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from tools.interop.foreign.plain import (
    Call,
    DictEntry,
    Fields,
    PlainDict,
    PlainSequence,
    Symbol,
    UnknownValue,
    argument,
    spread,
)
from tools.interop.foreign.precision_words import (
    bears_on_precision,
    shortened,
)

ARITHMETIC: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
LARGEST_NUMBER = 2.0**128  # no setting is larger
# 9 ** 9 ** 9 would take all memory
LARGEST_EXPONENT = 1024
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
# Attributes whose objects state a precision
PRECISION_HOLDERS = ("trainer", "plugin", "plugins")
CONFIGS = ("run.Config", "run.Partial", "nemo_run.Config", "nemo_run.Partial")
# Beginnings of functions that may change an object that they are given
CHANGING_FUNCTIONS = ("vars", "setattr", "delattr", "object.", "operator.", "dict.")
# Methods of a dict that change nothing
READING_METHODS = ("get", "items", "keys", "values", "copy")
# Beginnings of methods that may change their object, also of configuration packages
CHANGING_METHODS = ("update", "merge", "set", "load", "override", "pop", "add", "__")


class PythonFile:
    """A Python file by its values.

    calls: those of something outside of the file. names: those that the file assigns, and under
    "os.environ" the variables that it sets. made: every dict and call. uncertain: what is set
    though it cannot be followed, with line, text and reason. loose: keys and attributes that are
    set of nothing that is known, and names that are not used again.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.calls: list[Call] = []
        self.names = PlainDict({"os.environ": DictEntry(PlainDict())})
        self.made: list[Fields] = []
        self.uncertain: list[tuple[int, str, str]] = []
        self.loose: list[tuple[str, DictEntry]] = []
        # what a function makes and which functions it uses, and those used on a condition
        self._inside: dict[ast.AST, list[Any]] = defaultdict(list)
        self._conditional: dict[ast.AST, str] = {}
        self._arguments: dict[str, UnknownValue] = {}
        self._function: ast.AST = tree
        self._home: ast.AST = tree  # the function or loop that the statement at hand is in
        self._guard = ""  # the condition on which the statement at hand runs; empty for none
        self._is_target = False  # a value is looked up to set a part of it
        self._binders: dict[str, set[object]] = defaultdict(set)
        loaded = set[str]()
        for node in ast.walk(tree):
            for name, binder in _binders(node):
                self._binders[name].add(binder)
                if not isinstance(binder, ast.Name):
                    self.names.entries[name] = DictEntry(binder)
            if isinstance(node, ast.Name) and not _is_set(node):
                loaded.add(node.id)
        self.names.entries |= self._dicts_only_read(tree)
        self._read_parts(tree)
        for function, guard in self._conditional.items():
            self._make_conditional(function, guard)
        for name, entry in self.names.entries.items():
            if name not in loaded:
                self.loose.append((name, entry))

    def _dicts_only_read(self, tree: ast.Module) -> dict[str, DictEntry]:
        """Return the dicts of literals that are assigned once at the top and whose items alone are
        read: it does not matter where, and documents show uses before what they use."""
        uses: dict[str, int] = defaultdict(int)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not _is_set(node):
                uses[node.id] += 1
            elif isinstance(node, ast.Subscript) and not _is_set(node):
                # an item that is read is no other use
                uses[shortened(node.value)] -= 1
        entries: dict[str, DictEntry] = {}
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as assigned):
                    is_assigned_once = len(self._binders[name]) == 1
                    if is_assigned_once and uses[name] == 0:
                        # another dict is followed where it is assigned
                        with suppress(ValueError, TypeError):
                            table = _literal_table(assigned)
                            entries[name] = DictEntry(table, node.lineno)
        return entries

    def _make_conditional(self, value: Any, guard: str) -> None:
        """Make a call or dict depend on a condition, or all that a function makes and uses."""
        if isinstance(value, Fields):
            value.doubt = value.doubt or f"it depends on {guard}"
        else:
            for inner in self._inside.pop(value, []):
                self._make_conditional(inner, guard)

    # statements

    def _read_parts(self, node: ast.AST) -> None:
        """Read what a node consists of: statements, expressions, and what is set."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                self._statement(part)
            elif _is_set(part):
                unknown = _unknown(part, "changes, or is not followed")
                self._assign(part, unknown)
            elif isinstance(part, ast.expr):
                self.value(part)
            else:
                self._read_parts(part)

    def _statement(self, node: ast.stmt) -> None:
        """Follow a statement. What stands behind one that may leave its function or loop depends on
        it."""
        guard = self._guard
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                text = shortened(node)
                self.uncertain.append((node.lineno, text, "may bring the precision"))
            case ast.Assign(value=assigned):
                value = self.value(assigned)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign(value=ast.expr() as assigned):
                value = self.value(assigned)
                self._assign(node.target, value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._read_function(node)
            case _:
                home = self._home
                if isinstance(node, LOOPS):
                    self._home = node
                self._guard = guard or _condition_of(node)
                self._read_parts(node)
                self._home = home
        self._guard = guard or _leaves_early(node)

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read the body of a function, in which its arguments are not known. The condition that it
        stands on (`_guard`) changes; `_statement` restores it."""
        self._bind(node, node.name, node)
        function = self._function
        home = self._home
        outer = self._arguments
        # a method may be called, whatever else its class holds
        if self._guard.startswith("class "):
            self._guard = ""
        self._arguments = dict(outer)
        for part in ast.walk(node.args):
            if isinstance(part, ast.arg):
                why = f"is an argument of {node.name}()"
                self._arguments[part.arg] = UnknownValue(part.arg, node.lineno, why)
        self._function = node
        self._home = node
        self._read_parts(node)
        self._function = function
        self._home = home
        self._arguments = outer

    def _assign(self, target: ast.AST, value: Any) -> None:
        """Follow the assignment of a value to a name, attribute, item or tuple of them."""
        match target:
            case ast.Name():
                self._bind(target, target.id, value)
            case ast.Attribute():
                base = self._owner(target.value)
                self._set(target, base, target.attr, value)
            case ast.Subscript():
                base = self._owner(target.value)
                key = self.value(target.slice)
                self._set(target, base, key, value)
            case _:
                # each part of a tuple
                self._read_parts(target)

    def _bind(self, node: Any, name: str, value: Any) -> None:
        """Give a name its value, which is not known if it is assigned again or on a condition."""
        if len(self._binders[name]) > 1:
            why = "is assigned more than once"
            # a call is as it is made; which of them the name stands for is not known
            if isinstance(value, Call):
                value = Call(line=node.lineno, text=name, why=why, home=node)
            else:
                self._doubt(value, f"`{name}`, which stands for it, {why}")
                value = UnknownValue(name, node.lineno, why)
        elif self._guard and not isinstance(value, Fields | UnknownValue | ast.AST):
            value = UnknownValue(name, node.lineno, f"depends on {self._guard}")
        self.names.entries[name] = DictEntry(value, node.lineno, id(node))

    def _owner(self, node: ast.expr) -> Any:
        """Return the value of an expression, of which a part is then set."""
        self._is_target = True
        value = self.value(node)
        self._is_target = False
        return value

    def _set(self, target: ast.expr, base: Any, key: Any, value: Any) -> None:
        """Follow `target = ...`, also `target += ...` and `del target`."""
        why = self._why_uncertain(base)
        entry = DictEntry(value, target.lineno, id(target))
        text = shortened(target)
        # attributes of `self` are of a class of their own
        is_theirs = text.startswith("self.") and text.count(".") == 1
        is_of_precision = key in PRECISION_HOLDERS or bears_on_precision(str(key))
        is_meant = is_of_precision and not is_theirs
        if not why and isinstance(key, str):
            base.entries[key] = entry
            return
        self.loose.append((str(key), entry))
        self._doubt(base, f"{_quoted(target)} may change it")
        # torch.backends.cuda.matmul.allow_tf32 is in a note
        is_of_package = isinstance(base, Symbol)
        if not is_of_package and (is_meant or getattr(base, "is_read", False)):
            self.uncertain.append((target.lineno, text, why))

    def _why_uncertain(self, base: Any) -> str:
        """Return why it is not certain that what is set counts where the object is used."""
        if not isinstance(base, Fields):
            why = getattr(base, "why", "is no object here")
            return f"is set on what {why}"
        if self._guard:
            return f"depends on {self._guard}"
        # any function may set a variable of the environment, which none makes
        self._inside[self._function].append(base)
        if base.home not in (None, self._home):
            return "is not set where the object is made"
        return f"is set after line {base.used} has used it" if base.used else ""

    def _doubt(self, value: Any, why: str) -> None:
        """Make known that a value may be another than the file shows, with what a dict holds."""
        is_environment = value is self.names.get("os.environ")
        if isinstance(value, Fields | PlainSequence) and not value.doubt and not is_environment:
            value.doubt = why
            inner = value.entries.values() if isinstance(value, PlainDict) else ()
            for entry in inner:
                if isinstance(entry.value, PlainDict):
                    self._doubt(entry.value, why)

    # values

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression; `UnknownValue` if it would have to be run."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                base = self.value(node.value)
                return self._attribute(node, base)
            case ast.Subscript():
                base = self.value(node.value)
                key = self.value(node.slice)
                return self._item(node, base, key)
            case ast.Dict():
                return self._dict(node)
            case ast.List() | ast.Tuple() | ast.Set():
                items = [self.value(item) for item in node.elts]
                return PlainSequence(items)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                left = self.value(node.left)
                right = self.value(node.right)
                return self._number(node, left, right)
        return self._not_evaluated(node)

    def _not_evaluated(self, node: ast.AST) -> Any:
        """Read the parts of an expression of another kind; return its value if that is clear from
        the text, as of -1, or an unknown one."""
        # what is in it may run or not: `x if a else y`, `a or b`, a comprehension, a lambda
        guard = self._guard
        self._guard = guard or _quoted(node)
        self._read_parts(node)
        self._guard = guard
        match node:
            case ast.Lambda():
                return node
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
        return _unknown(node, "is not worked out")

    def _name(self, node: ast.Name) -> Any:
        """Return the value of a name where it is used."""
        name = node.id
        entry = self.names.entries.get(name)
        if name in self._arguments:
            return self._arguments[name]
        if entry is None and name not in self._binders:
            return Symbol(name)
        if entry is None:
            return _unknown(node, "is not assigned before its use")
        value = entry.value
        is_assigned_again = len(self._binders[name]) > 1
        if is_assigned_again and isinstance(value, Symbol | ast.AST):
            return _unknown(node, "is assigned more than once")
        if isinstance(value, ast.AST):
            self._inside[self._function].append(value)
            if self._guard:
                self._conditional.setdefault(value, self._guard)
        if isinstance(value, Fields) and not self._is_target:
            value.used = value.used or node.lineno
        return value

    def _number(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """Return the result of arithmetic on numbers of the size that settings have."""
        unknown = _unknown(node, "is not worked out")
        calculate = ARITHMETIC.get(type(node.op))
        are_numbers = {type(left), type(right)} <= {int, float}
        if calculate is None or not are_numbers:
            return unknown
        if isinstance(node.op, ast.Pow | ast.LShift) and right > LARGEST_EXPONENT:
            return unknown
        try:
            result = calculate(left, right)
            is_plausible = abs(result) <= LARGEST_NUMBER
            return result if is_plausible else unknown
        except (ArithmeticError, ValueError, TypeError):
            return unknown

    def _attribute(self, node: ast.Attribute, base: Any) -> Any:
        """Return an attribute of an object, if it is an object itself: what is set, an argument of
        the call that makes it, or one that is not known."""
        name = node.attr
        if isinstance(base, Symbol):
            symbol = Symbol(f"{base.name}.{name}", base.imported)
            is_environment = symbol.name == "os.environ"
            return self.names.get("os.environ") if is_environment else symbol
        is_container = isinstance(base, PlainDict | PlainSequence)
        if name == "__dict__" or (is_container and name not in READING_METHODS):
            self._doubt(base, f"{_quoted(node)} may change it")
        if not isinstance(base, Call):
            why = getattr(base, "why", "is not known")
            return _unknown(node, f"belongs to what {why}")
        # what is set of it later belongs to the object
        only_seen = Call(line=node.lineno, text=shortened(node), home=base.home)
        entry = base.entries.setdefault(name, DictEntry(only_seen, node.lineno))
        part = entry.value
        if isinstance(part, Fields):
            part.used = part.used or base.used
            part.doubt = part.doubt or base.doubt
        if isinstance(part, Fields | PlainSequence):
            return part
        return _unknown(node, "is not followed")

    def _item(self, node: ast.Subscript, base: Any, key: Any) -> Any:
        """Return an item of a known dict."""
        if isinstance(base, PlainDict) and not base.doubt:
            entries = spread(base)
            is_spread = any(name.startswith("**") for name in entries)
            if key in entries and not is_spread:
                base.is_read = True
                part = entries[key].value
                if isinstance(part, Fields):
                    part.used = part.used or base.used
                return part
        why = getattr(base, "doubt", "") or "is not known"
        return _unknown(node, why)

    def _dict(self, node: ast.Dict) -> PlainDict:
        """Return the value of a dict that is written out, in doubt if one of its keys is not
        known."""
        table = PlainDict(line=node.lineno)
        self._register(table)
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            # {**others} has no key
            key = self.value(key_node) if key_node else f"**{shortened(value_node)}"
            if isinstance(key, str):
                self._add(table, key, value_node, key_node or value_node)
            elif isinstance(key, UnknownValue):
                self._doubt(table, f"{_quoted(node)} has keys that are not known")
        return table

    def _register(self, fields: Fields) -> None:
        """Note a new dict or call, with the function and the condition that it stands in."""
        fields.home = self._home
        self.made.append(fields)
        self._inside[self._function].append(fields)
        if self._guard:
            self._make_conditional(fields, self._guard)

    def _add(self, fields: Fields, key: str, value_node: ast.expr, node: ast.AST) -> None:
        """Add an entry to a dict or call. node: what tells the entry from others."""
        if key in fields.entries:
            self._doubt(fields, f"{key} is given twice (line {value_node.lineno})")
        value = self.value(value_node)
        line = getattr(node, "lineno", 0)
        fields.entries[key] = DictEntry(value, line, id(node))

    def _call(self, node: ast.Call) -> Any:
        """Return the value of a call: a dict, or a `Call` of something outside of the file."""
        function = self.value(node.func)
        given = [*node.args]
        # run.Config(SomeClass, ...) stands for a call of its first argument
        if shortened(node.func) in CONFIGS and given:
            first = given.pop(0)
            function = self.value(first)
        is_dict = function == Symbol("dict")
        call = PlainDict(line=node.lineno) if is_dict else self._new_call(node, function)
        self._register(call)
        for index, item in enumerate(given):
            key = f"**{shortened(item)}" if is_dict else argument(index)
            self._add(call, key, item, item)
        for keyword in node.keywords:
            key = keyword.arg or f"**{shortened(keyword.value)}"
            self._add(call, key, keyword.value, keyword)
        for value in self._changed_by(node, function, call):
            self._doubt(value, f"{_quoted(node)} may change it")
        if isinstance(function, ast.AST):
            return _unknown(node, "is made by a function of the file, which is not run")
        if isinstance(call, Call):
            self.calls.append(call)
        return call

    def _new_call(self, node: ast.Call, function: Any) -> Call:
        """Return a call without its arguments, doubtful if it is not known what is called."""
        call = Call(line=node.lineno, text=shortened(node), node=id(node))
        if isinstance(function, Symbol):
            call.function = function
        else:
            call.function = Symbol(shortened(node.func))
        is_name = isinstance(node.func, ast.Name)
        # unknown, or a name that stands for the result of another call
        if isinstance(function, UnknownValue) or (isinstance(function, Call) and is_name):
            call.doubt = f"`{function.text}` {function.why}"
        return call

    def _changed_by(self, node: ast.Call, function: Any, call: Fields) -> list[Any]:
        """Return the objects that a call may change."""
        given = [entry.value for entry in call.entries.values()]
        called = node.func
        name = getattr(function, "name", "")
        if not given:
            return []
        if isinstance(function, ast.AST):
            # attributes that it sets are refused there, by their names
            return [value for value in given if isinstance(value, PlainDict)]
        if name.startswith(CHANGING_FUNCTIONS):
            first = given[0]
            return [first]
        if isinstance(called, ast.Attribute) and called.attr.startswith(CHANGING_METHODS):
            return [self.value(called.value)]
        return []


def _literal_table(node: ast.Dict) -> PlainDict:
    """Return a dict of literals. Raises ValueError or TypeError for another."""
    entries: dict[str, DictEntry] = {}
    for key, value in ast.literal_eval(node).items():
        entries[key] = DictEntry(value, node.lineno)
    return PlainDict(entries, line=node.lineno)


def _unknown(node: ast.AST, why: str) -> UnknownValue:
    """Return the value of an expression that is not known, for a reason."""
    return UnknownValue(shortened(node), _line_of(node), why)


def _quoted(node: ast.AST) -> str:
    """Return the text of a node with its line, for a reason."""
    return f"`{shortened(node)}` (line {_line_of(node)})"


def _line_of(node: ast.AST) -> int:
    """Return the line of a node, 0 if it has none."""
    return getattr(node, "lineno", 0)


def _is_set(node: ast.AST) -> bool:
    """Return True for a name, attribute, item or tuple that is assigned or deleted."""
    context = getattr(node, "ctx", None)
    return isinstance(context, ast.Store | ast.Del)


def _binders(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the names that a node assigns, each with what tells it from another assignment."""
    match node:
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                first, _, _ = alias.name.partition(".")
                bound = alias.asname or first
                # import a.b binds a
                name = alias.name if alias.asname else first
                if isinstance(node, ast.ImportFrom):
                    module = "." * node.level + (node.module or "")
                    name = f"{module}.{alias.name}"
                yield bound, Symbol(name, imported=True)
        case ast.Name() if _is_set(node):
            yield node.id, node
        case ast.Global() | ast.Nonlocal():
            for name in node.names:
                yield name, node
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name, node


def _condition_of(node: ast.stmt) -> str:
    """Return the condition on which the body of a statement runs; empty for none."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name} (line {node.lineno})"
    if isinstance(node, ast.If):
        # `if __name__ == "__main__":` runs whenever the file is run
        is_main = shortened(node.test).startswith("__name__ ==") and not node.orelse
        return "" if is_main else _quoted(node.test)
    return _quoted(node) if isinstance(node, ast.Try | ast.Match) else ""


def _leaves_early(node: ast.stmt) -> str:
    """Return what in a statement may leave its function or loop, so that what follows may not run;
    empty for none."""
    if isinstance(node, DEFINITIONS):
        return ""
    # a `break` leaves its own loop only
    kinds: tuple[type[ast.stmt], ...] = (ast.Return, ast.Break, ast.Continue)
    if isinstance(node, LOOPS):
        kinds = (ast.Return,)
    for part in ast.walk(node):
        if isinstance(part, kinds):
            return _quoted(part)
    return ""
