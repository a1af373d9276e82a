"""Readers of tables, whose documents are the rows: comma- or tab-separated text and Parquet.

Rows of Parquet are counted from 1; those of separated text are named by the line at which they
begin, counted from 1 with the header.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.data.forms import is_utf8_instead
from megaprec.data.packed_files import import_pyarrow, naming_damage, open_unpacked
from megaprec.data.pieces import WHICH, OnFault, Piece, cut_document
from megaprec.data.places import is_remote, naming_url, openable
from megaprec.errors import UserError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHER_SEPARATORS = (",", ";", "\t", "|")  # that tables may have by mistake
BATCH_ROWS = 256  # that are read together
MAX_FIELD = 1 << 26  # characters of a field, which is read whole


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
            column = _column(file, header, field)
        if row is not None:
            yield from cut_document(f"{document}:{line}", row[column])


def separated_rows(
    file: Path, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the fields of each row, as `separated_pieces` reads them."""
    for line, header, row in _separated_lines(file, encoding, separator, on_fault):
        if len({*header}) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            _column(file, header, twice)  # raises
        if row is not None:
            yield line, dict(zip(header, row, strict=True))


def _separated_lines(
    file: Path, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[tuple[int, list[str], list[str] | None]]:
    """Yield the line, the header and the fields of the header itself (None) and of each row."""
    # a limit of the module csv, whose default of 131,072 characters is less than many documents
    csv.field_size_limit(MAX_FIELD)
    line = 1
    if is_utf8_instead(file, encoding):
        raise UserError.of("data.utf8_instead", file=file, encoding=encoding)
    try:
        with (
            naming_damage(file, lambda: str(line)),
            io.TextIOWrapper(open_unpacked(file), encoding, newline="") as stream,
        ):
            rows = csv.reader(stream, delimiter=separator, strict=True)
            header = next(rows, [])
            yield line, header, None
            line = rows.line_num + 1
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
    except csv.Error as problem:
        raise UserError.of(
            "data.table_broken", file=file, line=line, problem=problem, separator=separator
        ) from problem
    except UnicodeDecodeError as problem:
        reason = f"not {encoding}: {problem.reason}, at or after line {line}"
        raise UserError.of("data.table_encoding", file=file, reason=reason) from problem


def has_column(file: Path, field: str, encoding: str, separator: str) -> bool:
    """Return False if a table has a header without this column; True also for what is no table,
    which its reader refuses."""
    csv.field_size_limit(MAX_FIELD)
    try:
        with (
            naming_damage(file, lambda: "1"),
            io.TextIOWrapper(open_unpacked(file), encoding, newline="") as stream,
        ):
            header = next(csv.reader(stream, delimiter=separator, strict=True), None)
    except (csv.Error, UnicodeError, UserError):
        return True
    if header is None or field in header:
        return True
    # a table with another separator is refused by its reader, not left out
    return len(header) == 1 and any(field in header[0].split(sign) for sign in OTHER_SEPARATORS)


def _column(file: Path, header: Sequence[str], field: str) -> int:
    """Return the number of the column of the text. Raises UserError unless there is one."""
    if field not in header:
        for separator in OTHER_SEPARATORS:
            if len(header) == 1 and field in header[0].split(separator):
                raise UserError.of("data.other_separator", file=file, separator=separator)
        names = ", ".join(header) or "none"
        raise UserError.of("data.field_missing", where=file, field=field, names=names, which=WHICH)
    if header.count(field) > 1:
        raise UserError.of(
            "data.column_twice",
            file=file,
            column_count=header.count(field),
            field=field,
            which=WHICH,
        )
    return header.index(field)


def parquet_pieces(file: Path, document: str, field: str, on_fault: OnFault) -> Iterator[Piece]:
    """Yield the texts in column `field` of a Parquet file.

    Raises UserError if the column is missing or has another type, and for a damaged file.
    """
    arrow = import_pyarrow(file)
    with naming_row(file, arrow, _damaged_parquet) as current, _open_parquet(file) as table:
        require_texts(file, table.schema_arrow, field)
        batches = table.iter_batches(batch_size=BATCH_ROWS, columns=[field], use_threads=False)
        yield from column_pieces(file, document, field, batches, current, on_fault)


def parquet_rows(file: Path, on_fault: OnFault) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each row of a Parquet file. Raises UserError for a damaged
    file."""
    arrow = import_pyarrow(file)
    with naming_row(file, arrow, _damaged_parquet) as current, _open_parquet(file) as table:
        batches = table.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
        yield from batch_rows(file, batches, current, on_fault)


@dataclass
class CurrentRow:
    """The number of the row that is read, counted from 1; 0 before the first."""

    number: int = 0


def column_pieces(
    file: Path,
    document: str,
    field: str,
    batches: Iterable[Any],
    current: CurrentRow,
    on_fault: OnFault,
) -> Iterator[Piece]:
    """Yield the texts in a column of record batches of Arrow, and note where they are."""
    for batch in batches:
        # a column named a.b may come with b of a structure a
        column = batch.column(batch.schema.get_field_index(field))
        for value in column:
            current.number += 1
            where = f"{file}:{current.number}: field {field!r}"
            try:
                text = value.as_py()
            except UnicodeDecodeError as problem:
                on_fault(UserError.of("data.not_utf8", file=where, other_form=problem.reason))
                continue
            if text is None:
                on_fault(UserError.of("data.field_null", where=where))
                continue
            yield from cut_document(f"{document}:{current.number}", text)


def batch_rows(
    file: Path, batches: Iterable[Any], current: CurrentRow, on_fault: OnFault
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each row of record batches of Arrow."""
    for batch in batches:
        for number in range(batch.num_rows):
            current.number += 1
            try:
                (row,) = batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as problem:
                where = f"{file}:{current.number}"
                on_fault(UserError.of("data.not_utf8", file=where, other_form=problem.reason))
                continue
            yield current.number, row


@contextmanager
def naming_row(
    file: Path, arrow: Any, refusal: Callable[[Path, int, str], UserError]
) -> Iterator[CurrentRow]:
    """Raise UserError for a file that Arrow cannot read inside the context.

    arrow: the module.
    refusal: makes the error of the file, the number of the row, and the reason.
    """
    current = CurrentRow()
    try:
        with naming_url(file) if is_remote(file) else nullcontext():
            yield current
    except (arrow.ArrowException, OSError) as problem:
        reason = " ".join(str(problem).split())
        raise refusal(file, current.number + 1, reason) from problem


def _damaged_parquet(file: Path, row: int, reason: str) -> UserError:
    return UserError.of("data.parquet_not_whole", file=file, number=row, reason=reason)


def _open_parquet(file: Path) -> Any:
    """Open a Parquet file; row groups are read in small pieces."""
    import pyarrow.parquet  # noqa: PLC0415 (optional)

    return pyarrow.parquet.ParquetFile(
        openable(file), buffer_size=1 << 20, page_checksum_verification=True
    )


def require_texts(file: Path, schema: Any, field: str) -> None:
    """Raise UserError unless a schema of Arrow has a column `field` of texts."""
    types = import_pyarrow(file).types
    _column(file, schema.names, field)
    field_type = schema.field(field).type
    value_type = field_type.value_type if types.is_dictionary(field_type) else field_type
    # the last is what engines such as Polars and DuckDB write
    kinds_of_text = (types.is_string, types.is_large_string, types.is_string_view)
    if not any(is_text(value_type) for is_text in kinds_of_text):
        raise UserError.of(
            "data.parquet_type", file=file, field=field, field_type=field_type, which=WHICH
        )
