"""JSON, TOML and YAML as tables of values, with the line of each key if the format provides it."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import MOST_BITS, parse_json, parse_toml
from tools.interop.foreign.plain import Call, Entry, Row, Symbol, Table, Unknown, inner_table

try:
    import yaml
except ImportError:  # an optional extra
    yaml = None

INTERPOLATED = "is an interpolation, which is not followed"
MERGE = "tag:yaml.org,2002:merge"
MOST_ALIASES = 100
MOST_VALUES = 50_000


class TooLarge(Exception):
    """A file with more values than any configuration has."""


class Data:
    """A tree of settings.

    calls: the objects in it that `_target_` describes. behind: node of an interpolation -> node of
        the key it names.
    """

    def __init__(self, builder: "_Builder", content: Any) -> None:
        value = builder.value(content)
        self.calls = builder.calls
        self.table = value if isinstance(value, Table) else Table({"the file": Entry(value)}, 1)
        self.behind = dict[int, int]()
        self._follow((self.table,))

    def _follow(self, tables: tuple[Table, ...]) -> None:
        """Put values in the place of OmegaConf's `${a.b}` that name one. tables: the innermost is
        the last."""
        entries = tables[-1].entries
        for key, entry in entries.items():
            named = _named(entry.value, tables) if _is_interpolation(entry.value) else None
            if named is not None:
                entries[key] = replace(entry, value=named.value)
                self.behind[entry.node] = named.node
            inner = inner_table(entry.value)
            if isinstance(inner, Table):
                self._follow((*tables, inner))


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, Unknown) and value.why == INTERPOLATED


def _named(value: Unknown, tables: tuple[Table, ...], hops: int = 8) -> Entry | None:
    """Return the entry of the scalar that an interpolation stands for; None if the tree has none.

    A part of a larger configuration says `${part.a}` of its own `a`: a first name that it does not
    have is left out.
    """
    match = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", value.text)
    if match is None or not hops:
        return None
    dots, names = match.groups()
    path = names.split(".")
    # a dot is the table that has the interpolation, each further one the table around it
    if len(dots) > len(tables):
        return None
    scopes = tables[: len(tables) - len(dots) + 1] if dots else tables[:1]
    if not dots and path[0] not in scopes[0].entries:
        path = path[1:]
    chain, entry = _entry_at(scopes, path)
    if entry is None or isinstance(entry.value, Table | Row):
        return None
    return _named(entry.value, chain, hops - 1) if _is_interpolation(entry.value) else entry


def _entry_at(
    tables: tuple[Table, ...], path: Sequence[str]
) -> tuple[tuple[Table, ...], Entry | None]:
    """Return the entry at a path from the last of `tables`, and the tables down to it."""
    entry: Entry | None = None
    for name in path:
        if entry is not None:
            inner = inner_table(entry.value)
            if not isinstance(inner, Table):
                return tables, None
            tables = (*tables, inner)
        entry = tables[-1].entries.get(name)
        if entry is None:
            return tables, None
    return tables, entry


class _Builder:
    """Builder of tables from plain data; each key gets a node number, by which it is accounted for.

    A table with `_target_`, Hydra's name of a class or function, is what a call of it returns.
    """

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[Call] = []

    def value(self, content: Any) -> Any:
        """Return the value of plain data."""
        self.number()
        if isinstance(content, dict):
            table = Table(line=1)
            for key, inner in content.items():
                table.entries[key] = Entry(self.value(inner), 0, self.number())
            return self.made(table)
        if isinstance(content, list):
            return Row([self.value(item) for item in content])
        return content

    def made(self, table: Table) -> Any:
        """Return the table, or the call that it describes."""
        name = table.get("_target_")
        if not isinstance(name, str):
            return table
        function = Symbol(name, imported=True)
        if table.get("_call_") is False:
            return function
        call = Call(f"{name}(...)", table.line, "comes of a call that is not run")
        call.function = function
        call.arguments.line = table.line
        for key, entry in table.entries.items():
            if not key.startswith("_") and entry.value is not None:
                call.arguments.entries[key] = entry
        self.calls.append(call)
        return call

    def number(self) -> int:
        """Return the number of the next value or key. Raises TooLarge."""
        self.count += 1
        if self.count > MOST_VALUES:
            raise TooLarge
        return -self.count


class _YamlBuilder(_Builder):
    """Builder of tables from YAML nodes, which know their lines."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        assert yaml is not None
        self.constructor = yaml.SafeLoader("")

    def value(self, content: Any) -> Any:
        """Return the value of a YAML node."""
        assert yaml is not None
        self.number()
        line = content.start_mark.line + 1
        if isinstance(content, yaml.MappingNode):
            return self.made(self._mapping(content, line))
        if isinstance(content, yaml.SequenceNode):
            return Row([self.value(item) for item in content.value])
        if content.tag.startswith(("tag:yaml.org,2002:python", "!")):
            return Unknown(content.tag, line, "is a tag of YAML, which is not followed")
        return _plain_scalar(self._scalar(content), line)

    def _mapping(self, node: Any, line: int) -> Table:
        table = Table(line=line)
        pairs = [pair for pair in node.value if pair[0].tag != MERGE]
        self._require_once([key for key, _ in pairs])
        for key, inner in node.value:
            if key.tag == MERGE:
                merged = self.value(inner)
                # of several tables the first wins
                parts = reversed(merged.items) if isinstance(merged, Row) else [merged]
                for part in parts:
                    table.entries |= part.entries if isinstance(part, Table) else {}
        for key, inner in pairs:  # explicit keys win over those that are merged
            name = str(self._scalar(key))
            table.entries[name] = Entry(self.value(inner), key.start_mark.line + 1, self.number())
        return table

    def _scalar(self, node: Any) -> Any:
        """Return the value of a scalar. Raises UserError for one that is none of its kind, or a
        number without end."""
        line = node.start_mark.line + 1
        try:
            value = self.constructor.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            shown = textwrap.shorten(str(node.value), 40, placeholder=" ...")
            raise UserError.of(
                "precision_file.yaml_scalar", path=self.path, line=line, shown=shown, kind=kind
            ) from error
        if isinstance(value, int) and abs(value) >> MOST_BITS:
            raise UserError.of(
                "precision_file.yaml_large_integer", path=self.path, line=line, most_bits=MOST_BITS
            )
        return value

    def _require_once(self, keys: Sequence[Any]) -> None:
        """Raise UserError if a table has a key twice: programs differ in which of the two they
        take."""
        lines: dict[str, int] = {}
        for key in keys:
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                raise UserError.of("precision_file.yaml_key_kind", path=self.path, line=line)
            if key.value in lines:
                raise UserError.of(
                    "precision_file.yaml_key_twice",
                    path=self.path,
                    line=line,
                    value=key.value,
                    lines=lines[key.value],
                )
            lines[key.value] = line


def from_json(text: str, path: Path | None = None) -> Data | None:
    """Return the object of a JSON text; None if the text is not an object.

    path: of a file that must be JSON; raises UserError, which says why, if it is not.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        if path is not None:
            raise UserError.of("precision_file.not_json", path=path, error=error) from error
        return None
    return Data(_Builder(), content) if isinstance(content, dict) else None


def from_toml(text: str) -> Data | None:
    """Return the table of a TOML text; None if the text is not TOML."""
    try:
        return Data(_Builder(), parse_toml(text))
    except ValueError:
        return None


def from_yaml(path: Path, text: str) -> Data | None:
    """Return the mapping of a YAML text; None if the text is not a mapping. Raises UserError for
    bad YAML or without PyYAML.

    Only plain values are built. Aliases are counted, so that a small file cannot expand to a huge
    one.
    """
    if yaml is None:
        raise UserError.of("precision_file.pyyaml_missing", path=path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader))
        if aliases > MOST_ALIASES:
            raise UserError.of(
                "precision_file.yaml_aliases", path=path, aliases=aliases, most_aliases=MOST_ALIASES
            )
        node = yaml.compose(text, loader)
        if isinstance(node, yaml.MappingNode):
            return Data(_YamlBuilder(path), node)
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError.of(
            "precision_file.not_yaml",
            path=path,
            line=line,
            getattr=getattr(error, "problem", None) or "cannot be read",
        ) from error
    except RecursionError as error:
        raise UserError.of("precision_file.yaml_too_deep", path=path) from error


def _plain_scalar(value: Any, line: int) -> Any:
    """Return a scalar; an interpolation of OmegaConf or a placeholder is unknown."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return Unknown(value, line, "must be filled in" if value == "???" else INTERPOLATED)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
