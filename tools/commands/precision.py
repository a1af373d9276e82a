"""`megaprec precision`: show the precision plan of a configuration, or translate it for another
system.

    megaprec precision show FILE [table.key=value ...]
        the plan, each field with the key that decided it
    megaprec precision translate FILE [...] --to SYSTEM
        the same plan in another system's configuration

FILE is a run file, a part of one, or a configuration of another system: Python, YAML, JSON or TOML.
Nothing in it is executed. A value that the file leaves open is given as a key of the command:
`precision.smp.mixed_precision.param_dtype=bfloat16`.
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

from megaprec.dialects.translate import DIALECTS, RELATED_KEYS, format_value, translate
from megaprec.errors import UserError
from megaprec.parsing import MOST_SETTINGS, parse_toml, read_text
from megaprec.precision.plan import FIELDS, PrecisionPlan, dtype_name
from models.config import ModelConfig
from tools.commands.notes import tell_notes
from tools.commands.options import add_overrides, add_strict
from tools.config.precision_modules import ROLES, ModuleRow, rows
from tools.config.resolved_run import resolve_run
from tools.config.rules.precision_advice import PlanInRun, advice
from tools.config.run_file import known_keys, load_precision, read_run_settings
from tools.config.tables.native_keys import fields_without_key, native_keys_of
from tools.config.tables.precision_settings import FP8, PLAN_ONLY, Precision
from tools.console.tables import print_table, table_console
from tools.console.toml import Setting, toml
from tools.console.wrapped import say
from tools.interop.foreign.read import read_foreign


@dataclass(frozen=True)
class PrecisionOfFile:
    """A file that was read: its plan, other run-file keys that it decides, and the model if it is a
    whole run."""

    file: Path
    plan: PrecisionPlan
    settings: Mapping[str, Setting]
    notes: tuple[str, ...]
    model: ModelConfig | None = None
    microbatches: int = 1
    replicas: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `precision`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    show_parser = commands.add_parser(
        "show", help="show the precision plan of a file, with the key that decided each field"
    )
    show_parser.set_defaults(run=main_show)
    translate_parser = commands.add_parser(
        "translate",
        help="translate the precision plan of a file into another system's configuration",
    )
    translate_parser.add_argument(
        "--to",
        required=True,
        metavar="SYSTEM",
        help=f"target system: native, {', '.join(DIALECTS)}",
    )
    translate_parser.set_defaults(run=main_translate)
    show_parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON instead of tables"
    )
    for command in (show_parser, translate_parser):
        command.add_argument(
            "file", metavar="FILE", type=Path, help="run file or another system's configuration"
        )
        add_overrides(command)
        add_strict(command)


def main_show(args: argparse.Namespace) -> int:
    """Run `megaprec precision show`; return the exit code."""
    understood = read_precision(args.file, args.overrides)
    planned_run = PlanInRun(understood.plan, understood.microbatches, understood.replicas)
    warnings = advice(planned_run)
    # otherwise they stand below the tables
    if args.strict:
        tell_notes(understood.notes, strict=True)
    if args.json:
        print(json.dumps(as_json(understood, warnings), indent=2, ensure_ascii=False))
        return 0
    print_table(plan_table(understood, short=table_console().is_terminal))
    if understood.model is not None:
        print_table(module_table(rows(understood.plan, understood.model)))
    for note in understood.notes:
        say(f"note: {note}")
    for line in warnings:
        say(f"warning: {line}")
    return 0


def as_json(understood: PrecisionOfFile, warnings: Sequence[str]) -> dict[str, Any]:
    """Return a plan for programs: fields and run-file keys, each with its value and the key that
    decided it."""
    plan = dict[str, Any]()
    for name in FIELDS:
        origin = understood.plan.origin.get(name, "default")
        plan[name] = {"value": jsonable(getattr(understood.plan, name)), "origin": origin}
    settings = dict[str, Any]()
    for key, setting in _shown_settings(understood):
        settings[key] = {"value": jsonable(setting.value), "origin": setting.origin}
    return {
        "plan": plan,
        "settings": settings,
        "notes": list(understood.notes),
        "warnings": list(warnings),
    }


def jsonable(value: Any) -> Any:
    """Return a value of a plan for JSON: dtypes by name, loss scaling and FP8 recipe as objects."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if is_dataclass(value):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "__name__", str(value))  # a function, of which a recipe may have some


def main_translate(args: argparse.Namespace) -> int:
    """Run `megaprec precision translate`: print TOML, with notes and untranslatable settings as
    comments."""
    if args.to not in ("native", *DIALECTS):
        raise UserError.of("command.system_unknown", to=args.to, dialects=", ".join(DIALECTS))
    understood = read_precision(args.file, args.overrides)
    tell_notes(understood.notes, args.strict)
    settings = {key: setting.value for key, setting in understood.settings.items()}
    if args.to == "native":
        lines = native_lines(understood.plan, settings)
    else:
        translation = translate(understood.plan, settings, args.to)
        lines = table_lines(f"precision.{args.to}", translation.config)
        lines += [f"# not said: {line}" for line in translation.losses]
    lines += [f"# note: {note}" for note in understood.notes]
    print("\n".join(lines))
    return 0


def read_precision(path: Path, overrides: Sequence[str] = ()) -> PrecisionOfFile:
    """Return the plan of a run file, a part of one or another system's configuration, and what else
    the file decides. Raises UserError."""
    content = _read_tables(path)
    # a run file has one of these tables; nothing else that is TOML does
    if any(isinstance(content.get(name), dict) for name in ("train", "precision", "fp8")):
        if "train" in content:
            return _understand_run(path, overrides)
        settings, problems = read_run_settings(path, overrides)
        notes: tuple[str, ...] = ()
    else:
        overridden, problems = read_run_settings(None, overrides)
        foreign = read_foreign(path, overridden)
        settings = {**foreign.given, **overridden}
        notes = foreign.notes
    if problems:
        raise UserError(*problems)
    plan, other_settings, plan_notes = load_precision(settings)
    return PrecisionOfFile(path, plan, other_settings, (*notes, *plan_notes))


def _read_tables(path: Path) -> Mapping[str, Any]:
    """Return the contents of a TOML file; empty if it is anything else."""
    if path.suffix.lower() in (".py", ".yaml", ".yml", ".json"):
        return {}
    try:
        return parse_toml(read_text(path, MOST_SETTINGS))
    except (OSError, ValueError):  # whoever reads it next says what it is
        return {}


def _understand_run(path: Path, overrides: Sequence[str]) -> PrecisionOfFile:
    """Return the plan of a whole run file, with the keys that concern precision and its model."""
    config = resolve_run(path, overrides)
    settings = dict[str, Setting]()
    for key in RELATED_KEYS:
        if key in known_keys():
            value = config.get(key)
            if key == "parallel.zero":
                value = bool(value)  # no precision depends on more than that state is sharded
            settings[key] = Setting(value, config.origin(key))
    for name, value in config.model:
        settings[f"model.{name}"] = Setting(value, config.origin(f"model.{name}"))
    return PrecisionOfFile(
        file=path,
        plan=config.plan,
        settings=settings,
        notes=config.notes,
        model=config.sized_model,
        microbatches=config.num_microbatches,
        replicas=config.parallel.data,
    )


def plan_table(understood: PrecisionOfFile, short: bool = False) -> Table:
    """Return a table with a row per field of the plan and per other key that was decided.

    short: show only the names of files, as on a narrow terminal.
    """

    def origin_text(origin: str) -> str:
        return shorten_origin(origin) if short else origin

    title = "precision plan"
    if short:
        title = f"precision plan of {understood.file.name}"
    table = Table(title=title, title_justify="left")
    for column in ("field", "value", "decided by"):
        table.add_column(column, overflow="fold")
    for name in FIELDS:
        origin = understood.plan.origin.get(name, "default")
        table.add_row(name, format_value(getattr(understood.plan, name)), origin_text(origin))
    for key, setting in _shown_settings(understood):
        table.add_row(key, format_value(setting.value), origin_text(setting.origin))
    return table


def _shown_settings(understood: PrecisionOfFile) -> Iterable[tuple[str, Setting]]:
    """Return the keys to show: of a whole run those that concern precision alone."""
    if understood.model is None:
        return understood.settings.items()
    return [(key, setting) for key, setting in understood.settings.items() if key in RELATED_KEYS]


def shorten_origin(origin: str) -> str:
    """Return an origin for a terminal: files without their folders, keys without the prefix of
    their system."""
    without_folder = re.sub(r"file \S*/", "file ", origin)
    # on a terminal the title names the file
    without_file = re.sub(r"file [^,()]*, line", "line", without_folder)
    return re.sub(r"\bprecision\.[a-z]+\.", "", without_file)


def module_table(module_rows: Iterable[ModuleRow]) -> Table:
    """Return a table with a row per module: dtypes, and bytes of the whole model before it is
    sharded."""
    table = Table(
        title="modules, bytes of the whole model",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("module", overflow="fold")
    for role in ROLES:
        table.add_column(role, overflow="fold")
    totals: dict[str, int] = dict.fromkeys(ROLES, 0)
    for row in module_rows:
        table.add_row(row.name, *(_dtype_cell(row, role) for role in ROLES))
        # roles without memory of their own are not in it
        for role, count in row.bytes.items():
            totals[role] += count
    table.add_section()
    table.add_row("all", *(size(total) if total else "" for total in totals.values()))
    return table


def _dtype_cell(row: ModuleRow, role: str) -> str:
    """Return the dtype of a role and the bytes it takes."""
    if role not in row.bytes:
        return row.dtypes[role]
    if row.bytes[role]:
        return f"{row.dtypes[role]}\n{size(row.bytes[role])}"
    return "the same"  # a master that is the parameter itself


def size(count: int) -> str:
    """Return a number of bytes in a unit that leaves about three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count}B"


def native_lines(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[str]:
    """Return the plan as native tables of a run file, without keys that have their default."""
    keys = native_keys_of(plan)
    tables: dict[str, dict[str, Any]] = {"precision": _needed_keys(Precision, "precision", keys)}
    if fp8 := _needed_keys(FP8, "fp8", keys):
        tables["fp8"] = fp8
    unknown = list[str]()
    for key, value in settings.items():
        if key not in known_keys():
            unknown.append(key)
            continue
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    lines = list[str]()
    for name, values in tables.items():
        lines += [*table_lines(name, values), ""]
    lines.pop()  # the empty line after the last table
    for key in unknown:
        lines.append(f"# not said: {key} = {toml(settings[key])}; not supported yet")
    for key, value in fields_without_key(plan):
        lines.append(f"# not said: {key} = {toml(value)}; {PLAN_ONLY[key]}")
    return lines


def _needed_keys(
    kind: type[Precision] | type[FP8], table: str, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys that are not what the keys before them imply: without them the table would
    mean something else.
    """
    needed: dict[str, Any] = {}
    for name in kind.model_fields:
        value = keys.get(f"{table}.{name}")
        # defaults may follow from keys before, which are all in `needed`
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
