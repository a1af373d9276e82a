"""Readers of one text file: plain text, JSON lines, a JSON list (each also compressed by gzip or
zstd) or Parquet.

Each reader yields pieces `(document, text)`; consecutive pieces of one document have the same name.
A file that is truncated, damaged or not of the format that its name says raises a `UserError` that
names the file and the line (for Parquet the row, for a list the item), counted from 1. Zstd and
Parquet are read with the optional package `pyarrow`.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megaprec.data.json_list import items, once
from megaprec.errors import UserError

TEXT = (".txt", ".text", ".md", ".rst", ".py")
JSONL = ".jsonl"
ALSO_JSONL = (".ndjson", ".jsonlines")  # other names of the same form
JSON = ".json"
PARQUET = ".parquet"
PACKED = {".gz": "gzip", ".zst": "zstd"}  # may follow all of these but .parquet
SUFFIXES = (*TEXT, JSONL, *ALSO_JSONL, JSON, PARQUET)
PIECE_CHARS = 1 << 20
MAX_LINE = 1 << 26  # bytes of a line of JSONL, which is parsed whole
ROWS = 256  # of a Parquet file that are read together
# Endings of forms that are not read, and would be one plain text in silence: what the file is, and
# what to do.
NOT_READ = {
    **dict.fromkeys(
        (".csv", ".tsv"), "a table: write it as .jsonl; to read it as one text, name it .txt"
    ),
    **dict.fromkeys(
        (".html", ".htm", ".xhtml"),
        "marked up: extract its text; to read it with its tags, name it .txt",
    ),
    **dict.fromkeys(
        (".zip", ".tar", ".tgz", ".7z", ".rar"), "an archive: unpack it and give the folder"
    ),
    **dict.fromkeys(
        (".bz2", ".xz", ".lzma", ".lz4", ".br", ".z", ".tbz2", ".txz"),
        "packed in a form that is not read: unpack it, or pack it by gzip or zstd",
    ),
    **dict.fromkeys(
        (".arrow", ".feather", ".ipc"), "an Arrow table: write it as .parquet or .jsonl"
    ),
}
# First bytes of files that are taken for text by mistake; where they are letters, as many as no
# text begins with.
MAGIC = {
    b"\x1f\x8b": "it is packed by gzip: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd: its name must end in .zst",
    b"BZh91AY&SY": "it is packed by bzip2: unpack it",
    b"\xfd7zXZ\0": "it is packed by xz: unpack it",
    b"\x04\x22M\x18": "it is packed by lz4: unpack it",
    b"PAR1\x15": "it is Parquet: its name must end in .parquet",
    b"ARROW1\0\0": f"it is {NOT_READ['.arrow']}",
    b"%PDF-": "it is a PDF: extract its text first",
    b"PK\x03\x04": "it is a zip archive or an office document: extract its text first",
    codecs.BOM_UTF16_LE: "it is UTF-16 or UTF-32: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16: convert it to UTF-8",
}
ZERO = "it is UTF-16 or binary; convert it to UTF-8 or leave it out"
WHICH = (
    "name the field that holds the text: data.text_field in a run file, --text-field in a command"
)

# names of fields that JSON can spell in one way only, but for escapes such as \u0041
ONE_SPELLING = re.compile(r"[\w .:-]+", re.ASCII)

Piece = tuple[str, str]
OnFault = Callable[[UserError], None]


def raise_fault(error: UserError) -> None:
    """Raise the error of a bad document."""
    raise error


def pieces(
    file: Path,
    document: str,
    field: str,
    skip_undecodable: bool,
    on_fault: OnFault = raise_fault,
) -> Iterator[Piece]:
    """Yield the text in `file` in pieces; `document` is the prefix of its documents' names.

    on_fault: called with the error of each line, item or row that is no document; reading goes on
        if it returns.
    """
    match form(file):
        case ".jsonl":
            return _jsonl_pieces(file, document, field, on_fault)
        case ".json":
            return _list_pieces(file, document, field, on_fault)
        case ".parquet":
            return _parquet_pieces(file, document, field, on_fault)
        case _:
            return _text_pieces(file, document, skip_undecodable)


def form(file: Path) -> str:
    """Return the suffix that tells the form of a file, in small letters and without that of the
    compression."""
    suffix = file.suffix.lower()
    if suffix in PACKED:
        suffix = Path(file.stem).suffix.lower()
    return JSONL if suffix in ALSO_JSONL else suffix


def require_read(file: Path) -> None:
    """Raise UserError for a file whose ending says that it has a form that is not read."""
    description = NOT_READ.get(form(file))
    if description:
        raise UserError.of("data.source_not_text", file=file, description=description)


def check_readable(files: Sequence[Path]) -> None:
    """Raise UserError if a package is missing that one of the files needs."""
    for file in files:
        if file.suffix.lower() == ".zst" or form(file) == PARQUET:
            _import_pyarrow(file)
            return


def is_list(file: Path) -> bool:
    """Return True if a .json file is a list, by its first sign. Other JSON is no text: settings,
    notebooks, tables."""
    with _reading(file, lambda: "1"), _open_unpacked(file) as stream:
        start = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
        while not start and (sign := stream.read(1)):
            start = sign.strip()
        return start.startswith(b"[")


def _text_pieces(
    file: Path,
    document: str,
    skip_undecodable: bool,
) -> Iterator[Piece]:
    line = 1
    other_form = _other_form(file)
    if other_form:
        if skip_undecodable:
            return
        raise UserError.of("data.not_utf8", file=file, other_form=other_form)
    try:
        with (
            _reading(file, lambda: str(line)),
            io.TextIOWrapper(_open_unpacked(file), "utf-8-sig", newline="") as stream,
        ):
            while text := stream.read(PIECE_CHARS):
                # to the end of a line, or as much again of a very long one
                text += stream.readline(PIECE_CHARS)
                zero = text.find("\0")
                if zero >= 0 and not skip_undecodable:
                    line += text.count("\n", 0, zero)
                    raise UserError.of("data.zero_byte", file=file, line=line, zero=ZERO)
                line += text.count("\n")
                yield document, text
    except UnicodeDecodeError as problem:
        if not skip_undecodable:
            reason = f"{problem.reason} in line {_undecodable_line(file)}"
            raise UserError.of("data.not_utf8_in_line", file=file, reason=reason) from problem


def _other_form(file: Path) -> str:
    """Return what a file is, by its first bytes, and what to do; "" if they may be text."""
    with _reading(file, lambda: "1"), _open_unpacked(file) as stream:
        return _by_first_bytes(stream.read(max(map(len, MAGIC))))


def _by_first_bytes(content: bytes) -> str:
    for magic, description in MAGIC.items():
        if content.startswith(magic):
            return description
    return ""


def _undecodable_line(file: Path) -> int:
    """Return the number of the line that holds the first byte that is not UTF-8."""
    line = 1
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open_unpacked(file) as stream:
        while piece := stream.read(PIECE_CHARS):
            try:
                line += decoder.decode(piece).count("\n")
            except UnicodeDecodeError as problem:
                return line + problem.object[: problem.start].count(b"\n")
    return line


def _jsonl_pieces(
    file: Path,
    document: str,
    field: str,
    on_fault: OnFault,
) -> Iterator[Piece]:
    number = 0
    with _reading(file, lambda: str(number + 1)), _open_unpacked(file) as stream:
        # One byte more than a line may have, so that a longer one is told from one that just fits.
        lines = iter(lambda: stream.readline(MAX_LINE + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE:
                raise UserError.of(
                    "data.line_too_long", file=file, number=number, max_line=MAX_LINE
                )
            if line.isspace():
                continue
            where = f"{file}:{number}"
            try:
                record = _parse_line(line, field, where)
                text = _text_of(record, field, where)
            except UserError as error:
                on_fault(error)
                continue
            yield from _cut(f"{document}:{number}", text)


@contextmanager
def _reading(file: Path, position: Callable[[], str]) -> Iterator[None]:
    """Raise UserError for a file that cannot be read or unpacked inside the context.

    position: returns the number of the line or item that is being read.
    """
    try:
        yield
    except (EOFError, zlib.error, OSError) as problem:
        compression = PACKED.get(file.suffix.lower())
        # an error number is the system's, and none of unpacking
        if compression is None or getattr(problem, "errno", None):
            raise UserError.of(
                "data.row_unreadable", file=file, place=position(), problem=problem
            ) from problem
        raise UserError.of(
            "data.file_not_whole",
            file=file,
            place=position(),
            compression=compression,
            problem=problem,
        ) from problem


def _list_pieces(
    file: Path,
    document: str,
    field: str,
    on_fault: OnFault,
) -> Iterator[Piece]:
    """Yield the texts of a JSON list, whose items are texts or objects with the field."""
    if not is_list(file):
        other_form = _other_form(file)
        if other_form:
            raise UserError.of("data.not_json_list", file=file, other_form=other_form)
        raise UserError.of("data.json_list_of_other", file=file)
    number = 0
    try:
        with (
            _reading(file, lambda: str(number + 1)),
            io.TextIOWrapper(_open_unpacked(file), "utf-8-sig") as stream,
        ):
            for number, item in enumerate(items(stream, field), 1):
                where = f"{file}:{number}"
                try:
                    if isinstance(item, str):
                        text = _require_unicode(item, where, "the item")
                    else:
                        text = _text_of(item, field, where)
                except UserError as error:
                    on_fault(error)
                    continue
                yield from _cut(f"{document}:{number}", text)
    except UserError:
        raise
    except UnicodeDecodeError as problem:
        raise UserError.of("data.json_list_not_utf8", file=file, reason=problem.reason) from problem
    except (ValueError, RecursionError) as problem:
        # UTF-16 is a common reason, and its error is of no help
        with _open_unpacked(file) as stream:
            reason = ZERO if b"\0" in stream.read(2) else problem
        raise UserError.of(
            "data.json_list_broken", file=file, number=number + 1, reason=reason
        ) from problem


def _cut(document: str, text: str) -> Iterator[Piece]:
    """Yield a document's text in pieces, cut at line ends where there are some."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        latest_end = start + 2 * PIECE_CHARS
        line_end = text.find("\n", start + PIECE_CHARS, latest_end)
        end = latest_end if line_end < 0 else line_end + 1
        yield document, text[start:end]
        start = end
    # an empty document is a document too
    if start < len(text) or not text:
        yield document, text[start:]


def _open_unpacked(file: Path) -> BinaryIO:
    """Open a file for reading; what it gives is not packed any more."""
    suffix = file.suffix.lower()
    if suffix == ".zst":
        stream = _import_pyarrow(file).input_stream(str(file), compression="zstd")
        return io.BufferedReader(stream, 1 << 16)
    return gzip.open(file, "rb") if suffix == ".gz" else open(file, "rb")  # pyright: ignore[reportReturnType]


def _parse_line(
    line: bytes,
    field: str,
    where: str,
) -> Any:
    """Return the value of a line of JSONL. Raises UserError, which names `where`."""
    try:
        # Most lines are spared the slower hook: those in which the field cannot be twice, in this
        # or another spelling.
        escaped = b"\\u00" in line or not ONE_SPELLING.fullmatch(field)
        if not escaped and line.count(f'"{field}"'.encode()) < 2:
            return json.loads(line)
        return json.loads(line, object_pairs_hook=once(field))
    except (ValueError, RecursionError) as problem:
        other_form = _by_first_bytes(line) or (ZERO if b"\0" in line else "")
        if other_form:
            raise UserError.of("data.row_not_json", where=where, other_form=other_form) from problem
        raise UserError.of("data.row_not_json_object", where=where, problem=problem) from problem


def _text_of(
    record: Any,
    field: str,
    where: str,
) -> str:
    """Return the text of a record. Raises UserError, which names `where`, if there is none."""
    if not isinstance(record, dict):
        # A list or a text may be long; numbers, true, false and null are shown.
        kind = {list: "a list", str: "a text"}.get(type(record)) or json.dumps(record)
        raise UserError.of("data.row_not_object", where=where, kind=kind, field=field)
    if field not in record:
        names = ", ".join(sorted(record)) or "none"
        raise UserError.of("data.field_missing", where=where, field=field, names=names, which=WHICH)
    text = record[field]
    if not isinstance(text, str):
        raise UserError.of(
            "data.field_not_text",
            where=where,
            field=field,
            dumps=json.dumps(text)[:40],
            which=WHICH,
        )
    return _require_unicode(text, where, f"field {field!r}")


def _require_unicode(
    text: str,
    where: str,
    what: str,
) -> str:
    """Return the text. Raises UserError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise UserError.of("data.half_surrogate_in_row", where=where, what=what) from problem
    return text


def _parquet_pieces(
    file: Path,
    document: str,
    field: str,
    on_fault: OnFault,
) -> Iterator[Piece]:
    arrow = _import_pyarrow(file)
    number = 0
    try:
        with _open_parquet(file, arrow, field) as table:
            for batch in table.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
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
                    yield from _cut(f"{document}:{number}", text)
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

    table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, page_checksum_verification=True)
    schema = table.schema_arrow
    if field not in schema.names:
        names = ", ".join(schema.names) or "none"
        raise UserError.of("data.field_missing", where=file, field=field, names=names, which=WHICH)
    column_count = schema.names.count(field)
    if column_count > 1:
        raise UserError.of(
            "data.parquet_column_twice",
            file=file,
            column_count=column_count,
            field=field,
            which=WHICH,
        )
    field_type = schema.field(field).type
    value_type = field_type.value_type if arrow.types.is_dictionary(field_type) else field_type
    if not (arrow.types.is_string(value_type) or arrow.types.is_large_string(value_type)):
        raise UserError.of(
            "data.parquet_type", file=file, field=field, field_type=field_type, which=WHICH
        )
    return table


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.pyarrow_missing", file=file) from problem
    return pyarrow
