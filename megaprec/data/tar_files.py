"""Reader of WebDataset's shards: tar archives in which the members of a sample follow each other,
with one name and several endings.

`a/0001.txt` and `a/0001.json` are the members `txt` and `json` of sample `a/0001`: an ending begins
at the first dot of the last part of a name.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megaprec.data.json_list import once
from megaprec.data.json_rows import text_of
from megaprec.data.packed_files import naming_damage, open_unpacked
from megaprec.data.pieces import OnFault, Piece, cut_document, require_unicode
from megaprec.errors import UserError

MAX_MEMBER = 1 << 26  # bytes of a text, which is read whole
MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)
META = re.compile(r"(^|/)__[^/]*__($|/)")  # members that are of no sample
END = bytes(2 * tarfile.BLOCKSIZE)  # of an archive
TEXT_MEMBERS = ("txt", "text")
JSON_MEMBER = "json"

Sample = dict[str, bytes]


def tar_pieces(file: Path, document: str, field: str, on_fault: OnFault) -> Iterator[Piece]:
    """Yield the texts of samples: of the member `field`, or else `txt`, or else that field of the
    object `json`."""
    wanted = (field, *TEXT_MEMBERS, JSON_MEMBER)
    for name, sample in _samples(file, wanted, on_fault):
        where = f"{file}:{name}"
        try:
            text = _text_of(sample, field, where)
        except UserError as error:
            on_fault(error)
            continue
        yield from cut_document(f"{document}:{name}", text)


def tar_rows(
    file: Path, fields: Sequence[str], on_fault: OnFault
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the object `json` of each sample.

    fields: must not be given twice in an object.
    """
    for name, sample in _samples(file, (JSON_MEMBER,), on_fault):
        where = f"{file}:{name}"
        try:
            row = _object_of(sample, fields, where)
        except UserError as error:
            on_fault(error)
            continue
        yield name, row


def _samples(file: Path, wanted: Sequence[str], on_fault: OnFault) -> Iterator[tuple[str, Sample]]:
    """Yield the name and the wanted members of each sample. Raises UserError for an archive that
    is cut off."""
    name = ""
    sample: Sample | None = None
    for sample_name, ending, content in _members(file, wanted):
        if sample is None or sample_name != name:
            if sample is not None:
                yield name, sample
            name = sample_name
            sample = {}
        if ending in sample:
            on_fault(UserError.of("data.tar_member_twice", where=f"{file}:{name}", ending=ending))
        elif content is not None:
            sample[ending] = content
    if sample is not None:
        yield name, sample


def _members(file: Path, wanted: Sequence[str]) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield the sample, the ending and the content of each member; None for one that is not wanted.

    Raises UserError.
    """
    place = "the beginning"
    try:
        with naming_damage(file, lambda: place), open_unpacked(file) as packed:
            stream = _Tail(packed)
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    place = member.name
                    found = MEMBER.fullmatch(member.name.removeprefix("./"))
                    if member.isdir() or META.search(member.name):
                        continue
                    if found is None or not member.isreg():
                        raise UserError.of("data.tar_member", file=file, member=member.name)
                    content = None
                    if found[2] in wanted:
                        content = _content(file, archive, member)
                    yield found[1], found[2], content
            if not stream.ends_with(END):
                raise UserError.of("data.tar_cut_off", file=file, reason="its end is missing")
    except tarfile.TarError as problem:
        raise UserError.of("data.tar_cut_off", file=file, reason=problem) from problem


def _content(file: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a regular member. Raises UserError for one that is too large."""
    if member.size > MAX_MEMBER:
        raise UserError.of("data.tar_member_size", file=file, member=member.name, most=MAX_MEMBER)
    opened = archive.extractfile(member)
    assert opened
    return opened.read()


class _Tail(io.BufferedIOBase):
    """A stream that remembers the end of what was read."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._tail = b""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        content = self._stream.read(-1 if size is None else size)
        self._tail = (self._tail + content)[-len(END) :]
        return content

    def ends_with(self, end: bytes) -> bool:
        """Read to the end; return True if these are the last bytes."""
        while self.read(1 << 20):
            pass
        return self._tail == end


def _text_of(sample: Sample, field: str, where: str) -> str:
    """Return the text of a sample. Raises UserError."""
    for ending in (field, *TEXT_MEMBERS):
        if ending in sample and ending != JSON_MEMBER:
            text = _decoded(sample[ending], where)
            if "\0" in text:
                raise UserError.of("data.not_utf8", file=where, other_form="it has a byte 0")
            return text
    return text_of(_object_of(sample, [field], where), field, where)


def _object_of(sample: Sample, fields: Sequence[str], where: str) -> Any:
    """Return the object of a sample. Raises UserError."""
    if JSON_MEMBER not in sample:
        raise UserError.of("data.tar_no_text", where=where)
    text = _decoded(sample[JSON_MEMBER], where)
    try:
        return json.loads(text, object_pairs_hook=once(fields))
    except (ValueError, RecursionError) as problem:
        raise UserError.of("data.row_not_json_object", where=where, problem=problem) from problem


def _decoded(content: bytes, where: str) -> str:
    try:
        return require_unicode(content.decode(), where, "it")
    except UnicodeDecodeError as problem:
        raise UserError.of("data.not_utf8", file=where, other_form=problem.reason) from problem
