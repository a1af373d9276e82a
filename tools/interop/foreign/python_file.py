"""A Python file, read as text: the values of its names, dicts and calls, without running it.

A name counts that is assigned once in its scope: a literal, arithmetic, a dict, a call, another
name. Keys and attributes that are set later belong to the dict or object, if it is certain that
they are set before its use. Everything else makes a value `Unknown`, with the reason: a condition,
a loop, a function's argument, a second assignment, what is set in another function.
"""

import ast
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaprec.errors import Problem, UserError
from tools.interop.foreign.plain import Call, Entry, Row, Symbol, Table, Unknown, spread
from tools.interop.foreign.precision_words import (
    MAKING_TENSORS,
    OTHER_NUMBERS,
    bears_on_precision,
    shortened,
)

ARITHMETIC: Mapping[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
NUMBERS = (int, float)
# 9 ** 9 ** 9 would take all memory
LARGEST_EXPONENT = 1024
LARGEST = 2.0**128  # numbers past it are not worked out
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (ast.Module, *FUNCTIONS, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
# a class too: what belongs to it may be changed through it
DECIDING = (ast.If, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.match_case, ast.ClassDef)
PARTIALS = ("run.Config", "run.Partial", "nemo_run.Config", "nemo_run.Partial")
LATER = ("functools.partial", "partial")  # called where its result is called
SETTING_ENVIRONMENT = ("os.environ.setdefault", "os.environ.update", "os.putenv")
READING = ("get", "items", "keys", "values", "copy")  # methods of a dict that change nothing
CHANGING = ("vars", "setattr", "delattr", "object.__setattr__", "operator.", "dict.")
"""Beginnings of functions that may change an object that they are given."""
CHANGING_METHODS = ("update", "merge", "set", "load", "override", "pop", "add", "clear", "__")
"""Beginnings of methods that may change their object, also of configuration packages."""


class PythonFile:
    """A Python file by its values.

    calls: every call of something outside of the file. scopes: of the module and each function, its
    names. environment: the variables that it sets. problems: what cannot be followed though it
    concerns precision. notes: lines and texts of what is taken for granted. named: every key,
    argument and attribute that is set, and every name that is not used again.
    """

    def __init__(self, path: Path, tree: ast.Module) -> None:
        """Read the module. Raises UserError for a key of precision that is given twice."""
        self.environment: dict[str, Entry] = {}
        self.problems: list[Problem] = []
        self.notes: list[tuple[int, str]] = []
        self.named: list[tuple[str, Entry]] = []
        self._path = path
        self._nodes = list(ast.walk(tree))
        self._parents = {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }
        self._values: dict[ast.AST, Any] = {}
        self._partials: dict[int, Call] = {}
        self._calls_made: dict[int, Call] = {}
        self._roots: set[ast.AST] = set()  # names through which something is set
        self._used: dict[int, int] = {}  # ids of values that a call has, and its line
        self._binders: dict[ast.AST, dict[str, list[ast.AST]]] = defaultdict(dict)
        self._loads: dict[str, list[ast.Name]] = defaultdict(list)
        self._shared: set[str] = set()  # names that functions assign for others
        self._leaving: dict[ast.AST, list[ast.stmt]] = defaultdict(list)
        self._calls_depend_on: dict[ast.AST, str] = {}  # function -> condition of its calls
        self._collect_names()
        self._follow_changes()
        self.scopes = [self._names_of(scope) for scope in self._binders]
        for scope in self.scopes:
            for name, entry in scope.entries.items():
                if not self._loads[name]:
                    self.named.append((name, entry))
        for node in self._nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Dict):
                # a dict on its own, as snippets have it
                content = self._if_certain(self.value(node.value), node.value)
                self.scopes.append(Table({"the dict": Entry(content, node.lineno)}))
            elif isinstance(node, ast.expr):
                # to collect the calls in it too
                self.value(node)
        self.calls = list(self._calls_made.values())

    # names

    def _collect_names(self) -> None:
        for node in self._nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    self._loads[name].append(node)
                case ast.Name(id=name) | ast.arg(arg=name):
                    self._bind(name, node)
                case ast.alias():
                    self._bind(node.asname or node.name.partition(".")[0], node)
                case ast.Global() | ast.Nonlocal():
                    self._shared |= set(node.names)
                case ast.Return() | ast.Break() | ast.Continue():
                    self._leaving[self._scope(node)].append(node)
                case _ if isinstance(name := getattr(node, "name", None), str):
                    # a function, a class, an error that is caught or a pattern
                    self._bind(name, node)

    def _bind(self, name: str, node: ast.AST) -> None:
        self._binders[self._scope(node)].setdefault(name, []).append(node)

    def _scope(self, node: ast.AST) -> ast.AST:
        """Return the module, function or class whose names a node sees or assigns."""
        node = self._parents.get(node, node)
        while not isinstance(node, SCOPES):
            node = self._parents[node]
        return node

    def _binders_of(self, node: ast.Name) -> list[ast.AST]:
        """Return the nodes that assign a name, in the scope where it is found."""
        first_scope = scope = self._scope(node)
        while True:
            is_seen = scope is first_scope or not isinstance(scope, ast.ClassDef)
            if is_seen and node.id in self._binders.get(scope, {}):
                return self._binders[scope][node.id]
            if isinstance(scope, ast.Module):
                return []
            scope = self._scope(scope)

    def _names_of(self, scope: ast.AST) -> Table:
        """Return the names that a scope assigns, as a table."""
        table = Table()
        for name, binders in self._binders[scope].items():
            node = binders[-1]
            if isinstance(node, ast.Name):
                value = self._if_certain(self._bound(name, binders), node)
                table.entries[name] = Entry(value, node.lineno, id(node))
        return table

    def _if_certain(self, value: Any, node: ast.expr) -> Any:
        """Return the value of what counts by its name alone; unknown under a condition."""
        if guard := self._guard(node):
            if not isinstance(value, Table):
                return _unknown(node, f"depends on {guard}")
            value.doubt = f"it depends on {guard}"
        return value

    def _bound(self, name: str, binders: list[ast.AST]) -> Any:
        """Return the value of a name that these nodes assign."""
        symbols = {self._imported(binder) for binder in binders}
        symbol = symbols.pop()
        if symbol is not None and not symbols:
            return symbol
        if len(binders) > 1 or name in self._shared:
            return self._bound_again(name, binders)
        (node,) = binders
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            return node
        assigned = self._assigned(node)
        if assigned is not None:
            return self.value(assigned)
        why = "changes in a loop, or is not followed"
        if isinstance(node, ast.arg):
            why = f"is an argument of {self._title(node)}"
        return Unknown(name, getattr(node, "lineno", 0), why)

    def _bound_again(self, name: str, binders: list[ast.AST]) -> Unknown:
        """Return the value of a name that is assigned more than once: a call if each value is one,
        as in model = Model(); model = wrap(model)."""
        assigned = [self._assigned(binder) for binder in binders]
        kind = Unknown
        if all(isinstance(value, ast.Call) for value in assigned):
            holds_dict = any(isinstance(self.value(value), Table) for value in assigned)
            kind = Unknown if holds_dict else Call
        return kind(name, getattr(binders[-1], "lineno", 0), "is assigned more than once")

    def _assigned(self, target: ast.AST) -> ast.expr | None:
        """Return the expression that a statement assigns to a name; None if it is not plain."""
        parent = self._parents[target]
        if isinstance(parent, ast.Tuple) and isinstance(self._parents[parent], ast.Assign):
            values = getattr(self._parents[parent], "value", None)
            if isinstance(values, ast.Tuple) and len(values.elts) == len(parent.elts):
                for part, value in zip(parent.elts, values.elts, strict=True):
                    if part is target:
                        return value
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return parent.value
        return None

    def _imported(self, node: ast.AST) -> Symbol | None:
        if not isinstance(node, ast.alias):
            return None
        parent = self._parents[node]
        name = node.name
        if isinstance(parent, ast.ImportFrom):
            module = "." * parent.level + (parent.module or "")
            name = f"{module}.{name}"
        elif not node.asname:
            # import a.b binds a
            name, _, _ = name.partition(".")
        return Symbol(name, imported=True)

    def _title(self, node: ast.AST) -> str:
        scope = self._scope(node)
        name = getattr(scope, "name", "")
        if isinstance(scope, ast.ClassDef):
            return f"class {name}"
        return f"{name}()" if name else "the module"

    # conditions

    def _guard(self, node: ast.AST) -> str:
        """Return the condition on which it depends whether a node runs; empty for none. A loop and
        the body of a `try` count as run."""
        enclosing = self._enclosing(node)
        for inner, outer in pairwise([node, *enclosing]):
            if _decides(outer, inner):
                return _described(outer)
        function = [node, *enclosing][-1]
        return self._leaving_before(node, enclosing) or self._condition_of_calls(function)

    def _enclosing(self, node: ast.AST) -> list[ast.AST]:
        """Return what a node stands in, up to its function or the module."""
        enclosing = list[ast.AST]()
        while not isinstance(node, (ast.Module, *FUNCTIONS)):
            node = self._parents[node]
            enclosing.append(node)
        return enclosing

    def _leaving_before(self, node: ast.AST, enclosing: list[ast.AST]) -> str:
        """Return the condition of a statement that may leave the function before a node runs."""
        line = getattr(node, "lineno", 0)
        for leaving in self._leaving[self._scope(node)]:
            loop = self._loop(leaving)
            # a `break` leaves its own loop only
            leaves_node = isinstance(leaving, ast.Return) or loop is None or loop in enclosing
            if (leaving.end_lineno or 0) < line and leaves_node:
                return _described(self._parents[leaving])
        return ""

    def _condition_of_calls(self, function: ast.AST) -> str:
        """Return a condition of the calls of a function, if all of them have one."""
        if function not in self._calls_depend_on:
            self._calls_depend_on[function] = ""  # of a function that calls itself
            uses = self._loads[getattr(function, "name", "")]
            guards = [self._guard(use) for use in uses if self._binders_of(use) == [function]]
            if guards and all(guards):
                self._calls_depend_on[function] = guards[0]
        return self._calls_depend_on[function]

    def _loop(self, node: ast.AST | None) -> ast.AST | None:
        while node is not None and not isinstance(node, LOOPS):
            node = self._parents.get(node)
        return node

    # changes

    def _follow_changes(self) -> None:
        """Follow, in the order of the file, what sets keys and attributes or may do so."""
        parts = list[ast.expr]()
        calls = list[ast.expr | ast.stmt]()
        for node in self._nodes:
            if isinstance(node, ast.Attribute | ast.Subscript):
                parts.append(node)
                if not isinstance(node.ctx, ast.Load):
                    self._roots.add(_root(node))
            elif isinstance(node, ast.Call | ast.AugAssign):
                calls.append(node)
        # a call begins where its function does, which is looked up before it
        for node in sorted([*parts, *calls], key=_position):
            self._follow_change(node)

    def _follow_change(self, node: ast.AST) -> None:
        match node:
            case ast.Attribute(ctx=ast.Load(), attr=name):
                base = self.value(node.value)
                may_change = isinstance(base, Table | Row) and name not in READING
                if may_change or name == "__dict__":
                    self._doubt(base, node)
            case ast.Attribute(attr=name):
                self._set(node, name)
            case ast.Subscript() if not isinstance(node.ctx, ast.Load):
                self._set(node, self.value(node.slice))
            case ast.AugAssign(target=ast.Name() as name):
                # another name may stand for the same object
                for binder in self._binders_of(name):
                    self._doubt(self.value(self._assigned(binder)), node)
            case ast.Call():
                self._follow_call(node)

    def _follow_call(self, node: ast.Call) -> None:
        """Doubt the objects that a call may change."""
        function = self.value(node.func)
        arguments = [self.value(argument) for argument in node.args]
        arguments += [self.value(keyword.value) for keyword in node.keywords]
        if function != Symbol("dict"):
            for value in arguments:
                self._used.setdefault(id(value), node.lineno)
        for value in self._changed_by(node, function, arguments):
            self._doubt(value, node)
        if isinstance(function, Symbol) and function.name in SETTING_ENVIRONMENT and arguments:
            variables = arguments[0]
            names = variables.entries if isinstance(variables, Table) else [variables]
            for name in names:
                self.environment[str(name)] = Entry(_unknown(node, "may set it"), node.lineno)

    def _changed_by(self, node: ast.Call, function: Any, arguments: list[Any]) -> Iterator[Any]:
        """Yield the objects that a call may change."""
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith(CHANGING_METHODS):
            yield self.value(node.func.value)
        if isinstance(function, Symbol) and function.name.startswith(CHANGING):
            yield from arguments[:1]
        if isinstance(function, ast.AST) and _changes_objects(function):
            yield from arguments

    def _doubt(self, value: Any, node: ast.AST) -> None:
        if isinstance(value, Table | Row | Unknown):
            line = getattr(node, "lineno", 0)
            value.doubt = f"`{shortened(node)}` (line {line}) may change it"

    def _set(self, target: ast.Attribute | ast.Subscript, key: Any) -> None:
        """Follow `target = ...`, also `target += ...` and `del target`."""
        base = self.value(target.value)
        assigned = self._assigned(target)
        value = self.value(assigned)
        if assigned is None:
            value = _unknown(target, "is changed in place")
        self.named.append((str(key), Entry(value, target.lineno, id(target))))
        if isinstance(base, Symbol):
            # torch.backends.cuda.matmul.allow_tf32 is in a note
            if base.last == "environ":
                self._set_environment(target, str(key), value)
        elif isinstance(base, Row) or not isinstance(key, str):
            self._doubt(base, target)
        else:
            self._set_entry(target, base, key, value)

    def _set_environment(self, target: ast.expr, name: str, value: Any) -> None:
        if self._guard(target) or name in self.environment:
            value = _unknown(target, "is set under a condition, or twice")
        self.environment[name] = Entry(value, target.lineno, id(target))

    def _set_entry(self, target: ast.expr, base: Any, key: str, value: Any) -> None:
        root = _root(target)
        why = self._why_uncertain(target, root)
        if id(base) in self._used:
            why = f"is set after line {self._used[id(base)]} has used it"
        if not isinstance(base, Table | Unknown):
            why = "is set on what is no object here"
        # what belongs to `self` is of a class of their own, and in a note
        if why and bears_on_precision(key) and shortened(root) != "self":
            self._refuse(target, why)
        if why:
            value = _unknown(target, why)
        entry = Entry(value, target.lineno, id(target))
        if isinstance(base, Table):
            base.entries[key] = entry
        elif isinstance(base, Unknown):
            base.attributes[key] = entry

    def _refuse(self, node: ast.expr, why: str) -> None:
        text = shortened(node)
        problem = Problem.of(
            "precision_file.not_followed", path=self._path, line=node.lineno, text=text, why=why
        )
        self.problems.append(problem)

    def _why_uncertain(self, target: ast.expr, root: ast.expr) -> str:
        """Return why it is not certain that what is set counts where the object is used."""
        value = self.value(root)
        if isinstance(value, Unknown) and not isinstance(value, Call):
            return f"belongs to `{value.text}`, which {value.why}"
        binders = self._binders_of(root) if isinstance(root, ast.Name) else []
        assigned = self._assigned(binders[0]) if len(binders) == 1 else None
        if assigned is None or self._block(target) is not self._block(assigned):
            return f"is not set beside the assignment of `{shortened(root)}`"
        if not isinstance(assigned, ast.Dict | ast.Call):
            return f"is set by another name, `{shortened(root)}`"
        if guard := self._guard(target):
            return f"depends on {guard}"
        return self._used_before(target, root, binders)

    def _used_before(self, target: ast.expr, root: ast.expr, binders: list[ast.AST]) -> str:
        """Return that a name is used before something is set through it; empty if it is not."""
        for name in self._loads[getattr(root, "id", "")]:
            is_use = name not in self._roots and name.lineno < target.lineno
            if is_use and self._binders_of(name) is binders:
                return f"is set after line {name.lineno} has used it"
        return ""

    def _block(self, node: ast.AST) -> ast.AST:
        """Return the statement, module or function in whose body a node's statement stands."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return self._parents[node]

    # values

    def value(self, node: ast.AST | None) -> Any:
        """Return the value of an expression; `Unknown` if it would have to be run."""
        if node is None:
            return None
        if node not in self._values:
            self._values[node] = _unknown(node, "holds itself")
            self._values[node] = self._new_value(node)
        return self._values[node]

    def _new_value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as literal):
                return literal
            case ast.Name():
                binders = self._binders_of(node)
                return self._bound(node.id, binders) if binders else Symbol(node.id)
            case ast.Attribute():
                return self._part(node, self.value(node.value), node.attr)
            case ast.Subscript():
                return self._part(node, self.value(node.value), self.value(node.slice))
            case ast.Dict():
                return self._dict(node)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._row(node)
            case ast.Lambda():
                return node
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp() | ast.BinOp():
                return self._number(node)
        return self._unworked(node)

    def _unworked(self, node: ast.AST) -> Unknown:
        for part in ast.iter_child_nodes(node):
            value = self.value(part) if isinstance(part, ast.expr) else None
            if isinstance(value, Unknown):
                return _unknown(node, f"hangs on `{value.text}`, which {value.why}")
        return _unknown(node, "is not worked out")

    def _row(self, node: ast.List | ast.Tuple | ast.Set) -> Table | Row:
        """Return a list; an empty dict for what documentation has in the place of one:
        {TRAINER_ARGS}."""
        items = [self.value(item) for item in node.elts]
        match node, items:
            case ast.Set(elts=[ast.Name()]), [Symbol(imported=False)]:
                text = f"`{shortened(node)}` is a placeholder of documentation, read as nothing"
                self.notes.append((node.lineno, text))
                return Table(line=node.lineno)
        return Row(items)

    def _number(self, node: ast.UnaryOp | ast.BinOp) -> Any:
        """Return the result of arithmetic on numbers of the size that settings have."""
        if isinstance(node, ast.UnaryOp):
            operands = [node.operand]
        else:
            operands = [node.left, node.right]
        numbers = [self.value(operand) for operand in operands]
        calculate = ARITHMETIC.get(type(node.op))
        if calculate is None or any(type(number) not in NUMBERS for number in numbers):
            return self._unworked(node)
        is_growing = isinstance(node.op, ast.Pow | ast.LShift)
        if is_growing and numbers[1] > LARGEST_EXPONENT:
            return _unknown(node, "is not worked out")
        try:
            result = calculate(*numbers)
        except (ArithmeticError, ValueError, TypeError):
            return _unknown(node, "is not worked out")
        # a power of a negative number may be complex
        is_number = type(result) in NUMBERS and abs(result) <= LARGEST
        return result if is_number else _unknown(node, "is not worked out")

    def _part(self, node: ast.expr, base: Any, key: Any) -> Any:
        """Return an attribute or item of a value."""
        is_attribute = isinstance(node, ast.Attribute)
        if isinstance(base, Symbol) and is_attribute:
            return Symbol(f"{base.name}.{key}", base.imported)
        doubt = getattr(base, "doubt", "")
        if isinstance(base, Table) and not is_attribute and not doubt:
            return self._item(node, base, key)
        if isinstance(base, Unknown) and isinstance(key, str) and not doubt:
            return self._attribute(node, base, key)
        return _unknown(node, doubt or "is not in the file")

    def _item(self, node: ast.expr, table: Table, key: Any) -> Any:
        entries = spread(table)
        if key not in entries or any(name.startswith("**") for name in entries):
            return _unknown(node, "is not in the dict, or may be another")
        return entries[key].value

    def _attribute(self, node: ast.expr, base: Unknown, key: str) -> Any:
        """Return an attribute or item of an object: what the file sets, or a call that is an
        argument of its maker, such as recipe.trainer of Recipe(trainer=Trainer())."""
        if key not in base.attributes:
            part = base.arguments.get(key) if isinstance(base, Call) else None
            if not isinstance(part, Call):
                part = _unknown(node, f"belongs to `{base.text}`, which {base.why}")
            base.attributes[key] = Entry(part, node.lineno)
        return base.attributes[key].value

    def _dict(self, node: ast.Dict) -> Table:
        table = Table(line=node.lineno)
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node)
            if key_node is None:
                key = f"**{shortened(value_node)}"
                table.entries[key] = Entry(value, value_node.lineno)
            elif isinstance(key := self.value(key_node), str):
                self._add(table, key, value, key_node)
            elif isinstance(key, Unknown):
                self._doubt(table, key_node)
        self.named += table.entries.items()
        return table

    def _add(self, table: Table, key: str, value: Any, node: ast.expr | ast.keyword) -> None:
        if key in table.entries and bears_on_precision(key):
            line = node.lineno
            raise UserError.of("precision_file.key_twice", path=self._path, line=line, name=key)
        table.entries[key] = Entry(value, node.lineno, id(node))

    # calls

    def _call(self, node: ast.Call) -> Any:
        """Return the value of a call: a dict, what a function of the file returns, or a `Call`."""
        function = self.value(node.func)
        name = function.name if isinstance(function, Symbol) else ""
        positional = [Entry(self.value(item), item.lineno) for item in node.args]
        arguments = self._keywords(node)
        if name == "dict":
            spread_items = {
                f"**{shortened(item)}": entry
                for item, entry in zip(node.args, positional, strict=True)
            }
            arguments.entries = spread_items | arguments.entries
        if not name.startswith((*MAKING_TENSORS, *OTHER_NUMBERS)):
            self.named += arguments.entries.items()
        if name == "dict":
            return arguments
        if name in (*PARTIALS, *LATER) and positional:
            function = positional.pop(0).value
        if isinstance(function, ast.AST):
            return self._returned(function, node)
        call = self._new_call(node, function, positional, arguments)
        # the others count where they are called again
        calls = self._partials if name in LATER else self._calls_made
        calls[id(call)] = call
        return call

    def _keywords(self, node: ast.Call) -> Table:
        """Return the arguments by name."""
        arguments = Table(line=node.lineno)
        for keyword in node.keywords:
            key = keyword.arg or f"**{shortened(keyword.value)}"
            self._add(arguments, key, self.value(keyword.value), keyword)
        return arguments

    def _new_call(
        self, node: ast.Call, function: Any, positional: list[Entry], arguments: Table
    ) -> Call:
        """Return a call of something outside of the file, with what a partial brings along."""
        call = Call(shortened(node), node.lineno, "comes of a call that is not run")
        if partial := self._partials.get(id(function)):
            positional = [*partial.positional, *positional]
            arguments.entries = partial.arguments.entries | arguments.entries
            function = partial.function
        if isinstance(function, Unknown) and isinstance(node.func, ast.Name):
            call.doubt = f"`{function.text}` {function.why}"
        if not isinstance(function, Symbol):
            text = function.text if isinstance(function, Unknown) else shortened(node.func)
            function = Symbol(text)
        call.function = function
        call.positional = tuple(positional)
        call.arguments = arguments
        call.guard = self._guard(node)
        call.node = id(node)
        return call

    def _returned(self, function: ast.AST, node: ast.Call) -> Any:
        """Return what a function of the file returns at its end, if it is called once."""
        name = getattr(function, "name", "a lambda")
        returns = self._leaving[function]
        body = function.body if isinstance(function, FUNCTIONS) else []
        is_decorated = bool(getattr(function, "decorator_list", []))
        is_plain = len(self._loads[name]) == 1 and not is_decorated
        if is_plain and body and returns == body[-1:]:
            return self.value(getattr(returns[0], "value", None))
        return _unknown(node, f"is made by {name}(), which is not run")


def _unknown(node: ast.AST, why: str) -> Unknown:
    return Unknown(shortened(node), getattr(node, "lineno", 0), why)


def _position(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _root(target: ast.expr) -> ast.expr:
    """Return the beginning of a chain such as recipe.trainer.plugins."""
    if isinstance(target, ast.Attribute):
        return _root(target.value)
    match target:
        case ast.Subscript(slice=ast.Constant(value=str())):
            return _root(target.value)
    return target


def _described(node: ast.AST) -> str:
    """Return a condition or loop for a message, with its line."""
    head = getattr(node, "test", None) or getattr(node, "type", None)
    text = shortened(head or node).partition(":")[0]
    # a case has no line of its own, but its pattern has
    line = getattr(node, "lineno", 0) or getattr(getattr(node, "pattern", None), "lineno", 0)
    return f"`{text}` (line {line})"


def _decides(parent: ast.AST, node: ast.AST) -> bool:
    """Return True if it depends on a node's parent whether the node runs."""
    if any(part.ifs for part in getattr(parent, "generators", ())):
        return True
    return isinstance(parent, DECIDING) and not _always_runs(parent, node)


def _always_runs(parent: ast.AST, node: ast.AST) -> bool:
    """Return True for the condition itself, and what is under `if __name__ == ...`."""
    if isinstance(parent, ast.BoolOp):
        return node is parent.values[0]
    test = getattr(parent, "test", None)
    is_main = test is not None and shortened(test).startswith("__name__ ==")
    return node is test or (is_main and node not in getattr(parent, "orelse", []))


def _changes_objects(function: ast.AST) -> bool:
    """Return True if a function may change an object that it is given."""
    for part in ast.walk(function):
        match part:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Attribute(attr="__dict__"):
                return True
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                return True
            case ast.Call() if shortened(part.func).startswith(CHANGING):
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith(CHANGING_METHODS):
                return True
    return False
