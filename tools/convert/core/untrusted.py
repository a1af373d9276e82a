"""A separate program that lists the contents of a torch file of unknown origin without trusting it.

    python -P untrusted.py PATH ...        each a file of torch.save, or the folder of a distributed checkpoint

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
import itertools
import json
import pickle
import re
import resource
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

gc.disable()  # as in tools/start.py: this process lives for a second
import torch  # noqa: E402

gc.freeze()
gc.enable()

MEMORY = 4 << 30  # bytes more than torch itself takes
SECONDS = 300  # of processor time for a folder
# seconds for the start, and for each file
OF_START = 20
OF_FILE = 2
MOST = 1_000_000  # values that a file may have, a tensor counted as one and a text by its length
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
# Names, but for a prefix, of what Megatron's distributed optimizer says of steps and the loss
# scale.
SAID = tuple(
    f"optimizer.distributed.dp_group_idx_0.{name}/" for name in ("optimizer", "grad_scaler")
)
METADATA = tuple(
    f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner")
)
_ANEW = "load it with torch and save it again"
STORAGE = re.compile(r".*/data/[^/]+")  # the files of a torch file that hold values
# torch's with more in it
OWN_METADATA = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "MCoreMetadata",
)


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


class Reference(Inert):
    """The number of a tensor that is in another file."""


def limit(seconds: int = SECONDS) -> None:
    """Limit this process: little memory and time, no files to write, no child processes.

    Memory is limited on Linux only: other systems do not say how much of it this process has, or do
    not keep to it.
    """
    limits = {resource.RLIMIT_CPU: seconds}
    limits |= {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: 0}
    with suppress(FileNotFoundError):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = taken + MEMORY
    for what, most in limits.items():
        _, allowed = resource.getrlimit(what)  # the user's own limit, which may only be lowered
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(what, (most, most))


def described(file: Path | BinaryIO) -> Any:
    """Return the contents of a torch file as a JSON value: [kind, content].

    Raises ValueError for more than MOST values and characters, for a small file that refers to the
    same list again and again would be a huge answer, and as `_unpickled` and `_place` do.
    """
    if isinstance(file, Path):
        _require_zip(file)
    storages = _storages(file)
    return _described(_unpickled(file), storages, itertools.count(0))


def _described(
    value: Any, storages: Mapping[int, tuple[int, int]], counted: "itertools.count[int]"
) -> Any:
    for _ in range(1 + len(value) // 64 if isinstance(value, str) else 1):
        if next(counted) > MOST:
            raise ValueError(f"it has more than {MOST:,} values")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        place = _place(value, storages)
        return ["tensor", [dtype, list(value.shape), list(value.stride()), *place]]
    if isinstance(value, Reference):
        return ["reference", int(value.state["tid"])]
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        entries = {_key(k): _described(v, storages, counted) for k, v in value.items()}
        if len(entries) < len(value):
            raise ValueError("it has a table with two keys that are alike but for their kind")
        return ["dict", [*entries.items()]]
    if isinstance(value, list | tuple | torch.Size):
        return ["list", [_described(v, storages, counted) for v in value]]
    if value is None or isinstance(value, str | int | float | bool):
        return ["plain", value]
    if isinstance(value, torch.dtype):
        return ["plain", str(value)]
    return ["other", type(value).__name__]


def _key(key: Any) -> str | int:
    """Return the key of a dict's entry: a whole number, or text, also of a tuple, such as one of
    dtypes."""
    if isinstance(key, str | int):
        return key
    if isinstance(key, tuple):
        return ", ".join(map(str, key))
    return str(key)


def _storages(file: Path | BinaryIO) -> dict[int, tuple[int, int]]:
    """Return where values begin in a torch file, how many bytes from there on are of one storage,
    and their CRC-32.

    Nothing is read by `zipfile` itself: of a file that torch saved without checksums it would say
    that it is damaged.
    """
    found: dict[int, tuple[int, int]] = {}
    try:
        directory = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(
            "it lacks its end, which lists its parts: it was not saved or fetched whole"
        ) from error
    with (
        directory as archive,
        file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened,
    ):
        for entry in archive.infolist():
            order = entry.filename.endswith("/byteorder")
            if not (order or STORAGE.fullmatch(entry.filename)):
                continue
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its values are compressed; torch.save does not do that: {_ANEW}")
            # where a zip says how long its own words before the values are
            opened.seek(entry.header_offset + 26)
            start = entry.header_offset + 30 + sum(struct.unpack("<HH", opened.read(4)))
            opened.seek(start)
            if order and opened.read(min(entry.file_size, 16)) != sys.byteorder.encode():
                raise ValueError(
                    "its numbers have their bytes in the other order: a machine of another "
                    "kind saved it"
                )
            found[start] = entry.file_size, entry.CRC
    return found


def _place(value: torch.Tensor, storages: Mapping[int, tuple[int, int]]) -> tuple[int, int | None]:
    """Return the byte where the first element of a tensor lies, and the CRC-32 of its bytes if the
    file states it.

    It does if the tensor is all of a storage; a checksum of 0 stands for none. torch reckons where
    storages begin, from how torch.save writes a file. Raises ValueError unless one of that size
    begins there, and the tensor lies in it.
    """
    storage: Any = value.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    size = storage.nbytes()
    if start is None or value.is_neg() or value.is_conj():
        raise ValueError("a tensor in it has no values that could be read as they lie")
    there, crc = storages.get(start, (0, 0))
    if size != there and size:
        raise ValueError(
            "its values do not lie where torch.save puts them, so it is damaged or packed "
            f"anew: {_ANEW}"
        )
    spans = [(n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)]
    end = 0 if 0 in value.shape else value.storage_offset() + sum(spans) + 1
    if end * value.dtype.itemsize > size:
        raise ValueError("a tensor in it is larger than its values are")
    whole = value.storage_offset() == 0 and end * value.dtype.itemsize == size
    return start + value.storage_offset() * value.dtype.itemsize, crc or None if whole else None


def _unpickled(file: Path | BinaryIO) -> Any:
    """Return the contents of a torch file, tensors without values. Raises if it is damaged or
    refers to anything harmful.
    """
    if not isinstance(file, Path):
        file.seek(0)
    # reads the names, makes nothing
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    known = ("argparse.Namespace", *DICTS, *REFERENCES)
    if foreign := [name for name in names if not name.startswith(HARMLESS) and name not in known]:
        raise ValueError(
            f"it refers to {', '.join(foreign)}, which is not among the kinds of objects that "
            "are let in"
        )
    stands: list[Callable | tuple[Callable, str]] = [
        (Inert, name) for name in names if name not in known
    ]
    stands += [(dict, name) for name in names if name in DICTS]
    stands += [(Reference, name) for name in names if name in REFERENCES]
    if not isinstance(file, Path):
        file.seek(0)
    with torch.serialization.safe_globals([argparse.Namespace, *stands]):
        return torch.load(file, map_location="meta", weights_only=True)


def _require_zip(file: Path) -> None:
    """Raise if a file is not one of torch.save since torch 1.6, and say what it is instead."""
    with open(file, "rb") as opened:
        begins = opened.read(32)
    if begins.startswith(b"\x80"):
        raise ValueError(
            "it has the form that torch.save had before torch 1.6, which is not read here: "
            "save it anew"
        )
    if begins.startswith(b"version https://git-lfs"):
        raise ValueError(
            "it is a pointer of Git LFS, not the file itself: git lfs pull fetches that"
        )
    if not begins.startswith(b"PK"):
        raise ValueError("it is no file of torch.save")


class Metadata(pickle.Unpickler):
    """Unpickler of a distributed checkpoint's .metadata, with `Record` in place of torch's classes
    that only hold values.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module in METADATA and name[:1] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ") or (
            module,
            name,
        ) == OWN_METADATA:
            return type(name, (Record,), {})
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return {"Size": torch.Size, "_get_layout": str}[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in (
            ("collections", "OrderedDict"),
            ("builtins", "dict"),
            ("builtins", "set"),
        ):
            return {"OrderedDict": dict, "dict": dict, "set": set}[name]
        if f"{module}.{name}".startswith(HARMLESS):
            return Inert
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which is not among the classes that are let in"
        )


class Record:
    """An object with the fields that the pickle gives it."""

    def __new__(cls, *args: Any) -> "Record":
        made = super().__new__(cls)
        made.args = args  # type: ignore[attr-defined]
        return made

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __hash__(self) -> int:
        return hash(json.dumps(plain(self), default=repr, sort_keys=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and plain(self) == plain(other)


def plain(value: Any) -> Any:
    """Return a Record as a dict of its fields, recursively."""
    if isinstance(value, Record):
        return {k: plain(v) for k, v in vars(value).items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


class Part(io.RawIOBase):
    """Some bytes of an open file as a file of their own: only those that are asked for are read."""

    def __init__(self, file: io.RawIOBase, start: int, length: int) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        )
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.at)
        done = self.file.readinto(memoryview(buffer)[: max(0, self.length - self.at)]) or 0
        self.at += done
        return done


def distributed(folder: Path) -> Any:
    """Return the tensors of a distributed checkpoint: name -> shape and chunks, each with its dtype
    and its place in a file.

    Also returns the contents of its distributed optimizer besides tensors: name -> content, and its
    place.
    """
    with open(folder / ".metadata", "rb") as file:
        metadata = Metadata(file).load()
    places = {}
    for index, info in metadata.storage_data.items():
        offset = tuple(index.offset) if getattr(index, "offset", None) is not None else None
        places[index.fqn, offset] = info

    def place(name: str, offset: tuple[int, ...] | None) -> Any:
        if (name, offset) not in places:
            raise ValueError(f".metadata does not say where {name} lies, or one of its parts")
        return places[name, offset]

    tensors = {}
    said = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            chunks = [
                _chunk(
                    folder,
                    place(name, tuple(chunk.offsets)),
                    list(chunk.offsets),
                    list(chunk.sizes),
                )
                for chunk in entry.chunks
            ]
            tensors[name] = {"shape": list(entry.size), "chunks": chunks}
        elif any(known in name for known in SAID):
            said[name] = _inside(folder, place(name, None))
    return {"tensors": tensors, "said": said}


def _inside(folder: Path, info: Any) -> dict[str, Any]:
    """Return the contents of a file of torch.save inside of a file, and the byte where it begins in
    the outer one."""
    file = folder / info.relative_path
    if file.parent != folder or not file.is_file():
        raise ValueError(f".metadata names {info.relative_path}, which is not in the folder")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(
            f"{file.name} holds values that are transformed, such as compressed, which are not read"
        )
    if not 0 <= info.offset <= info.offset + info.length <= file.stat().st_size:
        raise ValueError(
            f".metadata names bytes of {file.name} that it does not have: it is not whole"
        )
    with open(file, "rb", buffering=0) as opened:
        inside = io.BufferedReader(Part(opened, info.offset, info.length))
        return {"file": file.name, "start": info.offset, "content": described(inside)}


def _chunk(folder: Path, info: Any, offset: list[int], shape: list[int]) -> dict[str, Any]:
    inside = _inside(folder, info)
    kind, content = inside["content"]
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
    folders = any(Path(path).is_dir() for path in paths)
    limit(SECONDS if folders else OF_START + OF_FILE * len(paths))
    answers = []
    for path in map(Path, paths):
        try:
            answers.append(distributed(path) if path.is_dir() else described(path))
        except Exception as error:  # whatever a file can provoke is the file's fault
            reason = " ".join(str(error).split())[:600]
            print(f"{path} is not opened: {type(error).__name__}: {reason}", file=sys.stderr)
            sys.exit(1)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
