"""The values of calls: methods of dicts and lists, functions that make or copy settings, and all
others.

A call of something external becomes a `Thing` with its arguments. `run.Config(f, ...)`,
`run.Partial(f, ...)` and `functools.partial(f, ...)` count as calls of f with these arguments.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tools.foreign.expressions import ENVIRONMENT, Expressions, is_number, shortened
from tools.foreign.values import Class, Entry, External, Function, Partial, Row, Table, Thing

PARTIALS = (
    "run.Config",
    "run.Partial",
    "nemo_run.Config",
    "nemo_run.Partial",
    "functools.partial",
    "partial",
)
COPIES = ("copy.copy", "copy.deepcopy", "deepcopy", "dataclasses.replace", "replace")
PASSING = (
    "OmegaConf.create",
    "omegaconf.OmegaConf.create",
    "DictConfig",
    "omegaconf.DictConfig",
    "MappingProxyType",
)
TABLES = (
    "dict",
    "OrderedDict",
    "collections.OrderedDict",
    "SimpleNamespace",
    "types.SimpleNamespace",
    "Namespace",
)
TABLES += ("argparse.Namespace", "EasyDict", "easydict.EasyDict", "addict.Dict", "AttrDict", "Box")
ROWS = ("list", "tuple", "set")
SETTERS = ("setattr", "object.__setattr__")
CHANGING = ("update", "merge", "set", "load", "override", "pop", "del", "add", "clear", "__ior__")
"""Beginnings of the names of methods that change a dict, also those of configuration packages: merge_from_list."""
REARRANGING = ("clear", "insert", "pop", "remove", "reverse", "sort")
UNREAD_OPERAND = "is not in the file"


class Calls(Expressions):
    """Values of expressions with calls."""

    def _call(self, node: ast.Call) -> Any:
        base = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Attribute):
            callee = self.assumed_or(node.func, self.attribute(base, node.func.attr, node.func))
        else:
            callee = self.value(node.func)
        positional, arguments = self._arguments(node)
        made = self._called(callee, base, node, positional, arguments)
        self.seen[id(node)] = made
        return made

    def _attribute(self, node: ast.Attribute) -> Any:
        """Return the value of an attribute; a dict whose changing method is handed on may change
        unseen."""
        base = self.value(node.value)
        if isinstance(base, Table) and node.attr not in base.entries and changes(node.attr):
            self.open_up(base, self.unknown(node, "may change any key"))
        return self.attribute(base, node.attr, node)

    def _arguments(self, node: ast.Call) -> tuple[tuple[Entry, ...], Table]:
        positional: list[Entry] = []
        for item in node.args:
            value = self.value(item.value if isinstance(item, ast.Starred) else item)
            if isinstance(item, ast.Starred):
                if isinstance(value, Row):
                    spread = value.items
                else:
                    spread = (self.unknown(item, UNREAD_OPERAND),)
                positional += [Entry(part, item.lineno) for part in spread]
            else:
                positional.append(Entry(value, item.lineno))
        arguments = Table(line=node.lineno)
        for word in node.keywords:
            value = self.value(word.value)
            if word.arg is None:
                # certain, for Python refuses an argument that is given twice
                given = dict(arguments.entries)
                self.merge_into(arguments, value)
                arguments.entries |= given
            else:
                self.seen[id(word)] = value
                arguments.entries[word.arg] = Entry(value, word.lineno, id(word))
        return tuple(positional), arguments

    def _called(
        self,
        callee: Any,
        base: Any,
        node: ast.Call,
        positional: tuple[Entry, ...],
        arguments: Table,
    ) -> Any:
        """Return the value of a call. base: the object whose attribute `callee` is; None if there
        is none."""
        if isinstance(callee, Function | Class):
            return self.called_inside(callee, positional, arguments, node.lineno)
        if isinstance(callee, Partial):
            merged = Table(dict(callee.arguments.entries), node.lineno, list(callee.arguments.open))
            self.merge_into(merged, arguments)
            return self.called_inside(
                callee.function, callee.positional + positional, merged, node.lineno
            )
        if isinstance(node.func, ast.Attribute):
            found = self._method(base, node.func.attr, node, positional, arguments)
            if found is not None:
                return found.value
        if (
            isinstance(callee, External)
            and (known := self._builtin(callee, node, positional, arguments)) is not None
        ):
            return known.value
        return self._outside(callee, node, positional, arguments)

    def _outside(
        self,
        callee: Any,
        node: ast.Call,
        positional: tuple[Entry, ...],
        arguments: Table,
        is_now: bool = True,
    ) -> Thing:
        """Return the result of a call of an external function. A call of a result of `run.Partial`
        adds arguments."""
        if (
            isinstance(callee, Thing)
            and callee.function
            and isinstance(node.func, ast.Name | ast.Call)
        ):
            merged = Table(dict(callee.arguments.entries), node.lineno, list(callee.arguments.open))
            self.merge_into(merged, arguments)
            function = callee.function
            positional = callee.positional + positional
            arguments = merged
        elif isinstance(callee, External):
            function = callee
        else:
            function = External(
                f"{callee.text}" if isinstance(callee, Thing) else shortened(node.func)
            )
        made = Thing(
            shortened(node),
            node.lineno,
            "",
            function,
            positional,
            arguments,
            conditions=tuple(self.conditions),
        )
        made.node = id(node)
        if is_now:
            self.things.append(made)
        return made

    def _builtin(
        self, function: External, node: ast.Call, positional: tuple[Entry, ...], arguments: Table
    ) -> Entry | None:
        """Return the result of a builtin function or a well-known helper as an entry; None for any
        other function."""
        first = positional[0].value if positional else None
        if function.name in TABLES:
            return Entry(self._new_table(node, positional, arguments))
        if function.name in ROWS and isinstance(first, Row | None):
            return Entry(Row({"items": first.items if isinstance(first, Row) else ()}))
        if function.name in PASSING and positional:
            return Entry(first)
        if function.name in COPIES and positional:
            return self._copy(first, node, arguments)
        if _is_partial(function) and positional:
            return self._partial(node, positional, arguments, is_now=function.last != "partial")
        if function.name in CONVERSIONS and isinstance(first, bool | int | float | str):
            return Entry(self._converted(function.name, first, node))
        if (
            function.name == "getattr"
            and len(positional) > 1
            and isinstance(name := positional[1].value, str)
        ):
            return Entry(self.attribute(first, name, node))
        if function.name in SETTERS and len(positional) == 3:
            return self._set_attribute(
                first, positional[1].value, Entry(positional[2].value, node.lineno, id(node))
            )
        if function.name == "vars" and isinstance(first, Thing):
            return Entry(self.fields_of(first, node))
        if function.name.startswith("dict.") and isinstance(first, Table):
            return self._table_method(first, function.last, node, positional[1:], arguments)
        if function.name in ("operator.setitem", "operator.delitem") and isinstance(first, Table):
            return self._table_method(
                first, f"__{function.last}__", node, positional[1:], arguments
            )
        if function.name in ("os.putenv", "putenv") and len(positional) == 2:
            self.set_environment(first, Entry(positional[1].value, node.lineno, id(node)))
            return Entry(None)
        return None

    def _new_table(self, node: ast.Call, positional: tuple[Entry, ...], arguments: Table) -> Table:
        table = Table(line=node.lineno)
        for entry in positional:
            self.merge_into(table, entry.value)
        self.merge_into(table, arguments)
        return table

    def _partial(
        self, node: ast.Call, positional: tuple[Entry, ...], arguments: Table, is_now: bool
    ) -> Entry | None:
        """Return a function with arguments; an external one counts as called with them, now or when
        the result is called.
        """
        function = positional[0].value
        rest = positional[1:]
        if isinstance(function, Function | Class):
            if isinstance(function, Class) or is_now:
                return Entry(self.called_inside(function, rest, arguments, node.lineno))
            function.called = True
            return Entry(Partial(function, rest, arguments))
        if not isinstance(function, External | Thing):
            return None
        return Entry(self._outside(function, node, rest, arguments, is_now))

    def _copy(self, value: Any, node: ast.Call, changes: Table) -> Entry | None:
        """Return a copy of a dict or thing, with the changes of dataclasses.replace."""
        if isinstance(callee := self.value(node.func), External) and callee.last == "deepcopy":
            return Entry(self._deep(value, {}))
        if isinstance(value, Table):
            table = Table(dict(value.entries), node.lineno, list(value.open))
            self.merge_into(table, changes)
            return Entry(table)
        if not isinstance(value, Thing) or value.why:
            return Entry(value) if not isinstance(value, Thing) else None
        copied = Thing(value.text, node.lineno, "", value.function, value.positional, node=id(node))
        copied.arguments = Table(
            dict(value.arguments.entries), node.lineno, list(value.arguments.open)
        )
        copied.attributes = value.attributes | changes.entries
        copied.conditions = tuple(self.conditions)
        self.things.append(copied)
        return Entry(copied)

    def _deep(self, value: Any, made: dict[int, Any]) -> Any:
        """Return a deep copy. made: copies that exist already, by id of the original."""
        if id(value) in made or not isinstance(value, Table | Row | Thing):
            return made.get(id(value), value)
        if isinstance(value, Row):
            return Row({"items": tuple(self._deep(item, made) for item in value.items)})
        if isinstance(value, Table):
            made[id(value)] = table = Table(line=value.line, open=list(value.open))
            table.entries |= {
                k: replace(e, value=self._deep(e.value, made)) for k, e in value.entries.items()
            }
            return table
        made[id(value)] = copied = replace(value)
        copied.arguments = self._deep(value.arguments, made)
        copied.positional = tuple(
            replace(e, value=self._deep(e.value, made)) for e in value.positional
        )
        copied.attributes = {
            k: replace(e, value=self._deep(e.value, made)) for k, e in value.attributes.items()
        }
        if value.function is not None and not value.why:
            self.things.append(copied)
        return copied

    def _converted(self, name: str, value: bool | int | float | str, node: ast.Call) -> Any:
        try:
            result = CONVERSIONS[name](value)
        except (ValueError, OverflowError):
            return self.unknown(node, "is not worked out")
        if not isinstance(result, float) or is_number(result):
            return result
        return self.unknown(node, "is not a number")

    # methods

    def _method(
        self, base: Any, name: str, node: ast.Call, positional: tuple[Entry, ...], arguments: Table
    ) -> Entry | None:
        """Return the result of a method of a dict, list, text or os.environ as an entry; None for
        any other method."""
        if isinstance(base, External) and base.name in ENVIRONMENT:
            return self._environment_method(name, node, positional, arguments)
        if isinstance(base, Table):
            return self._table_method(base, name, node, positional, arguments)
        if isinstance(base, Row) and name in ("append", "extend") and positional:
            value = positional[0].value
            if name == "append":
                added = (value,)
            elif isinstance(value, Row):
                added = value.items
            else:
                added = (value,)
            self.write(base.slots, "items", base.items + added)
            return Entry(None)
        if isinstance(base, Row) and name in REARRANGING:
            if name == "clear":
                rest = ()
            else:
                rest = (self.unknown(node, "depends on what a list was changed to"),)
            self.write(base.slots, "items", rest)
            return Entry(rest[0] if rest else None)
        if isinstance(base, str) and name in ("lower", "upper", "strip") and not positional:
            return Entry(getattr(base, name)())
        if isinstance(base, str) and name in ("startswith", "endswith") and len(positional) == 1:
            (part,) = (entry.value for entry in positional)
            if isinstance(part, str):
                return Entry(getattr(base, name)(part))
            return None
        return None

    def _environment_method(
        self, name: str, node: ast.Call, positional: tuple[Entry, ...], arguments: Table
    ) -> Entry | None:
        values = [entry.value for entry in positional]
        known = self.outside.entries.get(f"env {values[0]}") if values else None
        if name == "setdefault" and len(values) == 2:
            if known is None:
                self.set_environment(values[0], Entry(values[1], node.lineno, id(node)))
            return known or Entry(values[1])
        if name == "pop" and known is not None:
            self.erase(self.outside.entries, f"env {values[0]}")
            return known
        if name == "update":
            given = self._new_table(node, positional, arguments)
            for key, entry in given.entries.items():
                self.set_environment(key, entry)
            return Entry(None)
        return known if name == "get" else None

    def set_environment(self, name: Any, entry: Entry) -> None:
        """Record that the file sets an environment variable."""
        self.write(self.outside.entries, f"env {name}", entry)

    def _table_method(
        self,
        table: Table,
        name: str,
        node: ast.Call,
        positional: tuple[Entry, ...],
        arguments: Table,
    ) -> Entry | None:
        values = [entry.value for entry in positional]
        if name == "update":
            self.merge_into(table, self._new_table(node, positional, arguments))
            return Entry(None)
        if name == "copy" and not values:
            return Entry(Table(dict(table.entries), node.lineno, list(table.open)))
        if name in ("items", "keys", "values") and not table.open:
            pairs = [Row({"items": (key, entry.value)}) for key, entry in table.entries.items()]
            parts = {
                "items": pairs,
                "keys": list(table.entries),
                "values": [e.value for e in table.entries.values()],
            }
            return Entry(Row({"items": tuple(parts[name])}))
        if (
            name in ("get", "pop", "setdefault", "__delitem__")
            and values
            and isinstance(values[0], str)
        ):
            return self._looked_up(table, name.replace("__delitem__", "pop"), node, values)
        if name == "__setitem__" and len(values) == 2 and isinstance(values[0], str):
            self.write(table.entries, values[0], Entry(values[1], node.lineno, id(node)))
            return Entry(None)
        if name == "clear":
            for key in list(table.entries):
                self.erase(table.entries, key)
            return Entry(None)
        if changes(name):
            self.open_up(table, self.unknown(node, "may change any key"))
        return None

    def _looked_up(self, table: Table, name: str, node: ast.Call, values: list[Any]) -> Entry:
        key = values[0]
        default = values[1] if len(values) > 1 else None
        entry = table.entries.get(key)
        if entry is None and table.open:
            return Entry(self.unknown(node, "may be in a dict that is not known"))
        if name == "setdefault" and entry is None:
            self.write(table.entries, key, Entry(default, node.lineno, id(node)))
        if name == "pop":
            self.erase(table.entries, key)
        return Entry(default if entry is None else self.held(entry, node))

    def _set_attribute(self, base: Any, name: Any, entry: Entry) -> Entry:
        if isinstance(name, str):
            self.assign_attribute(base, name, entry)
            return Entry(None)
        by = Thing("setattr(...)", entry.line, "sets a field that is not known")
        if isinstance(base, Table):
            self.open_up(base, by)
        elif isinstance(base, Thing):
            base.arguments.open.append(by)
            self.doubt(base.arguments.entries, by)
            self.doubt(base.attributes, by)
        elif isinstance(base, Class):
            for field, value in list(base.scope.names.items()):
                if not isinstance(value, Function):
                    unknown = Thing(
                        f"{base.name}.{field}", entry.line, f"may be set by `{by.text}`"
                    )
                    self.write(base.scope.names, field, unknown)
        return Entry(None)

    def assign_attribute(self, base: Any, name: str, entry: Entry) -> None:
        """Assign base.name = value, or base["name"] = value."""
        if isinstance(base, Thing):
            self.write(base.attributes, name, entry)
        elif isinstance(base, Table):
            self.write(base.entries, name, entry)
        elif isinstance(base, External) and base.name in ENVIRONMENT:
            self.set_environment(name, entry)
        elif isinstance(base, External):
            self.write(self.outside.entries, f"{base.name}.{name}", entry)
        elif isinstance(base, Class):
            self.write(base.scope.names, name, entry.value)

    def delete(self, target: ast.expr) -> None:
        """Follow `del target`, of an item or an attribute."""
        if isinstance(target, ast.Attribute) and isinstance(
            owner := self.value(target.value), Thing
        ):
            self.write(
                owner.attributes,
                target.attr,
                Entry(self.unknown(target, "is deleted"), target.lineno),
            )
        if not isinstance(target, ast.Subscript):
            return
        base = self.value(target.value)
        key = self.value(target.slice)
        if isinstance(base, Table):
            self.erase(base.entries, key)
        elif isinstance(base, Row):
            self.write(base.slots, "items", (self.unknown(target, "is deleted from a list"),))
        elif isinstance(base, External) and base.name in ENVIRONMENT:
            self.erase(self.outside.entries, f"env {key}")


def changes(method: str) -> bool:
    """Return True if a method of this name may change its dict."""
    return method.startswith(CHANGING)


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}


def _is_partial(function: External) -> bool:
    return function.name in PARTIALS or (
        function.name.endswith((".Config", ".Partial")) and "run" in function.name
    )
