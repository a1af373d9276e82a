"""JSON, TOML and YAML as tables of values, with the line of each key if the format provides it."""

import re
import textwrap
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import MOST_BITS, NESTING, parse_json, parse_toml
from tools.interop.foreign.plain import (
    Call,
    DictEntry,
    Fields,
    PlainDict,
    PlainSequence,
    Symbol,
    UnknownValue,
    find,
)

try:
    import yaml
except ImportError:  # an optional extra
    yaml = None

PATH = re.compile(r"\$\{([\w.]+)\}")
INTERPOLATED = "is an interpolation, which is not followed"
MOST_HOPS = 8
MERGE = "tag:yaml.org,2002:merge"
MOST_ALIASES = 100
MOST_VALUES = 50_000


class TooLarge(Exception):
    """A file with more values than any configuration has."""


class SettingsTree:
    """A tree of settings. calls: the objects in it that `_target_` describes. trees: these and all
    tables."""

    def __init__(self, builder: "_Builder", content: Any) -> None:
        value = builder.value(content)
        self.calls = builder.calls
        self.trees = builder.trees
        self.table = (
            value if isinstance(value, PlainDict) else PlainDict({"the file": DictEntry(value)}, 1)
        )
        # one may name another
        for _ in range(MOST_HOPS):
            self._follow_interpolations()

    def _follow_interpolations(self) -> None:
        """Put what OmegaConf's `${a.b}` names in its place, if that is a single value."""
        no_single_values = Fields | PlainSequence | UnknownValue
        for tree in self.trees:
            for key, entry in tree.entries.items():
                text = entry.value.text if isinstance(entry.value, UnknownValue) else ""
                match = PATH.fullmatch(text)
                named = find(self.table, match[1]) if match else None
                if named is not None and not isinstance(named.value, no_single_values):
                    tree.entries[key] = named


class _Builder:
    """Builder of tables from plain data; each key gets a node number, by which it is accounted for.

    A table with `_target_`, Hydra's name of a class or function, is what a call of it returns.
    """

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[Call] = []
        self.trees: list[Fields] = []

    def value(self, content: Any) -> Any:
        """Return the value of plain data."""
        self.number()
        if isinstance(content, dict):
            table = PlainDict(line=1)
            for key, inner in content.items():
                table.entries[key] = DictEntry(self.value(inner), 0, self.number())
            return self.made(table)
        if isinstance(content, list):
            return PlainSequence([self.value(item) for item in content])
        return content

    def made(self, table: PlainDict) -> Any:
        """Return the table, or the call that it describes."""
        self.trees.append(table)
        name = table.get("_target_")
        if not isinstance(name, str):
            return table
        function = Symbol(name, imported=True)
        if table.get("_call_") is False:
            return function
        call = Call(line=table.line, text=f"{name}(...)", function=function)
        for key, entry in table.entries.items():
            if not key.startswith("_") and entry.value is not None:
                call.entries[key] = entry
        self.calls.append(call)
        self.trees[-1] = call
        return call

    def number(self) -> int:
        """Return the number of the next value or key: negative, so that it is never the id of a
        syntax node of a Python file. Raises TooLarge."""
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
            return PlainSequence([self.value(item) for item in content.value])
        if content.tag.startswith(("tag:yaml.org,2002:python", "!")):
            return UnknownValue(content.tag, line, "is a tag of YAML, which is not followed")
        return _plain_scalar(self._scalar(content), line)

    def _mapping(self, node: Any, line: int) -> PlainDict:
        """Return a table. Raises UserError for a key that it has twice, of which programs differ in
        which they take, and for one that takes in another table."""
        table = PlainDict(line=line)
        for key, inner in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                raise UserError.of("precision_file.yaml_key_kind", path=self.path, line=line)
            if key.tag == MERGE:
                raise UserError.of("precision_file.yaml_merge", path=self.path, line=line)
            name = str(self._scalar(key))
            if name in table.entries:
                raise UserError.of("precision_file.key_twice", path=self.path, line=line, name=name)
            table.entries[name] = DictEntry(self.value(inner), line, self.number())
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


def from_json(text: str, path: Path | None = None) -> SettingsTree | None:
    """Return the object of a JSON text; None if the text is not an object.

    path: of a file that must be JSON; raises UserError, which says why, if it is not.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        if path is not None:
            raise UserError.of("precision_file.not_json", path=path, error=error) from error
        return None
    return SettingsTree(_Builder(), content) if isinstance(content, dict) else None


def from_toml(text: str) -> SettingsTree | None:
    """Return the table of a TOML text; None if the text is not TOML."""
    try:
        return SettingsTree(_Builder(), parse_toml(text))
    except ValueError:
        return None


def from_yaml(path: Path, text: str) -> SettingsTree | None:
    """Return the mapping of a YAML text; None if the text is not a mapping. Raises UserError for
    bad YAML or without PyYAML.

    Only plain values are built. Levels and aliases are counted first: what is nested some ten
    thousand levels deep crashes the library, and a small file could expand to a huge one.
    """
    if yaml is None:
        raise UserError.of("precision_file.pyyaml_missing", path=path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        aliases = _aliases(path, text, loader)
        if aliases > MOST_ALIASES:
            raise UserError.of(
                "precision_file.yaml_aliases", path=path, aliases=aliases, most_aliases=MOST_ALIASES
            )
        node = yaml.compose(text, loader)
        if isinstance(node, yaml.MappingNode):
            return SettingsTree(_YamlBuilder(path), node)
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError.of(
            "precision_file.not_yaml",
            path=path,
            line=line,
            problem=getattr(error, "problem", None) or "cannot be read",
        ) from error
    except RecursionError as error:
        raise UserError.of("precision_file.yaml_too_deep", path=path) from error


def _aliases(path: Path, text: str, loader: Any) -> int:
    """Return the number of aliases in a YAML text. Raises UserError if it is nested too deeply."""
    assert yaml is not None
    aliases = 0
    depth = 0
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        if depth > NESTING:
            raise UserError.of("precision_file.yaml_too_deep", path=path)
    return aliases


def _plain_scalar(value: Any, line: int) -> Any:
    """Return a scalar; an interpolation of OmegaConf or a placeholder is unknown."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        is_open = value == "???"
        return UnknownValue(value, line, "must be filled in" if is_open else INTERPOLATED)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
