"""Folders whose files are named by a description in them: data sets that Hugging Face's `datasets`
has saved (`save_to_disk`), and MosaicML's MDS.

They are read in the order of the description, and nothing beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_text
from megaprec.text.packed_files import open_unpacked
from megaprec.tokens.bounds import MAX_ITEM
from megaprec.tokens.places import is_remote, naming_url

STATE = "state.json"
INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"
INDEX = "index.json"
MDS_PACKED = ("zstd", "gz")  # compressions of shards that are read


def described_files(folder: Path) -> list[Path] | None:
    """Return the files of a data set in their order; None for a folder without a description.

    Raises UserError for one of several splits, of which one must be chosen, and for a file that is
    missing.
    """
    if (folder / SPLITS).is_file():
        splits = _description(folder / SPLITS).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        raise UserError.of("data.folder_of_splits", folder=folder, names=names)
    if (folder / STATE).is_file() and (folder / INFO).is_file():
        return _saved_files(folder)
    if (folder / INDEX).is_file():
        index = _description(folder / INDEX)
        if isinstance(index.get("shards"), list):
            return _shards(folder, index["shards"])
    return None


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a data set of `datasets`. Raises UserError."""
    description = folder / STATE
    state = _description(description)
    # earlier versions could save a selection of rows beside the rows
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise _unfit(description, "it selects rows: load it by datasets, flatten_indices, save it")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise _unfit(description, "it names no files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    return [_named_file(description, name) for name in names]


def _shards(folder: Path, shards: Sequence[Any]) -> list[Path]:
    """Return the files of MDS's shards, in order; of a shard that is there packed and unpacked, the
    unpacked one. Raises UserError."""
    description = folder / INDEX
    files: list[Path] = []
    for shard in shards:
        if not isinstance(shard, dict) or shard.get("format") != "mds":
            raise _unfit(description, "it has a shard of another format than mds")
        if shard.get("version") != 2:
            raise _unfit(description, f"it has version {shard.get('version')}, not 2")
        files.append(_shard(description, shard))
    if not files:
        raise _unfit(description, "it names no shards")
    return files


def _shard(description: Path, shard: Mapping[str, Any]) -> Path:
    """Return the file of a shard, which must have the size that is recorded. Raises UserError."""
    unpacked = shard.get("raw_data")
    packed = shard.get("zip_data")
    chosen = unpacked
    if isinstance(packed, dict) and not _is_there(description, unpacked):
        chosen = packed
        compression = str(shard.get("compression")).partition(":")[0]
        if compression not in MDS_PACKED:
            raise _unfit(description, f"its shards are packed by {compression}: unpack them")
    if not isinstance(chosen, dict):
        raise _unfit(description, "it has a shard without a file")
    file = _named_file(description, chosen.get("basename"))
    size = file.stat().st_size
    if size != chosen.get("bytes"):
        raise _unfit(description, f"{file.name} has {size} bytes, not {chosen.get('bytes')}")
    return file


def _is_there(description: Path, entry: Any) -> bool:
    name = entry.get("basename") if isinstance(entry, dict) else None
    return isinstance(name, str) and (description.parent / name).is_file()


def _named_file(description: Path, name: Any) -> Path:
    """Return the file of a name in the folder of a description. Raises UserError."""
    if not isinstance(name, str) or Path(name).name != name:
        raise _unfit(description, f"{name!r} is no name of a file")
    file = description.parent / name
    if not file.is_file():
        raise _unfit(description, f"{name} is not there")
    return file


def _description(file: Path) -> Mapping[str, Any]:
    """Return the object in a description. Raises UserError."""
    try:
        if is_remote(file):
            with naming_url(file), open_unpacked(file) as stream:
                content = parse_json(stream.read(MAX_ITEM))
        else:
            content = parse_json(read_text(file, MAX_ITEM))
    except (OSError, ValueError) as problem:
        raise _unfit(file, str(problem)) from problem
    if not isinstance(content, dict):
        raise _unfit(file, "it is no object")
    return content


def _unfit(description: Path, reason: str) -> UserError:
    return UserError.of("data.description_unfit", file=description, reason=reason)
