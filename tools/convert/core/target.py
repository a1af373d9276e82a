"""Writing a model in any format: files are allocated first, then tensors are filled in one by one.

A target is written to a hidden folder beside its final name. A journal in it has a line for every
tensor that is written, with a checksum of its values; an interrupted conversion resumes after the
last line, and since every tensor has a place of its own, it leaves the same bytes. Then everything
is read back through the reader of the target's format, each tensor's checksum is compared, and only
then the folder gets its name. A conversion that is refused would be refused again, so it leaves
nothing.
"""

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaprec.checkpoint.digests import raw
from megaprec.durable import read_whole, sync
from megaprec.errors import UserError
from megaprec.parsing import parse_json
from tools.convert.core.finite import NotFinite
from tools.convert.core.source import Source
from tools.convert.core.tensors import fill

JOURNAL = "journal.jsonl"
# (bytes written or compared since the last call, what is being done)
Report = Callable[[int, str], None]


@dataclass(frozen=True)
class Place:
    """The place of a part of a tensor. take: returns the part of the joined tensor, in the file's
    dtype."""

    file: str
    start: int
    take: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Write:
    """One tensor of the target's format: the keys of the logical tensors that it is joined of, and
    its places.

    straight: it is one logical tensor at one place, row by row; it is then never in memory as a
        whole.
    """

    name: str
    keys: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    places: tuple[Place, ...]
    straight: bool = False


@dataclass(frozen=True)
class Target:
    """The writer of a format for one source.

    describe: JSON value that identifies this conversion; an interrupted one is resumed only if it
    is equal. dtypes: key -> dtype in which it will be read back. reserve: creates the files in a
    folder (unless the flag says that they exist) and returns the writes. finish: writes everything
    but tensors. reopen: reads the folder. left_out: parts of the model that the format lacks.
    """

    describe: dict[str, Any]
    size: int
    dtypes: dict[str, torch.dtype]
    reserve: Callable[[Path, bool], list[Write]]
    finish: Callable[[Path], None]
    reopen: Callable[[Path], Source]
    left_out: tuple[str, ...] = ()


def convert(source: Source, target: Target, destination: Path, report: Report) -> list[str]:
    """Write `source` to `destination`, which must not exist, completely or not at all. Raises
    UserError.

    Returns a line for each tensor that has numbers that are NaN or infinite.
    """
    damage = NotFinite()
    partial = destination.with_name(f".{destination.name}.partial")
    with _disk_told(destination):
        journal = Journal(partial / JOURNAL, _identity(source, target))
        if not journal.begun:
            _make_room(partial, target.size)
        with _nothing_left(partial):
            _fill(source, target, partial, journal, report)
            _compare(target.reopen(partial), journal.by_key(), damage, report)
        journal.path.unlink()
        _publish(partial, destination)
    return damage.lines((key, source.dtype(key), dtype) for key, dtype in target.dtypes.items())


def _fill(
    source: Source, target: Target, partial: Path, journal: "Journal", report: Report
) -> None:
    """Write everything that is not written yet."""
    writes = _ordered(target.reserve(partial, not journal.begun), source)
    _check_complete(writes, target, source)
    journal.begin()
    for write in writes:
        if write.name not in journal.digests:
            journal.add(write.name, _write(write, source, target, partial))
        report(_nbytes(write.keys, source, target), f"writing {write.name}")
    target.finish(partial)


@contextmanager
def _nothing_left(partial: Path) -> Iterator[None]:
    """Remove the folder if the conversion is refused. After a full disk or a kill it stays, to be
    resumed."""
    try:
        yield
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _publish(partial: Path, destination: Path) -> None:
    """Flush the folder to disk and give it its name."""
    for path in partial.rglob("*"):
        sync(path)
    partial.rename(destination)
    sync(destination.parent)


class Journal:
    """The journal of a conversion: a line that identifies it, then a line per tensor that was
    written."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = identity
        lines = self._whole_lines()
        self.begun = bool(lines) and lines[0] == identity
        self.digests: dict[
            str, dict[str, str]
        ] = {}  # checksums of logical tensors by key, by name of the target's tensor
        if self.begun:
            self.digests = {line["name"]: line["digests"] for line in lines[1:]}

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines, without a last one that was truncated by a kill."""
        if not self.path.is_file():
            return []
        content = read_whole(self.path)
        whole = content[: content.rfind(b"\n") + 1]
        os.truncate(self.path, len(whole))
        try:
            lines = [parse_json(line) for line in whole.splitlines()]
            assert all(isinstance(line, dict) for line in lines)
            return [
                *lines[:1],
                *({"name": line["name"], "digests": line["digests"]} for line in lines[1:]),
            ]
        except (ValueError, KeyError, AssertionError) as error:
            raise UserError(
                f"{self.path} is damaged: remove {self.path.parent} to convert anew"
            ) from error

    def begin(self) -> None:
        """Record that the files exist, unless that is recorded already."""
        if not self.begun:
            self.path.write_text(json.dumps(self.identity) + "\n")

    def add(self, name: str, digests: dict[str, str]) -> None:
        """Record that a tensor of the target is written."""
        self.digests[name] = digests
        with open(self.path, "a") as file:
            file.write(json.dumps({"name": name, "digests": digests}) + "\n")

    def by_key(self) -> dict[str, str]:
        """Return the digest of every logical tensor."""
        return {key: value for digests in self.digests.values() for key, value in digests.items()}


@contextmanager
def _disk_told(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{destination}: {os.strerror(error.errno).lower()}; make room and run the "
                "same command again"
            ) from error
        raise UserError(f"{destination} cannot be written: {error}") from error


def _identity(source: Source, target: Target) -> dict[str, Any]:
    """Return a line that identifies the conversion, including the files of the source."""
    files = sorted(f for f in source.path.rglob("*") if f.is_file())
    stamps = [
        (str(f.relative_to(source.path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files
    ]
    seen = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    return {"target": target.describe, "source": str(source.path.absolute()), "files": seen}


def _make_room(partial: Path, size: int) -> None:
    """Return an empty folder on a disk with enough room."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if size > free:
        partial.rmdir()
        raise UserError(
            f"{partial.parent} has {free:,} bytes free, and {size:,} are needed: make room"
        )


def _ordered(writes: list[Write], source: Source) -> list[Write]:
    """Return the writes in the order of the source, so that each of its tensors is read once."""
    place = {key: number for number, key in enumerate(source.shapes)}
    return sorted(writes, key=lambda write: min(place.get(key, -1) for key in write.keys))


def _check_complete(writes: Sequence[Write], target: Target, source: Source) -> None:
    """Raise UserError unless each logical tensor of the source is written exactly once."""
    wanted = [key for write in writes for key in write.keys]
    twice = [key for key, count in Counter(wanted).items() if count > 1]
    assert not twice, f"the table of the target has {twice} twice"
    missing = sorted(set(wanted) - source.shapes.keys())
    surplus = sorted(set(target.dtypes) - set(wanted))
    problems = [f"{source.path} lacks {key}, which the target needs" for key in missing]
    problems += [f"{source.path} holds {key}, which the target has no place for" for key in surplus]
    if problems:
        raise UserError(*problems[:10])


def _nbytes(keys: Sequence[str], source: Source, target: Target) -> int:
    return sum(prod(source.shapes[key]) * target.dtypes[key].itemsize for key in keys)


def _write(write: Write, source: Source, target: Target, partial: Path) -> dict[str, str]:
    if write.straight:
        return {write.keys[0]: _copy(write, source, target.dtypes[write.keys[0]], partial)}
    parts = [source.read(key) for key in write.keys]
    sums = {
        key: checksum(target.dtypes[key], part.shape, [part.to(target.dtypes[key])])
        for key, part in zip(write.keys, parts, strict=True)
    }
    whole = write.join(parts)
    del parts  # memory that is not needed twice
    for place in write.places:
        fill(partial / place.file, place.start, place.take(whole))
    return sums


def _copy(write: Write, source: Source, dtype: torch.dtype, partial: Path) -> str:
    """Write a tensor piece by piece; return its checksum."""
    (key,), (place,) = write.keys, write.places

    def written() -> Iterator[Tensor]:
        at = place.start
        for piece in source.pieces(key):
            values = place.take(piece)
            fill(partial / place.file, at, values)
            at += values.nbytes
            yield values

    return checksum(dtype, source.shapes[key], written())


def _compare(written: Source, digests: dict[str, str], damage: NotFinite, report: Report) -> None:
    """Raise UserError unless the target reads back as it was written. Counts numbers that are not
    finite."""
    if written.shapes.keys() != digests.keys():
        raise UserError(
            f"{written.path} has other tensors than were written: "
            f"{written.shapes.keys() ^ digests.keys()}"
        )
    for key, expected in digests.items():
        shape = written.shapes[key]
        dtype = written.dtype(key)
        if checksum(dtype, shape, damage.seen(key, written.pieces(key))) != expected:
            raise UserError(
                f"{written.path}: {key} does not read back as it was written; is the disk sound?"
            )
        report(prod(shape) * dtype.itemsize, f"checking {key}")


def checksum(dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> str:
    """Return the CRC-32 of dtype, shape and values.

    It detects errors of disks and readers; SHA-256 would also detect forgeries, but takes three
    times as long.
    """
    made = zlib.crc32(f"{dtype} {tuple(shape)}\n".encode())
    for piece in pieces:
        made = zlib.crc32(raw(piece), made)
    return f"{made:08x}"
