"""The check that an index describes its tokens, made once for all ranks and starts.

A large index takes minutes to check from end to end: 20 bytes a sequence, at ten billion sequences
200 GB. The check is therefore recorded beside the index, in PREFIX.checked, with the sizes and the
time of change of what was checked, and the digest of the index. As long as these fit, opening the
data set reads a few places only: both ends, and some random places between. If anything differs,
the whole index is checked again.
"""

import json
import random
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_regular
from megaprec.tokens.files import file_digest, with_suffix, write_whole

CHUNK = 1 << 20  # elements read at a time when a whole file is checked
LARGE = 1 << 20  # sequences: smaller indexes are checked at every opening, which takes milliseconds
# of an index that has been checked: spans at random places that are read, and sequences of a span
SPANS = 16
SPAN = 1 << 10
# nanoseconds: a file that changed more recently may change again without new times
SETTLED = 1_000_000_000


@dataclass(frozen=True)
class Index:
    """An index, memory-mapped: lengths i32 [S], pointers i64 [S], document indices i64 [D] and
    modes i8 [S], which only multimodal sets have.

    path: of the index.
    itemsize: bytes of an id.
    stored: bytes of the file of ids.
    """

    path: Path
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    modes: np.ndarray
    itemsize: int
    stored: int


@dataclass(frozen=True)
class Checked:
    """The record of a check.

    size, changed: size and time of change (ns) of the index.
    stored: bytes of the file of ids.
    sha256: digest of the index.
    """

    size: int
    changed: int
    stored: int
    sha256: str


def require_sound(index: Index, again: bool = False) -> None:
    """Raise UserError unless the index describes exactly the ids that are stored.

    again: check all of a large index even if a record says that it was checked.
    """
    _check_ends(index)
    if len(index.lengths) < LARGE:
        _check_all(index)
    elif again or known_check(index.path, index.stored) is None:
        _check_and_record(index)
    else:
        _check_spans(index)


def known_check(path: Path, stored: int) -> Checked | None:
    """Return the record of a check of the index at `path` as it now is; None if there is none."""
    try:
        checked = Checked(**parse_json(read_regular(_record_path(path))))
    except (OSError, ValueError, TypeError):
        return None
    file_status = path.stat()
    recorded = (checked.size, checked.changed, checked.stored)
    present = (file_status.st_size, file_status.st_mtime_ns, stored)
    return checked if recorded == present else None


def corrupt(path: Path, why: str) -> UserError:
    """Return the error of a damaged index."""
    return UserError.of("data.index_corrupt", path=path, why=why)


def _record_path(path: Path) -> Path:
    return with_suffix(path.with_name(path.name.removesuffix(".idx")), ".checked")


def _check_and_record(index: Index) -> None:
    """Check all of an index, and record that, unless the file changed meanwhile or just before."""
    began = time.time_ns()
    before = index.path.stat()
    _check_all(index)
    digest = file_digest(index.path)
    after = index.path.stat()
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if unchanged and began - after.st_mtime_ns > SETTLED:
        checked = Checked(after.st_size, after.st_mtime_ns, index.stored, digest)
        content = json.dumps(asdict(checked))
        # where the folder may not be written to, the next opening checks again
        with suppress(OSError):
            write_whole(_record_path(index.path), f"{content}\n".encode())


def _check_ends(index: Index) -> None:
    """Check that the documents begin at the first sequence and end after the last."""
    documents = index.documents
    sequences = len(index.lengths)
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        ends = f"run from {documents[0]} to {documents[-1]}" if len(documents) else "are empty"
        raise corrupt(
            index.path, f"document indices {ends} where they should run from 0 to {sequences}"
        )


def _check_all(index: Index) -> None:
    """Check all documents and sequences of an index. Raises UserError, as all checks here do."""
    _check_documents(index, 0, len(index.documents))
    end = 0
    for start in range(0, len(index.lengths), CHUNK):
        end = _check_sequences(index, start, CHUNK, end)
    _require_stored(index, end)


def _check_spans(index: Index) -> None:
    """Check some random places of an index, and that its last sequence ends where the ids do."""
    # Not by the run's seed: each opening looks at other places.
    generator = random.SystemRandom()
    last_start = len(index.lengths) - SPAN
    for _ in range(SPANS):
        start = generator.randrange(last_start)
        # one sequence more, so that the begin of the next span is compared with the end of this one
        _check_sequences(index, start, SPAN + 1, int(index.pointers[start]))
    end = _check_sequences(index, last_start, SPAN, int(index.pointers[last_start]))
    _require_stored(index, end)
    for _ in range(SPANS):
        start = generator.randrange(len(index.documents))
        _check_documents(index, start, SPAN)


def _check_documents(
    index: Index,
    start: int,
    count: int,
) -> None:
    """Check that up to `count` document indices from `start` on do not fall."""
    documents = index.documents[start : start + count]
    falls = np.flatnonzero(documents[1:] < documents[:-1])
    if len(falls):
        raise corrupt(index.path, f"document {start + falls[0]} ends before it begins")


def _check_sequences(
    index: Index,
    start: int,
    count: int,
    begin: int,
) -> int:
    """Check that up to `count` sequences from `start` on follow each other from byte `begin`;
    return their end."""
    lengths = index.lengths[start : start + count]
    # in int64: the bytes of a long sequence do not fit an i32
    sizes = lengths.astype(np.int64) * index.itemsize
    negative = np.flatnonzero(sizes < 0)
    if len(negative):
        raise corrupt(index.path, f"sequence {start + negative[0]} has a negative length")
    not_text = np.flatnonzero(index.modes[start : start + count])
    if len(not_text):
        sequence = start + int(not_text[0])
        raise UserError.of(
            "data.multimodal_sequence",
            path=index.path,
            sequence=sequence,
            modes=index.modes[sequence],
        )
    # where each sequence begins if all follow each other
    begins = begin + np.cumsum(sizes) - sizes
    pointers = index.pointers[start : start + count]
    wrong = np.flatnonzero(pointers != begins)
    if len(wrong):
        sequence = start + int(wrong[0])
        raise corrupt(
            index.path,
            f"sequence {sequence} begins at byte {index.pointers[sequence]} where the lengths "
            f"before it end at byte {begins[wrong[0]]} (only back-to-back sequences are read)",
        )
    return int(begins[-1] + sizes[-1])


def _require_stored(index: Index, end: int) -> None:
    """Raise UserError unless the last sequence ends where the file of ids does."""
    if end != index.stored:
        name = f"{index.path.name.removesuffix('.idx')}.bin"
        raise corrupt(
            index.path, f"it describes {end} bytes of tokens where {name} has {index.stored}"
        )
