"""JSON, TOML and YAML as tables of values, with the line of each key if the format provides it."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import MOST_BITS, parse_json, parse_toml
from tools.foreign.mentions import Mention, bears_on_precision
from tools.foreign.values import Entry, External, Row, Table, Thing

try:
    import yaml
except ImportError:  # an optional extra
    yaml = None

INTERPOLATED = "is an interpolation, which is not followed"
MOST_ALIASES = 100
MOST_VALUES = 50_000


class TooLarge(Exception):
    """A file with more values than any configuration has."""


class Data:
    """A tree of settings.

    things: the objects in it that `_target_` describes. behind: node of an interpolation -> node of
        the key it names.
    """

    def __init__(self, maker: "_Tables", content: Any) -> None:
        made = maker.of(content)
        self.things = maker.things
        self.table = made if isinstance(made, Table) else Table({"the file": Entry(made)}, 1)
        self.behind: dict[int, int] = {}
        self._follow((self.table,))

    def _follow(self, tables: tuple[Table, ...]) -> None:
        """Put values in the place of OmegaConf's `${a.b}` that name one. tables: the innermost is
        the last."""
        for key, entry in tables[-1].entries.items():
            value = entry.value
            if _is_interpolation(value) and (found := _named(value, tables)) is not None:
                tables[-1].entries[key] = replace(entry, value=found.value)
                self.behind[entry.node] = found.node
            inner = value.arguments if isinstance(value, Thing) else value
            if isinstance(inner, Table):
                self._follow((*tables, inner))


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, Thing) and value.why == INTERPOLATED


def _named(value: Thing, tables: tuple[Table, ...], hops: int = 8) -> Entry | None:
    """Return the entry of the scalar that an interpolation stands for; None if the tree has none.

    A part of a larger configuration says `${part.a}` of its own `a`: a first name that it does not
    have is left out.
    """
    match = re.fullmatch(r"\$\{(\.*)([\w.]+)\}", value.text)
    if match is None or (up := len(match[1])) > len(tables) or not hops:
        return None
    chain = [*tables[: len(tables) - up + 1]] if up else [tables[0]]
    path = match[2].split(".")
    entry: Entry | None = None
    for name in path[1:] if not up and path[0] not in chain[0].entries else path:
        if entry is not None:
            inner = entry.value.arguments if isinstance(entry.value, Thing) else entry.value
            if not isinstance(inner, Table):
                return None
            chain.append(inner)
        entry = chain[-1].entries.get(name)
        if entry is None:
            return None
    if entry is not None and _is_interpolation(entry.value):
        return _named(entry.value, tuple(chain), hops - 1)
    return None if entry is None or isinstance(entry.value, Table | Row) else entry


class _Tables:
    """Builder of tables from plain data; each key gets a node number, by which it is accounted for.

    A table with `_target_`, Hydra's name of a class or function, is the thing that a call of it
    returns.
    """

    def __init__(self) -> None:
        self.count = 0
        self.things: list[Thing] = []

    def made(self, table: Table) -> Any:
        """Return the table, or the thing that it describes."""
        name = table.get("_target_")
        if not isinstance(name, str):
            return table
        function = External(name, imported=True)
        if table.get("_call_") is False:
            return function
        given = {
            key: e
            for key, e in table.entries.items()
            if not str(key).startswith("_") and e.value is not None
        }
        self.things.append(
            Thing(f"{name}(...)", table.line, function=function, arguments=Table(given, table.line))
        )
        return self.things[-1]

    def of(self, value: Any) -> Any:
        self.count += 1
        if self.count > MOST_VALUES:
            raise TooLarge
        if isinstance(value, dict):
            return self.made(
                Table(
                    {key: Entry(self.of(inner), 0, self.number()) for key, inner in value.items()},
                    1,
                )
            )
        if isinstance(value, list):
            return Row({"items": tuple(self.of(item) for item in value)})
        return value

    def number(self) -> int:
        self.count += 1
        return -self.count


class _YamlTables(_Tables):
    """Builder of tables from YAML nodes, which know their lines."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        assert yaml is not None
        self.constructor = yaml.SafeLoader("")

    def of(self, value: Any) -> Any:
        assert yaml is not None
        self.count += 1
        if self.count > MOST_VALUES:
            raise TooLarge
        line = value.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            table = Table(line=line)
            own = [pair for pair in value.value if pair[0].tag != "tag:yaml.org,2002:merge"]
            self._require_once([key for key, _ in own])
            for key, inner in [
                *(pair for pair in value.value if pair not in own),
                *own,
            ]:  # explicit keys win
                table.entries |= self._entries(key, inner)
            return self.made(table)
        if isinstance(value, yaml.SequenceNode):
            return Row({"items": tuple(self.of(item) for item in value.value)})
        if value.tag.startswith("tag:yaml.org,2002:python") or value.tag.startswith("!"):
            return Thing(value.tag, line, "is a tag of YAML, which is not followed")
        return _plain_scalar(self._scalar(value), line)

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

    def _merged(self, value: Any) -> Mapping[Any, Entry]:
        """Return the entries of a table, or of several, of which the first wins."""
        tables = [
            part
            for part in (value.items if isinstance(value, Row) else (value,))
            if isinstance(part, Table)
        ]
        return {name: entry for part in reversed(tables) for name, entry in part.entries.items()}

    def _entries(self, key: Any, inner: Any) -> Mapping[Any, Entry]:
        if key.tag == "tag:yaml.org,2002:merge":
            return self._merged(self.of(inner))
        name = self._scalar(key)
        return {str(name): Entry(self.of(inner), key.start_mark.line + 1, self.number())}


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
    return Data(_Tables(), content) if isinstance(content, dict) else None


def from_toml(text: str) -> Data | None:
    """Return the table of a TOML text; None if the text is not TOML."""
    try:
        return Data(_Tables(), parse_toml(text))
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
            return Data(_YamlTables(path), node)
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
        why = "must be filled in" if value == "???" else INTERPOLATED
        return Thing(value, line, why)
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)


def mentions_in_data(table: Table, path: str = "") -> Iterator[Mention]:
    """Return every mention of precision among the keys of a tree."""
    for key, entry in table.entries.items():
        name = f"{path}.{key}" if path else str(key)
        if bears_on_precision(str(key)) and entry.value is not None:
            shown = "{...}" if isinstance(entry.value, Table) else _shown(entry.value)
            yield Mention(entry.node, str(key), entry.line, f"{name} = {shown}")
        values = entry.value.items if isinstance(entry.value, Row) else (entry.value,)
        for value in values:
            inner = value.arguments if isinstance(value, Thing) else value
            if isinstance(inner, Table):
                yield from mentions_in_data(inner, name)


def _shown(value: Any) -> str:
    if isinstance(value, Row):
        return "[...]"
    if isinstance(value, Thing):
        return value.text
    if isinstance(value, External):
        return value.name
    return str(value)
