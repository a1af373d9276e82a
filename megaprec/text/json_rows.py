"""The rows of JSON lines, and the items of a JSON list, each with its number, counted from 1."""

import codecs
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.text.forms import ZERO, by_first_bytes, other_form
from megaprec.text.json_list import items, row_value
from megaprec.text.packed_files import naming_damage, open_unpacked
from megaprec.text.pieces import WHICH, OnFault, require_unicode
from megaprec.tokens.bounds import MAX_ITEM

MAX_BLANK = 1 << 20  # bytes before a list
# names of fields that JSON can spell in one way only, but for escapes such as \u0041
ONE_SPELLING = re.compile(r"[\w .:-]+", re.ASCII)

CHAT_FIELDS = {"messages", "conversations", "completion"}
CHAT_WHICH = (
    "if the rows are conversations, say how they become text: data.chat_template in a run file, "
    "--chat-template of `megaprec data build`"
)

Row = tuple[int | str, Any]
"""The number of a row in its file, counted from 1, or its name there, and its value."""


def jsonl_rows(file: Path, fields: Sequence[str], on_fault: OnFault) -> Iterator[Row]:
    """Yield the lines of a file of JSON lines that are not blank.

    fields: must not be given twice in an object.
    on_fault: called with the error of a line that is no JSON.
    """
    number = 0
    with naming_damage(file, lambda: str(number + 1)), open_unpacked(file) as stream:
        # One byte more than a line may have, so that a longer one is told from one that just fits.
        lines = iter(lambda: stream.readline(MAX_ITEM + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_ITEM:
                raise UserError.of("data.line_too_long", file=file, number=number, limit=MAX_ITEM)
            if line.isspace():
                continue
            try:
                value = _parse_line(line, fields, f"{file}:{number}")
            except UserError as error:
                on_fault(error)
                continue
            yield number, value


def list_rows(file: Path, fields: Sequence[str]) -> Iterator[Row]:
    """Yield the items of a JSON list.

    fields: must not be given twice in an object.
    Raises UserError for a file that is no list.
    """
    if not is_list(file):
        description = other_form(file)
        if description:
            raise UserError.of("data.not_json_list", file=file, other_form=description)
        raise UserError.of("data.json_list_of_other", file=file)
    number = 0
    try:
        with (
            naming_damage(file, lambda: str(number + 1)),
            io.TextIOWrapper(open_unpacked(file), "utf-8-sig") as stream,
        ):
            for number, item in enumerate(items(stream, fields), 1):
                yield number, item
    except UserError:
        raise
    except UnicodeDecodeError as problem:
        raise UserError.of("data.json_list_not_utf8", file=file, reason=problem.reason) from problem
    except (ValueError, RecursionError) as problem:
        # UTF-16 is a common reason, and its error is of no help
        with open_unpacked(file) as stream:
            reason = ZERO if b"\0" in stream.read(2) else problem
        raise UserError.of(
            "data.json_list_broken", file=file, number=number + 1, reason=reason
        ) from problem


def is_list(file: Path) -> bool:
    """Return True if a .json file is a list, by its first sign. Other JSON is no text: settings,
    notebooks, tables."""
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        beginning = stream.read(MAX_BLANK).removeprefix(codecs.BOM_UTF8)
    return beginning.lstrip().startswith(b"[")


def text_of(row: Any, field: str, where: str) -> str:
    """Return the text of a row. Raises UserError, which names `where`, if there is none."""
    if not isinstance(row, dict):
        # A list or a text may be long; numbers, true, false and null are shown.
        kind = {list: "a list", str: "a text"}.get(type(row)) or json.dumps(row)
        raise UserError.of("data.row_not_object", where=where, kind=kind, field=field)
    if field not in row:
        names = ", ".join(sorted(row)) or "none"
        which = CHAT_WHICH if CHAT_FIELDS & row.keys() else WHICH
        raise UserError.of("data.field_missing", where=where, field=field, names=names, which=which)
    text = row[field]
    if not isinstance(text, str):
        raise UserError.of(
            "data.field_not_text",
            where=where,
            field=field,
            value=json.dumps(text, default=repr)[:40],
            which=WHICH,
        )
    return require_unicode(text, where, f"field {field!r}")


def _parse_line(line: bytes, fields: Sequence[str], where: str) -> Any:
    """Return the value of a line of JSONL. Raises UserError, which names `where`."""
    try:
        # Most lines are spared the slower hook: those in which no field can be twice, in this or
        # another spelling.
        if b"\\u00" not in line and all(_is_once(field, line) for field in fields):
            return row_value(line, ())
        return row_value(line, fields)
    except ValueError as problem:
        description = by_first_bytes(line) or (ZERO if b"\0" in line else "")
        if description:
            raise UserError.of(
                "data.row_not_json", where=where, other_form=description
            ) from problem
        reason = str(problem)
        if isinstance(problem, json.JSONDecodeError):
            # the line's number in the file stands before it; in itself it is line 1
            reason = f"{problem.msg}: column {problem.colno}"
        raise UserError.of("data.row_not_json_object", where=where, problem=reason) from problem


def _is_once(field: str, line: bytes) -> bool:
    """Return True if a line without escapes cannot give a field twice."""
    return ONE_SPELLING.fullmatch(field) is not None and line.count(f'"{field}"'.encode()) < 2
