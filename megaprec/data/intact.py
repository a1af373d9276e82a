"""Integrity check of a data set before training: its files are unchanged, and its ids fit the
vocabulary.

A token with a flipped bit is still a valid token, so only a digest detects it: `build` records the
digests of both files in PREFIX.json. A file of up to WHOLE bytes is read once from end to end, for
its digest and its smallest and largest id. The result is cached on this machine and reused while
the file's size, times and inode are unchanged, so that the next start reads nothing.

Of larger files only some blocks are read at a start, different ones each time: their ids are
checked against the vocabulary and their digests against the record, which also has the smallest and
largest id of the whole file. The digest of a larger index is that of its last full check
(`index_check`). `megaprec data verify` reads any file completely, and its result is reused at the
next start.
"""

import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megaprec.data.files import beside, write_whole
from megaprec.data.index_check import SETTLED, known_check
from megaprec.data.indexed import IndexedDataset
from megaprec.durable import reading
from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_regular

WHOLE = 10 << 30  # bytes: files up to this size are read from end to end
BLOCK = 64 << 20  # bytes per digest in the record of a larger file
SAMPLED = 16  # blocks of a larger file that are read at a start
READ = 1 << 22  # bytes read at a time; a multiple of the size of every id dtype
# of a record; earlier versions lack some
NUMBERS = (
    "vocab_size",
    "documents",
    "tokens",
    "chars",
    "bytes",
    "unknown",
)


@dataclass(frozen=True)
class Seen:
    """The digest of a file, or of some of its blocks. low, high: smallest and largest id; 0 and -1
    if there is none."""

    sha256: str
    low: int = 0
    high: int = -1


@dataclass(frozen=True)
class Contents:
    """The identity of a data set: its size, and the digests of both files.

    sampled: True if bin_sha256 is the digest of some blocks only. low, high: smallest and largest
        id that was read.
    """

    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str
    sampled: bool
    low: int
    high: int


def contents_of(
    dataset: IndexedDataset, remedy: str = "copy it again or build it again"
) -> Contents:
    """Check the files of a data set that this machine has not read before, and return the data
    set's identity.

    Raises UserError for a file that has changed since it was built. remedy: advice at the end of
    that error line.
    """
    dataset.require_ids()
    record = read_record(dataset.prefix)
    bin_file, idx_file = (beside(dataset.prefix, suffix) for suffix in (".bin", ".idx"))
    idx_digest = _digest_of_index(idx_file, bin_file)
    _compare(record, idx_file, idx_digest, remedy)
    whole = bin_file.stat().st_size <= WHOLE or _remembered(bin_file, dataset.dtype) is not None
    if whole:
        seen = scan_file(bin_file, dataset.dtype)
        _compare(record, bin_file, seen.sha256, remedy)
    else:
        seen = _remembered(bin_file, dataset.dtype, sampled=True) if record is None else None
        seen = seen or _check_some_blocks(bin_file, dataset.dtype, record, remedy)
    digest = seen.sha256 if whole or record is None else record["bin_sha256"]
    low, high = _range_with(seen, record)
    counts = dataset.num_tokens, dataset.num_documents
    return Contents(*counts, digest, idx_digest, not whole and record is None, low, high)


def _digest_of_index(idx_file: Path, bin_file: Path) -> str:
    """Return the SHA-256 of an index; of a large one, that of the check that is recorded beside it,
    if there is one."""
    if idx_file.stat().st_size > WHOLE and (
        known := known_check(idx_file, bin_file.stat().st_size)
    ):
        return known.sha256
    return scan_file(idx_file).sha256


def _range_with(seen: Seen, record: dict[str, Any] | None) -> tuple[int, int]:
    """Return the smallest and largest of the ids that were read and those that the record of the
    build names."""
    built = (record or {}).get("ids") or [seen.low, seen.high]
    return min(seen.low, built[0]), max(seen.high, built[1])


def check_vocabulary(dataset: IndexedDataset, seen: Contents, vocab: int) -> None:
    """Raise UserError if an id that was read is outside [0, vocab); the line names the first such
    id and its place."""
    if seen.low >= 0 and seen.high < vocab:
        return
    token = dataset.first_outside(vocab)
    if token is None:
        first = ""
    else:
        first = f"; the first is {dataset.tokens(token, 1)[0]} {place_of(dataset, token)}"
    raise UserError(
        f"{dataset.prefix} has token ids {seen.low} to {seen.high}, which a vocabulary of {vocab} "
        f"does not hold{first}: set the vocabulary to at least {seen.high + 1} or give the "
        "tokenizer's own data"
    )


def read_record(prefix: Path) -> dict[str, Any] | None:
    """Return the record PREFIX.json of a data set's build, None if there is none. Raises UserError
    if it is damaged."""
    path = beside(prefix, ".json")
    if not os.path.lexists(path):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = dict(parse_json(read_regular(path)))
        low, high = record.get("ids", (0, -1))  # earlier versions recorded none
        digests = record["bin_sha256"], record["idx_sha256"]
        numbers = low, high, *(record.get(name, 0) for name in NUMBERS), record.get("eos") or 0
        if all(isinstance(one, str) for one in digests) and all(
            type(one) is int for one in numbers
        ):
            return record
    raise UserError(f"{path} is damaged or of an older version: build the data set again")


def scan_file(file: Path, dtype: np.dtype | None = None, again: bool = False) -> Seen:
    """Return the SHA-256 of a whole file, and the range of its ids if `dtype`, the dtype of its
    ids, is passed.

    again: read the file even if its result is cached on this machine.
    """
    if not again and (known := _remembered(file, dtype)):
        return known
    began = time.time_ns()
    with reading(file) as opened:
        before = _state(os.fstat(opened.fileno()), dtype)
        seen = _scan(opened, dtype)
        after = _state(os.fstat(opened.fileno()), dtype)
    if before == after and began - max(before["changed"]) > SETTLED:
        _remember(file, before, seen)
    return seen


def block_digests(file: Path) -> list[str]:
    """Return the SHA-256 of each BLOCK of a file."""
    with reading(file) as opened:
        return [
            hashlib.sha256(block).hexdigest() for block in iter(lambda: opened.read(BLOCK), b"")
        ]


def describe_bad_id(
    dataset: IndexedDataset, sample: int, first: int, length: int, vocab: int
) -> str:
    """Return an error line if the sample of `length` tokens from token `first` on has an id outside
    the vocabulary; empty if there is none. The line names the first such id and its place."""
    ids = dataset.tokens(first, length)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if not len(wrong):
        return ""
    token = first + int(wrong[0])
    return (
        f"sample {sample} has token id {ids[wrong[0]]} {place_of(dataset, token)}, which a "
        f"vocabulary of {vocab} does not hold; no step was taken with it: restore the file, or "
        "build it again"
    )


def place_of(dataset: IndexedDataset, token: int) -> str:
    """Return the place of a token in the data set, in words."""
    document = int(dataset.documents_of(token, 1)[0])
    place = dataset.stored_place(token)
    return f"in document {document} of {beside(dataset.prefix, '.bin')}, token {place}"


def _compare(record: dict[str, Any] | None, file: Path, digest: str, remedy: str) -> None:
    if record is not None and record[f"{file.suffix[1:]}_sha256"] != digest:
        raise UserError(
            f"{file} is not what was built (SHA-256 differs from the record's): {remedy}"
        )


def _scan(file: BinaryIO, dtype: np.dtype | None) -> Seen:
    made = hashlib.sha256()
    low, high = _scan_into(made, file, dtype)
    return Seen(made.hexdigest(), low, high)


def _scan_into(
    made: "hashlib._Hash", file: BinaryIO, dtype: np.dtype | None, most: int | None = None
) -> tuple[int, int]:
    """Add the next `most` bytes of a file to a digest, in pieces; return the range of their ids,
    (0, -1) if none."""
    low = list[int]()
    high = list[int]()
    left = most
    while chunk := file.read(READ if left is None else min(READ, left)):
        left = None if left is None else left - len(chunk)
        made.update(chunk)
        if dtype is not None:
            ids = np.frombuffer(chunk, dtype)
            low.append(int(ids.min()))
            high.append(int(ids.max()))
    return min(low, default=0), max(high, default=-1)


def _check_some_blocks(
    file: Path, dtype: np.dtype, record: dict[str, Any] | None, remedy: str
) -> Seen:
    """Check some blocks of a large file: random ones, or, without a record, always the same ones.

    Without a record, the digest returned is that of the blocks read, and is cached on this machine.
    """
    count = -(-file.stat().st_size // BLOCK)
    known = (record or {}).get("blocks") or {}
    digests = known.get("sha256", []) if known.get("bytes") == BLOCK else []
    if record:
        numbers = sorted(random.SystemRandom().sample(range(count), min(SAMPLED, count)))
    else:
        numbers = _spread(count)
    made = hashlib.sha256()
    lows = list[int]()
    highs = list[int]()
    began = time.time_ns()
    with reading(file) as opened:
        before = _state(os.fstat(opened.fileno()), dtype, sampled=True)
        for number in numbers:
            opened.seek(number * BLOCK)
            made = hashlib.sha256() if digests else made
            low, high = _scan_into(made, opened, dtype, BLOCK)
            if digests and digests[number] != made.hexdigest():
                raise UserError(
                    f"{file} is not what was built (SHA-256 of block {number} differs): {remedy}"
                )
            lows.append(low)
            highs.append(high)
    seen = Seen(made.hexdigest(), min(lows), max(highs))
    if record is None and began - max(before["changed"]) > SETTLED:
        _remember(file, before, seen)
    return seen


def _spread(count: int) -> Iterable[int]:
    """Return the numbers of at most SAMPLED of `count` blocks, evenly spaced from the first to the
    last."""
    return sorted({round(n * (count - 1) / max(1, SAMPLED - 1)) for n in range(SAMPLED)})


def _memory(file: Path) -> Path | None:
    """Return the path of this machine's cache entry for a file; None if there is no home folder for
    a cache."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    name = hashlib.sha256(
        f"{platform.node()}\0{file.resolve()}".encode(errors="surrogateescape")
    ).hexdigest()
    return cache / "megaprec" / "seen" / f"{name[:32]}.json"


def _state(of: os.stat_result, dtype: np.dtype | None, sampled: bool = False) -> dict[str, Any]:
    """Return the properties of a file that change when the file changes. sampled: only some blocks
    of it were read."""
    return {
        "size": of.st_size,
        "changed": [of.st_mtime_ns, of.st_ctime_ns],
        "inode": [of.st_dev, of.st_ino],
        "dtype": dtype.str if dtype is not None else "",
        **({"blocks": [SAMPLED, BLOCK]} if sampled else {}),
    }


def _remember(file: Path, state: dict[str, Any], seen: Seen) -> None:
    if memory := _memory(file):
        with suppress(OSError):  # without a cache entry the file is read again
            write_whole(
                memory,
                json.dumps({"file": str(file), "state": state, "seen": asdict(seen)}).encode(),
            )


def _remembered(file: Path, dtype: np.dtype | None, sampled: bool = False) -> Seen | None:
    memory = _memory(file)
    if memory is None:
        return None
    try:
        known = parse_json(read_regular(memory))
        if known["state"] == _state(file.stat(), dtype, sampled):
            return Seen(**known["seen"])
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
