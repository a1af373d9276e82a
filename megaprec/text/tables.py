"""Reader of tables of comma- or tab-separated text, whose documents are the rows, named by the line
at which they begin, counted from 1 with the header.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megaprec.errors import UserError
from megaprec.text.columns import OTHER_SEPARATORS, require_column
from megaprec.text.forms import is_utf8_instead
from megaprec.text.packed_files import naming_damage, open_unpacked
from megaprec.text.pieces import OnFault, Piece, cut_document
from megaprec.tokens.bounds import MAX_ITEM, MAX_VALUES

SEPARATORS = {".csv": ",", ".tsv": "\t"}


def separated_pieces(
    file: Path, document: str, field: str, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[Piece]:
    """Yield the texts in column `field` of a table with a header; fields are quoted as in RFC 4180.

    on_fault: also called for a row that has more or fewer fields than the header.
    Raises UserError for a column that is missing or there twice, and for a file that breaks off
    within a quoted field or is not text of this encoding.
    """
    column: int | None = None
    for line, header, row in _separated_lines(file, encoding, separator, on_fault):
        if column is None:
            column = require_column(file, header, field)
        if row is not None:
            yield from cut_document(f"{document}:{line}", row[column])


def separated_rows(
    file: Path, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the fields of each row, as `separated_pieces` reads them."""
    for line, header, row in _separated_lines(file, encoding, separator, on_fault):
        if len({*header}) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            require_column(file, header, twice)  # raises
        if row is not None:
            yield line, dict(zip(header, row, strict=True))


def _separated_lines(
    file: Path, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[tuple[int, list[str], list[str] | None]]:
    """Yield (line, header, fields) for the header, whose fields are None, and then for each row.
    line: at which it begins, counted from 1."""
    # a limit of the module csv, whose default of 131,072 characters is less than many documents
    csv.field_size_limit(MAX_ITEM)
    line = 1
    if is_utf8_instead(file, encoding):
        raise UserError.of("data.utf8_instead", file=file, encoding=encoding)
    try:
        with (
            naming_damage(file, lambda: str(line)),
            io.TextIOWrapper(open_unpacked(file), encoding, newline="") as stream,
        ):
            lines = _RowLines(file, stream, separator)
            rows = csv.reader(lines, delimiter=separator, strict=True)
            header = next(rows, [])
            yield line, header, None
            line = rows.line_num + 1
            lines.begin_row(line)
            for row in rows:
                if len(row) == len(header):
                    yield line, header, row
                elif row:  # an empty line is no row
                    on_fault(
                        UserError.of(
                            "data.row_fields",
                            where=f"{file}:{line}",
                            count=len(row),
                            columns=len(header),
                        )
                    )
                line = rows.line_num + 1
                lines.begin_row(line)
    except csv.Error as problem:
        raise UserError.of(
            "data.table_broken", file=file, line=line, problem=problem, separator=separator
        ) from problem
    except UnicodeDecodeError as problem:
        reason = f"not {encoding}: {problem.reason}, at or after line {line}"
        raise UserError.of("data.table_encoding", file=file, reason=reason) from problem


class _RowLines:
    """The lines of a table, of which those of one row have bounds: MAX_ITEM characters, and
    MAX_VALUES fields."""

    def __init__(self, file: Path, stream: TextIO, separator: str) -> None:
        self._file = file
        self._stream = stream
        self._separator = separator
        self.begin_row(1)

    def begin_row(self, line: int) -> None:
        """Count anew: a row begins at this line."""
        self._line = line
        self._chars = 0
        self._fields = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line. Raises UserError for a row that has too many of them, or one that
        is too long."""
        line = self._stream.readline(MAX_ITEM + 1)
        if not line:
            raise StopIteration
        self._chars += len(line)
        # fewer characters cannot be too many fields
        if self._chars > MAX_VALUES:
            self._fields += line.count(self._separator)
            where = f"{self._file}:{self._line}"
            if self._chars > MAX_ITEM:
                raise UserError.of("data.row_too_long", where=where, most=MAX_ITEM)
            if self._fields > MAX_VALUES:
                raise UserError.of("data.row_too_wide", where=where, most=MAX_VALUES)
        return line


def has_column(file: Path, field: str, encoding: str, separator: str) -> bool:
    """Return False if a table has a header without this column; True also for what is no table,
    which its reader refuses."""
    csv.field_size_limit(MAX_ITEM)
    try:
        with (
            naming_damage(file, lambda: "1"),
            io.TextIOWrapper(open_unpacked(file), encoding, newline="") as stream,
        ):
            lines = _RowLines(file, stream, separator)
            header = next(csv.reader(lines, delimiter=separator, strict=True), None)
    except (csv.Error, UnicodeError, UserError):
        return True
    if header is None or field in header:
        return True
    # a table with another separator is refused by its reader, not left out
    return len(header) == 1 and any(field in header[0].split(sign) for sign in OTHER_SEPARATORS)
