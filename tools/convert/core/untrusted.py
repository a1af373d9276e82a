"""A separate program that lists the contents of a torch file of unknown origin without trusting it.

    python -P untrusted.py PATH ...

A path is a file of torch.save, or the folder of a distributed checkpoint.

Such files are pickles. Only this process unpickles them, with limits of memory, time and open files
and unable to write any, through torch's own unpickler of weights, which makes tensors and plain
containers and calls nothing else. Names of harmless kinds (settings, enumerations, random states)
become empty objects of a class defined here; a file with any other name is refused. No value of a
tensor is read: the answer, JSON on stdout, states its place in the file, and the caller reads it
from there.
"""

import argparse
import gc
import io
import json
import pickle
import re
import runpy
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

gc.disable()  # as in tools/start.py: this process lives for a second
import torch  # noqa: E402

gc.freeze()
gc.enable()

ROOT = Path(__file__).resolve().parents[3]
limit_process = runpy.run_path(str(ROOT / "megaprec/text/limits.py"))["limit_process"]
MEMORY = 4 << 30  # bytes more than torch itself takes
SECONDS = 300  # of processor time for a folder
# seconds for the start, and for each file
SECONDS_OF_START = 20
SECONDS_OF_FILE = 2
# Values that a file may have, a tensor counted as one and a text by its length: the largest models
# have some ten thousand tensors.
MOST_VALUES = 1_000_000
TEXT_UNIT = 64  # characters of a text that count as one value
HARMLESS = (
    "megatron.",
    "transformer_engine.",
    "numpy.",
    "signal.",
    "pathlib.",
    "enum.",
    "_io.BytesIO",
)
# InternEvo's settings, a dict by another name
DICTS = ("internlm.core.context.parallel_context.Config",)
# stands for a tensor in a file of its own
REFERENCES = ("torch_xla.utils.serialization.TensorReference",)
# Names, but for a prefix, of the steps and the loss scale of Megatron's distributed optimizer.
OPTIMIZER_OBJECTS = (
    "optimizer.distributed.dp_group_idx_0.optimizer/",
    "optimizer.distributed.dp_group_idx_0.grad_scaler/",
)
METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
)
_ANEW = "load it with torch and save it again"
STORAGE = re.compile(r".*/data/[^/]+")  # the files of a torch file that hold values
# torch's Metadata with more in it
MEGATRON_METADATA = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
# Other classes that .metadata may name, and what stands for them.
PLAIN_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
}


class Inert:
    """An empty object in place of one that is not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return hash(repr(self.args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert) and self.args == other.args


class PickledReference(Inert):
    """The number of a tensor that is in another file."""


def limit(seconds: int = SECONDS) -> None:
    """Limit this process: little memory and time, no files to write, no child processes."""
    limit_process(MEMORY, seconds, may_start_others=False)


def describe(torch_file: Path | BinaryIO) -> Any:
    """Return the contents of a torch file as a JSON value: [kind, content].

    An opened one is part of a file of a distributed checkpoint, and places count from where this
    part begins.
    Raises ValueError for more than MOST_VALUES values and characters, for a small file that refers
    to the same list again and again would be a huge answer, and as `_unpickle` and `_locate` do.
    """
    if isinstance(torch_file, Path):
        _require_zip(torch_file)
    storages = _read_storages(torch_file)
    return _Description(storages).describe(_unpickle(torch_file))


class _Description:
    """The description of a file's contents. storages: as `_read_storages` returns them."""

    def __init__(self, storages: Mapping[int, tuple[int, int]]) -> None:
        self.storages = storages
        self.count = -1  # values in the file, of which the outermost is none

    def describe(self, value: Any) -> Any:
        """Return [kind, content] of a value, and of what is in it."""
        self._count(value)
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            start, crc = _locate(value, self.storages)
            return ["tensor", [dtype, list(value.shape), list(value.stride()), start, crc]]
        if isinstance(value, PickledReference):
            return ["reference", int(value.state["tid"])]
        if isinstance(value, argparse.Namespace):
            return self._describe_dict(vars(value))
        if isinstance(value, dict):
            return self._describe_dict(value)
        if isinstance(value, list | tuple | torch.Size):
            return ["list", [self.describe(item) for item in value]]
        if value is None or isinstance(value, str | int | float | bool):
            return ["plain", value]
        if isinstance(value, torch.dtype):
            return ["plain", str(value)]
        return ["other", type(value).__name__]

    def _describe_dict(self, table: Mapping[Any, Any]) -> Any:
        """Return a table as JSON can hold it. Raises ValueError if two keys would be one there."""
        entries = {}
        for key, value in table.items():
            entries[_key(key)] = self.describe(value)
        # Keys become text in JSON, where 1 and "1" would be one.
        if len(entries) < len(table):
            raise ValueError("it has a table with two keys that are alike but for their kind")
        return ["dict", [*entries.items()]]

    def _count(self, value: Any) -> None:
        self.count += 1
        if isinstance(value, str):
            self.count += len(value) // TEXT_UNIT
        if self.count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")


def _key(key: Any) -> str | int:
    """Return the key of a dict's entry: a whole number, or text, also of a tuple, such as one of
    dtypes."""
    if isinstance(key, str | int):
        return key
    if isinstance(key, tuple):
        return ", ".join(map(str, key))
    return str(key)


def _read_storages(torch_file: Path | BinaryIO) -> dict[int, tuple[int, int]]:
    """Return the storages of a torch file: the byte where each begins -> its bytes and their
    CRC-32.

    Nothing is read by `zipfile` itself: of a file that torch saved without checksums it would say
    that it is damaged.
    """
    storages: dict[int, tuple[int, int]] = {}
    try:
        directory = zipfile.ZipFile(torch_file)
    except zipfile.BadZipFile as error:
        raise ValueError(
            "it lacks its end, which lists its parts: it was not saved or fetched whole"
        ) from error
    opening = torch_file.open("rb") if isinstance(torch_file, Path) else nullcontext(torch_file)
    with directory as archive, opening as opened:
        for entry in archive.infolist():
            is_byte_order = entry.filename.endswith("/byteorder")
            if not is_byte_order and not STORAGE.fullmatch(entry.filename):
                continue
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its values are compressed; torch.save does not do that: {_ANEW}")
            start = _content_start(opened, entry)
            opened.seek(start)
            if is_byte_order and opened.read(min(entry.file_size, 16)) != sys.byteorder.encode():
                raise ValueError(
                    "its numbers have their bytes in the other order: a machine of another "
                    "kind saved it"
                )
            storages[start] = entry.file_size, entry.CRC
    return storages


def _content_start(opened: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return the first byte of an entry's contents, which follow a local header of 30 bytes, a name
    and an extra field, whose lengths are its bytes 26 to 30."""
    opened.seek(entry.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", opened.read(4))
    return entry.header_offset + 30 + name_length + extra_length


def _locate(value: torch.Tensor, storages: Mapping[int, tuple[int, int]]) -> tuple[int, int | None]:
    """Return the byte where the first element of a tensor lies, and the CRC-32 of its bytes if the
    file states it.

    It does if the tensor is all of a storage; a checksum of 0 stands for none. torch reckons where
    storages begin, from how torch.save writes a file. Raises ValueError unless one of that size
    begins there, and the tensor lies in it.
    """
    storage: Any = value.untyped_storage()
    storage_start = getattr(storage, "_checkpoint_offset", None)
    storage_size = storage.nbytes()
    if storage_start is None or value.is_neg() or value.is_conj():
        raise ValueError("a tensor in it has no values that could be read as they lie")
    stored_size, crc = storages.get(storage_start, (0, 0))
    if storage_size != stored_size and storage_size:
        raise ValueError(
            "its values do not lie where torch.save puts them, so it is damaged or packed "
            f"anew: {_ANEW}"
        )
    end = 0  # in elements from the start of the storage
    if 0 not in value.shape:
        steps = zip(value.shape, value.stride(), strict=True)
        last = value.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        end = last + 1
    itemsize = value.dtype.itemsize
    if end * itemsize > storage_size:
        raise ValueError("a tensor in it is larger than its values are")
    is_whole_storage = value.storage_offset() == 0 and end * itemsize == storage_size
    start = storage_start + value.storage_offset() * itemsize
    has_checksum = is_whole_storage and crc != 0
    return start, crc if has_checksum else None


def _unpickle(torch_file: Path | BinaryIO) -> Any:
    """Return the contents of a torch file, tensors without values. Raises if it is damaged or
    refers to anything harmful.
    """
    if not isinstance(torch_file, Path):
        torch_file.seek(0)
    # reads the names, makes nothing
    names = torch.serialization.get_unsafe_globals_in_checkpoint(torch_file)
    known_names = ("argparse.Namespace", *DICTS, *REFERENCES)
    foreign = [name for name in names if not name.startswith(HARMLESS) and name not in known_names]
    if foreign:
        raise ValueError(
            f"it refers to {', '.join(foreign)}, which is not among the kinds of objects that "
            "are let in"
        )
    stand_ins: list[Callable | tuple[Callable, str]] = [argparse.Namespace]
    for name in names:
        if name in DICTS:
            stand_ins.append((dict, name))
        elif name in REFERENCES:
            stand_ins.append((PickledReference, name))
        elif name not in known_names:
            stand_ins.append((Inert, name))
    if not isinstance(torch_file, Path):
        torch_file.seek(0)
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(torch_file, map_location="meta", weights_only=True)


def _require_zip(torch_file: Path) -> None:
    """Raise if a file is not one of torch.save since torch 1.6, and say what it is instead."""
    with open(torch_file, "rb") as opened:
        beginning = opened.read(32)
    if beginning.startswith(b"\x80"):
        raise ValueError(
            "it has the form that torch.save had before torch 1.6, which is not read here: "
            "save it anew"
        )
    if beginning.startswith(b"version https://git-lfs"):
        raise ValueError(
            "it is a pointer of Git LFS, not the file itself: git lfs pull fetches that"
        )
    if not beginning.startswith(b"PK"):
        raise ValueError("it is no file of torch.save")


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler of a distributed checkpoint's .metadata, with `PickledRecord` in place of torch's
    classes that only hold values.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that a pickle refers to, or a harmless one in its place. Raises
        UnpicklingError for one that is not let in."""
        # Names of classes begin with a capital: no function of these modules is let in.
        is_class = name[:1] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        if (module in METADATA_MODULES and is_class) or (module, name) == MEGATRON_METADATA:
            return type(name, (PickledRecord,), {})
        if (module, name) in PLAIN_CLASSES:
            return PLAIN_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}".startswith(HARMLESS):
            return Inert
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which is not among the classes that are let in"
        )


class PickledRecord:
    """An object with the fields that the pickle gives it."""

    def __new__(cls, *args: Any) -> "PickledRecord":
        record = super().__new__(cls)
        record.args = args  # type: ignore[attr-defined]
        return record

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __hash__(self) -> int:
        return hash(json.dumps(as_plain(self), default=repr, sort_keys=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledRecord) and as_plain(self) == as_plain(other)


def as_plain(value: Any) -> Any:
    """Return a value with each `PickledRecord` in it, within lists and tuples too, as a dict of its
    fields. Tuples become lists; other values, dicts too, are as they were."""
    if isinstance(value, PickledRecord):
        return {name: as_plain(field) for name, field in vars(value).items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


class FilePart(io.RawIOBase):
    """Some bytes of an open file as a file of their own: only those that are asked for are read."""

    def __init__(self, file: io.RawIOBase, start: int, length: int) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}
        self.position = max(0, offset + bases[whence])
        return self.position

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.position)
        remaining = max(0, self.length - self.position)
        count = self.file.readinto(memoryview(buffer)[:remaining]) or 0
        self.position += count
        return count


def describe_distributed(folder: Path) -> Any:
    """Return the tensors of a distributed checkpoint: name -> shape and chunks, each with its dtype
    and its location in a file.

    Also returns the contents of its distributed optimizer besides tensors: name -> content, and its
    location.
    """
    with open(folder / ".metadata", "rb") as file:
        metadata = MetadataUnpickler(file).load()
    storage_infos = {}
    for index, location in metadata.storage_data.items():
        offset = tuple(index.offset) if getattr(index, "offset", None) is not None else None
        storage_infos[index.fqn, offset] = location

    def storage_info(tensor_name: str, offset: tuple[int, ...] | None) -> Any:
        if (tensor_name, offset) not in storage_infos:
            raise ValueError(
                f".metadata does not say where {tensor_name} lies, or one of its parts"
            )
        return storage_infos[tensor_name, offset]

    tensors = {}
    optimizer = {}
    for tensor_name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            chunks = []
            for chunk in entry.chunks:
                location = storage_info(tensor_name, tuple(chunk.offsets))
                chunks.append(_describe_chunk(folder, location, [*chunk.offsets], [*chunk.sizes]))
            tensors[tensor_name] = {"shape": list(entry.size), "chunks": chunks}
        # Other objects of a checkpoint, such as random states, are not needed.
        elif any(known in tensor_name for known in OPTIMIZER_OBJECTS):
            optimizer[tensor_name] = _describe_inside(folder, storage_info(tensor_name, None))
    return {"tensors": tensors, "optimizer": optimizer}


def _describe_inside(folder: Path, location: Any) -> dict[str, Any]:
    """Return the contents of a file of torch.save inside of a file, and the byte where it begins in
    the outer one."""
    file = folder / location.relative_path
    if file.parent != folder or not file.is_file():
        raise ValueError(f".metadata names {location.relative_path}, which is not in the folder")
    if getattr(location, "transform_descriptors", None):
        raise ValueError(
            f"{file.name} holds values that are transformed, such as compressed, which are not read"
        )
    if not 0 <= location.offset <= location.offset + location.length <= file.stat().st_size:
        raise ValueError(
            f".metadata names bytes of {file.name} that it does not have: it is not whole"
        )
    with open(file, "rb", buffering=0) as opened:
        inside = io.BufferedReader(FilePart(opened, location.offset, location.length))
        return {"file": file.name, "start": location.offset, "content": describe(inside)}


def _describe_chunk(
    folder: Path, location: Any, offset: list[int], shape: list[int]
) -> dict[str, Any]:
    """Return where a part of a tensor lies, and where in the tensor it begins."""
    inside = _describe_inside(folder, location)
    kind, content = inside["content"]
    # The file itself says its shape too.
    if kind != "tensor" or content[1] != shape:
        raise ValueError(f"{folder / inside['file']} does not hold the {shape} that .metadata says")
    dtype, shape, strides, start, crc = content
    return {
        "file": inside["file"],
        "dtype": dtype,
        "shape": shape,
        "strides": strides,
        "start": inside["start"] + start,
        "crc": crc,
        "offset": offset,
    }


def main(paths: Sequence[str]) -> None:
    """Print the contents of each path, or the first path with a fault."""
    has_folders = any(Path(path).is_dir() for path in paths)
    limit(SECONDS if has_folders else SECONDS_OF_START + SECONDS_OF_FILE * len(paths))
    answers = []
    for path in map(Path, paths):
        try:
            answers.append(describe_distributed(path) if path.is_dir() else describe(path))
        except Exception as error:  # whatever a file can provoke is the file's fault
            reason = " ".join(str(error).split())[:600]
            print(f"{path} is not opened: {type(error).__name__}: {reason}", file=sys.stderr)
            sys.exit(1)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
