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

from megaprec.checkpoint.digests import tensor_bytes
from megaprec.checkpoint.object_store import sizes
from megaprec.durable import REMEDIES, naming_file, put_text, read_whole, sync
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_json
from megaprec.tokens.places import is_remote
from tools.convert.core.finite import NotFinite
from tools.convert.core.source import Source
from tools.convert.core.tensors import fill

JOURNAL = "journal.jsonl"
MOST_PROBLEMS = 10  # lines of a refusal
# (bytes written or compared since the last call, what is being done)
Report = Callable[[int, str], None]


@dataclass(frozen=True)
class Location:
    """The location of a part of a tensor in the target's files.

    start: byte of its first element.
    take: returns the part of the joined tensor, in the file's dtype.
    """

    file: str
    start: int
    take: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Write:
    """One tensor of the target's format.

    keys: of the logical tensors that it is joined of.
    locations: of its parts.
    straight: it is one logical tensor at one location, row by row; it is then never in memory as a
        whole.
    """

    name: str
    keys: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    locations: tuple[Location, ...]
    straight: bool = False


@dataclass(frozen=True)
class Target:
    """The writer of a format for one source.

    describe: JSON value that identifies this conversion; an interrupted one is resumed only if it
        is equal.
    size: bytes that the target takes.
    dtypes: key -> dtype in which it will be read back.
    reserve: creates the files in a folder (unless the flag says that they exist) and returns the
        writes.
    finish: writes everything but tensors.
    reopen: reads the folder.
    left_out: parts of the model that the format lacks.
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
    # Beside the destination, so that it gets its name in one step on the same disk.
    partial = destination.with_name(f".{destination.name}.partial")
    with _report_disk_errors(destination):
        journal = ConversionJournal(partial / JOURNAL, _identity(source, target))
        if not journal.begun:
            _make_folder(partial, target.size)
        with _remove_if_refused(partial):
            _write_all(source, target, partial, journal, report)
            # Read back by the format's own reader: a wrong file is found before it has its name.
            _compare(target.reopen(partial), journal.by_key(), damage, report)
        # Only the files of the format remain.
        journal.path.unlink()
        _publish(partial, destination)
    casts = []
    for tensor_key, dtype in target.dtypes.items():
        casts.append((tensor_key, source.dtype(tensor_key), dtype))
    return damage.lines(casts)


def _write_all(
    source: Source, target: Target, partial: Path, journal: "ConversionJournal", report: Report
) -> None:
    """Write everything that is not written yet."""
    # All files get their room first: a full disk is found before the work.
    writes = _in_order_of_source(target.reserve(partial, not journal.begun), source)
    _check_complete(writes, target, source)
    journal.begin()
    for tensor_write in writes:
        if tensor_write.name not in journal.digests:
            digests = _write(tensor_write, source, target, partial)
            journal.add(tensor_write.name, digests)
        nbytes = _nbytes(tensor_write.keys, source, target)
        report(nbytes, f"writing {tensor_write.name}")
    target.finish(partial)


@contextmanager
def _remove_if_refused(partial: Path) -> Iterator[None]:
    """Context manager that removes the folder if the conversion is refused. After a full disk or a
    kill it stays, to be resumed."""
    try:
        yield
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _publish(partial: Path, destination: Path) -> None:
    """Flush the folder to disk and give it its name."""
    # A name for files that are not on the disk would promise what a power cut takes away.
    for path in partial.rglob("*"):
        sync(path)
    partial.rename(destination)
    sync(destination.parent)


class ConversionJournal:
    """The journal of a conversion: a line that identifies it, then a line per tensor that was
    written."""

    def __init__(self, journal_path: Path, identity: dict[str, Any]) -> None:
        self.path = journal_path
        self.identity = identity
        lines = self._read_complete_lines()
        self.begun = bool(lines) and lines[0] == identity
        # Checksums of logical tensors by key, by name of the target's tensor.
        self.digests: dict[str, dict[str, str]] = {}
        if self.begun:
            self.digests = {line["name"]: line["digests"] for line in lines[1:]}

    def _read_complete_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines, without a last one that was truncated by a kill."""
        if not self.path.is_file():
            return []
        content = read_whole(self.path)
        length = content.rfind(b"\n") + 1
        complete = content[:length]
        # The next line must not be appended to half of one.
        os.truncate(self.path, len(complete))
        try:
            lines = [parse_json(line) for line in complete.splitlines()]
            if not all(isinstance(line, dict) for line in lines):
                raise ValueError("a line is no object")
            writes = [{"name": line["name"], "digests": line["digests"]} for line in lines[1:]]
        except (ValueError, KeyError) as error:
            raise UserError.of(
                "convert.plan_damaged", path=self.path, parent=self.path.parent
            ) from error
        return [*lines[:1], *writes]

    def begin(self) -> None:
        """Record that the files exist, unless that is recorded already."""
        if not self.begun:
            put_text(self.path, json.dumps(self.identity) + "\n")

    def add(self, name: str, digests: dict[str, str]) -> None:
        """Record that a tensor of the target is written."""
        self.digests[name] = digests
        with naming_file(self.path), open(self.path, "a") as file:
            file.write(json.dumps({"name": name, "digests": digests}) + "\n")

    def by_key(self) -> dict[str, str]:
        """Return the digest of every logical tensor."""
        by_key: dict[str, str] = {}
        for digests in self.digests.values():
            by_key |= digests
        return by_key


@contextmanager
def _report_disk_errors(destination: Path) -> Iterator[None]:
    """Context manager that raises UserError in place of OSError, with a remedy for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError.of(
                "convert.disk_told",
                destination=destination,
                reason=os.strerror(error.errno).lower(),
                remedy=REMEDIES[error.errno],
            ) from error
        raise UserError.of("convert.not_writable", destination=destination, error=error) from error


def _identity(source: Source, target: Target) -> dict[str, Any]:
    """Return a line that identifies the conversion, including the files of the source."""
    stamps: list[Any] = []
    # Sizes and times tell a changed source; to read gigabytes for digests would take too long.
    for folder in source.folders:
        if is_remote(folder):
            # what is saved at a URL is never replaced
            stamps.append((str(folder), sorted(sizes(folder).items())))
            continue
        files = [path for path in folder.rglob("*") if path.is_file()]
        for file in sorted(files):
            status = file.stat()
            name = str(file.relative_to(folder))
            stamps.append((name, status.st_size, status.st_mtime_ns))
    # A source that was changed in between is converted anew, not resumed.
    digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    identity = {
        "target": target.describe,
        "source": _absolute(source.path),
        "files": digest,
    }
    if source.facts.averaged:
        identity["ema"] = True
    if source.facts.merged:
        identity["merged"] = [
            [_absolute(merged_input.path), merged_input.weight]
            for merged_input in source.facts.merged
        ]
    return identity


def _absolute(path: Path) -> str:
    return str(path) if is_remote(path) else str(path.absolute())


def _make_folder(partial: Path, size: int) -> None:
    """Make an empty folder. Raises UserError if its disk has not `size` bytes free."""
    # What another conversion left there cannot be resumed.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if size > free:
        partial.rmdir()
        raise UserError.of("convert.no_room", parent=partial.parent, free=free, size=size)


def _in_order_of_source(writes: list[Write], source: Source) -> list[Write]:
    """Return the writes in the order of the source, so that each of its tensors is read once."""
    positions = {tensor_key: number for number, tensor_key in enumerate(source.shapes)}

    def first_position(write: Write) -> int:
        # -1 for a tensor that the source lacks: `_check_complete` refuses it
        return min(positions.get(tensor_key, -1) for tensor_key in write.keys)

    return sorted(writes, key=first_position)


def _check_complete(writes: Sequence[Write], target: Target, source: Source) -> None:
    """Raise UserError unless each logical tensor of the source is written exactly once."""
    needed: list[str] = []
    for tensor_write in writes:
        needed += tensor_write.keys
    repeated = [tensor_key for tensor_key, count in Counter(needed).items() if count > 1]
    assert not repeated, f"the table of the target has {repeated} twice"
    missing = sorted(set(needed) - source.shapes.keys())
    surplus = sorted(set(target.dtypes) - set(needed))
    problems = [Problem.of("convert.source_lacks", path=source.path, key=key) for key in missing]
    for key in surplus:
        problems.append(Problem.of("convert.source_surplus", path=source.path, key=key))
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])


def _nbytes(keys: Sequence[str], source: Source, target: Target) -> int:
    """Return the bytes that logical tensors take in the target."""
    nbytes = 0
    for tensor_key in keys:
        nbytes += prod(source.shapes[tensor_key]) * target.dtypes[tensor_key].itemsize
    return nbytes


def _write(tensor_write: Write, source: Source, target: Target, partial: Path) -> dict[str, str]:
    """Write one tensor of the target; return the checksums of its logical tensors by key."""
    if tensor_write.straight:
        (tensor_key,) = tensor_write.keys
        dtype = target.dtypes[tensor_key]
        return {tensor_key: _copy_pieces(tensor_write, source, dtype, partial)}
    parts = [source.read(tensor_key) for tensor_key in tensor_write.keys]
    digests = _checksums(tensor_write.keys, parts, target)
    joined = tensor_write.join(parts)
    del parts  # memory that is not needed twice
    for location in tensor_write.locations:
        fill(partial / location.file, location.start, location.take(joined))
    return digests


def _checksums(keys: Sequence[str], parts: Sequence[Tensor], target: Target) -> dict[str, str]:
    """Return the checksums of logical tensors by key, of their values as they will be read back."""
    digests = {}
    for tensor_key, part in zip(keys, parts, strict=True):
        dtype = target.dtypes[tensor_key]
        digests[tensor_key] = checksum(dtype, part.shape, [part.to(dtype)])
    return digests


def _copy_pieces(tensor_write: Write, source: Source, dtype: torch.dtype, partial: Path) -> str:
    """Write a tensor piece by piece; return its checksum.

    partial: the folder of the unfinished conversion. dtype: of the tensor in the target.
    """
    (tensor_key,) = tensor_write.keys
    (location,) = tensor_write.locations

    def written_pieces() -> Iterator[Tensor]:
        """Yield the pieces of the tensor, each after it was written to the file."""
        # `checksum` takes the pieces, and each is written as it is taken: one is in memory
        start = location.start
        for piece in source.pieces(tensor_key):
            values = location.take(piece)
            fill(partial / location.file, start, values)
            start += values.nbytes
            yield values

    return checksum(dtype, source.shapes[tensor_key], written_pieces())


def _compare(written: Source, digests: dict[str, str], damage: NotFinite, report: Report) -> None:
    """Raise UserError unless the target reads back as it was written. Counts numbers that are not
    finite."""
    if written.shapes.keys() != digests.keys():
        raise UserError.of(
            "convert.written_differs",
            path=written.path,
            shapes=written.shapes.keys() ^ digests.keys(),
        )
    for tensor_key, expected in digests.items():
        shape = written.shapes[tensor_key]
        dtype = written.dtype(tensor_key)
        # Counted on the way, so that no tensor is read for that alone.
        pieces = damage.seen(tensor_key, written.pieces(tensor_key))
        if checksum(dtype, shape, pieces) != expected:
            raise UserError.of("convert.read_back_differs", path=written.path, key=tensor_key)
        report(prod(shape) * dtype.itemsize, f"checking {tensor_key}")


def checksum(dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> str:
    """Return the CRC-32 of dtype, shape and values.

    It detects errors of disks and readers; SHA-256 would also detect forgeries, but takes three
    times as long.
    """
    crc = zlib.crc32(f"{dtype} {tuple(shape)}\n".encode())
    for piece in pieces:
        crc = zlib.crc32(tensor_bytes(piece), crc)
    return f"{crc:08x}"
