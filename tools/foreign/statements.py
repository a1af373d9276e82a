"""Following the statements of a configuration file as far as possible without running it.

Assignments, functions, classes and conditions are followed. If a condition is unknown, both
branches are followed, and values on which they disagree are unknown afterwards. A loop over a known
list is unrolled; the body of any other loop is followed once. A function that the file does not
call is followed with unknown arguments.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.foreign.calls import Calls
from tools.foreign.expressions import calculated, shortened
from tools.foreign.values import (
    Class,
    Condition,
    Entry,
    External,
    Function,
    Row,
    Scope,
    Table,
    Thing,
    same,
)

DEEPEST = 12  # calls within calls
LONGEST_LOOP = 64


class Statements(Calls):
    """Follower of the statements of a module.

    scopes: every scope, as it was when it was left. top_names: node and line of the module's
        assignments.
    """

    def __init__(self, tree: ast.Module, assumptions: Mapping[str, ast.expr]) -> None:
        super().__init__(assumptions)
        self.scopes = [self.scope]
        self.functions: list[Function] = []
        self.top_names: dict[str, tuple[int, int]] = {}
        self._running: list[ast.AST] = []
        self._returned: list[list[Any]] = []
        self.block(tree.body)
        for function in self.functions:  # grows as functions within functions are found
            if not function.called:
                self._follow_uncalled(function)

    def block(self, body: Sequence[ast.stmt]) -> str:
        """Follow statements; return the word by which they left the block: return, raise, break,
        continue, or none."""
        for i, statement in enumerate(body):
            if isinstance(statement, ast.If) and not isinstance(
                truth := self._truth(statement.test), bool
            ):
                left = self._either_way(statement, truth, body[i + 1 :])
                if left is not None:
                    return left
                continue
            follow = getattr(self, f"_{type(statement).__name__.lower()}_", None)
            if follow is not None and (left := follow(statement)):
                return left
        return ""

    # simple statements

    def _expr_(self, node: ast.Expr) -> None:
        value = self.value(node.value)
        if isinstance(value, Table):  # a dict on its own, as snippets have it
            self.scope.names[f"line {node.lineno}"] = value

    def _assign_(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._assign_to(target, value)

    def _annassign_(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign_to(node.target, self.value(node.value))

    def _augassign_(self, node: ast.AugAssign) -> None:
        before = self.value(node.target)
        after = calculated(node.op, before, self.value(node.value))
        if isinstance(before, Table):
            self.merge_into(before, self.value(node.value))
            return
        changed = self.unknown(node.target, "is not worked out") if after is None else after
        self._assign_to(node.target, changed)

    def _assign_to(self, target: ast.expr, value: Any) -> None:
        self.seen[id(target)] = value
        self.assigned.add(id(value))
        if isinstance(target, ast.Name):
            scope = self.scope.declared.get(target.id, self.scope)
            if scope is self.scopes[0]:
                self.top_names[target.id] = (id(target), target.lineno)
            self.write(scope.names, target.id, value)
        elif isinstance(target, ast.Attribute):
            self.assign_attribute(
                self.value(target.value), target.attr, Entry(value, target.lineno, id(target))
            )
        elif isinstance(target, ast.Subscript):
            self._assign_item(target, self.value(target.value), self.value(target.slice), value)
        elif isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, Row) and len(value.items) == len(target.elts):
                parts = value.items
            else:
                parts = None
            for i, part in enumerate(target.elts):
                unknown = Thing(
                    shortened(part), part.lineno, "is a part of something that is not in the file"
                )
                self._assign_to(part, parts[i] if parts is not None else unknown)

    def _assign_item(self, target: ast.Subscript, base: Any, key: Any, value: Any) -> None:
        if isinstance(key, str):
            self.assign_attribute(base, key, Entry(value, target.lineno, id(target)))
        elif isinstance(base, Row):
            known = type(key) is int and -len(base.items) <= key < len(base.items)
            unknown = tuple(
                Thing(shortened(target), target.lineno, "is one of a list") for _ in base.items
            )
            items = list(base.items if known else unknown)
            if known:
                items[key] = value
            self.write(base.slots, "items", tuple(items))
        elif isinstance(base, Table):
            self.open_up(
                base,
                Thing(shortened(target), target.lineno, "is set under a key that is not known"),
            )

    def _delete_(self, node: ast.Delete) -> None:
        for target in node.targets:
            self.delete(target)

    def _import_(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.write(
                self.scope.names,
                name,
                External(alias.name if alias.asname else name, imported=True),
            )

    def _importfrom_(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            self.write(
                self.scope.names,
                alias.asname or alias.name,
                External(f"{module}.{alias.name}", imported=True),
            )

    # blocks

    def _truth(self, test: ast.expr) -> bool | Condition:
        return self._main_guard(test) or self.condition(test)

    def _if_(self, node: ast.If) -> str:
        truth = self._truth(node.test) is True
        self._pass_over(node.orelse if truth else node.body, f"`{shortened(node.test)}` is {truth}")
        return self.block(node.body if truth else node.orelse)

    def _either_way(
        self, node: ast.If, condition: Condition, rest: Sequence[ast.stmt]
    ) -> str | None:
        """Follow both branches of an unknown condition; return None if the statements after it are
        still to be followed.

        If one branch leaves the block, the statements after it belong to the other branch alone. An
        error ends the
        program: the statements after it are certain.
        """
        left, written = self.attempt(lambda: self.block(node.body), condition)
        left_too, written_too = self.attempt(lambda: self.block(node.orelse), condition)
        if bool(left) == bool(left_too):
            self.merge(written, written_too, condition)
            return left or None
        if "raise" in (left, left_too):
            staying = written_too if left else written
            self.merge(staying, staying, condition)
            return None
        stays = node.orelse if left else node.body
        after, going_on = self.attempt(lambda: self.block(stays) or self.block(rest), condition)
        self.merge(written if left else written_too, going_on, condition)
        return after

    def _main_guard(self, test: ast.expr) -> bool:
        return (
            isinstance(test, ast.Compare)
            and isinstance(test.left, ast.Name)
            and test.left.id == "__name__"
        )

    def _pass_over(self, body: Sequence[ast.stmt], why: str) -> None:
        if body:
            self.unreached.append((body[0].lineno, body[-1].end_lineno or body[-1].lineno, why))

    def _for_(self, node: ast.For | ast.AsyncFor) -> str:
        items = self.value(node.iter)
        if isinstance(items, Row) and len(items.items) <= LONGEST_LOOP:
            return self._unrolled(node, items.items)
        self._assign_to(
            node.target, Thing(shortened(node.target), node.lineno, "changes in a loop")
        )
        self._loop(
            node.body,
            Condition(f"for {shortened(node.target)} in {shortened(node.iter)}", node.lineno),
        )

        return ""

    _asyncfor_ = _for_

    def _unrolled(self, node: ast.For | ast.AsyncFor, items: Sequence[Any]) -> str:
        for item in items:
            self._assign_to(node.target, item)
            left = self.block(node.body)
            if left == "break":
                return ""
            if left in ("return", "raise"):
                return left
        return self.block(node.orelse)

    def _while_(self, node: ast.While) -> None:
        self._loop(node.body, Condition(f"while {shortened(node.test)}", node.lineno))
        self.block(node.orelse)

    def _loop(self, body: Sequence[ast.stmt], condition: Condition) -> None:
        """Follow the body of a loop once, as for each training step; values that it changes are
        unknown afterwards."""
        _, written = self.attempt(lambda: self.block(body), None)
        self.merge(
            written, {where: new for where, new in written.items() if self.is_new(new)}, condition
        )

    def _if_body(self, body: Sequence[ast.stmt], condition: Condition) -> None:
        _, written = self.attempt(lambda: self.block(body), condition)
        self.merge(written, {}, condition)

    def _with_(self, node: ast.With | ast.AsyncWith) -> str:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self._assign_to(item.optional_vars, value)
        return self.block(node.body)

    _asyncwith_ = _with_

    def _try_(self, node: ast.Try) -> str:
        left = self.block(node.body)
        for handler in node.handlers:
            caught = shortened(handler.type) if handler.type else "an error"
            self._if_body(handler.body, Condition(f"except {caught}", handler.lineno))
        if not left:
            left = self.block(node.orelse)
        return self.block(node.finalbody) or left

    def _match_(self, node: ast.Match) -> None:
        for case in node.cases:
            self._if_body(
                case.body, Condition(f"match {shortened(node.subject)}", case.pattern.lineno)
            )

    # functions and classes

    def _functiondef_(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        made = Function(node.name, node, self.scope)
        made.defaults = {
            name: self.value(default) for name, default in _defaults(node.args).items()
        }
        self.write(self.scope.names, node.name, made)
        self.functions.append(made)

    _asyncfunctiondef_ = _functiondef_

    def _classdef_(self, node: ast.ClassDef) -> None:
        scope = Scope(node.name, self.scope, is_class=True)
        self.write(
            self.scope.names, node.name, made := Class(node.name, scope, Thing("self", node.lineno))
        )
        self.scopes.append(scope)
        before = self.scope
        self.scope = scope
        self.block(node.body)
        self.scope = before
        made.prototype.attributes = _members(made, made.prototype, node.lineno)
        for function in (
            f for f in scope.names.values() if isinstance(f, Function) and not _is_static(f)
        ):
            function.owner = made.prototype

    def _return_(self, node: ast.Return) -> str:
        value = None if node.value is None else self.value(node.value)
        if self._returned:
            self._returned[-1].append(value)
        return "return"

    def _raise_(self, node: ast.Raise) -> str:
        return "raise"

    def _break_(self, node: ast.Break) -> str:
        return "break"

    def _continue_(self, node: ast.Continue) -> str:
        return "continue"

    def _global_(self, node: ast.Global) -> None:
        self.scope.declared |= dict.fromkeys(node.names, self.scopes[0])

    def _nonlocal_(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            found = self.scope.parent.find(name) if self.scope.parent else None
            if found is not None:
                self.scope.declared[name] = found

    def called_inside(
        self, function: Function | Class, positional: tuple[Entry, ...], arguments: Table, line: int
    ) -> Any:
        """Return the value of a call of a function or class of the file."""
        if isinstance(function, Class):
            return self._instance(function, positional, arguments, line)
        function.called = True
        if self._is_decorated(function):
            return Thing(f"{function.name}(...)", line, "is changed by a decorator of the file")
        if function.node in self._running or len(self._running) >= DEEPEST:
            return Thing(f"{function.name}(...)", line, "calls itself")
        scope = Scope(function.name, function.scope)
        self._bind(function, scope, positional, arguments)
        return self._run(function, scope)

    def _is_decorated(self, function: Function) -> bool:
        """Return True if a function of the file decorates this one."""
        decorators: Iterable[ast.expr] = getattr(function.node, "decorator_list", ())
        return any(
            isinstance(self.value(d), Function) for d in decorators if isinstance(d, ast.Name)
        )

    def _instance(
        self, kind: Class, positional: tuple[Entry, ...], arguments: Table, line: int
    ) -> Thing:
        """Return an instance: members of the class, fields given by keyword as for a dataclass,
        then its `__init__`."""
        made = Thing(f"{kind.name}(...)", line, function=External(kind.name), positional=positional)
        made.arguments = arguments
        made.conditions = tuple(self.conditions)
        made.attributes = _members(kind, made, line)
        start = kind.scope.names.get("__init__")
        if isinstance(start, Function):
            self.called_inside(replace(start, owner=made), positional, arguments, line)
            start.called = True
        else:
            fields = [
                name for name, value in kind.scope.names.items() if not isinstance(value, Function)
            ]
            made.attributes |= dict(zip(fields, positional, strict=False)) | arguments.entries
            after = kind.scope.names.get("__post_init__")
            if isinstance(after, Function):
                self.called_inside(replace(after, owner=made), (), Table(), line)
                after.called = True
        return made

    def _bind(
        self, function: Function, scope: Scope, positional: tuple[Entry, ...], arguments: Table
    ) -> None:
        """Bind arguments in the scope of a call, with defaults for missing ones, and things for
        unknown ones."""
        spec = function.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        given: dict[str, Any] = dict(
            zip(names, [function.owner] if function.owner else [], strict=False)
        )
        given |= zip(names[len(given) :], [entry.value for entry in positional], strict=False)
        unsure_of = {
            key: Thing(str(key), function.node.lineno, "may be given by **")
            for key in arguments.entries
        }
        spread = {
            str(k): e.value if e.doubt is None else unsure_of[k]
            for k, e in arguments.entries.items()
        }
        given |= {
            name: spread.pop(name) for name in list(spread) if name in (*names, *_words(spec))
        }
        for name, default in _defaults(spec).items():
            if name not in given:
                unsure = bool(arguments.open)
                if name in function.defaults:
                    usual = function.defaults[name]
                else:
                    usual = self.value(default)
                if unsure:
                    given[name] = Thing(name, function.node.lineno, "may be given by **")
                else:
                    given[name] = usual
        for name in (*names, *_words(spec)):
            why = f"is an argument of {function.name}() that is not in the file"
            scope.names[name] = given.get(name, Thing(name, function.node.lineno, why))
        if spec.kwarg:
            rest = {k: e for k, e in arguments.entries.items() if k in spread}
            scope.names[spec.kwarg.arg] = Table(
                dict(rest), function.node.lineno, list(arguments.open)
            )
        if spec.vararg:
            extra = tuple(entry.value for entry in positional[len(names) - bool(function.owner) :])
            scope.names[spec.vararg.arg] = Row({"items": extra})

    def _follow_uncalled(self, function: Function) -> None:
        """Follow a function that is never called; its defaults do not count as its arguments."""
        scope = Scope(function.name, function.scope)
        spec = function.node.args
        for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            default = _defaults(spec).get(argument.arg)
            hint = f", by default {shortened(default)}," if default is not None else ""
            why = f"is an argument of {function.name}(){hint} whose value is not in the file"
            thing = Thing(argument.arg, argument.lineno, why)
            scope.names[argument.arg] = self._given_for(argument.arg, thing)
        if function.owner is not None and (first := [*spec.posonlyargs, *spec.args][:1]):
            scope.names[first[0].arg] = function.owner
        if spec.kwarg:
            unknown = Thing(f"**{spec.kwarg.arg}", function.node.lineno, "is not in the file")
            scope.names[spec.kwarg.arg] = Table({}, function.node.lineno, [unknown])
        if spec.vararg:
            scope.names[spec.vararg.arg] = Thing(
                f"*{spec.vararg.arg}", function.node.lineno, "is not in the file"
            )
        self._run(function, scope)

    def _given_for(self, name: str, unknown: Thing) -> Any:
        """Return the value that was assumed for an argument, if one was."""
        if name not in self.assumptions:
            return unknown
        self.assumed.add(name)
        return self.value(self.assumptions[name])

    def _run(self, function: Function, scope: Scope) -> Any:
        """Follow the body of a function in its scope; return its value."""
        self.scopes.append(scope)
        before = self.scope
        self.scope = scope
        self._running.append(function.node)
        self._returned.append([])
        if isinstance(function.node, ast.Lambda):
            self._returned[-1].append(self.value(function.node.body))
        elif self.block(function.node.body) not in ("return", "raise") and self._returned[-1]:
            self._returned[-1].append(None)  # it may end without a return
        values = self._returned.pop()
        self._running.pop()
        self.scope = before
        if not values:
            return None
        scope.names["return"] = values[0] if len(values) == 1 else Row({"items": tuple(values)})
        if all(same(values[0], other) for other in values):
            return values[0]
        why = "returns one thing or another"
        return Thing(f"{function.name}(...)", function.node.lineno, why, alternatives=tuple(values))


def _members(kind: Class, owner: Thing, line: int) -> dict[Any, Entry]:
    """Add the names of a class to `owner` as attributes, and its functions as methods."""
    members: dict[Any, Entry] = {}
    for name, value in kind.scope.names.items():
        is_method = isinstance(value, Function) and not _is_static(value)
        bound = replace(value, owner=owner) if is_method else value
        members[name] = Entry(bound, line)
    return members


def _is_static(function: Function) -> bool:
    decorators: Iterable[ast.expr] = getattr(function.node, "decorator_list", ())
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in decorators)


def _words(spec: ast.arguments) -> list[str]:
    return [a.arg for a in spec.kwonlyargs]


def _defaults(spec: ast.arguments) -> dict[str, ast.expr]:
    """Return default expressions by argument."""
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    found = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
    words = zip(_words(spec), spec.kw_defaults, strict=True)
    return found | {name: default for name, default in words if default is not None}
