"""Settings that stand in several YAML files: Primus's, which extend others, and FlagScale's, whose
list of defaults names another.

Primus merges the files of the trainer, those of the model and its overrides, in this order; each
begins with what it extends (primus/core/config). FlagScale composes its files by Hydra:
`train: 70b` is train/70b.yaml beside.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.errors import UserError
from megaprec.parsing import read_text
from tools.convert.megatron.keys import ALIASES
from tools.interop.foreign.data_files import TooLarge, from_yaml
from tools.interop.foreign.plain import PlainDict, PlainSequence, UnknownValue, find

LARGEST = 256 * 1024  # bytes
LONGEST_NAME = 250  # letters
DEEPEST = 16  # files that extend each other
MOST_FILES = 64
FRAMEWORK = "megatron"
# folders of Primus's files, from the folder of an experiment or one above it
CONFIGS = "primus/configs"
MOST_ABOVE = 8
# ${NAME:default}, of the environment; FlagScale writes ?? for what must be given
FROM_ENVIRONMENT = re.compile(r"\$\{(\w+):(?!\?\?)([^{}]*)\}")
GROUP = "train"  # of FlagScale's settings of a training
RUNNER = ("experiment.runner.nnodes", "experiment.runner.nproc_per_node")


class Leaf(NamedTuple):
    """A setting: its last name, its value and where it stands."""

    name: str
    value: Any
    file: str
    line: int


@dataclass
class Chain:
    """The settings of a YAML file, the first, and of those that it names, a later one in place of
    an earlier one.

    leaves: by name. files: names of those that were read beside the first. absent: variables of the
    environment whose defaults count, for it is not known whether they are set. has_base: the files
    beside the first hold the program's defaults. ranks: that the first says its launcher starts.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    has_base: bool = False
    ranks: int | None = None

    def add(self, table: PlainDict, file: str) -> None:
        """Add the settings of a table. Raises UserError if it says one of them in two ways."""
        own = dict[str, Any]()
        for leaf in leaves_of(table, file):
            first = own.setdefault(leaf.name, leaf.value)
            if first != leaf.value:
                raise UserError.of(
                    "import.two_values",
                    file=file,
                    name=leaf.name,
                    first=first,
                    second=leaf.value,
                )
            if isinstance(leaf.value, UnknownValue):
                variable = FROM_ENVIRONMENT.fullmatch(leaf.value.text)
                if variable:
                    name, default = variable.groups()
                    self.absent.append(name)
                    leaf = leaf._replace(value=default)
            self.leaves[leaf.name] = leaf


def leaves_of(table: PlainDict, file: str) -> Iterator[Leaf]:
    """Yield the settings of a table and the tables in it."""
    for key, entry in table.entries.items():
        if isinstance(entry.value, PlainDict):
            yield from leaves_of(entry.value, file)
        else:
            written = str(key)
            name = ALIASES.get(written, written)
            yield Leaf(name, entry.value, file, entry.line)


def read_chain(path: Path, table: PlainDict) -> Chain | None:
    """Return the settings that a YAML file and those that it names have together; None if it names
    none. Raises UserError for a file that is not there."""
    # an experiment of Primus
    modules = table.get("modules")
    if isinstance(modules, PlainDict):
        trainers = [module for module in _tables(modules) if module.get("framework") == FRAMEWORK]
        if len(trainers) != 1:
            return None
        (trainer,) = trainers
        return _read_primus(path, trainer)
    # one of FlagScale, which Hydra composes
    defaults = table.get("defaults")
    names = _named_by(defaults) if isinstance(defaults, PlainSequence) else {}
    return _read_group(path, table, names[GROUP]) if GROUP in names else None


def _tables(table: PlainDict) -> Iterator[PlainDict]:
    """Yield the tables in a table."""
    for entry in table.entries.values():
        if isinstance(entry.value, PlainDict):
            yield entry.value


def _read_primus(path: Path, trainer: PlainDict) -> Chain:
    """Return the settings of an experiment of Primus."""
    chain = Chain(has_base=True)
    for key, folder in (("config", "modules"), ("model", "models")):
        name = trainer.get(key)
        if isinstance(name, str):
            file = f"{folder}/{FRAMEWORK}/{name}"
            root = _root(path, file)
            # part by part: an absolute name stays one, and is refused
            _extend(root / folder / FRAMEWORK / name, root, chain)
    overrides = trainer.get("overrides")
    if isinstance(overrides, PlainDict):
        chain.add(overrides, path.name)
    return chain


def _root(path: Path, name: str) -> Path:
    """Return the folder of the files of Primus, by the name of one of them. Raises UserError."""
    parents = [*path.resolve().parents]
    above = parents[:MOST_ABOVE]
    own_folder = above[0]
    folders = [own_folder, *(folder / CONFIGS for folder in above)]
    # a longer one is an error of the system and not of the file
    is_name = len(name) <= LONGEST_NAME
    for folder in folders:
        if is_name and (folder / name).is_file():
            return folder
    raise UserError.of("import.no_named_file", path=path, name=name)


def _extend(path: Path, root: Path, chain: Chain, depth: int = 0) -> None:
    """Add the settings of a file behind those of the files that it extends. Raises UserError.

    root: no file outside of this folder is read. depth: how many files led to this one.
    """
    is_within = path.resolve().is_relative_to(root.resolve())
    if depth > DEEPEST or len(chain.files) > MOST_FILES or not is_within:
        raise UserError.of("import.not_followed", written=path.name)
    table = _table(path)
    extended = table.entries.pop("extends", None)
    if extended and isinstance(extended.value, PlainSequence):
        for name in extended.value.items:
            _extend(path.parent / str(name), root, chain, depth + 1)
    chain.files.append(path.name)
    chain.add(table, path.name)


def _table(path: Path) -> PlainDict:
    """Return the settings of a file. Raises UserError."""
    try:
        text = read_text(path, LARGEST)
        data = from_yaml(path, text)
    except OSError as error:
        raise UserError.of("import.file_unreadable", path=path, reason=error.strerror) from error
    except ValueError as error:
        raise UserError.of("import.file_unreadable", path=path, reason="not UTF-8 text") from error
    except TooLarge as error:
        raise UserError.of("import.too_many_values", path=path) from error
    if data is None:
        raise UserError.of("import.not_yaml_mapping", path=path)
    return data.table


def _named_by(defaults: PlainSequence) -> dict[str, str]:
    """Return the files that a list of Hydra's defaults names, by their group."""
    named = dict[str, str]()
    for item in defaults.items:
        if not isinstance(item, PlainDict):
            continue
        for key, entry in item.entries.items():
            named[str(key)] = str(entry.value)
    return named


def _read_group(path: Path, table: PlainDict, name: str) -> Chain:
    """Return the settings of the group of a training: those of the file of this name in its folder,
    beside the file at `path`, whose table also says how many ranks its launcher starts."""
    chain = Chain()
    folder = path.parent
    file = folder / GROUP / f"{name[:LONGEST_NAME]}.yaml"
    # asked second: a name with a zero byte is no file, and cannot be resolved
    if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise UserError.of("import.no_named_file", path=path, name=f"{GROUP}/{name}.yaml")
    _extend(file, folder, chain)
    sizes = [find(table, key) for key in RUNNER]
    numbers = [size.value for size in sizes if size is not None]
    are_whole = all(isinstance(number, int) for number in numbers)
    if len(numbers) == len(RUNNER) and are_whole:
        nodes, local = numbers
        chain.ranks = nodes * local
    return chain
