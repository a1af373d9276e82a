"""Readers of one text file: plain text, JSON lines (also compressed by gzip or zstd) or Parquet.

Each reader yields pieces `(document, text)`; consecutive pieces of one document have the same name. A file that is
truncated, damaged or not of the format that its name says raises a `UserError` that names the file and the line (for
Parquet the row), both counted from 1. Zstd and Parquet are read with the optional package `pyarrow`.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megaprec.errors import UserError

JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = ".parquet"
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *JSONL, PARQUET)
PIECE_CHARS = 1 << 20
MOST_LINE = 1 << 26  # bytes of a line of JSONL, which is parsed whole
ROWS = 256  # of a Parquet file that are read together

Piece = tuple[str, str]


def pieces(file: Path, document: str, field: str, skip_undecodable: bool) -> Iterator[Piece]:
    """Yield the text in `file` in pieces; `document` is the prefix of its documents' names."""
    if file.name.endswith(JSONL):
        return _jsonl_pieces(file, document, field)
    if file.name.endswith(PARQUET):
        return _parquet_pieces(file, document, field)
    return _text_pieces(file, document, skip_undecodable)


def check_readable(files: Sequence[Path]) -> None:
    """Raise UserError if a package is missing that one of the files needs."""
    if needing := [file for file in files if file.name.endswith((".zst", PARQUET))]:
        _pyarrow(needing[0])


def _text_pieces(file: Path, document: str, skip_undecodable: bool) -> Iterator[Piece]:
    line = 1
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            while text := stream.read(PIECE_CHARS):
                text += stream.readline(PIECE_CHARS)
                line += text.count("\n")
                yield document, text
    except UnicodeDecodeError as problem:
        if not skip_undecodable:
            raise UserError(
                f"{file} is not UTF-8 text ({problem.reason}, after line {line}); convert it or leave it out"
            ) from problem


def _jsonl_pieces(file: Path, document: str, field: str) -> Iterator[Piece]:
    number = 0
    try:
        with _unpacked(file) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE + 1), b""), 1):
                if len(line) > MOST_LINE:
                    raise UserError(f"{file}:{number}: a line of more than {MOST_LINE:,} bytes; split the document")
                if not line.isspace():
                    yield from _cut(f"{document}:{number}", _field(line, field, f"{file}:{number}"))
    except (EOFError, zlib.error, OSError) as problem:
        kind = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix)
        if kind is None or getattr(problem, "errno", None):
            raise UserError(f"{file}:{number + 1}: cannot be read ({problem})") from problem
        raise UserError(f"{file}:{number + 1}: not a whole {kind} file ({problem}); copy it again") from problem


def _cut(document: str, text: str) -> Iterator[Piece]:
    """Yield a document's text in pieces, cut at line ends where there are some, as those of a text file are."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        line_end = text.find("\n", start + PIECE_CHARS, start + 2 * PIECE_CHARS)
        end = start + 2 * PIECE_CHARS if line_end < 0 else line_end + 1
        yield document, text[start:end]
        start = end
    if start < len(text) or not text:
        yield document, text[start:]


def _unpacked(file: Path) -> BinaryIO:
    if file.suffix == ".zst":
        return io.BufferedReader(_pyarrow(file).input_stream(str(file), compression="zstd"), 1 << 16)
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")  # pyright: ignore[reportReturnType]


def _field(line: bytes, field: str, where: str) -> str:
    """Return the text in one line of JSONL. Raises UserError, which names `where`, if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{where}: not JSON ({problem}); each line must be one JSON object") from problem
    if not isinstance(record, dict) or field not in record:
        there = ", ".join(sorted(record)) or "none" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where}: no field {field!r} (there is: {there}); name the field that holds the text")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} is {json.dumps(text)[:40]}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError(f"{where}: field {field!r} is no Unicode text (half of a surrogate pair)") from problem
    return text


def _parquet_pieces(file: Path, document: str, field: str) -> Iterator[Piece]:
    arrow, number = _pyarrow(file), 0
    try:
        with _parquet(file, arrow, field) as table:
            for batch in table.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
                for value in batch.column(0):
                    number += 1
                    text = value.as_py()
                    if text is None:
                        raise UserError(f"{file}:{number}: field {field!r} is null, not a text")
                    yield from _cut(f"{document}:{number}", text)
    except UnicodeDecodeError as problem:
        raise UserError(f"{file}:{number}: field {field!r} is not UTF-8 text ({problem.reason})") from problem
    except (arrow.ArrowException, OSError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError(f"{file}:{number + 1}: not a whole Parquet file ({reason}); copy it again") from problem


def _parquet(file: Path, arrow: Any, field: str) -> Any:
    """Open a Parquet file that has a column `field` of texts; row groups are read in small pieces.

    Raises UserError if the column is missing or has another type.
    """
    import pyarrow.parquet  # noqa: PLC0415 (optional)

    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
    schema = table.schema_arrow
    if field not in schema.names:
        there = ", ".join(schema.names) or "none"
        raise UserError(f"{file}: no field {field!r} (there is: {there}); name the field that holds the text")
    kind = schema.field(field).type
    text = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(text) or arrow.types.is_large_string(text)):
        raise UserError(f"{file}: field {field!r} is of type {kind}, not a text")
    return table


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError(f"{file} needs pyarrow: pip install pyarrow") from problem
    return pyarrow
