"""The sources of `megaprec import-args`: a command line, a script, YAML or DeepSpeed's JSON, each read as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from tools.convert.megatron.keys import ALIASES
from tools.foreign.data_files import TooLarge, from_yaml
from tools.foreign.plain import Unreadable, plain
from tools.foreign.values import Table
from tools.importing.grammar import Arguments, read_table, read_words
from tools.importing.shell import Word, read_script, split_words

LARGEST = 256 * 1024  # bytes
SCRIPTS, YAML, JSON = (".sh", ".bash", ".slurm", ".sbatch"), (".yaml", ".yml"), (".json",)
LISTED = "MODEL_ARGS"  # the table of arguments in the YAML of Megatron-LM's functional tests


@dataclass
class Sources:
    """Everything that was read. deepspeed: configurations by file. ranks: what a launcher starts, if it says so."""

    arguments: Arguments = field(default_factory=Arguments)
    deepspeed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    megatron: bool = False


def read_sources(items: Sequence[str], assumed: Mapping[str, str], dropped: frozenset[str]) -> Sources:
    """Read files by their suffix, others as scripts; the rest is a command line. dropped: arguments to leave out.

    Raises UserError for what cannot be read.
    """
    sources, words = Sources(Arguments(dropped)), list[Word]()
    for i, item in enumerate(items):
        if item.startswith("-") and not any(sign in item for sign in " \t\n"):
            words += [Word(word) for word in items[i:]]
            break
        _read(item, sources, words, assumed)
    if words:
        sources.megatron = True
        sources.names.append("a command line")
        read_words(words, sources.arguments)
    if not sources.names:
        raise UserError("nothing to import: give a command line in quotes, a .sh or .yaml file, or DeepSpeed's .json")
    return sources


def _read(item: str, sources: Sources, words: list[Word], assumed: Mapping[str, str]) -> None:
    path = Path(item)
    suffix = path.suffix.lower() if not item.startswith("-") and "\n" not in item else ""
    is_file = "--" not in item and _is_file(path)
    if is_file or (suffix in (*SCRIPTS, *YAML, *JSON) and " " not in item):
        sources.names.append(path.name)
        text = _text(path)
        if suffix in JSON:
            sources.deepspeed[path.name] = _json(path, text)
            return
        sources.megatron = True
        if suffix in YAML:
            _read_yaml(path, text, sources)
            return
        found = read_script(text, path.name, assumed)
    elif "--" not in item:
        raise UserError(
            f"{item or 'an empty word'}: neither a file that is there nor a command line, which has --arguments"
        )
    else:
        found = split_words(item, assumed)
        words += found.words
        found.words = []
    sources.ranks, sources.notes = found.ranks or sources.ranks, [*sources.notes, *found.notes]
    read_words(found.words, sources.arguments)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: more than {LARGEST} bytes: is it the right file?")
        return read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason})") from error


def _json(path: Path, text: str) -> Mapping[str, Any]:
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object, as DeepSpeed's configuration is")
    return content


def _read_yaml(path: Path, text: str, sources: Sources) -> None:
    try:
        data = from_yaml(path, text)
    except TooLarge as error:
        raise UserError(f"{path}: more values than a configuration has") from error
    if data is None:
        raise UserError(f"{path}: not a YAML mapping")
    table = data.table
    if isinstance(listed := table.get(LISTED), Table):
        others = ", ".join(str(key) for key in table.entries if key != LISTED)
        if others:
            sources.notes.append(f"{path.name}: {LISTED} is read, and not: {others}")
        table = listed
    flat = _flat(table, sources.arguments, path.name)
    if any(isinstance(entry.value, Table) for entry in table.entries.values()):
        sources.notes.append(
            f"{path.name}: what its tables do not say is taken as Megatron-LM's default, not as that of a recipe"
        )
    read_table(flat, sources.arguments, path.name)


def _flat(table: Table, arguments: Arguments, place: str) -> dict[str, Any]:
    """Return the leaves of a table by their last name. A name with two values is a problem."""
    found = dict[str, Any]()
    for key, entry in table.entries.items():
        if isinstance(entry.value, Table):
            inner = _flat(entry.value, arguments, place)
        else:
            try:
                inner = {ALIASES.get(str(key), str(key)): plain(entry.value)}
            except Unreadable as why:
                arguments.problems.append(f"{key} ({place}, line {entry.line}): {why}")
                continue
        for name, value in inner.items():
            if name in found and found[name] != value:
                arguments.problems.append(f"{name} ({place}): is {found[name]!r} and {value!r}: keep one of them")
            found[name] = value
    return found
