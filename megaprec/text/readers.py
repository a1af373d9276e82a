"""Readers of one text file: plain text, JSON lines, a JSON list, tables, HTML pages and notebooks,
each also compressed by gzip or zstd (but for Parquet).

Each reader yields pieces `(document, text)`; consecutive pieces of one document have the same name.
A file that is truncated, damaged or not of the format that its name says raises a `UserError` that
names the file and the line (for Parquet the row, for a list the item), counted from 1. Zstd and
Parquet are read with the optional package `pyarrow`, pages with `inscriptis`.
"""

import codecs
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from megaprec.errors import UserError
from megaprec.text.arrow_files import table_pieces, table_rows
from megaprec.text.chats import ROW_FIELDS, Chats
from megaprec.text.confined import Helpers
from megaprec.text.forms import (
    ALSO_JSONL,
    UTF8,
    ZERO,
    form,
    is_utf8_instead,
    other_form,
)
from megaprec.text.json_rows import Row, jsonl_rows, list_rows, text_of
from megaprec.text.marked_up import (
    NOT_OF_TEXTS,
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

PLAIN = "plain"


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


class TextReading(NamedTuple):
    """A file that is read.

    document: the prefix of its documents' names.
    helpers: the processes that read pages and tables of Arrow.
    on_fault: called with the error of each line, item or row that is no document; reading goes on
        if it returns.
    """

    file: Path
    document: str
    options: TextOptions
    helpers: Helpers
    on_fault: OnFault


Pieces = Callable[[TextReading], Iterator[Piece]]
Rows = Callable[[TextReading, Sequence[str]], Iterator[Row]]


class Form(NamedTuple):
    """A form of text files.

    pieces: reads the texts.
    rows: reads rows with some of their fields, for conversations; None: the form has no fields.
    version: of the reader: another number means that a file may give another text. Data sets that
        an earlier version built are then compared by their text.
    package: that decides the text, whose version then counts too; "": none.
    needs: raises UserError, with the file, if a package is missing.
    in_folders: whether such files are texts of a folder that no description names.
    """

    pieces: Pieces
    rows: Rows | None = None
    version: int = 1
    package: str = ""
    needs: Callable[[Path], object] | None = None
    in_folders: bool = True


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
    rows = form_of(file).rows
    if rows is None:
        raise UserError.of("data.chat_form", file=file)
    fields = [*dict.fromkeys((*ROW_FIELDS, options.field))]
    return rows(TextReading(file, "", options, helpers, on_fault), fields)


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
    return form_of(file).pieces(TextReading(file, document, options, helpers, on_fault))


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
    for file in files:
        if PACKED.get(file.suffix.lower()) == "zstd":
            import_pyarrow(file)
        if needs := form_of(file).needs:
            needs(file)


def _text_pieces(reading: TextReading) -> Iterator[Piece]:
    """Yield a plain text.

    If bad files are to be skipped, the text is read twice: none of it is yielded before all of it
    has been decoded.
    """
    encoding = reading.options.encoding
    if reading.options.skip_bad:
        for _ in _decoded_pieces(reading.file, reading.document, encoding):
            pass
    yield from _decoded_pieces(reading.file, reading.document, encoding)


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


def _texts_of(rows: Rows, has_texts: bool = False) -> Pieces:
    """Return the reader of the texts in a field of rows. has_texts: a row may itself be a text."""

    def read(reading: TextReading) -> Iterator[Piece]:
        """Yield the pieces of the text of each row, whose document has the row's number."""
        field = reading.options.field
        for number, row in rows(reading, [field]):
            where = f"{reading.file}:{number}"
            try:
                if has_texts and isinstance(row, str):
                    text = require_unicode(row, where, "the item")
                else:
                    text = text_of(row, field, where)
            except UserError as error:
                reading.on_fault(error)
                continue
            yield from cut_document(f"{reading.document}:{number}", text)

    return read


def _jsonl_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    return jsonl_rows(reading.file, fields, reading.on_fault)


def _list_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    return list_rows(reading.file, fields)


def _mds_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    return mds_rows(reading.file, fields, reading.on_fault)


def _tar_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    return tar_rows(reading.file, fields, reading.on_fault)


def _tar_pieces(reading: TextReading) -> Iterator[Piece]:
    return tar_pieces(reading.file, reading.document, reading.options.field, reading.on_fault)


def _arrow_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    return table_rows(reading.file, fields, reading.on_fault, reading.helpers)


def _arrow_pieces(reading: TextReading) -> Iterator[Piece]:
    field = reading.options.field
    return table_pieces(reading.file, reading.document, field, reading.on_fault, reading.helpers)


def _separated_rows(reading: TextReading, fields: Sequence[str]) -> Iterator[Row]:
    encoding = _without_byte_order_mark(reading.options.encoding)
    separator = SEPARATORS[form(reading.file)]
    return separated_rows(reading.file, encoding, separator, reading.on_fault)


def _separated_pieces(reading: TextReading) -> Iterator[Piece]:
    options = reading.options
    encoding = _without_byte_order_mark(options.encoding)
    separator = SEPARATORS[form(reading.file)]
    return separated_pieces(
        reading.file, reading.document, options.field, encoding, separator, reading.on_fault
    )


def _page_pieces(reading: TextReading) -> Iterator[Piece]:
    encoding = reading.options.encoding
    return page_pieces(reading.file, reading.document, encoding, reading.helpers)


def _notebook_pieces(reading: TextReading) -> Iterator[Piece]:
    return notebook_pieces(reading.file, reading.document)


_PLAIN = Form(_text_pieces)
_ROWS_OF_JSON = Form(_texts_of(_jsonl_rows), _jsonl_rows)
_ARROW = Form(_arrow_pieces, _arrow_rows, needs=import_pyarrow)
_SEPARATED = Form(_separated_pieces, _separated_rows)
_PAGE = Form(_page_pieces, package="inscriptis", needs=import_inscriptis)

FORMS: Mapping[str, Form] = {
    PLAIN: _PLAIN,
    ".jsonl": _ROWS_OF_JSON,
    ".json": Form(_texts_of(_list_rows, has_texts=True), _list_rows),
    ".csv": _SEPARATED,
    ".tsv": _SEPARATED,
    ".parquet": _ARROW,
    ".arrow": _ARROW._replace(in_folders=False),
    ".mds": Form(_texts_of(_mds_rows), _mds_rows, in_folders=False),
    ".tar": Form(_tar_pieces, _tar_rows, in_folders=False),
    ".html": _PAGE,
    ".htm": _PAGE,
    ".xhtml": _PAGE,
    ".ipynb": Form(_notebook_pieces),
}
"""The forms of text by the endings of their files; of any other ending a file is `PLAIN`."""
CONVERSATIONS_VERSION = 1
"""The version of the reader of conversations, which are rows of any form (`Chats`)."""
FOLDER_ENDINGS = (
    *(".txt", ".text", ".md", ".rst", ".py"),
    *ALSO_JSONL,
    *(ending for ending, row in FORMS.items() if ending != PLAIN and row.in_folders),
)
"""The endings of files that are the texts of a folder: of plain text these alone."""


def form_of(file: Path) -> Form:
    """Return the form of a file, by its ending."""
    return FORMS.get(form(file), _PLAIN)


def reader_versions(files: Iterable[Path], conversations: bool) -> str:
    """Return the versions of the readers of these files, as one text.

    conversations: rows are conversations.
    """
    forms = {ending if ending in FORMS else PLAIN for ending in map(form, files)}
    numbers = {ending: FORMS[ending].version for ending in forms}
    if conversations:
        numbers["conversations"] = CONVERSATIONS_VERSION
    versions: list[str] = []
    for name in sorted(numbers):
        versions.append(f"{name} {numbers[name]}")
        if name in FORMS and (package := FORMS[name].package):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)
