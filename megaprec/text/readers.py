"""Readers of one text file: plain text, JSON lines, a JSON list, tables, HTML pages and notebooks,
each also compressed by gzip or zstd (but for Parquet).

Each reader yields pieces `(document, text)`; consecutive pieces of one document have the same name.
A file that is truncated, damaged or not of the format that its name says raises a `UserError` that
names the file and the line (for Parquet the row, for a list the item), counted from 1. Zstd and
Parquet are read with the optional package `pyarrow`, pages with `inscriptis`.
"""

import codecs
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaprec.errors import UserError
from megaprec.text.arrow_files import table_pieces, table_rows
from megaprec.text.chats import ROW_FIELDS, Chats
from megaprec.text.confined import Helpers
from megaprec.text.forms import (
    ALSO_JSONL,
    ARROW,
    JSON,
    JSONL,
    PARQUET,
    UTF8,
    ZERO,
    form,
    is_utf8_instead,
    other_form,
)
from megaprec.text.json_rows import Row, jsonl_rows, list_rows, text_of
from megaprec.text.marked_up import (
    NOT_OF_TEXTS,
    NOTEBOOK,
    PAGES,
    import_inscriptis,
    notebook_pieces,
    page_pieces,
)
from megaprec.text.mds_files import mds_rows
from megaprec.text.packed_files import PACKED, import_pyarrow, naming_damage, open_unpacked
from megaprec.text.pieces import (
    PIECE_CHARS,
    MarkedPiece,
    OnFault,
    Piece,
    cut_document,
    raise_fault,
    require_unicode,
    unmarked,
)
from megaprec.text.tables import (
    SEPARATORS,
    has_column,
    separated_pieces,
    separated_rows,
)
from megaprec.text.tar_files import tar_pieces, tar_rows

TEXT = (".txt", ".text", ".md", ".rst", ".py")
SUFFIXES = (*TEXT, JSONL, *ALSO_JSONL, JSON, *SEPARATORS, PARQUET, *PAGES, NOTEBOOK)


@dataclass(frozen=True)
class TextOptions:
    """Options of reading the text of a source.

    field: name of the field or column that holds the text.
    encoding: of plain text, separated tables, and pages that do not name theirs, as Python names
        it; other forms are always UTF-8.
    exclude: shell patterns of files to leave out, by name or by path below the folder; `*` stands
        for any characters, `/` too. A folder that one matches is left out whole.
    skip_bad: number of bad files and rows that are left out; with one more, and with 0, the source
        is refused.
    max_chars: number of characters after which reading stops, even within a document.
    chats: the way in which rows become documents that are conversations; None: rows are texts.
    """

    field: str = "text"
    encoding: str = UTF8
    exclude: tuple[str, ...] = ()
    skip_bad: int = 0
    max_chars: int | None = None
    chats: Chats | None = None


def encoding_problem(encoding: str) -> str:
    """Return why text cannot have this encoding; "" if it can."""
    try:
        "a".encode(encoding)
    except (LookupError, ValueError) as problem:
        return str(problem)
    if codecs.lookup(encoding).name.replace("-", "_") in NOT_OF_TEXTS:
        return "no text has it, but names of hosts and programs"
    return ""


def marked_pieces(
    file: Path,
    document: str,
    options: TextOptions,
    helpers: Helpers,
    on_fault: OnFault = raise_fault,
) -> Iterator[MarkedPiece]:
    """Yield the text in `file` with the marks of what counts, see `pieces`."""
    chats = options.chats
    if chats is None:
        yield from unmarked(pieces(file, document, options, helpers, on_fault))
        return
    for number, row in _rows(file, options, helpers, on_fault):
        try:
            yield from chats.pieces(f"{document}:{number}", row, options.field, f"{file}:{number}")
        except UserError as error:
            on_fault(error)


def _rows(file: Path, options: TextOptions, helpers: Helpers, on_fault: OnFault) -> Iterator[Row]:
    """Return the rows of a file, which must be of a form that has fields. Raises UserError."""
    fields = [*dict.fromkeys((*ROW_FIELDS, options.field))]
    match form(file):
        case ".jsonl":
            return jsonl_rows(file, fields, on_fault)
        case ".json":
            return list_rows(file, fields)
        case ".csv" | ".tsv" as suffix:
            encoding = _without_byte_order_mark(options.encoding)
            return separated_rows(file, encoding, SEPARATORS[suffix], on_fault)
        case ".parquet" | ".arrow":
            return table_rows(file, fields, on_fault, helpers)
        case ".mds":
            return mds_rows(file, fields, on_fault)
        case ".tar":
            return tar_rows(file, fields, on_fault)
        case _:
            raise UserError.of("data.chat_form", file=file)


def pieces(
    file: Path,
    document: str,
    options: TextOptions,
    helpers: Helpers,
    on_fault: OnFault = raise_fault,
) -> Iterator[Piece]:
    """Yield the text in `file` in pieces; `document` is the prefix of its documents' names.

    helpers: the processes that read pages and tables of Arrow.
    on_fault: called with the error of each line, item or row that is no document; reading goes on
        if it returns.
    """
    match form(file):
        case ".jsonl":
            rows = jsonl_rows(file, [options.field], on_fault)
            return _row_pieces(rows, file, document, options.field, on_fault)
        case ".json":
            items = list_rows(file, [options.field])
            return _row_pieces(items, file, document, options.field, on_fault, has_texts=True)
        case ".parquet" | ".arrow":
            return table_pieces(file, document, options.field, on_fault, helpers)
        case ".mds":
            samples = mds_rows(file, [options.field], on_fault)
            return _row_pieces(samples, file, document, options.field, on_fault)
        case ".tar":
            return tar_pieces(file, document, options.field, on_fault)
        case ".csv" | ".tsv" as suffix:
            encoding = _without_byte_order_mark(options.encoding)
            separator = SEPARATORS[suffix]
            return separated_pieces(file, document, options.field, encoding, separator, on_fault)
        case ".html" | ".htm" | ".xhtml":
            return page_pieces(file, document, options.encoding, helpers)
        case ".ipynb":
            return notebook_pieces(file, document)
        case _:
            return _text_pieces(file, document, options)


def lacks_column(file: Path, options: TextOptions) -> bool:
    """Return True for a table of separated text that has no column of the text."""
    separator = SEPARATORS.get(form(file))
    if separator is None:
        return False
    encoding = _without_byte_order_mark(options.encoding)
    return not has_column(file, options.field, encoding, separator)


def _without_byte_order_mark(encoding: str) -> str:
    """Return the encoding that also drops the mark at the beginning of a file, of UTF-8."""
    return "utf-8-sig" if codecs.lookup(encoding).name == UTF8 else encoding


def check_readable(files: Sequence[Path]) -> None:
    """Raise UserError if a package is missing that one of the files needs."""
    arrow_files = [
        file
        for file in files
        if PACKED.get(file.suffix.lower()) == "zstd" or form(file) in (PARQUET, ARROW)
    ]
    if arrow_files:
        import_pyarrow(arrow_files[0])
    page_files = [file for file in files if form(file) in PAGES]
    if page_files:
        import_inscriptis(page_files[0])


def _text_pieces(file: Path, document: str, options: TextOptions) -> Iterator[Piece]:
    """Yield a plain text.

    If bad files are to be skipped, the text is read twice: none of it is yielded before all of it
    has been decoded.
    """
    if options.skip_bad:
        for _ in _decoded_pieces(file, document, options.encoding):
            pass
    yield from _decoded_pieces(file, document, options.encoding)


def _decoded_pieces(file: Path, document: str, encoding: str) -> Iterator[Piece]:
    """Yield a plain text. Raises UserError where it is no text of this encoding."""
    line = 1
    description = other_form(file, encoding)
    if description:
        raise UserError.of("data.not_utf8", file=file, other_form=description)
    if is_utf8_instead(file, encoding):
        raise UserError.of("data.utf8_instead", file=file, encoding=encoding)
    try:
        with (
            naming_damage(file, lambda: str(line)),
            io.TextIOWrapper(
                open_unpacked(file), _without_byte_order_mark(encoding), newline=""
            ) as stream,
        ):
            while text := stream.read(PIECE_CHARS):
                # to the end of a line, or as much again of a very long one
                text += stream.readline(PIECE_CHARS)
                zero = text.find("\0")
                if zero >= 0:
                    line += text.count("\n", 0, zero)
                    raise UserError.of("data.zero_byte", file=file, line=line, zero=ZERO)
                line += text.count("\n")
                yield document, text
    except UnicodeError as problem:
        raise _not_decodable(file, encoding, problem) from problem


def _not_decodable(file: Path, encoding: str, problem: UnicodeError) -> UserError:
    """Return the error of a plain text that is not of its encoding."""
    reason = getattr(problem, "reason", problem)
    line = _undecodable_line(file, encoding)
    if codecs.lookup(encoding).name == UTF8:
        return UserError.of("data.not_utf8_in_line", file=file, reason=f"{reason} in line {line}")
    return UserError.of(
        "data.not_of_encoding", file=file, encoding=encoding, reason=reason, line=line
    )


def _undecodable_line(file: Path, encoding: str) -> int:
    """Return the number of the line that holds the first byte that is not of the encoding."""
    line = 1
    decoder = codecs.getincrementaldecoder(encoding)()
    with open_unpacked(file) as stream:
        while piece := stream.read(PIECE_CHARS):
            state = decoder.getstate()
            try:
                line += decoder.decode(piece).count("\n")
            except UnicodeError:
                decoder.setstate(state)
                return line + _lines_before_fault(decoder, piece)
    return line


def _lines_before_fault(decoder: codecs.IncrementalDecoder, content: bytes) -> int:
    """Return the number of lines that end before the first byte that cannot be decoded."""
    lines = 0
    for byte in content:
        try:
            lines += decoder.decode(bytes([byte])).count("\n")
        except UnicodeError:
            break
    return lines


def _row_pieces(
    rows: Iterator[Row],
    file: Path,
    document: str,
    field: str,
    on_fault: OnFault,
    has_texts: bool = False,
) -> Iterator[Piece]:
    """Yield the texts in a field of rows. has_texts: a row may itself be a text."""
    for number, row in rows:
        where = f"{file}:{number}"
        try:
            if has_texts and isinstance(row, str):
                text = require_unicode(row, where, "the item")
            else:
                text = text_of(row, field, where)
        except UserError as error:
            on_fault(error)
            continue
        yield from cut_document(f"{document}:{number}", text)
