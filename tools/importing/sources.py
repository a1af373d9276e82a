"""The sources of `megaprec import-args`: a command line, a script, YAML or DeepSpeed's JSON, each
read as text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from tools.arguments.deepspeed import is_deepspeeds
from tools.convert.megatron.keys import ALIASES
from tools.foreign.data_files import Data, Table, TooLarge, from_json, from_yaml
from tools.foreign.plain import Unreadable, plain
from tools.foreign.whose import DEEPSPEED, whose, whose_file
from tools.importing.grammar import Arguments, is_known, read_table, read_words
from tools.importing.shell import Word, read_script, split_words

LARGEST = 256 * 1024  # bytes
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
YAML = (".yaml", ".yml")
JSON = (".json",)
OTHERS = (".toml", ".py")  # files of settings that are recognised, and read by other commands
LISTED = "MODEL_ARGS"  # the table of arguments in the YAML of Megatron-LM's functional tests
VARIABLE = re.compile(r"\$\{(\w+)\}")
SETTINGS = (*YAML, *OTHERS)
ELSE = (
    "it is of another program, whose settings are not read: write a run file (megaprec init "
    "FOLDER begins one)"
)
FEWEST = 3  # names that are not Megatron-LM's, from which a file may be another system's


@dataclass
class Sources:
    """Everything that was read. deepspeed: configurations by file. ranks: what a launcher starts,
    if it says so."""

    arguments: Arguments = field(default_factory=Arguments)
    deepspeed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    megatron: bool = False


def read_sources(
    items: Sequence[str], assumed: Mapping[str, str], dropped: frozenset[str]
) -> Sources:
    """Read files by their suffix, others as scripts; the rest is a command line. dropped: arguments
    to leave out.

    Raises UserError for what cannot be read.
    """
    sources = Sources(Arguments(dropped))
    words = list[Word]()
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
        raise UserError.of("import.nothing_to_import")
    return sources


def _read(item: str, sources: Sources, words: list[Word], assumed: Mapping[str, str]) -> None:
    path = Path(item)
    suffix = path.suffix.lower() if not item.startswith("-") and "\n" not in item else ""
    is_file = "--" not in item and _is_file(path)
    if is_file or (suffix in (*SCRIPTS, *YAML, *JSON, *OTHERS) and " " not in item):
        sources.names.append(path.name)
        text = _text(path)
        _require_readable(path, text)
        if suffix in JSON:
            _read_json(path, text, sources)
            return
        sources.megatron = True
        if suffix in YAML:
            for name, value in assumed.items():
                text = text.replace(f"${{{name}}}", value)
            data = _yaml(path, text)
            _read_data(path, data, sources)
            return
        command = read_script(text, path, assumed)
        _require_megatrons(path.name, [word.text for word in command.words])
    elif "--" not in item:
        raise UserError.of("import.no_file_or_command", item=item or "an empty word")
    else:
        command = split_words(item, assumed)
        _require_megatrons("the command line", [word.text for word in command.words])
        words += command.words
        command.words = []
    sources.ranks = command.ranks or sources.ranks
    sources.notes += command.notes
    sources.names += command.taken_in
    read_words(command.words, sources.arguments)


def _require_readable(path: Path, text: str) -> None:
    """Raise UserError for a file of settings of another system, by its name, and for any TOML or
    Python."""
    kind = whose_file(path, text)
    read_here = kind is DEEPSPEED and path.suffix.lower() in JSON
    if kind is not None and not read_here:
        raise UserError(kind.of(path))
    if path.suffix.lower() in OTHERS:
        raise UserError.of("import.unknown_system", path=path)


def _require_megatrons(name: str, words: Sequence[str]) -> None:
    """Raise UserError if most arguments are another program's. words: names without dashes are
    passed over."""
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    kind = whose(typed)
    if kind is not None:
        raise UserError(kind.of(name))
    if (settings := _settings_file(words)) is not None:
        raise UserError.of("import.settings_file", name=name, settings=settings, remedy=ELSE)
    _require_most(name, [word.removeprefix("--") for word in typed])


def _settings_file(words: Sequence[str]) -> str | None:
    """Return the file of settings that stands first, or after an argument that Megatron-LM does not
    have."""
    before = "--"
    for word in words:
        option, equals, value = word.partition("=")
        holder = option if equals else before
        file = value if equals else word
        theirs = holder.startswith("--") and not is_known(holder.removeprefix("--"))
        if theirs and Path(file).suffix.lower() in SETTINGS:
            return file
        before = word
    return None


def _require_most(name: str, typed: Sequence[str]) -> None:
    """Raise UserError if fewer than half of the arguments are Megatron-LM's."""
    strange = [word for word in typed if not is_known(word)]
    if len(strange) >= FEWEST and 2 * len(strange) > len(typed):
        raise UserError.of(
            "import.foreign_arguments",
            name=name,
            num_typed=len(typed),
            num_strange=len(strange),
            strange=", ".join(strange[:3]),
            remedy=ELSE,
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError.of("import.file_too_large", path=path, largest=LARGEST)
        return read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError.of("import.file_unreadable", path=path, reason=reason) from error


def _read_json(path: Path, text: str, sources: Sources) -> None:
    """Read DeepSpeed's configuration, or arguments of Megatron-LM as a table."""
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError.of("import.not_json", path=path, error=error) from error
    if not isinstance(content, dict):
        raise UserError.of("import.not_json_object", path=path)
    if not content or any(is_deepspeeds(str(name)) for name in content):
        sources.deepspeed[path.name] = content
        return
    data = from_json(text)
    assert data is not None
    sources.megatron = True
    _read_data(path, data, sources)


def _yaml(path: Path, text: str) -> Data:
    try:
        data = from_yaml(path, text)
    except TooLarge as error:
        raise UserError.of("import.too_many_values", path=path) from error
    if data is None:
        raise UserError.of("import.not_yaml_mapping", path=path)
    return data


def _read_data(path: Path, data: Data, sources: Sources) -> None:
    """Read a table of Megatron-LM's arguments."""
    table = data.table
    listed = table.get(LISTED)
    if isinstance(listed, Table):
        others = ", ".join(str(key) for key in table.entries if key != LISTED)
        if others:
            sources.notes.append(f"{path.name}: {LISTED} is read, and not: {others}")
        table = listed
    typed = [name.removeprefix("--") for name in _leaves(table)]
    _require_most(path.name, typed)
    flat = _flat(table, sources.arguments, path.name)
    if any(isinstance(entry.value, Table) for entry in table.entries.values()):
        sources.notes.append(
            f"{path.name}: what its tables do not say is taken as Megatron-LM's default, not "
            "as that of a recipe"
        )
    read_table(flat, sources.arguments, path.name)


def _leaves(table: Table) -> Iterator[str]:
    """Yield the last names of all values."""
    for key, entry in table.entries.items():
        if isinstance(entry.value, Table):
            yield from _leaves(entry.value)
        else:
            yield ALIASES.get(str(key), str(key))


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
                names = VARIABLE.findall(str(why))
                way = f": --assume {names[0]}=VALUE gives it" if names else ""
                arguments.problems.append(f"{key} ({place}, line {entry.line}): {why}{way}")
                arguments.tried.add(str(key).removeprefix("--").replace("-", "_"))
                continue
        for name, value in inner.items():
            if name in found and found[name] != value:
                arguments.problems.append(
                    f"{name} ({place}): is {found[name]!r} and {value!r}: keep one of them"
                )
            found[name] = value
    return found
