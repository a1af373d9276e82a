"""The members of a tar archive, one after the other, as a stream gives them.

The module tarfile reads headers before a member (long names, pax records) whole, however large they
say that they are, and passes over a member of any size without an end. So blocks are read here,
with bounds; tarfile knows what a block means.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megaprec.errors import UserError
from megaprec.tokens.bounds import BUFFER, MAX_HEADER, MAX_HEADERS

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)  # of an archive
LONG_NAME = tarfile.GNUTYPE_LONGNAME
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
# before the members that they tell about
HEADERS = (LONG_NAME, tarfile.GNUTYPE_LONGLINK, *PAX, tarfile.XGLTYPE)
PLAIN_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# of these the size is no number of bytes that follow
WITHOUT_CONTENT = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
    tarfile.DIRTYPE,
)


@dataclass(frozen=True)
class Member:
    """A member of an archive, and the number of bytes that it has."""

    name: str
    size: int
    is_folder: bool
    is_file: bool


class TarMembers:
    """The members of an open archive; iterating it once yields them.

    Raises UserError, also while it is read, for an archive that is damaged or cut off.
    Attribute: `place`, the name of the member that is read.
    """

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.place = "the beginning"
        self._file = file
        self._stream = stream
        # bytes of the current member that were not read yet, and those that fill its last block
        self._left = 0
        self._filling = 0

    def __iter__(self) -> Iterator[Member]:
        """Yield the members in order; `content` reads that of the last one."""
        records: dict[str, str] = {}  # what headers say of the member behind them
        num_headers = 0
        while (header := self._next_header()) is not None:
            if header.type in HEADERS:
                num_headers += 1
                records |= self._records(header)
                if num_headers > MAX_HEADERS:
                    raise self._damaged(f"more than {MAX_HEADERS} headers follow each other")
                continue
            member = self._member(header, records)
            self.place = member.name
            self._begin(0 if header.type in WITHOUT_CONTENT else member.size)
            yield member
            self._pass_over()
            records = {}
            num_headers = 0

    def content(self) -> bytes:
        """Return all of the current member."""
        size = self._left
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left:
            raise self._damaged(f"it ends within member {self.place!r}")
        return content

    def _next_header(self) -> tarfile.TarInfo | None:
        """Return the next header; None at the end of the archive."""
        block = self._stream.read(BLOCK)
        if block == bytes(BLOCK):
            self._require_end(block)
            return None
        if len(block) < BLOCK:
            raise self._damaged("its end is missing")
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as problem:
            raise self._damaged(str(problem)) from problem

    def _require_end(self, tail: bytes) -> None:
        """Read to the end. Raises UserError unless the last blocks are empty."""
        while piece := self._stream.read(BUFFER):
            tail = (tail + piece)[-len(END) :]
        if tail != END:
            raise self._damaged("its end is missing")

    def _records(self, header: tarfile.TarInfo) -> dict[str, str]:
        """Return what a header says of the member behind it."""
        if not 0 <= header.size <= MAX_HEADER:
            raise self._damaged(
                f"a header of {header.size} bytes stands before a member, of at most {MAX_HEADER}"
            )
        self._begin(header.size)
        content = self.content()
        self._pass_over()
        if header.type == LONG_NAME:
            name = content.partition(b"\0")[0]
            return {"path": name.decode("utf-8", "surrogateescape")}
        if header.type in PAX:
            return self._pax_records(content)
        if header.type == tarfile.XGLTYPE and self._pax_records(content).keys() & {"path", "size"}:
            raise self._damaged("one header gives all members a name or a size")
        return {}

    def _pax_records(self, content: bytes) -> dict[str, str]:
        """Return the records of a pax header, each `LENGTH NAME=VALUE` and a line end."""
        records: dict[str, str] = {}
        position = 0
        while position < len(content) and content[position]:
            length_text, _, _ = content[position : position + 20].partition(b" ")
            length = int(length_text) if length_text.isdigit() else 0
            record = content[position + len(length_text) + 1 : position + length]
            name, sign, value = record.partition(b"=")
            if not sign or not record.endswith(b"\n") or position + length > len(content):
                raise self._damaged("a pax header before a member has a record that is none")
            name_text = name.decode("utf-8", "surrogateescape")
            records[name_text] = value[:-1].decode("utf-8", "surrogateescape")
            position += length
        return records

    def _member(self, header: tarfile.TarInfo, records: dict[str, str]) -> Member:
        """Return the member of a header and of what was said before it."""
        name = records.get("path", header.name)
        if any(key.startswith("GNU.sparse.") for key in records):
            raise UserError.of("data.tar_sparse", file=self._file, member=name)
        size_text = records.get("size", str(header.size))
        if not size_text.isdecimal() or len(size_text) > len(str(1 << 64)):
            raise self._damaged(f"member {name!r} would have {size_text} bytes")
        return Member(
            name=name,
            size=int(size_text),
            is_folder=header.isdir(),
            is_file=header.type in PLAIN_FILES,
        )

    def _begin(self, size: int) -> None:
        """Begin to read bytes that fill whole blocks."""
        self._left = size
        self._filling = -size % BLOCK

    def _pass_over(self) -> None:
        """Go on behind the current member."""
        remaining = self._left + self._filling
        while remaining:
            piece = self._stream.read(min(remaining, BUFFER))
            if not piece:
                raise self._damaged(f"it ends within member {self.place!r}")
            remaining -= len(piece)
        self._begin(0)

    def _damaged(self, reason: str) -> UserError:
        return UserError.of("data.tar_cut_off", file=self._file, reason=reason)
