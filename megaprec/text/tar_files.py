"""Reader of WebDataset's shards: tar archives in which the members of a sample follow each other,
with one name and several endings.

`a/0001.txt` and `a/0001.json` are the members `txt` and `json` of sample `a/0001`: an ending begins
at the first dot of the last part of a name.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.text.json_list import row_value
from megaprec.text.json_rows import text_of
from megaprec.text.packed_files import naming_damage, open_unpacked
from megaprec.text.pieces import OnFault, Piece, cut_document, require_unicode
from megaprec.text.tar_members import Member, TarMembers
from megaprec.tokens.bounds import MAX_ITEM

MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)
META = re.compile(r"(^|/)__[^/]*__($|/)")  # members that are of no sample
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
    with open_unpacked(file) as stream:
        members = TarMembers(file, stream)
        with naming_damage(file, lambda: members.place):
            for member in members:
                found = MEMBER.fullmatch(member.name.removeprefix("./"))
                if member.is_folder or META.search(member.name):
                    continue
                if found is None or not member.is_file:
                    raise UserError.of("data.tar_member", file=file, member=member.name)
                sample_name, ending = found.groups()
                content = None
                if ending in wanted:
                    _require_small(file, member)
                    content = members.content()
                yield sample_name, ending, content


def _require_small(file: Path, member: Member) -> None:
    """Raise UserError for a member that is too large to be read whole."""
    if member.size > MAX_ITEM:
        raise UserError.of("data.tar_member_size", file=file, member=member.name, most=MAX_ITEM)


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
        return row_value(text, fields)
    except ValueError as problem:
        raise UserError.of("data.row_not_json_object", where=where, problem=problem) from problem


def _decoded(content: bytes, where: str) -> str:
    try:
        return require_unicode(content.decode(), where, "it")
    except UnicodeDecodeError as problem:
        raise UserError.of("data.not_utf8", file=where, other_form=problem.reason) from problem
