"""Whether a data set is what was built and its ids fit the vocabulary, found out before anything is trained on it.

A flipped bit is a valid token, so only a digest tells: `build` leaves that of both files in PREFIX.json. A file of up
to WHOLE bytes is read from end to end once, for its digest and its smallest and largest id. What was seen is remembered
for this machine and asked for again by size, times and inode, so that the next start reads nothing.

Of larger files some blocks are read at a start, each time others: their ids are looked at, and their digests compared
with those in the record. `megaprec data verify` reads all of any file, and what it has seen counts at the next start.
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
from megaprec.data.indexed import IndexedDataset
from megaprec.errors import UserError

WHOLE = 10 << 30  # bytes: files up to this size are read from end to end
BLOCK = 64 << 20  # bytes that have a digest of their own in the record of a larger file
SAMPLED = 16  # blocks of a larger file that are read at a start
READ = 1 << 22  # bytes at a time; a multiple of every size of an id
SETTLED = 1_000_000_000  # nanoseconds: a file changed so recently may change again within one tick of its times


@dataclass(frozen=True)
class Seen:
    """What reading a file, or some blocks of it, has shown. low, high: of its ids; 0 and -1 if there is none."""

    sha256: str
    low: int = 0
    high: int = -1


@dataclass(frozen=True)
class Contents:
    """What tells a data set from any other: its size, and the digests of both files. low, high: of the ids looked at.

    sampled: whether the first digest is of some blocks alone.
    """

    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str
    sampled: bool
    low: int
    high: int


def contents_of(dataset: IndexedDataset, remedy: str = "copy it again or build it again") -> Contents:
    """Reads what this machine has not read before, see above. Raises UserError for a file that is not what was built.

    remedy: the end of that line.
    """
    dataset.require_ids()
    record = read_record(dataset.prefix)
    bin_file, idx_file = (beside(dataset.prefix, suffix) for suffix in (".bin", ".idx"))
    idx = look(idx_file)
    _compare(record, idx_file, idx.sha256, remedy)
    whole = bin_file.stat().st_size <= WHOLE or _remembered(bin_file, dataset.dtype) is not None
    if whole:
        seen = look(bin_file, dataset.dtype)
        _compare(record, bin_file, seen.sha256, remedy)
    else:
        seen = _look_at_some(bin_file, dataset.dtype, record, remedy)
    digest = seen.sha256 if whole or record is None else record["bin_sha256"]
    counts = dataset.num_tokens, dataset.num_documents
    return Contents(*counts, digest, idx.sha256, not whole and record is None, seen.low, seen.high)


def check_vocabulary(dataset: IndexedDataset, seen: Contents, vocab: int) -> None:
    """Raises UserError if an id that was looked at lies outside of [0, vocab); it says which, and where."""
    if seen.low >= 0 and seen.high < vocab:
        return
    token = dataset.first_outside(vocab)
    first = "" if token is None else f"; the first is {dataset.tokens(token, 1)[0]} {place_of(dataset, token)}"
    raise UserError(
        f"{dataset.prefix} has token ids {seen.low} to {seen.high}, which a vocabulary of {vocab} does not hold{first}"
        f": set the vocabulary to at least {seen.high + 1} or give the tokenizer's own data"
    )


def read_record(prefix: Path) -> dict[str, Any] | None:
    """What PREFIX.json says of how a data set was built; None if it is not there. Raises UserError if it is damaged."""
    path = beside(prefix, ".json")
    if not os.path.lexists(path):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(path.read_bytes())
        if isinstance(record["bin_sha256"], str) and isinstance(record["idx_sha256"], str):
            return record
    raise UserError(f"{path} is damaged or of an older version: build the data set again")


def look(file: Path, dtype: np.dtype | None = None, again: bool = False) -> Seen:
    """The SHA-256 of a whole file, and the range of its ids if it holds ids of this dtype.

    again: whether it is read even if this machine remembers what was in it.
    """
    if not again and (known := _remembered(file, dtype)):
        return known
    began = time.time_ns()
    with file.open("rb") as opened:
        before = _state(os.fstat(opened.fileno()), dtype)
        seen = _scan(opened, dtype)
        after = _state(os.fstat(opened.fileno()), dtype)
    if before == after and began - max(before["changed"]) > SETTLED:
        _remember(file, before, seen)
    return seen


def block_digests(file: Path) -> list[str]:
    """SHA-256 of each BLOCK of a file."""
    with file.open("rb") as opened:
        return [hashlib.sha256(block).hexdigest() for block in iter(lambda: opened.read(BLOCK), b"")]


def accusation(dataset: IndexedDataset, sample: int, first: int, length: int, vocab: int) -> str:
    """Which id of a sample of `length` tokens that begins with token `first` the vocabulary does not hold; empty if
    none."""
    ids = dataset.tokens(first, length)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if not len(wrong):
        return ""
    token = first + int(wrong[0])
    return (
        f"sample {sample} has token id {ids[wrong[0]]} {place_of(dataset, token)}, which a vocabulary of {vocab} does "
        f"not hold; no step was taken with it: restore the file, or build it again"
    )


def place_of(dataset: IndexedDataset, token: int) -> str:
    """Where in the data set a token is, in words."""
    document = int(dataset.documents_of(token, 1)[0])
    return f"in document {document} of {beside(dataset.prefix, '.bin')}, token {token}"


def _compare(record: dict[str, Any] | None, file: Path, digest: str, remedy: str) -> None:
    if record is not None and record[f"{file.suffix[1:]}_sha256"] != digest:
        raise UserError(f"{file} is not what was built (SHA-256 differs from the record's): {remedy}")


def _scan(file: BinaryIO, dtype: np.dtype | None) -> Seen:
    made, low, high = hashlib.sha256(), list[int](), list[int]()
    while chunk := file.read(READ):
        made.update(chunk)
        if dtype is not None:
            ids = np.frombuffer(chunk, dtype)
            low.append(int(ids.min()))
            high.append(int(ids.max()))
    return Seen(made.hexdigest(), min(low, default=0), max(high, default=-1))


def _look_at_some(file: Path, dtype: np.dtype, record: dict[str, Any] | None, remedy: str) -> Seen:
    """Some blocks of a large file. The digest is of blocks that are always the same ones, if there is no record."""
    count = -(-file.stat().st_size // BLOCK)
    known = (record or {}).get("blocks") or {}
    digests = known.get("sha256", []) if known.get("bytes") == BLOCK else []
    numbers = sorted(random.SystemRandom().sample(range(count), min(SAMPLED, count))) if record else _spread(count)
    made, lows, highs = hashlib.sha256(), list[int](), list[int]()
    with file.open("rb") as opened:
        for number in numbers:
            opened.seek(number * BLOCK)
            block = opened.read(BLOCK)
            made.update(block)
            if digests and digests[number] != hashlib.sha256(block).hexdigest():
                raise UserError(f"{file} is not what was built (SHA-256 of block {number} differs): {remedy}")
            ids = np.frombuffer(block, dtype)
            lows.append(int(ids.min()))
            highs.append(int(ids.max()))
    return Seen(made.hexdigest(), min(lows), max(highs))


def _spread(count: int) -> Iterable[int]:
    """At most SAMPLED of `count` blocks, evenly, the first and the last among them."""
    return sorted({round(n * (count - 1) / max(1, SAMPLED - 1)) for n in range(SAMPLED)})


def _memory(file: Path) -> Path | None:
    """Where this machine remembers what it has seen of a file; None if there is no place for it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    name = hashlib.sha256(f"{platform.node()}\0{file.resolve()}".encode(errors="surrogateescape")).hexdigest()
    return cache / "megaprec" / "seen" / f"{name[:32]}.json"


def _state(of: os.stat_result, dtype: np.dtype | None) -> dict[str, Any]:
    """What changes when a file does."""
    return {
        "size": of.st_size,
        "changed": [of.st_mtime_ns, of.st_ctime_ns],
        "inode": [of.st_dev, of.st_ino],
        "dtype": dtype.str if dtype is not None else "",
    }


def _remember(file: Path, state: dict[str, Any], seen: Seen) -> None:
    if memory := _memory(file):
        with suppress(OSError):  # then it is read again
            write_whole(memory, json.dumps({"file": str(file), "state": state, "seen": asdict(seen)}).encode())


def _remembered(file: Path, dtype: np.dtype | None) -> Seen | None:
    memory = _memory(file)
    if memory is None:
        return None
    try:
        known = json.loads(memory.read_bytes())
        return Seen(**known["seen"]) if known["state"] == _state(file.stat(), dtype) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
