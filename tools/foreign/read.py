"""Reading the precision settings of another system's file, as tables of a run file with the line of
every value.

Nothing in the file is run. Python is followed as text; JSON, TOML and YAML are plain data. Every
name in it that concerns precision is read, refused with its line, or named in a note.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.errors import Problem, UserError, did_you_mean
from megaprec.parsing import read_text
from tools.console.toml import Setting
from tools.foreign.account import Account
from tools.foreign.data_files import (
    Data,
    TooLarge,
    from_json,
    from_toml,
    from_yaml,
    mentions_in_data,
)
from tools.foreign.expressions import TooMuch
from tools.foreign.gather import Gatherer, reachable
from tools.foreign.mentions import bears_on_precision, mentions_in
from tools.foreign.nemo_forms import note_overwritten
from tools.foreign.plain import is_expression
from tools.foreign.statements import Statements
from tools.foreign.systems import NEMO, Spot
from tools.foreign.values import Entry
from tools.foreign.whose import whose_file
from tools.foreign.yaml_forms import note_composed, read_flat, read_forms

# bytes, commas and brackets; what has more would take seconds to read
LARGEST = 256 * 1024
MOST_PARTS = 20_000
KNOWN = (
    "mixed_precision_config, MixedPrecision(...), fp16 = dict(mode=...), model = "
    "dict(dtype=...), bf16_mixed()"
)


@dataclass(frozen=True)
class Foreign:
    """The result of reading a file. given: keys of a run file, in the tables of one or more
    dialects. notes: settings that were not read, and why.
    """

    given: Mapping[str, Setting]
    notes: tuple[str, ...]


def read_foreign(path: Path, assume: Sequence[str] = (), pick: str = "") -> Foreign:
    """Read the precision settings of a file.

    assume: values of expressions that the file leaves open, "args.bf16=True". pick: the variable to
    read, if the file describes several runs. Raises UserError if the file cannot be read or
    understood, or has no such settings.
    """
    text = _text(path)
    assumptions = dict(_assumption(item) for item in assume)
    try:
        data = _data(path, text)
        if data is not None:
            account = _account_of_data(path, text, data)
            _need_python(path, assume, pick)
        else:
            account = _account_of_python(path, text, assumptions, pick)
        fields = account.settle()
    except (TooMuch, TooLarge, RecursionError) as error:
        why = "more work than a configuration asks for: give the part about precision"
        raise UserError.of("precision_file.whose_file", path=path, why=why) from error
    note_overwritten(account, fields.get(NEMO, {}))
    account.close()
    if account.problems:
        raise UserError(*dict.fromkeys(account.problems))
    if not fields:
        kind = whose_file(path, text)
        if kind is not None and not kind.shown:
            raise UserError(kind.of(path))
        whose = f"{kind.whose}, which " if kind is not None else ""
        unread = [f"not read: {note}" for note in account.notes[:3]]
        raise UserError(
            Problem.of("precision_file.nothing_of_precision", path=path, whose=whose, known=KNOWN),
            *unread,
        )
    return Foreign(_given(path, fields, account), tuple(dict.fromkeys(account.notes)))


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise UserError.of("precision_file.file_too_large", path=path, size=size)
        text = read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("precision_file.file_unreadable", path=path, reason=reason) from error
    if sum(text.count(sign) for sign in ",([{") > MOST_PARTS:
        raise UserError.of("precision_file.too_many_values", path=path)
    return text


def _data(path: Path, text: str) -> Data | None:
    """Return the file as data; None if it is Python. A suffix that names a format is trusted."""
    kind = path.suffix.lower()
    if kind in (".yaml", ".yml"):
        return _needed(path, from_yaml(path, text), "a YAML mapping")
    if kind == ".json":
        return _needed(path, from_json(text, path), "a JSON object")
    if kind == ".toml":
        return _needed(path, from_toml(text), "TOML")
    return None if kind == ".py" else from_toml(text) or from_json(text)


def _needed(path: Path, data: Data | None, what: str) -> Data:
    if data is None:
        raise UserError.of("precision_file.not_python", path=path, what=what)
    return data


def _need_python(path: Path, assume: Sequence[str], pick: str) -> None:
    for option in [*(f"--assume {item}" for item in assume), *([f"--pick {pick}"] if pick else [])]:
        raise UserError.of("precision_file.nothing_open", option=option, path=path)


def _account_of_data(path: Path, text: str, data: Data) -> Account:
    account = Account(str(path), mentions_in_data(data.table))
    account.behind = data.behind
    if not read_forms(data.table, account):
        found = Statements(ast.Module([], []), {})
        found.scope.names["the file"] = data.table
        found.things += data.things
        Gatherer(found, account, None).gather()
    if not account.sayings:
        kind = whose_file(path, text)
        if kind is not None and not kind.shown:
            raise UserError(kind.of(path))
        read_flat(data.table, account)
    note_composed(data.table, account)
    return account


def _account_of_python(
    path: Path, text: str, assumptions: Mapping[str, ast.expr], pick: str
) -> Account:
    tree = _parsed(path, text)
    _require_keys_once(path, tree)
    account = Account(str(path), mentions_in(tree))
    found = Statements(tree, assumptions)
    for name in sorted(set(assumptions) - found.assumed):
        raise UserError.of("precision_file.assume_unknown", name=name, path=path)
    Gatherer(found, account, _picked(path, found, pick)).gather()
    account.close_unreached(found.unreached)
    _refuse_star_imports(tree, account)
    return account


def _picked(path: Path, found: Statements, name: str) -> frozenset[int] | None:
    if not name:
        return None
    values = [scope.names[name] for scope in found.scopes if name in scope.names]
    values += [
        value for scope in found.scopes if scope.path == name for value in scope.names.values()
    ]
    if not values:
        known = [str(key) for scope in found.scopes for key in scope.names]
        raise UserError.of(
            "precision_file.pick_unknown",
            name=name,
            path=path,
            did_you_mean=did_you_mean(name, known),
        )
    return frozenset().union(*(reachable(value) for value in values))


def _refuse_star_imports(tree: ast.Module, account: Account) -> None:
    """Refuse star imports, which may define any name, unless the file itself sets the dtype."""
    known = any(
        "dtype" in saying.fields or saying.spot[0] != "internevo" for saying in account.sayings
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            if known:
                account.note(
                    node.lineno, f"from {node.module} import *: what it brings is not read"
                )
            else:
                why = (
                    "it may bring the precision, which is not in this file: write it here, or "
                    "give that file"
                )
                account.refuse(node.lineno, f"from {node.module} import *: {why}")


def _parsed(path: Path, text: str) -> ast.Module:
    """Return the parsed module; lines of dots, as in documentation, are skipped."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        lines = ["" if line.strip() in ("...", "...,") else line for line in text.split("\n")]
        try:
            return ast.parse("\n".join(lines))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UserError(_why_not_python(path, text, error)) from error


def _require_keys_once(path: Path, tree: ast.Module) -> None:
    """Raise UserError for a call that has an argument twice, which Python refuses too, or a dict a
    key of precision."""
    for node in ast.walk(tree):
        words: list[tuple[object, int]] = []
        if isinstance(node, ast.Call):
            words = [(word.arg, word.lineno) for word in node.keywords if word.arg]
        elif isinstance(node, ast.Dict):
            keys = [
                key
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
            words = [(key.value, key.lineno) for key in keys if bears_on_precision(str(key.value))]
        seen = set[object]()
        for name, line in words:
            if name in seen:
                raise UserError.of("precision_file.key_twice", path=path, line=line, name=name)
            seen.add(name)


def _why_not_python(path: Path, text: str, error: Exception) -> str:
    formats = "Python" if path.suffix == ".py" else "TOML, JSON or Python"
    if not isinstance(error, SyntaxError):
        return f"{path}: not {formats}: nested too deeply, or holds null bytes"
    line = f", line {error.lineno}" if error.lineno else ""
    lost = len(text) > 200 and text.count("\n") < 3 and text.count("import ") > 1
    if lost:
        hint = "; several statements stand on one line: were line breaks lost in copying?"
    else:
        hint = ""
    return f"{path}{line}: not {formats}: {error.msg}{hint}"


def _assumption(item: str) -> tuple[str, ast.expr]:
    """Return expression and value of "args.bf16=True", the expression as Python writes it."""
    signs = [i for i, sign in enumerate(item) if sign == "="]
    for place in reversed(signs):  # the last that is not one of a comparison
        name = item[:place].strip()
        value = item[place + 1 :].strip()
        if is_expression(name) and is_expression(value):
            return ast.unparse(ast.parse(name, mode="eval")), ast.parse(value, mode="eval").body
    raise UserError.of("precision_file.assume_form", item=item)


def _given(
    path: Path, fields: Mapping[Spot, Mapping[str, tuple[Any, Entry]]], account: Account
) -> dict[str, Setting]:
    """Return the tables as dotted keys, each with file and line."""
    given: dict[str, Setting] = {}
    for (system, table), values in fields.items():
        prefix = f"precision.{system}.{table}".rstrip(".")
        given.setdefault(prefix, Setting({}, f"file {path}"))
        for key, (value, entry) in values.items():
            given[f"{prefix}.{key}"] = Setting(value, f"file {account.place(entry.line)}")
    given |= _zero_of_nxd(given, account)
    return given


def _zero_of_nxd(given: Mapping[str, Setting], account: Account) -> dict[str, Setting]:
    """Return the setting of ZeRO-1, which all of NxD's mixed precision depends on, if the file does
    not state it."""
    own = [key for key in given if key.startswith("precision.nxd")]
    key = "precision.nxd.optimizer_config"
    typed = given.get("precision.nxd.precision_type")
    if not own or typed is not None or any(name.startswith(key) for name in own):
        return {}
    needed = [name for name in own if given[name].value is True]
    if needed:
        first = needed[0].removeprefix("precision.nxd.")
        account.notes.append(
            f"optimizer_config is not in the file: ZeRO-1 is taken to be on, as {first} = "
            "true needs it"
        )
        return {f"{key}.zero_one_enabled": Setting(True, given[needed[0]].origin)}
    account.notes.append(
        "optimizer_config is not in the file: NxD leaves ZeRO-1 off unless told otherwise"
    )
    return {f"{key}.zero_one_enabled": Setting(False, "NxD's default")}
