"""Megatron's `.bin/.idx` format: token ids on disk, memory-mapped for reading, or at a URL.

`PREFIX.bin` contains the token ids of all documents back to back, nothing else. `PREFIX.idx`
describes it, little-endian and without padding:

    9 bytes   magic "MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code of the ids (see DTYPES)
    u64       S, the number of sequences
    u64       D, the number of document indices: documents + 1
    i32[S]    length of each sequence in tokens
    i64[S]    byte at which each sequence begins in the .bin
    i64[D]    sequence at which each document begins; the first is 0, the last is S
    i8[S]     mode of each sequence, optional (multimodal sets); must be 0, text

A document is one or more sequences. A set that was written without ends of documents, whose D is 1,
is read as Megatron reads it: each sequence is a document. Sequences are back to back in every file
that Megatron's own tools write. This is required here, because then the .bin *is* the training
stream and token `i` is found without a search.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from megaprec.durable import reading
from megaprec.errors import UserError
from megaprec.tokens.copies import file_here, is_there
from megaprec.tokens.files import discard, open_part, publish, with_suffix
from megaprec.tokens.index_check import CHUNK, Index, corrupt, require_sound
from megaprec.tokens.loss_mask import SUFFIX as LOSS_MASK
from megaprec.tokens.loss_mask import LossMask, LossMaskWriter, MaskMark
from megaprec.tokens.places import is_remote
from megaprec.tokens.ranges import RemoteFile, RemoteTokens
from megaprec.url_secrets import masked

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
INT32_CODE = 4
UINT16_CODE = 8
UINT16_VOCABULARY = 65500  # Megatron's own limit, a little under 2**16
LONGEST_SEQUENCE = 2**31 - 1  # lengths are i32


@dataclass(frozen=True)
class WriteProgress:
    """The progress of a writer.

    tokens, lengths, documents: bytes of its temporary files.
    open: tokens of the open sequence.
    ids: smallest and largest id.
    mask: of the writer of the loss mask; None: there is none.
    """

    tokens: int
    lengths: int
    documents: int
    open: int
    ids: tuple[int, int]
    mask: MaskMark | None = None


class IndexedWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`, streaming; a context manager.

    The ids are stored as uint16 if `vocab_size` < 65500, else as int32. The final names do not
    exist before the end: leaving the `with` block renames both files into place, the `.idx` last.
    An exception removes the temporary files. After an interruption or a kill they stay, and a new
    writer resumes from a `mark` that was taken before. Memory use does not grow with the data.

    has_mask: `PREFIX.loss_mask` is written too; otherwise that of an older pair is removed.
    """

    def __init__(
        self,
        prefix: Path,
        vocab_size: int,
        mark: WriteProgress | None = None,
        has_mask: bool = False,
    ) -> None:
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._code = UINT16_CODE if vocab_size < UINT16_VOCABULARY else INT32_CODE
        # the smallest and largest id before any was written: every id is smaller and larger
        no_ids = (vocab_size, -1)
        mark = mark or WriteProgress(tokens=0, lengths=0, documents=0, open=0, ids=no_ids)
        self._bin = open_part(with_suffix(prefix, ".bin"), mark.tokens)
        self._lengths = open_part(with_suffix(prefix, ".lengths"), mark.lengths)
        self._documents = open_part(with_suffix(prefix, ".documents"), mark.documents)
        self._mask = LossMaskWriter(prefix, mark.mask) if has_mask else None
        self._sequences = mark.lengths // 4
        self._open = mark.open  # tokens of the open sequence
        low, high = mark.ids  # a list, if it was read from JSON
        self.ids = low, high  # the smallest and largest id that was written
        if not mark.documents:
            self._documents.write(bytes(8))  # the first document begins at sequence 0

    def add_document(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Append tokens and close the document."""
        self.extend(ids, np.array([len(ids)]))

    def extend(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        ends: NDArray[np.int64],
        counted: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append tokens of several documents.

        ends: the first document ends after ends[0] of the tokens, the next after ends[1], ...
        counted: whether each token counts in the loss; None: all do.

        Tokens after the last end belong to a document that stays open. A document is one sequence,
        or several if its length does not fit an i32. Raises UserError if an id is outside
        [0, vocab_size).
        """
        # of an empty list numpy would make floats
        tokens = np.asarray(ids, dtype=None if len(ids) else np.int64)
        if len(tokens):
            low = int(tokens.min())
            high = int(tokens.max())
            self.ids = min(low, self.ids[0]), max(high, self.ids[1])
            if low < 0 or high >= self._vocab_size:
                raise self._outside_vocabulary(tokens, ends)
        # those of the new tokens that belong to the open document
        continued = int(ends[0]) if len(ends) else len(tokens)
        if self._open + continued > LONGEST_SEQUENCE:
            # its sequence ends here, and the document goes on in another one
            self._write_lengths(np.array([self._open]))
            self._open = 0
        stored_tokens = tokens.astype(DTYPES[self._code])
        self._bin.write(stored_tokens.tobytes())
        if self._mask:
            all_count = np.ones(len(tokens), bool)
            self._mask.extend(all_count if counted is None else counted)
        self._open += continued
        if len(ends):
            self._end_documents(ends)
            self._open = len(tokens) - int(ends[-1])

    def _end_documents(self, ends: NDArray[np.int64]) -> None:
        """Write the lengths of documents that have ended, and where the next ones begin.

        ends: of the tokens that were appended last, the numbers after which documents end. The
            first of these documents has as many tokens as are open.
        """
        num_before = self._sequences
        lengths_of_others = np.diff(ends)
        lengths = np.concatenate(([self._open], lengths_of_others))
        self._write_lengths(lengths)
        # each document is one more sequence; the next one begins at the sequence after it
        next_sequences = np.arange(num_before + 1, self._sequences + 1, dtype="<i8")
        self._documents.write(next_sequences.tobytes())

    def _outside_vocabulary(
        self,
        tokens: NDArray[np.integer],
        ends: NDArray[np.int64],
    ) -> UserError:
        """Return the error for tokens of which some are outside the vocabulary. ends: as in
        `extend`."""
        is_wrong = (tokens < 0) | (tokens >= self._vocab_size)
        first_wrong = int(np.flatnonzero(is_wrong)[0])
        written_documents = self._documents.tell() // 8 - 1
        ended_before = int(np.searchsorted(ends, first_wrong, side="right"))
        return UserError.of(
            "data.ids_outside_vocabulary",
            prefix=self._prefix,
            smallest=tokens.min(),
            largest=tokens.max(),
            vocab_size=self._vocab_size,
            first_id=tokens[first_wrong],
            document=written_documents + ended_before,
        )

    def _write_lengths(self, lengths: NDArray[np.integer]) -> None:
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._sequences += len(lengths)

    def mark(self) -> WriteProgress:
        """Flush everything to the disk; return the mark from which a new writer can resume."""
        for part in self._parts:
            part.flush()
            os.fsync(part.fileno())
        tokens, lengths, documents = (part.tell() for part in self._parts)
        mask = self._mask.mark() if self._mask else None
        return WriteProgress(tokens, lengths, documents, self._open, self.ids, mask)

    def close(self) -> None:
        """Publish the pair. An older pair of the same name ceases to be readable before it is
        replaced."""
        assert not self._open, "a document was begun and not ended"
        bin_path = with_suffix(self._prefix, ".bin")
        idx_path = with_suffix(self._prefix, ".idx")
        idx = open_part(idx_path)
        try:
            self._write_index(idx.write)
            # without its index, an old .bin cannot be read beside a new index
            idx_path.unlink(missing_ok=True)
            self._publish(bin_path, idx, idx_path)
        except BaseException:
            discard(idx)
            raise

    def _publish(
        self,
        bin_path: Path,
        idx: BinaryIO,
        idx_path: Path,
    ) -> None:
        """Give all files their final names, the index last. After an error there is no index, and
        so no pair."""
        try:
            if self._mask:
                self._mask.publish()
            else:
                with_suffix(self._prefix, LOSS_MASK).unlink(missing_ok=True)
            # the index last: a pair is there once its index is
            publish(self._bin, bin_path)
            publish(idx, idx_path)
        except BaseException:
            idx_path.unlink(missing_ok=True)
            raise

    def _write_index(self, write: Callable[[bytes], object]) -> None:
        """Write the content of the .idx, made of the temporary files of lengths and documents."""
        # in chunks: an index may be larger than the memory
        lengths = _map_written(self._lengths, "<i4")
        documents = _map_written(self._documents, "<i8")
        itemsize = DTYPES[self._code].itemsize
        header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents))
        write(header)
        for start in range(0, len(lengths), CHUNK):
            chunk = lengths[start : start + CHUNK]
            write(chunk.tobytes())
        begin = 0  # the byte of the .bin at which a sequence begins
        for start in range(0, len(lengths), CHUNK):
            chunk = lengths[start : start + CHUNK]
            token_counts = np.cumsum(chunk, dtype="<i8")
            ends = begin + token_counts * itemsize
            begins = np.concatenate(([begin], ends[:-1]))
            write(begins.astype("<i8").tobytes())
            begin = int(ends[-1])
        for start in range(0, len(documents), CHUNK):
            chunk = documents[start : start + CHUNK]
            write(chunk.tobytes())

    @property
    def _parts(self) -> tuple[BinaryIO, BinaryIO, BinaryIO]:
        return self._bin, self._lengths, self._documents

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # KeyboardInterrupt and SystemExit are no Exception
        interrupted = kind is not None and not issubclass(kind, Exception)
        try:
            if kind is None:
                self.close()
        finally:
            for part in self._parts:
                if interrupted:  # a new writer can resume
                    part.close()
                else:
                    discard(part)
            if self._mask and interrupted:
                self._mask.close()
            elif self._mask:
                self._mask.discard()


class IndexedDataset:
    """A `.bin/.idx` pair. Opening it checks the index (`index_check`); reading touches only the
    tokens read.

    prefix: of files of this machine, which are memory-mapped, or of files at a URL: there the .bin
        is read by ranges (`ranges`), and the index is copied (`copies`).
    again: check the whole index even if a record says that it was checked, and the copies of files
        at a URL.
    Raises UserError if a file is missing or the index is corrupt, saying what is wrong with it.
    Attributes: `dtype` of the stored ids, `num_documents`, `num_sequences`, `num_tokens`;
    `stored_bytes` of the .bin; `idx_file`, on this machine; `notes`: lines for the user.
    """

    def __init__(self, prefix: Path, again: bool = False) -> None:
        self.prefix = prefix
        bin_path = with_suffix(prefix, ".bin")
        for suffix in (".idx", ".bin"):
            if not is_there(prefix, suffix):
                raise UserError.of("data.data_set_missing", path=with_suffix(prefix, suffix))
        self.idx_file = file_here(prefix, ".idx", again)
        remote_bin = RemoteFile(bin_path) if is_remote(bin_path) else None
        self.stored_bytes = remote_bin.size if remote_bin else bin_path.stat().st_size
        self.dtype, index = self._read_own_index()
        self.notes: tuple[str, ...] = ()
        if np.array_equal(index.documents, [0]) and len(index.lengths):
            every_sequence = np.arange(len(index.lengths) + 1, dtype=np.int64)
            index = replace(index, documents=every_sequence)
            idx_path = with_suffix(prefix, ".idx")
            self.notes += (
                f"{masked(str(idx_path))} has no ends of documents: each of its "
                "sequences is taken for a document",
            )
        if remote_bin and not remote_bin.has_version:
            self.notes += (
                f"{masked(str(bin_path))}: its server tells neither a tag nor a time: a change "
                "under way is seen by the size alone",
            )
        require_sound(index, again)
        self._lengths = index.lengths
        self._pointers = index.pointers
        self._documents = index.documents
        self.num_documents = len(self._documents) - 1
        self.num_sequences = len(self._lengths)
        self.num_tokens = index.stored // self.dtype.itemsize
        self._stream: np.ndarray | RemoteTokens
        if remote_bin:
            remote_bin.require_ranges()
            self._stream = RemoteTokens(remote_bin, self.dtype)
        else:
            self._stream = _map(bin_path, self.dtype, 0, self.num_tokens)
        has_mask = is_there(prefix, LOSS_MASK)
        self._mask = LossMask(prefix, self.num_tokens, again) if has_mask else None

    def _read_own_index(self) -> tuple[np.dtype, Index]:
        """Return the dtype of the stored ids, and the index. Raises UserError if it is corrupt."""
        try:
            return _read_index(self.idx_file, self.stored_bytes)
        except UserError as error:
            if not is_remote(self.prefix):
                raise
            # a user knows the URL, not the copy of it that was read
            url = f"{with_suffix(self.prefix, '.idx')}: "
            raise UserError(*(problem.within(url) for problem in error.problems)) from error

    @property
    def has_mask(self) -> bool:
        """Return True if a loss mask says which tokens count."""
        return self._mask is not None

    def document(self, index: int) -> NDArray[np.generic]:
        """Return the token ids of document `index` (all its sequences) in the stored dtype, as a
        read-only view."""
        if not 0 <= index < self.num_documents:
            raise UserError.of(
                "data.document_missing",
                index=index,
                prefix=self.prefix,
                num_documents=self.num_documents,
            )
        start = self._begin(self._documents[index])
        stop = self._begin(self._documents[index + 1])
        return self._stream[start:stop]

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each document, int64 [num_documents].

        Takes 8 bytes a sequence.
        """
        begins = np.append(self._pointers // self.dtype.itemsize, self.num_tokens)
        return np.diff(begins[self._documents])

    def tokens(self, start: int, length: int) -> NDArray[np.int64]:
        """Return tokens [start, start + length) of all documents back to back, int64 [length], as a
        copy."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise UserError.of(
                "data.token_range_outside",
                start=start,
                stop=start + length,
                prefix=self.prefix,
                num_tokens=self.num_tokens,
            )
        self.require_integer_ids()
        return self._stream[start : start + length].astype(np.int64)

    def prepare(self, starts: Iterable[int], length: int) -> None:
        """Read what is at a URL of the tokens [start, start + length) for each start at once: the
        times that its server takes do not add up."""
        self.prepare_spans((start, start + length) for start in starts)

    def prepare_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        """Read what is at a URL of the tokens [start, stop) of each span at once."""
        self._prepare_stored(spans)

    def _prepare_stored(self, spans: Iterable[tuple[int, int]]) -> None:
        if isinstance(self._stream, RemoteTokens):
            self._stream.prepare(spans)

    def counted(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether each of the tokens [start, start + length) counts in the loss, [length]:
        all do without a mask."""
        if self._mask is None:
            return np.ones(length, bool)
        return self._mask.counted(start, length)

    def documents_of(self, start: int, length: int) -> NDArray[np.int64]:
        """Return the document number of each of the tokens [start, start + length), int64
        [length]."""
        # only the few sequences and documents that have these tokens are searched
        first_sequence = self._sequence_of(start)
        last_sequence = self._sequence_of(start + length - 1)
        begins = self._pointers[first_sequence : last_sequence + 1] // self.dtype.itemsize
        tokens = np.arange(start, start + length)
        begun_sequences = np.searchsorted(begins, tokens, side="right")
        sequences = first_sequence + begun_sequences - 1
        first_document = bisect_right(self._documents, first_sequence) - 1
        end_document = bisect_right(self._documents, last_sequence)
        first_sequences = self._documents[first_document:end_document]
        begun_documents = np.searchsorted(first_sequences, sequences, side="right")
        return first_document + begun_documents - 1

    def stored_place(self, token: int) -> int:
        """Return the place of a token in the file, which is that in the stream."""
        return token

    def _sequence_of(self, token: int) -> int:
        """Return the number of the sequence of a token."""
        # numpy's search would copy the whole array, whose elements are not aligned in the file
        return bisect_right(self._pointers, token * self.dtype.itemsize) - 1

    def token_range(self) -> tuple[int, int]:
        """Return the smallest and largest token id, (0, -1) if there is none.

        Reads the whole file in chunks.
        """
        self.require_integer_ids()
        smallest: list[int] = []
        largest: list[int] = []
        for start in range(0, len(self._stream), CHUNK):
            chunk = self._stream[start : start + CHUNK]
            smallest.append(int(chunk.min()))
            largest.append(int(chunk.max()))
        return min(smallest, default=0), max(largest, default=-1)

    def max_token(self) -> int:
        """Return the largest token id; -1 if there is no token."""
        _, largest = self.token_range()
        return largest

    def first_outside(self, vocab: int) -> int | None:
        """Return the position of the first token whose id is outside [0, vocab), None if there is
        none."""
        for start in range(0, self.num_tokens, CHUNK):
            chunk = self._stream[start : start + CHUNK]
            outside = np.flatnonzero((chunk < 0) | (chunk >= vocab))
            if len(outside):
                return start + int(outside[0])
        return None

    def _begin(self, sequence: np.int64) -> int:
        """Return the token at which `sequence` begins; the number of tokens for the one after the
        last."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def require_integer_ids(self) -> None:
        """Raise UserError if the dtype of the data set is floating-point, so that its numbers are
        no token ids."""
        if self.dtype.kind == "f":
            raise UserError.of("data.not_token_ids", prefix=self.prefix, name=self.dtype.name)


def _map_written(part: BinaryIO, dtype: str) -> np.ndarray:
    """Return the content of a temporary file as a memory-mapped array."""
    part.flush()
    element = np.dtype(dtype)
    return _map(Path(part.name), element, 0, part.tell() // element.itemsize)


def _map(
    path: Path,
    dtype: np.dtype,
    offset: int,
    count: int,
) -> np.ndarray:
    """Return `count` elements at byte `offset`, memory-mapped read-only."""
    if count == 0:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def _read_index(path: Path, stored: int) -> tuple[np.dtype, Index]:
    """Return the dtype of the ids, and the index, memory-mapped.

    stored: bytes of the file of ids. Raises UserError if the sizes are inconsistent.
    """
    with reading(path) as file:
        head = file.read(HEADER.size)
    if head.startswith(OLD_MAGIC):
        raise UserError.of("data.old_index_format", path=path)
    if head[: len(MAGIC)] != MAGIC:
        raise corrupt(path, f"it begins with {head[: len(MAGIC)]!r} where {MAGIC!r} should stand")
    if len(head) < HEADER.size:
        raise corrupt(path, f"truncated: {len(head)} bytes, the header alone has {HEADER.size}")
    _, version, code, sequence_count, document_count = HEADER.unpack(head)
    if version != VERSION:
        raise corrupt(path, f"version {version} where only {VERSION} is known")
    if code not in DTYPES:
        raise corrupt(path, f"dtype code {code} where 1 to {max(DTYPES)} are known")
    size = path.stat().st_size
    pointers_begin = HEADER.size + 4 * sequence_count
    documents_begin = pointers_begin + 8 * sequence_count
    modes_begin = documents_begin + 8 * document_count
    if size not in (modes_begin, modes_begin + sequence_count):  # modes are optional
        state = "truncated" if size < modes_begin else "too long"
        raise corrupt(
            path,
            f"{state}: {size} bytes where {sequence_count} sequences and {document_count} document "
            f"indices take {modes_begin}",
        )
    index = Index(
        path,
        lengths=_map(path, np.dtype("<i4"), HEADER.size, sequence_count),
        pointers=_map(path, np.dtype("<i8"), pointers_begin, sequence_count),
        documents=_map(path, np.dtype("<i8"), documents_begin, document_count),
        modes=_map(path, np.dtype("i1"), modes_begin, size - modes_begin),
        itemsize=DTYPES[code].itemsize,
        stored=stored,
    )
    return DTYPES[code], index
