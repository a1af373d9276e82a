"""Readers of files whose text stands between marks: HTML pages and Jupyter notebooks.

A page is laid out as a browser would, by the package inscriptis, without scripts, styles and
addresses of links. A notebook is the sources of its cells, text and code, in their order, without
outputs.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprec.errors import UserError
from megaprec.parsing import parse_json
from megaprec.text import page_work
from megaprec.text.confined import ConfinedError, Helpers
from megaprec.text.packed_files import naming_damage, open_unpacked
from megaprec.text.pieces import Piece, cut_document, require_unicode
from megaprec.tokens.bounds import MAX_ITEM

PAGES = (".html", ".htm", ".xhtml")
NOTEBOOK = ".ipynb"
# of processor time for a page, and a second more for each SECOND_FOR characters of it
SECONDS = 10
SECOND_FOR = 1 << 18
MODULE = Path(page_work.__file__)
# encodings of Python that no text has: those of names of hosts and of programs
NOT_OF_TEXTS = ("punycode", "idna", "undefined", "unicode_escape", "raw_unicode_escape")
# where a page names its encoding, as HTML says, within the first 1,024 bytes
DECLARED = re.compile(rb"""<meta[^>]{0,200}\bcharset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.I)
DECLARED_WITHIN = 1024
TEXT_CELLS = ("markdown", "code", "raw")


def page_pieces(file: Path, document: str, encoding: str, helpers: Helpers) -> Iterator[Piece]:
    """Yield the text of an HTML page.

    encoding: of a page that does not name its own.
    Raises UserError for a page that cannot be decoded or laid out, and if inscriptis is missing.
    """
    import_inscriptis(file)
    content = _whole(file)
    encoding = _declared_encoding(content) or encoding
    try:
        if codecs.lookup(encoding).name.replace("-", "_") in NOT_OF_TEXTS:
            raise LookupError("no text has such an encoding")
        page = content.decode(encoding)
    except (UnicodeError, LookupError) as problem:
        reason = getattr(problem, "reason", problem)
        raise UserError.of(
            "data.page_encoding", file=file, encoding=encoding, reason=reason
        ) from problem
    seconds = SECONDS + len(page) // SECOND_FOR
    try:
        (text,) = helpers.of(MODULE).ask(page, seconds)
    except ConfinedError as problem:
        raise UserError.of("data.page_not_laid_out", file=file, problem=problem) from problem
    yield from cut_document(document, require_unicode(text, str(file), "it"))


def import_inscriptis(file: Path) -> Any:
    """Return the package inscriptis. Raises UserError, which names the file that needs it."""
    try:
        import inscriptis  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.inscriptis_missing", file=file) from problem
    return inscriptis


def notebook_pieces(file: Path, document: str) -> Iterator[Piece]:
    """Yield the sources of the cells of a notebook, an empty line between two.

    Raises UserError for a file that is no notebook of format 4.
    """
    try:
        notebook = parse_json(_whole(file).decode("utf-8-sig"))
        cells = notebook["cells"]
        sources = [_source(cell) for cell in cells if cell["cell_type"] in TEXT_CELLS]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError.of("data.not_a_notebook", file=file) from problem
    text = "\n\n".join(source for source in sources if source)
    yield from cut_document(document, require_unicode(text, str(file), "a cell"))


def _source(cell: dict[str, Any]) -> str:
    """Return the source of a cell, which is a text or a list of lines. Raises TypeError."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _whole(file: Path) -> bytes:
    """Return the content of a file, unpacked. Raises UserError for one that is too large."""
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        content = stream.read(MAX_ITEM + 1)
    if len(content) > MAX_ITEM:
        raise UserError.of("data.page_too_large", file=file, most=MAX_ITEM)
    return content


def _declared_encoding(content: bytes) -> str:
    """Return the encoding that a page names, by a byte order mark or a tag; "" if by neither."""
    if content.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    found = DECLARED.search(content, 0, DECLARED_WITHIN)
    return found[1].decode("ascii") if found else ""
