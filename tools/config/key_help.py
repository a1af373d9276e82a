"""Every key of a run file with its default and its help, by table: the text of `megaprec keys` and
of its parts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from models.config import ModelConfig
from models.presets import PRESETS
from tools.config.run_file import tables_of_a_run
from tools.console.toml import toml

PRESET = f"Name of a known model, whose keys the others of this table change: {', '.join(PRESETS)}."


@dataclass(frozen=True)
class Key:
    """One key. name: dotted. default: in TOML's grammar, or none, required, derived."""

    name: str
    default: str
    help: str


@dataclass(frozen=True)
class KeyTable:
    """One table of a run file. subject: one sentence."""

    name: str
    subject: str
    keys: tuple[Key, ...]


def key_tables() -> Iterator[KeyTable]:
    """Yield the tables of a run file with all their keys, in the order of the file."""
    for table, table_class in tables_of_a_run().items():
        keys: list[Key] = []
        # the preset is no field: it is resolved before the table is read
        if table_class is ModelConfig:
            keys.append(Key("model.preset", "none", PRESET))
        for name, field in table_class.model_fields.items():
            keys.append(Key(f"{table}.{name}", _default(field), field.description or ""))
        subject = (table_class.__doc__ or "").splitlines()[0]
        yield KeyTable(table, subject, tuple(keys))


def keys_of(tables: Iterable[KeyTable]) -> Iterator[Key]:
    """Yield the keys of tables, in their order."""
    for table in tables:
        yield from table.keys


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "derived" if field.default_factory is not None else toml(field.default)
