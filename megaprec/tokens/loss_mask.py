"""The tokens of a data set that count in the loss, one bit each, in `PREFIX.loss_mask`.

Token i of the .bin is bit i % 8, from the lowest, of byte i // 8; the bits after the last token are
0. A data set without this file has no mask: all of its tokens count.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.tokens.copies import file_here
from megaprec.tokens.files import discard, open_part, publish, with_suffix

SUFFIX = ".loss_mask"


class LossMask:
    """The memory-mapped mask of a data set; of one at a URL, its copy.

    tokens: number of the data set's tokens. again: see `file_here`. Raises UserError for a file of
    another size.
    """

    def __init__(self, prefix: Path, tokens: int, again: bool = False) -> None:
        path = file_here(prefix, SUFFIX, again)
        size = path.stat().st_size
        needed = _bytes_of(tokens)
        if size != needed:
            raise UserError.of("data.loss_mask_size", path=path, size=size, needed=needed)
        self._bytes = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)

    def counted(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether each of the tokens [start, start + length) counts, [length]."""
        first_byte = start // 8
        stop_byte = _bytes_of(start + length)
        packed = self._bytes[first_byte:stop_byte]
        bits = np.unpackbits(packed, bitorder="little")
        skipped = start - 8 * first_byte
        wanted = bits[skipped : skipped + length]
        return wanted.astype(bool)


@dataclass(frozen=True)
class MaskMark:
    """The progress of a writer.

    size: bytes of its temporary file.
    pending: the bits of a byte that is not full yet.
    """

    size: int
    pending: tuple[int, ...]


class LossMaskWriter:
    """Writes `PREFIX.loss_mask`, streaming.

    mark: of an earlier writer, which this one resumes.
    """

    def __init__(self, prefix: Path, mark: MaskMark | None = None) -> None:
        mark = mark or MaskMark(0, ())
        self._path = with_suffix(prefix, SUFFIX)
        self._part = open_part(self._path, mark.size)
        self._pending = np.array(mark.pending, np.uint8)

    def extend(self, counted: NDArray[np.bool_]) -> None:
        """Append whether each of some tokens counts, [n]."""
        new_bits = counted.astype(np.uint8)
        bits = np.concatenate((self._pending, new_bits))
        num_whole = len(bits) // 8 * 8
        whole_bytes = np.packbits(bits[:num_whole], bitorder="little")
        self._part.write(whole_bytes.tobytes())
        self._pending = bits[num_whole:]

    def mark(self) -> MaskMark:
        """Flush everything to the disk; return the mark from which a new writer can resume."""
        self._part.flush()
        os.fsync(self._part.fileno())
        return MaskMark(self._part.tell(), tuple(self._pending.tolist()))

    def publish(self) -> None:
        """Write the last bits, and give the file its final name."""
        last_byte = np.packbits(self._pending, bitorder="little")
        self._part.write(last_byte.tobytes())
        publish(self._part, self._path)

    def close(self) -> None:
        """Close the temporary file, from which a new writer can resume."""
        self._part.close()

    def discard(self) -> None:
        """Close and remove the temporary file."""
        discard(self._part)


def _bytes_of(tokens: int) -> int:
    """Return the number of bytes that the bits of so many tokens take."""
    return -(-tokens // 8)
