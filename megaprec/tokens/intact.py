"""Integrity check of a data set before training: its files are unchanged, and its ids fit the
vocabulary.

A token with a flipped bit is still a valid token, so only a digest detects it: `build` records the
digests of both files in PREFIX.json. A file of up to WHOLE bytes is read once from end to end, for
its digest and its smallest and largest id. The result is cached on this machine and reused while
the file's size, times and inode are unchanged, so that the next start reads nothing.

Of larger files only some blocks are read at a start, different ones each time: their ids are
checked against the vocabulary and their digests against the record, which also has the smallest and
largest id of the whole file. At a URL files above WHOLE_REMOTE bytes are treated so, unless their
record has a digest of the whole file alone. The digest of a larger index
is that of its last full check (`index_check`). `megaprec data verify` reads any file completely,
and its result is reused at the next start.
"""

import hashlib
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megaprec.durable import reading
from megaprec.errors import Problem, UserError
from megaprec.parsing import parse_json, read_regular
from megaprec.tokens.copies import file_here
from megaprec.tokens.files import cache_folder, with_suffix, write_whole
from megaprec.tokens.index_check import SETTLED, known_check
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.places import is_remote
from megaprec.tokens.ranges import RangeReader, RemoteFile
from megaprec.url_secrets import masked

WHOLE = 10 << 30  # bytes: files up to this size are read from end to end
BLOCK = 64 << 20  # bytes per digest in the record of a larger file
SAMPLED = 16  # blocks of a larger file that are read at a start
WHOLE_REMOTE = SAMPLED * BLOCK  # bytes: files at a URL up to this size are read from end to end
READ = 1 << 22  # bytes read at a time; a multiple of the size of every id dtype
# keys of a record, of which those of earlier versions lack some
MASK_DIGEST = "loss_mask_sha256"  # key of a record: digest of the loss mask, if there is one
NUMBERS = ("vocab_size", "documents", "tokens", "chars", "bytes", "unknown")


@dataclass(frozen=True)
class FileScan:
    """The result of reading a file.

    sha256: the digest of the file, or of some of its blocks.
    low, high: smallest and largest id; 0 and -1 if there is none.
    """

    sha256: str
    low: int = 0
    high: int = -1


@dataclass(frozen=True)
class DataSetContents:
    """The identity of a data set: its size, and the digests of both files.

    sampled: True if bin_sha256 is the digest of some blocks only.
    low, high: smallest and largest id that was read.
    loss_mask_sha256: of the loss mask; "" if there is none.
    """

    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str
    sampled: bool
    low: int
    high: int
    loss_mask_sha256: str = ""


def contents_of(
    dataset: IndexedDataset, remedy: str = "copy it again or build it again"
) -> DataSetContents:
    """Return the identity of a data set, after a check of those of its files that this machine has
    not read before.

    remedy: advice at the end of the error line.
    Raises UserError for a file that has changed since it was built.
    """
    dataset.require_integer_ids()
    record = read_record(dataset.prefix)
    bin_file = with_suffix(dataset.prefix, ".bin")
    idx_digest = _digest_of_index(dataset)
    _compare(record, with_suffix(dataset.prefix, ".idx"), idx_digest, remedy)
    sampled = False
    # whole, if it is small or was read whole before; else blocks, compared with the record; else
    # always the same blocks, whose digest stands for the file
    if _is_read_whole(dataset, record) or _cached_scan(bin_file, dataset.dtype) is not None:
        scan = scan_file(bin_file, dataset.dtype)
        _compare(record, bin_file, scan.sha256, remedy)
        bin_digest = scan.sha256
    elif record is not None:
        scan = _check_some_blocks(bin_file, dataset.dtype, record, remedy)
        bin_digest = record["bin_sha256"]
    else:
        scan = _cached_scan(bin_file, dataset.dtype, sampled=True)
        if scan is None:
            scan = _check_some_blocks(bin_file, dataset.dtype, None, remedy)
        bin_digest = scan.sha256
        sampled = True
    low, high = _range_with_record(scan, record)
    return DataSetContents(
        tokens=dataset.num_tokens,
        documents=dataset.num_documents,
        bin_sha256=bin_digest,
        idx_sha256=idx_digest,
        sampled=sampled,
        low=low,
        high=high,
        loss_mask_sha256=_digest_of_mask(dataset, record, remedy),
    )


def _is_read_whole(dataset: IndexedDataset, record: dict[str, Any] | None) -> bool:
    """Return True if the .bin of a data set is read from end to end at its first start."""
    size = dataset.stored_bytes
    if size > WHOLE or not is_remote(dataset.prefix):
        return size <= WHOLE
    # a record without digests of blocks can be compared with the whole file alone
    has_no_blocks = record is not None and not _recorded_blocks(record)
    return has_no_blocks or size <= WHOLE_REMOTE


def _digest_of_mask(dataset: IndexedDataset, record: dict[str, Any] | None, remedy: str) -> str:
    """Return the SHA-256 of the loss mask of a data set; "" if it has none. Raises UserError unless
    its record, if there is one, says so."""
    file = with_suffix(dataset.prefix, LOSS_MASK)
    recorded = record.get(MASK_DIGEST, "") if record else None
    digest = scan_file(file_here(dataset.prefix, LOSS_MASK)).sha256 if dataset.has_mask else ""
    if recorded not in (None, digest):
        # training without a mask, or with another one, would be another training
        if not digest:
            raise UserError.of("data.loss_mask_missing", file=file, remedy=remedy)
        raise UserError.of("data.digest_differs", file=file, remedy=remedy)
    return digest


def _digest_of_index(dataset: IndexedDataset) -> str:
    """Return the SHA-256 of an index; of a large one, that of a recorded check, if there is one."""
    idx_file = dataset.idx_file
    if idx_file.stat().st_size > WHOLE:
        checked = known_check(idx_file, dataset.stored_bytes)
        if checked is not None:
            return checked.sha256
    return scan_file(idx_file).sha256


def _range_with_record(scan: FileScan, record: dict[str, Any] | None) -> tuple[int, int]:
    """Return the smallest and largest of the ids that were read and those that the record of the
    build names."""
    # of a large file only some blocks were read, and the build has seen every id
    if record is None or not record.get("ids"):
        return scan.low, scan.high
    built_low, built_high = record["ids"]
    return min(scan.low, built_low), max(scan.high, built_high)


def check_vocabulary(
    dataset: IndexedDataset,
    contents: DataSetContents,
    vocab: int,
) -> None:
    """Raise UserError if an id that was read is outside [0, vocab); the line names the first such
    id and its place."""
    if contents.low >= 0 and contents.high < vocab:
        return
    token = dataset.first_outside(vocab)
    first = ""
    if token is not None:
        token_id = dataset.tokens(token, 1)[0]
        first = f"; the first is {token_id} {describe_token_place(dataset, token)}"
    raise UserError.of(
        "data.vocabulary_too_small",
        prefix=dataset.prefix,
        low=contents.low,
        high=contents.high,
        vocab=vocab,
        first=first,
        needed=contents.high + 1,
    )


def read_record(prefix: Path) -> dict[str, Any] | None:
    """Return the record PREFIX.json of a data set's build, None if there is none.

    Raises UserError if it is damaged.
    """
    path = file_here(prefix, ".json")
    if is_remote(path) or not os.path.lexists(path):
        return None
    # Whatever is wrong with the record, the error is the same.
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = dict(parse_json(read_regular(path)))
        low, high = record.get("ids", (0, -1))  # earlier versions recorded none
        digests = (record["bin_sha256"], record["idx_sha256"])
        numbers = [low, high, record.get("eos") or 0]
        numbers += [record.get(name, 0) for name in NUMBERS]
        has_digests = all(isinstance(digest, str) for digest in digests)
        has_numbers = all(type(number) is int for number in numbers)  # a bool is none
        if has_digests and has_numbers:
            return record
    raise UserError.of("data.record_damaged", path=path)


def scan_file(
    file: Path,
    dtype: np.dtype | None = None,
    again: bool = False,
) -> FileScan:
    """Return the SHA-256 of a whole file, and the range of its ids.

    dtype: of the ids; None: the file has none.
    again: read the file even if its result is cached on this machine.
    """
    if not again:
        cached = _cached_scan(file, dtype)
        if cached is not None:
            return cached
    began = time.time_ns()
    with _opened(file) as opened:
        before = _state_of(opened, dtype)
        scan = _scan(opened, dtype)
        after = _state_of(opened, dtype)
    # a file that changed a moment ago may change again without new times
    if before == after and _is_settled(before, began):
        _cache_scan(file, before, scan)
    return scan


def block_digests(file: Path) -> list[str]:
    """Return the SHA-256 of each BLOCK of a file."""
    digests: list[str] = []
    with reading(file) as opened:
        while block := opened.read(BLOCK):
            digests.append(hashlib.sha256(block).hexdigest())
    return digests


def describe_bad_id(
    dataset: IndexedDataset,
    sample: int,
    spans: Sequence[tuple[int, int]],
    vocab: int,
) -> Problem | None:
    """Return the problem of a sample that has an id outside the vocabulary; None if it has none.

    spans: the tokens [start, stop) that the sample is read from. The problem names the first such
        id and its place.
    """
    for start, stop in spans:
        ids = dataset.tokens(start, stop - start)
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if not len(wrong):
            continue
        index = int(wrong[0])
        return Problem.of(
            "data.sample_outside_vocabulary",
            sample=sample,
            token_id=int(ids[index]),
            place=describe_token_place(dataset, start + index),
            vocab=vocab,
        )
    return None


def describe_token_place(dataset: IndexedDataset, token: int) -> str:
    """Return the place of a token in the data set, in words."""
    document = int(dataset.documents_of(token, 1)[0])
    place = dataset.stored_place(token)
    return f"in document {document} of {with_suffix(dataset.prefix, '.bin')}, token {place}"


def _compare(
    record: dict[str, Any] | None,
    file: Path,
    digest: str,
    remedy: str,
) -> None:
    """Raise UserError if a file has another digest than its record, if there is one."""
    if record is not None and record[f"{file.suffix[1:]}_sha256"] != digest:
        raise UserError.of("data.digest_differs", file=file, remedy=remedy)


def _scan(file: BinaryIO | RangeReader, dtype: np.dtype | None) -> FileScan:
    """Read a file from its position to its end. dtype: as in `scan_file`."""
    digest = hashlib.sha256()
    low, high = _scan_into(digest, file, dtype)
    return FileScan(digest.hexdigest(), low, high)


def _scan_into(
    digest: "hashlib._Hash",
    file: BinaryIO | RangeReader,
    dtype: np.dtype | None,
    limit: float = math.inf,
) -> tuple[int, int]:
    """Add the next `limit` bytes of a file to a digest; return their smallest and largest id, or
    (0, -1) if there are none.

    dtype: of the ids; None: the file has none.
    """
    smallest: list[int] = []
    largest: list[int] = []
    remaining = limit
    while chunk := file.read(int(min(READ, remaining))):
        remaining -= len(chunk)
        digest.update(chunk)
        if dtype is not None:
            ids = np.frombuffer(chunk, dtype)
            smallest.append(int(ids.min()))
            largest.append(int(ids.max()))
    return min(smallest, default=0), max(largest, default=-1)


def _check_some_blocks(
    file: Path,
    dtype: np.dtype,
    record: dict[str, Any] | None,
    remedy: str,
) -> FileScan:
    """Read some blocks of a large file: random ones, which are compared with the record, or,
    without a record, always the same ones.

    Return the digest of the blocks that were read, and the range of their ids. Without a record
    this is cached on this machine. Raises UserError for a block of another digest than the
    record's.
    """
    expected = _recorded_blocks(record)  # digests of all blocks
    digest = hashlib.sha256()
    smallest: list[int] = []
    largest: list[int] = []
    began = time.time_ns()
    with _opened(file) as opened:
        before = _state_of(opened, dtype, sampled=True)
        block_count = -(-before["size"] // BLOCK)  # rounded up
        for number in _checked_blocks(block_count, record):
            opened.seek(number * BLOCK)
            if expected:  # each block has a digest of its own
                digest = hashlib.sha256()
            low, high = _scan_into(digest, opened, dtype, BLOCK)
            if expected and expected[number] != digest.hexdigest():
                raise UserError.of(
                    "data.block_digest_differs", file=file, number=number, remedy=remedy
                )
            smallest.append(low)
            largest.append(high)
    scan = FileScan(digest.hexdigest(), min(smallest), max(largest))
    if record is None and _is_settled(before, began):
        _cache_scan(file, before, scan)
    return scan


def _checked_blocks(count: int, record: dict[str, Any] | None) -> Iterable[int]:
    """Return the numbers of the blocks of a large file that are read at a start."""
    if not record:
        return _spread(count)
    # Others at each start, whatever seed the run has: all blocks are read in the end.
    generator = random.SystemRandom()
    return sorted(generator.sample(range(count), min(SAMPLED, count)))


def _recorded_blocks(record: dict[str, Any] | None) -> list[str]:
    """Return the digests of all blocks; empty if the record has none of blocks of this size."""
    blocks = (record or {}).get("blocks") or {}
    if blocks.get("bytes") != BLOCK:
        return []
    return blocks.get("sha256", [])


def _spread(count: int) -> Iterable[int]:
    """Return the numbers of at most SAMPLED of `count` blocks, evenly spaced from the first to the
    last."""
    last = count - 1
    intervals = max(1, SAMPLED - 1)
    # a set: fewer blocks than SAMPLED come several times
    numbers = {round(step * last / intervals) for step in range(SAMPLED)}
    return sorted(numbers)


def _cache_path(file: Path) -> Path | None:
    """Return the path of this machine's cache entry for a file; None without a home folder."""
    cache = cache_folder()
    if cache is None:
        return None
    # with the machine's name: several machines may share a home folder
    place = file if is_remote(file) else file.resolve()
    identity = f"{platform.node()}\0{place}"
    name = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
    return cache / "seen" / f"{name[:32]}.json"


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO | RangeReader]:
    """Open a file of this machine, or one at a URL, for reading."""
    if is_remote(file):
        yield RangeReader(RemoteFile(file))
        return
    with reading(file) as opened:
        yield opened


def _state_of(
    opened: BinaryIO | RangeReader,
    dtype: np.dtype | None,
    sampled: bool = False,
) -> dict[str, Any]:
    """Return the properties of a file that change when the file changes, and how it was read.

    sampled: only some blocks of it were read.
    """
    state: dict[str, Any]
    if isinstance(opened, RangeReader):
        remote = opened.file
        # all of its bytes are of this version
        state = {"size": remote.size, "version": remote.version if remote.has_version else None}
    else:
        file_stat = os.fstat(opened.fileno())
        state = {
            "size": file_stat.st_size,
            "changed": [file_stat.st_mtime_ns, file_stat.st_ctime_ns],
            "inode": [file_stat.st_dev, file_stat.st_ino],
        }
    state["dtype"] = dtype.str if dtype is not None else ""
    if sampled:
        state["blocks"] = [SAMPLED, BLOCK]
    return state


def _is_settled(state: dict[str, Any], began: int) -> bool:
    """Return True if a file that changes again has another state.

    began: time (ns) at which it was begun to be read.
    """
    if "changed" not in state:
        return state["version"] is not None
    return began - max(state["changed"]) > SETTLED


def _cache_scan(
    file: Path,
    state: dict[str, Any],
    scan: FileScan,
) -> None:
    """Keep in the cache what was read of a file in this state."""
    cache_path = _cache_path(file)
    if cache_path is None:
        return
    entry = {"file": masked(str(file)), "state": state, "seen": asdict(scan)}
    with suppress(OSError):  # without a cache entry the file is read again
        write_whole(cache_path, json.dumps(entry).encode())


def _cached_scan(
    file: Path,
    dtype: np.dtype | None,
    sampled: bool = False,
) -> FileScan | None:
    """Return what the cache has of a file as it now is; None if it has nothing."""
    cache_path = _cache_path(file)
    if cache_path is None:
        return None
    try:
        entry = parse_json(read_regular(cache_path))
        with _opened(file) as opened:
            state = _state_of(opened, dtype, sampled)
        if entry["state"] == state:
            return FileScan(**entry["seen"])
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
