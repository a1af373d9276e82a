"""Readers of tables, whose documents are the rows: comma- or tab-separated text and Parquet.

Rows of Parquet are counted from 1; those of separated text are named by the line at which they
begin, counted from 1 with the header.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megaprec.data.packed_files import import_pyarrow, naming_damage, open_unpacked
from megaprec.data.pieces import WHICH, OnFault, Piece, cut_document
from megaprec.data.places import is_remote, naming_url, openable
from megaprec.errors import UserError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET_ROWS = 256  # that are read together
MAX_FIELD = 1 << 26  # characters of a field, which is read whole


def separated_pieces(
    file: Path, document: str, field: str, encoding: str, separator: str, on_fault: OnFault
) -> Iterator[Piece]:
    """Yield the texts in column `field` of a table with a header; fields are quoted as in RFC 4180.

    on_fault: also called for a row that has more or fewer fields than the header.
    Raises UserError for a column that is missing or there twice, and for a file that breaks off
    within a quoted field or is not text of this encoding.
    """
    # a limit of the module csv, whose default of 131,072 characters is less than many documents
    csv.field_size_limit(MAX_FIELD)
    line = 1
    try:
        with (
            naming_damage(file, lambda: str(line)),
            io.TextIOWrapper(open_unpacked(file), encoding, newline="") as stream,
        ):
            rows = csv.reader(stream, delimiter=separator, strict=True)
            header = next(rows, [])
            column = _column(file, header, field)
            line = rows.line_num + 1
            for row in rows:
                if len(row) == len(header):
                    yield from cut_document(f"{document}:{line}", row[column])
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
    return header is None or field in header


def _column(file: Path, header: Sequence[str], field: str) -> int:
    """Return the number of the column of the text. Raises UserError unless there is one."""
    if field not in header:
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
    number = 0
    try:
        remote = naming_url(file) if is_remote(file) else nullcontext()
        with remote, _open_parquet(file, arrow, field) as table:
            for batch in table.iter_batches(
                batch_size=PARQUET_ROWS, columns=[field], use_threads=False
            ):
                # a column named a.b may come with b of a structure a
                column = batch.column(batch.schema.get_field_index(field))
                for value in column:
                    number += 1
                    where = f"{file}:{number}: field {field!r}"
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as problem:
                        on_fault(
                            UserError.of("data.not_utf8", file=where, other_form=problem.reason)
                        )
                        continue
                    if text is None:
                        on_fault(UserError.of("data.field_null", where=where))
                        continue
                    yield from cut_document(f"{document}:{number}", text)
    except (arrow.ArrowException, OSError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError.of(
            "data.parquet_not_whole", file=file, number=number + 1, reason=reason
        ) from problem


def _open_parquet(
    file: Path,
    arrow: Any,
    field: str,
) -> Any:
    """Open a Parquet file that has a column `field` of texts; row groups are read in small pieces.

    Raises UserError if the column is missing or has another type.
    """
    import pyarrow.parquet  # noqa: PLC0415 (optional)

    table = pyarrow.parquet.ParquetFile(
        openable(file), buffer_size=1 << 20, page_checksum_verification=True
    )
    schema = table.schema_arrow
    _column(file, schema.names, field)
    field_type = schema.field(field).type
    value_type = field_type.value_type if arrow.types.is_dictionary(field_type) else field_type
    if not (arrow.types.is_string(value_type) or arrow.types.is_large_string(value_type)):
        raise UserError.of(
            "data.parquet_type", file=file, field=field, field_type=field_type, which=WHICH
        )
    return table
