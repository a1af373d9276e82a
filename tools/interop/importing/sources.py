"""The sources of `megaprec import-args`: a command line, a script, a log, a checkpoint, YAML or
DeepSpeed's JSON, each read and never run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaprec.durable import reading
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_json
from tools.convert.megatron.distributed import read_common
from tools.convert.megatron.ranks import read_ranks
from tools.convert.megatron.read import find_megatron
from tools.interop.arguments import torchtitan as titan
from tools.interop.arguments.deepspeed import is_deepspeeds
from tools.interop.arguments.megatron import is_unused, option
from tools.interop.foreign.data_files import SettingsTree, TooLarge, from_json, from_toml, from_yaml
from tools.interop.foreign.plain import PlainDict, Unreadable, plain
from tools.interop.foreign.whose import (
    DEEPSPEED,
    OF_ACCELERATE,
    OF_NEMO,
    OF_NEOX,
    OF_TORCHTITAN,
    OF_TRAINER,
    Kind,
    whose,
    whose_file,
)
from tools.interop.importing.arguments import FILES_OF_DATA, Arguments
from tools.interop.importing.megatron_deepspeed import read_engine
from tools.interop.importing.megatron_logs import has_printed, printed_arguments
from tools.interop.importing.named_files import text_beside
from tools.interop.importing.read_arguments import is_known, read_kept, read_table, read_words
from tools.interop.importing.renamed import NotKnown
from tools.interop.importing.shell import CommandLine, read_script, split_words
from tools.interop.importing.shell_words import Word
from tools.interop.importing.torchtitan import given_in_words as given_to_torchtitan
from tools.interop.importing.trainer import Given, given_in_words
from tools.interop.importing.yaml_chains import Chain, Leaf, leaves_of, read_chain

LARGEST = 256 * 1024  # bytes
# bytes of a log that are looked at; Megatron-LM prints its arguments first
LARGEST_LOG = 16 * 2**20
YAML = (".yaml", ".yml")
JSON = ".json"
TOML = ".toml"
OTHERS = (TOML, ".py")  # files of settings that are recognised, and read by other commands
FILES = (*YAML, JSON, *OTHERS, ".sh", ".bash", ".slurm", ".sbatch", ".log", ".txt", ".out")
LISTED = "MODEL_ARGS"  # the table of arguments in the YAML of Megatron-LM's functional tests
VARIABLE = re.compile(r"\$\{(\w+)\}")
ELSE = (
    "it is of another program, whose settings are not read: write a run file (megaprec init "
    "FOLDER begins one)"
)
LOCAL_RANKS = "nproc_per_node"
SETTING = re.compile(
    r"[+~]*([\w.]+)="
)  # a word of a program that takes its settings without dashes
FEWEST = 3  # names that are not Megatron-LM's, from which a file may be another system's


@dataclass
class Sources:
    """Everything that was read.

    arguments: Megatron-LM's.
    deepspeed, accelerate: configurations by file.
    ranks: what a launcher starts, if it says so.
    names: of the files, and of a command line that was given.
    trainer: arguments of Hugging Face's Trainer, from a file in `folder`.
    documents: files that a script with these writes, by name.
    system: the kind of settings under names of their own. These are `renamed`, with a dot those
        within a table, from `renamed_files`.
    torchtitan: its settings by dotted key, each with its place; those of a command line count.
    """

    arguments: Arguments
    deepspeed: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    megatron: bool = False
    trainer: dict[str, Given] = field(default_factory=dict)
    system: str = ""
    renamed: dict[str, Any] = field(default_factory=dict)
    renamed_files: list[Path] = field(default_factory=list)
    folder: Path = Path()
    documents: Mapping[str, str] = field(default_factory=dict)
    torchtitan: dict[str, tuple[Any, str]] = field(default_factory=dict)
    accelerate: dict[Path, Mapping[str, Any]] = field(default_factory=dict)


def read_sources(items: Sequence[str], assumed: Mapping[str, str], arguments: Arguments) -> Sources:
    """Return what files and a command line say. Files are read by their suffix, others as scripts
    or logs. arguments: those of Megatron-LM are added to them.

    Raises UserError for what cannot be read.
    """
    sources = Sources(arguments)
    sources.system = _system_of(items)
    for i, item in enumerate(items):
        is_option = item.startswith("-") and not re.search(r"\s", item)
        if is_option:
            # The words from here on are those of one command.
            _read_typed(items[i:], sources)
            break
        _read_item(item, sources, assumed)
    if not sources.names:
        raise UserError.of("import.nothing_to_import")
    return sources


def _read_typed(words: Sequence[str], sources: Sources) -> None:
    """Read a command line that was typed word by word."""
    command = CommandLine([Word(word) for word in words], None, [])
    if _is_torchtitans(command):
        _read_titan_words("a command line", command, sources, Path())
    else:
        _read_command(command, "a command line", sources)


def _read_item(item: str, sources: Sources, assumed: Mapping[str, str]) -> None:
    """Read a file, or a command line in one word. Raises UserError if it is neither."""
    path = Path(item)
    may_be_command = "--" in item
    if not may_be_command and _exists(path):
        _read_file(path, sources, assumed)
        return
    if path.suffix.lower() in FILES and not re.search(r"^-|\s", item):
        reason = "No such file or directory"
        raise UserError.of("import.file_unreadable", path=path, reason=reason)
    if not may_be_command:
        raise UserError.of("import.no_file_or_command", item=item or "an empty word")
    _read_words("the command line", split_words(item, assumed), sources, Path())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _system_of(items: Sequence[str]) -> str:
    """Return the kind of settings under names of their own that a file has; "" if none has."""
    for item in items:
        path = Path(item)
        if path.suffix.lower() in (*YAML, JSON) and _exists(path) and path.is_file():
            kind = whose_file(path, _text(path))
            if kind is not None and kind.whose in (OF_NEOX, OF_NEMO):
                return kind.whose
    return ""


def _read_command(
    command: CommandLine, name: str, sources: Sources, folder: Path | None = None
) -> None:
    """Read a command line of Megatron-LM. name: of what it stands in. folder: of its script."""
    sources.megatron = True
    sources.ranks = command.ranks or sources.ranks
    own, deepspeed = read_engine(command, sources.arguments, folder)
    sources.deepspeed |= deepspeed
    sources.names += dict.fromkeys([name, *command.taken_in, *deepspeed])
    read_words(own.words, sources.arguments)
    _note_absent(name, command, sources)


def _note_absent(name: str, command: CommandLine, sources: Sources) -> None:
    """Note the variables that count as not set, and the ends of the script that do not count."""
    for written, file in command.guessed.items():
        sources.notes.append(
            f"{name}: {written} is taken as {file}, the only file of this name there: its "
            "folder is not known"
        )
    if command.passed:
        places = ", ".join(command.passed)
        sources.notes.append(
            f"{name}: it ends where a condition holds ({places}), by the values that are known "
            "here: passed by, for a training ran"
        )
    if command.absent:
        listed = ", ".join(f"${name.removeprefix('$')}" for name in command.absent)
        sources.notes.append(
            f"{name}: taken as not set, so that defaults and conditions of the script count: "
            f"{listed}; --assume NAME=VALUE gives one"
        )


def _read_file(path: Path, sources: Sources, assumed: Mapping[str, str]) -> None:
    """Read a checkpoint, a file of settings by the system that it belongs to, or a script or log.
    Raises UserError."""
    if path.is_dir():
        _read_all(_args_of_checkpoint(path), path, sources)
        return
    text = _text(path)
    suffix = path.suffix.lower()
    if sources.system and suffix in (*YAML, JSON):
        _read_renamed(path, _yaml(path, _with_assumed(text, assumed)), sources)
        return
    kind = whose_file(path, text)
    is_deepspeed = kind is DEEPSPEED and suffix == JSON
    if kind is not None and not is_deepspeed:
        _read_others(path, text, kind, sources)
    elif suffix in OTHERS:
        raise UserError.of("import.unknown_system", path=path)
    elif suffix == JSON:
        _read_json(path, text, sources)
    elif suffix in YAML:
        _read_data(path, _yaml(path, _with_assumed(text, assumed)), sources)
    else:
        _read_text(path, text, sources, assumed)


def _read_others(path: Path, text: str, kind: Kind, sources: Sources) -> None:
    """Read settings of another program than Megatron-LM and DeepSpeed. Raises UserError for a
    program whose settings are not read."""
    suffix = path.suffix.lower()
    if kind.whose in OF_TRAINER and suffix in YAML:
        _read_trainer(path, _yaml(path, text), sources)
    elif kind.whose == OF_TORCHTITAN and suffix == TOML:
        _read_titan(path, text, sources)
    elif kind.whose == OF_ACCELERATE and suffix in (*YAML, JSON):
        sources.names.append(path.name)
        sources.accelerate[path] = _plain_table(path, text)
    else:
        raise UserError(kind.of(path))


def _with_assumed(text: str, assumed: Mapping[str, str]) -> str:
    """Return the text of a file of settings with the values of variables that the user gives."""
    for name, value in assumed.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def _read_text(path: Path, text: str, sources: Sources, assumed: Mapping[str, str]) -> None:
    """Read a log, otherwise a script."""
    printed = printed_arguments(path, text)
    if printed:
        _read_all(printed, path, sources)
    else:
        _read_words(path.name, read_script(text, path, assumed), sources, path.parent)


def _read_words(name: str, command: CommandLine, sources: Sources, folder: Path) -> None:
    """Read a command line of Megatron-LM or of Hugging Face's Trainer."""
    if _is_torchtitans(command):
        _read_titan_words(name, command, sources, folder)
        return
    kind = whose(_typed_options(command.words))
    if kind is None or kind.whose not in OF_TRAINER:
        _require_megatrons(name, command.words)
        _read_command(command, name, sources, folder)
        return
    sources.trainer |= given_in_words(command.words)
    sources.folder = folder
    sources.documents = command.documents
    sources.ranks = command.ranks or sources.ranks
    sources.names += [name, *command.taken_in]
    _note_absent(name, command, sources)


def _typed_options(words: Sequence[Word]) -> list[str]:
    """Return the options of a command line, without values."""
    options = list[str]()
    for word in words:
        if word.text.startswith("--"):
            option, _, _ = word.text.partition("=")
            options.append(option)
    return options


def _is_torchtitans(command: CommandLine) -> bool:
    """Return True if options are torchtitan's, whose names have a table and a dot."""
    tables = {key.partition(".")[0] for key in titan.READ}
    options = _typed_options(command.words)
    named = [option.removeprefix("--").partition(".") for option in options]
    return any(dot and table in tables for table, dot, _ in named)


def _read_titan_words(name: str, command: CommandLine, sources: Sources, folder: Path) -> None:
    """Read options of torchtitan, and the TOML file that they name."""
    given = given_to_torchtitan(command.words)
    named, place = given.pop(titan.CONFIG_FILE, ("", ""))
    if named:
        text = text_beside(folder, named)
        if text is not None:
            _read_titan(Path(named), text, sources)
        elif not sources.torchtitan:
            raise UserError.of("import.titan_file_absent", name=name, place=place, file=named)
    sources.torchtitan |= given
    sources.ranks = command.ranks or sources.ranks
    sources.names += [name, *command.taken_in]
    _note_absent(name, command, sources)


def _read_titan(path: Path, text: str, sources: Sources) -> None:
    """Read a TOML file of torchtitan; what a command line says counts."""
    sources.names.append(path.name)
    data = from_toml(text)
    assert data is not None, "a file whose kind is known is TOML"
    for key, value, line in _settings_in(data.table, with_tables=True):
        place = f"{path.name}, line {line}" if line else path.name
        sources.torchtitan.setdefault(key, (value, place))


def _plain_table(path: Path, text: str) -> Mapping[str, Any]:
    """Return the table of a YAML or JSON file."""
    data = from_json(text) if path.suffix.lower() == JSON else _yaml(path, text)
    assert data is not None, "a file whose kind is known is a table"
    try:
        return plain(data.table)
    except Unreadable as problem:
        raise UserError.of("import.file_unreadable", path=path, reason=str(problem)) from problem


def _read_trainer(path: Path, data: SettingsTree, sources: Sources) -> None:
    """Read a table of arguments of Hugging Face's Trainer."""
    sources.names.append(path.name)
    sources.folder = path.parent
    for key, entry in data.table.entries.items():
        place = f"{path.name}, line {entry.line}"
        try:
            value = plain(entry.value)
        except Unreadable as problem:
            sources.trainer[str(key)] = Given("", f"--{key}", place, Problem(str(problem)))
            continue
        if isinstance(value, dict) and isinstance(value.get(LOCAL_RANKS), int):
            sources.ranks = value[LOCAL_RANKS]
        if value is not None:
            said = f"--{key} {value}"
            # a table in place of the name of its file
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            sources.trainer[str(key)] = Given(text, said, place)


def _read_renamed(path: Path, data: SettingsTree, sources: Sources) -> None:
    """Read the settings of a system that has Megatron-LM's arguments under names of its own, into
    `sources.renamed`. Raises UserError if a setting has two values."""
    sources.names.append(path.name)
    sources.renamed_files.append(path)
    with_tables = sources.system == OF_NEMO
    for name, value, line in _settings_in(data.table, with_tables):
        if sources.renamed.setdefault(name, value) != value:
            raise UserError.of(
                "import.two_values",
                file=f"{path.name}, line {line}",
                name=name,
                first=sources.renamed[name],
                second=value,
            )


def _settings_in(
    table: PlainDict, with_tables: bool, before: str = ""
) -> Iterator[tuple[str, Any, int]]:
    """Yield name, value and line of settings. A value that is not known stays as it is written.
    with_tables: tables are settings of their own, and not values."""
    for key, entry in table.entries.items():
        name = f"{before}{key}".replace("-", "_")
        if with_tables and isinstance(entry.value, PlainDict):
            yield from _settings_in(entry.value, with_tables, f"{name}.")
            continue
        try:
            value = plain(entry.value)
        except Unreadable as problem:
            value = NotKnown(str(problem), str(getattr(entry.value, "text", "")))
        yield name, value, entry.line


def _read_all(args: Mapping[str, Any], path: Path, sources: Sources) -> None:
    """Read all arguments as Megatron-LM keeps them."""
    sources.names.append(path.name)
    sources.megatron = True
    ranks = args.get("world_size")
    sources.ranks = ranks if isinstance(ranks, int) else sources.ranks
    sources.notes += read_kept(args, sources.arguments, path.name)


def _args_of_checkpoint(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a checkpoint of Megatron-LM keeps."""
    folder = find_megatron(path)
    if folder is None:
        raise UserError.of("import.no_checkpoint", path=path)
    if (folder / ".metadata").is_file():
        return read_common(folder)["args"]
    return read_ranks(folder).args


def _require_megatrons(name: str, words: Sequence[Word]) -> None:
    """Raise UserError if most arguments are another program's."""
    typed = _typed_options(words)
    kind = whose(typed)
    if kind is not None:
        raise UserError(kind.of(name))
    # a file of settings stands first, or behind an argument that Megatron-LM does not have
    before = "--"
    for word in words:
        option, equals, value = word.text.partition("=")
        holder, file = (option, value) if equals else (before, option)
        is_theirs = holder.startswith("--") and not is_known(holder.removeprefix("--"))
        if is_theirs and Path(file).suffix.lower() in (*YAML, *OTHERS):
            raise UserError.of("import.settings_file", name=name, settings=file, remedy=ELSE)
        before = option
    settings = [found[1] for word in words if (found := SETTING.match(word.text))]
    _require_most(name, typed or settings)


def _require_most(name: str, typed: Sequence[str]) -> None:
    """Raise UserError if fewer than half of the arguments are Megatron-LM's."""
    plain_names = [word.removeprefix("--") for word in typed]
    strange = [word for word in plain_names if not is_known(word)]
    if len(strange) >= FEWEST and 2 * len(strange) > len(typed):
        raise UserError.of(
            "import.foreign_arguments",
            name=name,
            num_typed=len(typed),
            num_strange=len(strange),
            strange=", ".join(strange[:3]),
            remedy=ELSE,
        )


def _text(path: Path) -> str:
    """Return the text of a file; of a log the beginning, where the arguments are."""
    try:
        with reading(path) as file:
            content = file.read(LARGEST_LOG)
    except OSError as error:
        raise UserError.of("import.file_unreadable", path=path, reason=error.strerror) from error
    if len(content) > LARGEST:
        text = content.decode(errors="replace")
        if not has_printed(text):
            raise UserError.of("import.file_too_large", path=path, largest=LARGEST)
        return text
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError.of("import.file_unreadable", path=path, reason="not UTF-8 text") from error


def _read_json(path: Path, text: str, sources: Sources) -> None:
    """Read DeepSpeed's configuration, or arguments of Megatron-LM as a table."""
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError.of("import.not_json", path=path, error=error) from error
    if not isinstance(content, dict):
        raise UserError.of("import.not_json_object", path=path)
    data = from_json(text)
    if data is not None and content and not any(map(is_deepspeeds, content)):
        _read_data(path, data, sources)
    else:
        sources.names.append(path.name)
        sources.deepspeed[path.name] = content


def _yaml(path: Path, text: str) -> SettingsTree:
    """Return the settings of a YAML file. Raises UserError if it is none, or too large."""
    try:
        data = from_yaml(path, text)
    except TooLarge as error:
        raise UserError.of("import.too_many_values", path=path) from error
    if data is None:
        raise UserError.of("import.not_yaml_mapping", path=path)
    return data


def _read_data(path: Path, data: SettingsTree, sources: Sources) -> None:
    """Read a table of Megatron-LM's arguments."""
    sources.names.append(path.name)
    sources.megatron = True
    table = _table_of_arguments(path, data.table, sources)
    chain = read_chain(path, table)
    if chain:
        leaves = _leaves_of_chain(path, chain, sources)
    else:
        leaves = _leaves_of_one(path, table, sources)
    values = dict[str, Any]()
    for leaf in leaves:
        _add_leaf(path, leaf, values, sources.arguments)
    read_table(values, sources.arguments, path.name)


def _table_of_arguments(path: Path, table: PlainDict, sources: Sources) -> PlainDict:
    """Return the table in a file that has the arguments: the whole of it, if it lists none."""
    listed = table.get(LISTED)
    if not isinstance(listed, PlainDict):
        return table
    others = ", ".join(str(key) for key in table.entries if key != LISTED)
    if others:
        sources.notes.append(f"{path.name}: {LISTED} is read, and not: {others}")
    return listed


def _leaves_of_one(path: Path, table: PlainDict, sources: Sources) -> Sequence[Leaf]:
    """Return the settings of a file that names no other. Raises UserError if most are another
    program's."""
    leaves = [*leaves_of(table, path.name)]
    _require_most(path.name, [leaf.name for leaf in leaves])
    if any(isinstance(entry.value, PlainDict) for entry in table.entries.values()):
        sources.notes.append(
            f"{path.name}: what its tables do not say is taken as Megatron-LM's default, not "
            "as that of a recipe"
        )
    return leaves


def _leaves_of_chain(path: Path, chain: Chain, sources: Sources) -> Sequence[Leaf]:
    """Return the settings of a file and of those that it names, and note what is not read."""
    _note_chain(path, chain, sources)
    leaves = list[Leaf]()
    own_defaults = list[str]()
    for leaf in chain.leaves.values():
        is_default = chain.has_base and leaf.file != path.name
        if is_default and not is_known(leaf.name):
            own_defaults.append(leaf.name)
        else:
            leaves.append(leaf)
    if own_defaults:
        listed = ", ".join(own_defaults)
        sources.notes.append(
            f"{path.name}: what its program adds to Megatron-LM and the file leaves at that "
            f"program's defaults is not read: {listed}"
        )
    return leaves


def _add_leaf(path: Path, leaf: Leaf, values: dict[str, Any], arguments: Arguments) -> None:
    """Add a setting to the values, or a problem with it."""
    name = leaf.name
    try:
        value = plain(leaf.value)
    except Unreadable as problem:
        _add_unreadable(leaf, problem, arguments)
        return
    if values.setdefault(name, value) != value:
        why = f"is {values[name]!r} and {value!r}: keep one of them"
        arguments.add_problem(name, path.name, why)


def _add_unreadable(leaf: Leaf, problem: Unreadable, arguments: Arguments) -> None:
    """Add a setting whose value is not known to those that may be open, or a problem with it."""
    names = VARIABLE.findall(str(problem))
    remedy = f": --assume {names[0]}=VALUE gives it" if names else ""
    why = Problem(f"{problem}{remedy}")
    place = f"{leaf.file}, line {leaf.line}"
    if leaf.name in FILES_OF_DATA or is_unused(leaf.name):
        word = Word(str(leaf.value.text), place, why)
        arguments.take(leaf.name, [word], option(leaf.name), place)
    else:
        arguments.add_problem(leaf.name, place, why)


def _note_chain(path: Path, chain: Chain, sources: Sources) -> None:
    """Add to the sources the files that a YAML file names (`chain`), the ranks that it says, and
    notes: its launcher's settings are not read, and variables of the environment to which it gives
    a default (`chain.absent`) are taken as not set."""
    sources.names += dict.fromkeys(chain.files)
    sources.ranks = chain.ranks or sources.ranks
    sources.notes.append(
        f"{path.name}: read are the settings of the training, and not those of its launcher"
    )
    if chain.absent:
        listed = ", ".join(f"${name}" for name in dict.fromkeys(chain.absent))
        sources.notes.append(f"{path.name}: taken as not set, so that defaults count: {listed}")
