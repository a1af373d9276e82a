"""`megaprec precision`: show the precision plan of a configuration, or translate it for another
system.

    megaprec precision show FILE [table.key=value ...]
        the plan, each field with the key that decided it
    megaprec precision translate FILE [...] --to SYSTEM
        the same plan in another system's configuration

FILE is a run file, a part of one, or a configuration of another system: Python, YAML, JSON or TOML.
Nothing in it is executed. A value that the file leaves open is set by `--assume args.bf16=True`; if
a file describes several runs, `--pick NAME` chooses one.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from megaprec.dialects.translate import BESIDE, DIALECTS, FIELDS, shown, translate
from megaprec.errors import UserError
from megaprec.parsing import MOST_SETTINGS, parse_toml, read_text
from megaprec.precision.plan import PrecisionPlan, dtype_name
from models.config import ModelConfig
from tools.config.native_keys import native
from tools.config.precision_advice import Scene, advice
from tools.config.precision_modules import ROLES, Row, rows
from tools.config.precision_settings import FP8, PLAN_ONLY, Precision, idle
from tools.config.run_file import given_in, known_keys, load_precision, load_run
from tools.console.tables import print_table, table_console
from tools.console.toml import Given, toml
from tools.console.wrapped import say
from tools.foreign.read import read_foreign
from tools.training.notes import add_strict, tell_notes


@dataclass(frozen=True)
class Understood:
    """A file that was read: its plan, other run-file keys that it decides, and the model if it is a
    whole run."""

    file: Path
    plan: PrecisionPlan
    settings: Mapping[str, Given]
    notes: tuple[str, ...]
    model: ModelConfig | None = None
    microbatches: int = 1
    replicas: int = 1


def add_parser(subparsers: Any) -> None:
    """Add `precision` and its commands."""
    parser = subparsers.add_parser(
        "precision", help="show or translate the precision of a configuration"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser(
        "show", help="show the precision plan of a file, with the key that decided each field"
    )
    show.set_defaults(run=main_show)
    to = commands.add_parser(
        "translate",
        help="translate the precision plan of a file into another system's configuration",
    )
    to.add_argument(
        "--to",
        required=True,
        metavar="SYSTEM",
        help=f"target system: native, {', '.join(DIALECTS)}",
    )
    to.set_defaults(run=main_translate)
    show.add_argument(
        "--json", action="store_true", help="print the plan as JSON instead of tables"
    )
    for command in (show, to):
        command.add_argument(
            "file", metavar="FILE", type=Path, help="run file or another system's configuration"
        )
        command.add_argument(
            "overrides",
            metavar="table.key=value",
            nargs="*",
            default=[],
            help="keys that differ from the file",
        )
        command.add_argument(
            "--assume", metavar="EXPRESSION=VALUE", action="append", default=[],
            help=("value of an expression that the file leaves open, such as args.bf16=True; may "
                "be given several times"),
        )  # fmt: skip
        command.add_argument(
            "--pick",
            metavar="NAME",
            default="",
            help="variable or function of the file to read, if it describes several runs",
        )
        add_strict(command)


def main_show(args: argparse.Namespace) -> int:
    """Run `megaprec precision show`."""
    found = understand(args.file, args.overrides, args.assume, args.pick)
    warnings = advice(Scene(found.plan, found.microbatches, found.replicas))
    if args.strict:
        tell_notes(found.notes, strict=True)
    if args.json:
        print(json.dumps(as_json(found, warnings), indent=2, ensure_ascii=False))
        return 0
    print_table(plan_table(found, short=table_console().is_terminal))
    if found.model is not None:
        print_table(module_table(rows(found.plan, found.model)))
    for note in found.notes:
        say(f"note: {note}")
    for line in warnings:
        say(f"warning: {line}")
    return 0


def as_json(found: Understood, warnings: Sequence[str]) -> dict[str, Any]:
    """Return a plan for programs: fields and run-file keys, each with its value and the key that
    decided it."""
    origins = found.plan.origin
    plan = {name: (getattr(found.plan, name), origins.get(name, "default")) for name in FIELDS}
    settings = {key: (entry.value, entry.origin) for key, entry in _settings_shown(found)}
    return {
        "plan": {
            name: {"value": jsonable(value), "origin": origin}
            for name, (value, origin) in plan.items()
        },
        "settings": {
            key: {"value": jsonable(value), "origin": origin}
            for key, (value, origin) in settings.items()
        },
        "notes": list(found.notes),
        "warnings": list(warnings),
    }


def jsonable(value: Any) -> Any:
    """Return a value of a plan for JSON: dtypes by name, loss scaling and FP8 recipe as objects."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if is_dataclass(value):
        return {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "__name__", str(value))


def main_translate(args: argparse.Namespace) -> int:
    """Run `megaprec precision translate`: print TOML, with notes and untranslatable settings as
    comments."""
    if args.to not in ("native", *DIALECTS):
        raise UserError(
            f'--to "{args.to}": no such system; there are native, {", ".join(DIALECTS)}'
        )
    found = understand(args.file, args.overrides, args.assume, args.pick)
    tell_notes(found.notes, args.strict)
    settings = {key: entry.value for key, entry in found.settings.items()}
    if args.to == "native":
        lines = native_lines(found.plan, settings)
    else:
        translation = translate(found.plan, settings, args.to)
        lines = table_lines(f"precision.{args.to}", translation.config)
        lines += [f"# not said: {line}" for line in translation.unsaid]
    print("\n".join([*lines, *(f"# note: {note}" for note in found.notes)]))
    return 0


def understand(
    path: Path, overrides: Sequence[str] = (), assume: Sequence[str] = (), pick: str = ""
) -> Understood:
    """Read a run file, a part of one or another system's configuration. Raises UserError.

    assume, pick: for another system's file; see `tools.foreign.read`.
    """
    content = _toml(path)
    if any(isinstance(content.get(name), dict) for name in ("train", "precision", "fp8")):
        if assume or pick:
            raise UserError("--assume and --pick are for other systems' files, not for run files")
        if "train" in content:
            return _of_run(path, overrides)
        given, problems = given_in(path, overrides)
        notes: tuple[str, ...] = ()
    else:
        foreign = read_foreign(path, assume, pick)
        given, problems = given_in(None, overrides)
        given = {**foreign.given, **given}
        notes = foreign.notes
    if problems:
        raise UserError(*problems)
    plan, settings, more = load_precision(given)
    return Understood(path, plan, settings, (*notes, *more))


def _toml(path: Path) -> Mapping[str, Any]:
    """Return the contents of a TOML file; empty if it is anything else."""
    if path.suffix.lower() in (".py", ".yaml", ".yml", ".json"):
        return {}
    try:
        return parse_toml(read_text(path, MOST_SETTINGS))
    except (OSError, ValueError):  # whoever reads it next says what it is
        return {}


def _of_run(path: Path, overrides: Sequence[str]) -> Understood:
    config = load_run(path, overrides)
    settings = {
        key: Given(config.get(key), config.origin(key)) for key in BESIDE if key in known_keys()
    }
    settings |= {
        f"model.{key}": Given(value, config.origin(f"model.{key}")) for key, value in config.model
    }
    return Understood(
        path,
        config.plan,
        settings,
        config.notes,
        config.sized_model,
        config.num_microbatches,
        config.parallel.data,
    )


def plan_table(found: Understood, short: bool = False) -> Table:
    """Return a table with a row per field of the plan and per other key that was decided.

    short: show only the names of files, for a terminal is narrow.
    """
    made = Table(
        title=f"precision plan of {found.file.name}" if short else "precision plan",
        title_justify="left",
    )
    for column in ("field", "value", "decided by"):
        made.add_column(column, overflow="fold")
    for name in FIELDS:
        origin = found.plan.origin.get(name, "default")
        made.add_row(name, shown(getattr(found.plan, name)), shortened(origin) if short else origin)
    for key, entry in _settings_shown(found):
        made.add_row(key, shown(entry.value), shortened(entry.origin) if short else entry.origin)
    return made


def _settings_shown(found: Understood) -> Iterable[tuple[str, Given]]:
    return (
        (key, entry)
        for key, entry in found.settings.items()
        if found.model is None or key in BESIDE
    )


def shortened(origin: str) -> str:
    """Return an origin for a terminal: files without their folders, keys without the prefix of
    their system."""
    origin = re.sub(r"file [^,()]*, line", "line", re.sub(r"file \S*/", "file ", origin))
    return re.sub(r"\bprecision\.[a-z]+\.", "", origin)


def module_table(all_rows: Iterable[Row]) -> Table:
    """Return a table with a row per module: dtypes, and bytes of the whole model before it is
    sharded."""
    made = Table(
        title="modules, bytes of the whole model",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    made.add_column("module", overflow="fold")
    for role in ROLES:
        made.add_column(role, overflow="fold")
    total: dict[str, int] = dict.fromkeys(ROLES, 0)
    for row in all_rows:
        made.add_row(row.name, *(_cell(row, role) for role in ROLES))
        total = {role: total[role] + row.bytes.get(role, 0) for role in ROLES}
    made.add_section()
    made.add_row("all", *(size(total[role]) if total[role] else "" for role in ROLES))
    return made


def _cell(row: Row, role: str) -> str:
    if role not in row.bytes:
        return row.dtypes[role]
    if row.bytes[role]:
        return f"{row.dtypes[role]}\n{size(row.bytes[role])}"
    return "the same"


def size(count: int) -> str:
    """Return a number of bytes in a unit that leaves about three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count}B"


def native_lines(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[str]:
    """Return the plan as native tables of a run file, without keys that have their default."""
    keys = native(plan)
    tables: dict[str, dict[str, Any]] = {"precision": _needed(Precision, "precision", keys)}
    tables |= {"fp8": fp8} if (fp8 := _needed(FP8, "fp8", keys)) else {}
    for key, value in settings.items():
        if key in known_keys():
            name, _, leaf = key.partition(".")
            tables.setdefault(name, {})[leaf] = value
    lines = [line for name, values in tables.items() for line in [*table_lines(name, values), ""]][
        :-1
    ]
    unknown = [key for key in settings if key not in known_keys()]
    lines += [f"# not said: {key} = {toml(settings[key])}; not supported yet" for key in unknown]
    asked = [key for key in PLAN_ONLY if key in keys and keys[key] != idle(key)]
    return lines + [f"# not said: {key} = {toml(keys[key])}; {PLAN_ONLY[key]}" for key in asked]


def _needed(
    kind: type[Precision] | type[FP8], table: str, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys that are not what the keys before them imply: without them the table would
    mean something else.
    """
    needed: dict[str, Any] = {}
    for name in kind.model_fields:
        value = None if f"{table}.{name}" in PLAN_ONLY else keys.get(f"{table}.{name}")
        if value is not None and getattr(kind.model_validate(needed), name) != value:
            needed[name] = value
    return needed


def table_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a TOML table, tables within it as tables of their own."""
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = [f"{key} = {toml(value)}" for key, value in values.items() if key not in inner]
    lines = [f"[{name}]", *plain] if plain or not inner else []
    for key, value in inner.items():
        lines += table_lines(f"{name}.{key}", value)
    return lines
