"""Reader of Arrow tables, in the form of a stream, as Hugging Face's `datasets` saves them, or of a
file. Their documents are the rows, counted from 1.

A stream that is cut off between two batches looks whole to Arrow's reader: the mark at its end must
be there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaprec.data.packed_files import import_pyarrow, open_unpacked
from megaprec.data.pieces import OnFault, Piece
from megaprec.data.tables import CurrentRow, batch_rows, column_pieces, naming_row, require_texts
from megaprec.errors import UserError

FILE_MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_pieces(file: Path, document: str, field: str, on_fault: OnFault) -> Iterator[Piece]:
    """Yield the texts in column `field` of an Arrow table.

    Raises UserError if the column is missing or has another type, and for a damaged file.
    """
    with _opened(file) as (table, current):
        require_texts(file, table.schema, field)
        yield from column_pieces(file, document, field, _batches(table), current, on_fault)


def arrow_rows(file: Path, on_fault: OnFault) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each row of an Arrow table. Raises UserError for a damaged
    file."""
    with _opened(file) as (table, current):
        yield from batch_rows(file, _batches(table), current, on_fault)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, CurrentRow]]:
    """Yield the reader of a table, and the place of its rows. Raises UserError, which names the
    row, where it is damaged."""
    arrow = import_pyarrow(file)
    import pyarrow.ipc  # noqa: PLC0415 (optional)

    with naming_row(file, arrow, _not_whole) as current, open_unpacked(file) as stream:
        is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
        if not is_file:
            _require_end(file, stream)
        stream.seek(0)
        open_table = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        with open_table(stream) as table:
            yield table, current


def _require_end(file: Path, stream: Any) -> None:
    """Raise UserError unless a stream has the mark at its end."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - len(STREAM_END)))
    if stream.read() != STREAM_END:
        reason = "it has no mark at its end: it is cut off, or no Arrow table"
        raise _not_whole(file, 1, reason)


def _batches(table: Any) -> Iterator[Any]:
    """Yield the batches of a reader of a stream or of a file."""
    if hasattr(table, "num_record_batches"):
        yield from map(table.get_batch, range(table.num_record_batches))
    else:
        yield from table


def _not_whole(file: Path, row: int, reason: str) -> UserError:
    return UserError.of("data.arrow_not_whole", file=file, number=row, reason=reason)
