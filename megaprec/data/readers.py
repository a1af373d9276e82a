"""Readers of one text file: plain text, JSON lines, a JSON list, tables, HTML pages and notebooks,
each also compressed by gzip or zstd (but for Parquet).

Each reader yields pieces `(document, text)`; consecutive pieces of one document have the same name.
A file that is truncated, damaged or not of the format that its name says raises a `UserError` that
names the file and the line (for Parquet the row, for a list the item), counted from 1. Zstd and
Parquet are read with the optional package `pyarrow`, pages with `inscriptis`.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprec.data.json_list import items, once
from megaprec.data.marked_up import (
    NOTEBOOK,
    PAGES,
    import_inscriptis,
    notebook_pieces,
    page_pieces,
)
from megaprec.data.packed_files import PACKED, import_pyarrow, naming_damage, open_unpacked
from megaprec.data.pieces import (
    PIECE_CHARS,
    WHICH,
    OnFault,
    Piece,
    cut_document,
    raise_fault,
    require_unicode,
)
from megaprec.data.tables import SEPARATORS, has_column, parquet_pieces, separated_pieces
from megaprec.errors import UserError

TEXT = (".txt", ".text", ".md", ".rst", ".py")
JSONL = ".jsonl"
ALSO_JSONL = (".ndjson", ".jsonlines")  # other names of the same form
JSON = ".json"
PARQUET = ".parquet"
SUFFIXES = (*TEXT, JSONL, *ALSO_JSONL, JSON, *SEPARATORS, PARQUET, *PAGES, NOTEBOOK)
OWN_ENCODING = (JSONL, *ALSO_JSONL, JSON, PARQUET, NOTEBOOK)  # UTF-8, as their formats say
MAX_LINE = 1 << 26  # bytes of a line of JSONL, which is parsed whole
UTF8 = "utf-8"
# Endings of forms that are not read, and would be one plain text in silence: what the file is, and
# what to do.
NOT_READ = {
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
}
UTF16_MAGIC = {
    codecs.BOM_UTF16_LE: "it is UTF-16 or UTF-32: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16: convert it to UTF-8",
}
ZERO = "it is UTF-16 or binary; convert it to UTF-8 or leave it out"

# names of fields that JSON can spell in one way only, but for escapes such as \u0041
ONE_SPELLING = re.compile(r"[\w .:-]+", re.ASCII)


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
    """

    field: str = "text"
    encoding: str = UTF8
    exclude: tuple[str, ...] = ()
    skip_bad: int = 0
    max_chars: int | None = None


def encoding_problem(encoding: str) -> str:
    """Return why text cannot have this encoding; "" if it can."""
    try:
        "a".encode(encoding)
    except (LookupError, ValueError) as problem:
        return str(problem)
    return ""


def pieces(
    file: Path,
    document: str,
    options: TextOptions,
    on_fault: OnFault = raise_fault,
) -> Iterator[Piece]:
    """Yield the text in `file` in pieces; `document` is the prefix of its documents' names.

    on_fault: called with the error of each line, item or row that is no document; reading goes on
        if it returns.
    """
    match form(file):
        case ".jsonl":
            return _jsonl_pieces(file, document, options.field, on_fault)
        case ".json":
            return _list_pieces(file, document, options.field, on_fault)
        case ".parquet":
            return parquet_pieces(file, document, options.field, on_fault)
        case ".csv" | ".tsv" as suffix:
            encoding = _without_byte_order_mark(options.encoding)
            separator = SEPARATORS[suffix]
            return separated_pieces(file, document, options.field, encoding, separator, on_fault)
        case ".html" | ".htm" | ".xhtml":
            return page_pieces(file, document, options.encoding)
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
    arrow_files = [file for file in files if file.suffix.lower() == ".zst" or form(file) == PARQUET]
    if arrow_files:
        import_pyarrow(arrow_files[0])
    page_files = [file for file in files if form(file) in PAGES]
    if page_files:
        import_inscriptis(page_files[0])


def is_list(file: Path) -> bool:
    """Return True if a .json file is a list, by its first sign. Other JSON is no text: settings,
    notebooks, tables."""
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        start = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
        while not start and (sign := stream.read(1)):
            start = sign.strip()
        return start.startswith(b"[")


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
    other_form = _other_form(file, encoding)
    if other_form:
        raise UserError.of("data.not_utf8", file=file, other_form=other_form)
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


def _other_form(file: Path, encoding: str = UTF8) -> str:
    """Return what a file is, by its first bytes, and what to do; "" if they may be text."""
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        beginning = stream.read(max(map(len, MAGIC)))
    other_form = _by_first_bytes(beginning)
    # other encodings may begin with the mark of UTF-16, or be it
    is_utf8 = codecs.lookup(encoding).name == UTF8
    return "" if other_form in UTF16_MAGIC.values() and not is_utf8 else other_form


def _by_first_bytes(content: bytes) -> str:
    for magic, description in {**MAGIC, **UTF16_MAGIC}.items():
        if content.startswith(magic):
            return description
    return ""


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


def _jsonl_pieces(
    file: Path,
    document: str,
    field: str,
    on_fault: OnFault,
) -> Iterator[Piece]:
    number = 0
    with naming_damage(file, lambda: str(number + 1)), open_unpacked(file) as stream:
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
            yield from cut_document(f"{document}:{number}", text)


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
            naming_damage(file, lambda: str(number + 1)),
            io.TextIOWrapper(open_unpacked(file), "utf-8-sig") as stream,
        ):
            for number, item in enumerate(items(stream, field), 1):
                where = f"{file}:{number}"
                try:
                    if isinstance(item, str):
                        text = require_unicode(item, where, "the item")
                    else:
                        text = _text_of(item, field, where)
                except UserError as error:
                    on_fault(error)
                    continue
                yield from cut_document(f"{document}:{number}", text)
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
    return require_unicode(text, where, f"field {field!r}")
