"""The work of a confined process that reads tables of Arrow and Parquet (`arrow_files`).

A request is an object:

    path      of the file; null: its bytes are asked for, and `size` is their number
    form      ".arrow" or ".parquet"
    texts     name of the column of texts, or null
    fields    names of columns of any values, for rows
    longest   characters that a text may have

The first answer has the names of all columns, and the type of the column of texts, with whether it
is one. The others are lists of rows: texts, or objects with the fields; null is null, and a list
stands for a row that has none: of its fault, NOT_UTF8 or UNFIT, and of the reason.

Arrow trusts the offsets, lengths and indices within a batch, which a damaged file has wrong, so
each is validated in full. This module imports no other module of the project.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

FILE_MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
NOT_UTF8 = "not UTF-8"
UNFIT = "unfit"
BATCH_ROWS = 256  # that are read together
ANSWER_CHARS = 1 << 20  # of an answer, at least, if there are rows for it


class AskedFile(io.RawIOBase):
    """A file whose bytes another process reads."""

    def __init__(self, read_bytes: Any, size: int) -> None:
        self._read_bytes = read_bytes
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = max(0, offset + bases[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        left = max(0, self._size - self._position)
        content = self._read_bytes(self._position, min(len(buffer), left)) if left else b""
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class Work:
    """The reading of one table for each request."""

    def answers(self, request: dict[str, Any], read_bytes: Any) -> Iterator[Any]:
        """Yield the columns and the rows of a table. Raises what pyarrow raises for a damaged
        one.

        read_bytes: asks the other process for bytes of a file without a path, by the first one and
            their number.
        """
        with _opened(request, read_bytes) as stream:
            if request["form"] == ".parquet":
                yield from _parquet(request, stream)
            else:
                yield from _arrow(request, stream)


def _opened(request: dict[str, Any], read_bytes: Any) -> BinaryIO:
    if request["path"] is None:
        asked = AskedFile(read_bytes, request["size"])
        return cast(BinaryIO, io.BufferedReader(cast(Any, asked), 1 << 20))
    return open(request["path"], "rb")


def _parquet(request: dict[str, Any], stream: BinaryIO) -> Iterator[Any]:
    """Yield all answers about a table of Parquet: the columns, then lists of rows."""
    import pyarrow.parquet  # noqa: PLC0415 (optional)

    # row groups are read in small pieces
    table = pyarrow.parquet.ParquetFile(
        stream, buffer_size=1 << 20, page_checksum_verification=True
    )
    yield _columns(request, table.schema_arrow)
    columns = _wanted(request, table.schema_arrow.names)
    batches = table.iter_batches(batch_size=BATCH_ROWS, columns=columns, use_threads=False)
    yield from _rows(request, batches)


def _arrow(request: dict[str, Any], stream: BinaryIO) -> Iterator[Any]:
    """Yield all answers about a table of Arrow, a file or a stream: the columns, then lists of
    rows."""
    import pyarrow.ipc  # noqa: PLC0415 (optional)

    is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
    if not is_file:
        _require_end(stream)
    stream.seek(0)
    if is_file:
        table = pyarrow.ipc.open_file(stream)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = pyarrow.ipc.open_stream(stream)
        batches = table
    yield _columns(request, table.schema)
    yield from _rows(request, batches)


def _require_end(stream: BinaryIO) -> None:
    """Raise ValueError unless a stream has the mark at its end: one that is cut off between two
    batches looks whole to pyarrow."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - len(STREAM_END)))
    if stream.read(len(STREAM_END)) != STREAM_END:
        raise ValueError("it has no mark at its end: it is cut off, or no Arrow table")


def _columns(request: dict[str, Any], schema: Any) -> list[Any]:
    """Return the names of all columns, the type of the column of texts, and whether it is one."""
    name = request["texts"]
    if schema.names.count(name) != 1:
        return [schema.names, "", False]
    from pyarrow import types  # noqa: PLC0415 (optional)

    field_type = schema.field(name).type
    value_type = field_type.value_type if types.is_dictionary(field_type) else field_type
    is_text = types.is_string(value_type) or types.is_large_string(value_type)
    return [schema.names, str(field_type), is_text or types.is_string_view(value_type)]


def _wanted(request: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the columns that are read."""
    wanted = request["fields"] if request["texts"] is None else [request["texts"]]
    return [name for name in names if name in wanted]


def _rows(request: dict[str, Any], batches: Any) -> Iterator[list[Any]]:
    """Yield the rows of batches in lists, each of at most BATCH_ROWS rows, and of few more
    characters than ANSWER_CHARS."""
    rows: list[Any] = []
    size = 0  # characters of these rows
    for batch in batches:
        for column in batch.columns:
            _require_sound(column)
        for row, row_size in _rows_of(request, batch):
            rows.append(row)
            size += row_size
            if len(rows) >= BATCH_ROWS or size >= ANSWER_CHARS:
                yield rows
                rows = []
                size = 0
    if rows:
        yield rows


def _require_sound(column: Any) -> None:
    """Raise pyarrow's error for a column that would be read beyond its buffers. A text that is no
    UTF-8 is the fault of its row."""
    from pyarrow import ArrowInvalid  # noqa: PLC0415 (optional)

    try:
        column.validate(full=True)
    except ArrowInvalid as problem:
        if "UTF8" not in str(problem):
            raise
        _as_bytes(column).validate(full=True)


def _as_bytes(column: Any) -> Any:
    """Return a column with bytes in place of its texts, in the same buffers."""
    from pyarrow import DictionaryArray, types  # noqa: PLC0415 (optional)

    if types.is_dictionary(column.type):
        return DictionaryArray.from_arrays(column.indices, _as_bytes(column.dictionary))
    return column.view(_type_of_bytes(column.type))


def _type_of_bytes(kind: Any) -> Any:
    """Return a type of Arrow with bytes in place of texts, also of those within lists and
    structures."""
    import pyarrow  # noqa: PLC0415 (optional)
    from pyarrow import types  # noqa: PLC0415 (optional)

    if types.is_string(kind):
        return pyarrow.binary()
    if types.is_large_string(kind):
        return pyarrow.large_binary()
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_type_of_bytes(kind.value_type)))
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_type_of_bytes(kind.value_type)))
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_type_of_bytes(field.type)) for field in kind])
    return kind


def _rows_of(request: dict[str, Any], batch: Any) -> Iterator[tuple[Any, int]]:
    """Yield each row of a batch, and the characters that it has."""
    name = request["texts"]
    longest = request["longest"]
    if name is not None:
        # a column named a.b may come with b of a structure a
        for value in batch.column(batch.schema.get_field_index(name)):
            yield _text(value, longest)
        return
    columns = batch.select(_wanted(request, batch.schema.names))
    for number in range(batch.num_rows):
        yield _object(columns.slice(number, 1), longest)


def _text(value: Any, longest: int) -> tuple[Any, int]:
    """Return the answer for a value of the column of texts, and the characters that it has."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as problem:
        return [NOT_UTF8, problem.reason], 0
    if text is None:
        return None, 0
    if len(text) > longest:
        return [UNFIT, f"it has more than {longest:,} characters: split the document"], 0
    return text, len(text)


def _object(row: Any, longest: int) -> tuple[Any, int]:
    """Return the answer for a row, an object with its fields, and the characters that it has as
    JSON. row: a batch of one row."""
    try:
        (value,) = row.to_pylist()
        text = json.dumps(value)
    except UnicodeDecodeError as problem:
        return [NOT_UTF8, problem.reason], 0
    except (TypeError, ValueError, RecursionError) as problem:
        return [UNFIT, f"it has a value that is no text, number, list or object: {problem}"], 0
    if len(text) > longest:
        return [UNFIT, f"it has more than {longest:,} characters: split the document"], 0
    return value, len(text)
