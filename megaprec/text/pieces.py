"""The pieces in which readers yield the text of documents, and the errors of documents that are
none."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from megaprec.errors import UserError
from megaprec.text.encoding import Marks

PIECE_CHARS = 1 << 20
WHICH = (
    "name the field that holds the text: data.text_field in a run file, --text-field in a command"
)

Piece = tuple[str, str]
"""Name of a document, and some of its text; consecutive pieces of one document have one name."""


class MarkedPiece(NamedTuple):
    """A piece with its marks; None: all of its text counts."""

    document: str
    text: str
    marks: Marks | None = None


OnFault = Callable[[UserError], None]
"""Called with the error of a line, item or row that is no document; reading goes on if it
returns."""


def raise_fault(error: UserError) -> None:
    """Raise the error of a bad document."""
    raise error


def unmarked(pieces: Iterable[Piece]) -> Iterator[MarkedPiece]:
    """Yield pieces of which all text counts."""
    for document, text in pieces:
        yield MarkedPiece(document, text)


def cut_document(document: str, text: str) -> Iterator[Piece]:
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


def require_unicode(
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
