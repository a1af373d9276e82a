"""The bounds of everything that is read from texts and data sets: bytes, values, depth.

Whatever comes in pieces, such as a text, a table of rows or an archive of members, may be as large
as a disk. What is read whole has a bound, and so has what a packed file becomes: `Unpacking` is the
stream that all packed files are read from. docs/data.md has a table of these bounds.
"""

import io
import time
from pathlib import Path
from typing import BinaryIO

from megaprec.errors import UserError

# bytes, or characters, of what is read whole: a line, item, row, field, member, sample or page
MAX_ITEM = 1 << 26
# bytes of what stands before contents: names and headers of archives, settings of shards
MAX_HEADER = 1 << 20
MAX_HEADERS = 16  # that follow each other before one member
MAX_VALUES = 1 << 22  # JSON values of one row, or fields of a row of a table
MAX_FOLDERS = 100  # in each other

MAX_RATIO = 250  # bytes that a packed one becomes: text becomes some 10, and rarely 50
FREE_BYTES = 1 << 24  # of which a file may be made in any ratio
MAX_IDLE = 1 << 22  # bytes of a packed file, one behind the other, that become nothing
SLOW_SECONDS = 60.0  # for which a file at a URL may come more slowly than LEAST_SPEED
LEAST_SPEED = 1 << 10  # bytes a second

BUFFER = 1 << 17  # bytes that are unpacked at a time


def require_ratio(file: Path, made: int, packed: int) -> None:
    """Raise UserError if a file has become more than FREE_BYTES and MAX_RATIO times what was read
    of it.

    made, packed: bytes; of tables characters that were made.
    """
    if made > FREE_BYTES and made > MAX_RATIO * packed:
        raise UserError.of("data.unpacks_too_far", file=file, size=made, ratio=MAX_RATIO)


class Fetching(io.RawIOBase):
    """A file at a URL, as it comes. Reading raises UserError if it has another size than its server
    tells, and if it comes too slowly.

    opened: the file, read from its beginning.
    size: in bytes.
    """

    def __init__(self, file: Path, opened: BinaryIO, size: int) -> None:
        self._file = file
        self._opened = opened
        self._size = size
        self._position = 0
        self._fetched = 0
        self._seconds = 0.0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True if the file is."""
        return self._opened.seekable()

    def tell(self) -> int:
        """Return the position in the file."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go on at another position."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = self._opened.seek(max(0, offset + bases[whence]))
        return self._position

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fill a buffer with the next bytes; return their number, 0 at the end."""
        began = time.monotonic()
        content = self._opened.read(len(buffer))
        self._seconds += time.monotonic() - began
        count = len(content)
        buffer[:count] = content
        self._position += count
        self._fetched += count
        ended_early = count == 0 and self._position < self._size
        if ended_early or self._position > self._size:
            raise UserError.of(
                "data.url_size_differs", url=self._file, size=self._size, fetched=self._position
            )
        if self._seconds > SLOW_SECONDS + self._fetched / LEAST_SPEED:
            raise UserError.of(
                "data.url_too_slow", url=self._file, fetched=self._fetched, seconds=self._seconds
            )
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._opened.close()
        super().close()


class Packed(io.BufferedReader):
    """A packed file, as it is. Reading raises UserError after MAX_IDLE bytes from which nothing has
    come: padding and empty parts may be as large as a disk, and cost nothing to make.

    raw: the file, open.
    """

    def __init__(self, file: Path, raw: io.RawIOBase) -> None:
        super().__init__(raw, BUFFER)
        self._file = file
        self._idle = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, at most `size`; none at the end."""
        content = super().read(size)
        self._idle += len(content)
        if self._idle > MAX_IDLE:
            raise UserError.of("data.packed_nothing", file=self._file, size=MAX_IDLE)
        return content

    def has_become_some(self) -> None:
        """Count anew, for something has come from the bytes that were read."""
        self._idle = 0


class Unpacking(io.RawIOBase):
    """The bytes that a packed file becomes. Reading raises UserError once that is
    more than FREE_BYTES and MAX_RATIO times what was read of the file.

    packed: the open file, whose position says how much was read.
    stream: which unpacks it.
    """

    def __init__(self, file: Path, packed: Packed, stream: BinaryIO) -> None:
        self._file = file
        self._packed = packed
        self._stream = stream
        self._size = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fill a buffer with the next bytes; return their number, 0 at the end."""
        content = self._stream.read(len(buffer))
        count = len(content)
        buffer[:count] = content
        self._size += count
        if count:
            self._packed.has_become_some()
        if self._size > FREE_BYTES:
            require_ratio(self._file, self._size, self._packed.tell())
        return count

    def close(self) -> None:
        """Close both files."""
        if not self.closed:
            self._stream.close()
            self._packed.close()
        super().close()
