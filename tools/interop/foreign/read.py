"""Reading the precision settings of another system's file, as tables of a run file with the line of
every value.

Nothing in the file is run. Python is followed as text; JSON, TOML and YAML are plain data. Every
name in it that concerns precision is read, refused with its line, or named in a note.
"""

import ast
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megaprec.errors import Problem, UserError
from megaprec.parsing import read_text
from tools.console.toml import Setting
from tools.interop.foreign.data_files import SettingsTree, TooLarge, from_json, from_toml, from_yaml
from tools.interop.foreign.findings import Findings, Known
from tools.interop.foreign.precision_words import mentions_of
from tools.interop.foreign.python_file import PythonFile
from tools.interop.foreign.python_settings import Gatherer
from tools.interop.foreign.systems import NXD, NXD_OPTIMIZER
from tools.interop.foreign.whose import whose_file
from tools.interop.foreign.yaml_forms import note_composed, read_forms

# bytes, commas and brackets; what has more would take seconds to read
LARGEST = 256 * 1024
MOST_PARTS = 20_000
KNOWN = (
    "mixed_precision_config, MixedPrecision(...), fp16 = dict(mode=...), model = "
    "dict(dtype=...), bf16_mixed()"
)
TOO_MUCH = "more work than a configuration asks for: give the part about precision"


@dataclass(frozen=True)
class Foreign:
    """The result of reading a file. given: keys of a run file, in the tables of one or more
    dialects. notes: settings that were not read, and why.
    """

    given: Mapping[str, Setting]
    notes: tuple[str, ...]


def read_foreign(path: Path, given: Collection[str] = ()) -> Foreign:
    """Return the precision settings of a file.

    given: keys that are set elsewhere, whose values the file may leave open. Raises UserError if
    the file cannot be read or understood, or has no such settings.
    """
    text = _text(path)
    try:
        data = _data(path, text)
        if data is not None:
            findings = _of_data(path, text, data, given)
        else:
            findings = _of_python(path, text, given)
        tables = findings.settle()
    except (TooLarge, RecursionError) as error:
        raise UserError.of("precision_file.whose_file", path=path, why=TOO_MUCH) from error
    findings.close()
    if findings.problems:
        raise UserError(*dict.fromkeys(findings.problems))
    if not tables:
        _refuse_nothing(path, text, findings)
    return Foreign(_settings(path, tables, findings), tuple(dict.fromkeys(findings.notes)))


def _refuse_nothing(path: Path, text: str, findings: Findings) -> None:
    """Raise UserError for a file without settings, by the system that it belongs to."""
    kind = whose_file(path, text)
    if kind is not None and not kind.shown:
        raise UserError(kind.of(path))
    whose = f"{kind.whose}, which " if kind is not None else ""
    problem = Problem.of("precision_file.nothing_of_precision", path=path, whose=whose, known=KNOWN)
    raise UserError(problem, *(f"not read: {note}" for note in findings.notes[:3]))


def _text(path: Path) -> str:
    """Return the text of a file. Raises UserError if it cannot be read, or is too large."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise UserError.of("precision_file.file_too_large", path=path, size=size)
        text = read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("precision_file.file_unreadable", path=path, reason=reason) from error
    if sum(text.count(sign) for sign in ",([{") > MOST_PARTS:
        raise UserError.of("precision_file.too_many_values", path=path)
    return text


def _data(path: Path, text: str) -> SettingsTree | None:
    """Return the file as data; None if it is Python. A suffix that names a format is trusted."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        return None
    if suffix not in (".yaml", ".yml", ".json", ".toml"):
        return from_toml(text) or from_json(text)
    what = {".json": "a JSON object", ".toml": "TOML"}.get(suffix, "a YAML mapping")
    if suffix == ".json":
        data = from_json(text, path)
    elif suffix == ".toml":
        data = from_toml(text)
    else:
        data = from_yaml(path, text)
    if data is None:
        raise UserError.of("precision_file.not_python", path=path, what=what)
    return data


def _of_data(path: Path, text: str, data: SettingsTree, given: Collection[str]) -> Findings:
    """Return what a file of data says of precision. Raises UserError for one of a system that is
    not read."""
    findings = Findings(str(path), mentions_of(data.trees, ()), given)
    kind = whose_file(path, text)
    if kind is not None and not kind.shown:
        raise UserError(kind.of(path))
    if not read_forms(data.table, findings):
        Gatherer(data.calls, data.table, findings).gather()
    note_composed(data.table, findings)
    return findings


def _of_python(path: Path, text: str, given: Collection[str]) -> Findings:
    """Return what a Python file says of precision."""
    file = PythonFile(_parsed(path, text))
    findings = Findings(str(path), mentions_of(file.made, file.loose), given)
    for line, name, why in file.uncertain:
        findings.refuse_unknown(line, name, why)
    Gatherer(file.calls, file.names, findings).gather()
    return findings


def _parsed(path: Path, text: str) -> ast.Module:
    """Return the parsed module; lines of dots, as in documentation, are skipped."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        lines = ["" if line.strip() in ("...", "...,") else line for line in text.split("\n")]
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.parse("\n".join(lines))
        place = f"{path}, line {error.lineno}" if error.lineno else str(path)
        why = error.msg
    except (ValueError, RecursionError, MemoryError):
        place = str(path)
        why = "nested too deeply, or holds null bytes"
    formats = "Python" if path.suffix == ".py" else "TOML, JSON or Python"
    raise UserError.of("precision_file.not_python", path=place, what=f"{formats}: {why}")


def _settings(path: Path, tables: Mapping[str, Known], findings: Findings) -> dict[str, Setting]:
    """Return the tables as dotted keys, each with file and line."""
    settings = dict[str, Setting]()
    for table, known in tables.items():
        settings.setdefault(f"precision.{table}", Setting({}, f"file {path}"))
        for key, (value, entry) in known.items():
            origin = f"file {findings.place(entry.line)}"
            settings[f"precision.{table}.{key}"] = Setting(value, origin)
    if NXD in tables and NXD_OPTIMIZER not in tables and "precision_type" not in tables[NXD]:
        key = f"precision.{NXD_OPTIMIZER}.zero_one_enabled"
        settings[key] = _zero_of_nxd(tables[NXD], findings)
    return settings


def _zero_of_nxd(known: Known, findings: Findings) -> Setting:
    """Return the setting of ZeRO-1, which all of NxD's mixed precision depends on, where the file
    does not state it."""
    for key, (value, entry) in known.items():
        if value is True:
            why = f"ZeRO-1 is taken to be on, as {key} = true needs it"
            findings.notes.append(f"optimizer_config is not in the file: {why}")
            return Setting(True, f"file {findings.place(entry.line)}")
    why = "NxD leaves ZeRO-1 off unless told otherwise"
    findings.notes.append(f"optimizer_config is not in the file: {why}")
    return Setting(False, "NxD's default")
