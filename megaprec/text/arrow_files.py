"""Reader of tables of Parquet and of Arrow, these in the form of a stream, as Hugging Face's
`datasets` saves them, or of a file. Their documents are the rows, counted from 1.

A process of its own opens them (`arrow_work`): a damaged table makes pyarrow crash, or take all
memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from megaprec.errors import UserError
from megaprec.text import arrow_work
from megaprec.text.columns import require_column
from megaprec.text.confined import ConfinedError, Helpers
from megaprec.text.forms import PARQUET, form
from megaprec.text.packed_files import PACKED, import_pyarrow, open_packed
from megaprec.text.pieces import WHICH, OnFault, Piece, cut_document
from megaprec.tokens.bounds import MAX_ITEM, require_ratio
from megaprec.tokens.places import is_remote, naming_url

MODULE = Path(arrow_work.__file__)
SECONDS = 20  # of processor time for BATCH_ROWS rows


def table_pieces(
    file: Path, document: str, field: str, on_fault: OnFault, helpers: Helpers
) -> Iterator[Piece]:
    """Yield the texts in column `field` of a table.

    Raises UserError if the column is missing or has another type, and for a damaged file.
    """
    table = _Table(file, helpers)
    for number, text in table.rows({"texts": field}):
        where = f"{file}:{number}: field {field!r}"
        if text is None:
            on_fault(UserError.of("data.field_null", where=where))
        elif isinstance(text, list):  # in place of a text that could not be read
            fault, reason = text
            on_fault(_row_fault(where, fault, reason))
        else:
            yield from cut_document(f"{document}:{number}", text)


def table_rows(
    file: Path, fields: Sequence[str], on_fault: OnFault, helpers: Helpers
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row of a table, and those of `fields` that it has; of others the
    names alone. Raises UserError for a damaged file."""
    table = _Table(file, helpers)
    for number, row in table.rows({"fields": [*fields]}):
        if isinstance(row, list):  # in place of a row that could not be read
            fault, reason = row
            on_fault(_row_fault(f"{file}:{number}", fault, reason))
        else:
            yield number, dict.fromkeys(table.names) | row


def _row_fault(where: str, fault: str, reason: str) -> UserError:
    """Return the error of a row that a helper could not read. fault, reason: as in
    `arrow_work`."""
    if fault == arrow_work.NOT_UTF8:
        return UserError.of("data.not_utf8", file=where, other_form=reason)
    return UserError.of("data.row_unfit", where=where, reason=reason)


class _Table:
    """A table that a helper reads. Attribute: `names` of its columns, once a row was read."""

    def __init__(self, file: Path, helpers: Helpers) -> None:
        import_pyarrow(file)
        if file.suffix.lower() in PACKED:
            raise UserError.of("data.packed_table", file=file)
        self.names: list[str] = []
        self._file = file
        self._helper = helpers.of(MODULE)
        self._number = 0

    def rows(self, wanted: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each row, counted from 1, and the helper's answer for it
        (`arrow_work`): a text, an object, null, or a list for one that could not be read.

        wanted: "texts", the name of the column of texts, or "fields", the names of those of rows.
        Raises UserError for a damaged table, and one that unpacks to too many characters.
        """
        with open_packed(self._file) as opened:
            size = opened.seek(0, 2)
            request = {
                "path": None if is_remote(self._file) else str(self._file.absolute()),
                "size": size,
                "form": form(self._file),
                "texts": None,
                "fields": [],
                "longest": MAX_ITEM,
            }
            num_chars = 0  # of all texts
            for rows in self._answers(request | wanted, opened):
                for row in rows:
                    self._number += 1
                    yield self._number, row
                    num_chars += len(row) if isinstance(row, str) else 0
                require_ratio(self._file, num_chars, size)

    def _answers(self, request: dict[str, Any], opened: BinaryIO) -> Iterator[list[Any]]:
        """Yield the helper's lists of rows, after its first answer: names and types of columns,
        which are checked here. opened: the file, whose bytes it may ask for. Raises UserError."""
        answers = self._helper.ask(request, SECONDS, opened)
        naming = naming_url(self._file) if is_remote(self._file) else nullcontext()
        with naming, closing(answers):
            try:
                self.names, kind, is_text = next(answers)
                if request["texts"] is not None:
                    require_column(self._file, self.names, request["texts"])
                    self._require_text(request["texts"], kind, is_text)
                yield from answers
            except ConfinedError as problem:
                raise self._damaged(str(problem)) from problem

    def _damaged(self, reason: str) -> UserError:
        """Return the error of a table that is damaged at the next row."""
        number = self._number + 1
        if form(self._file) == PARQUET:
            return UserError.of(
                "data.parquet_not_whole", file=self._file, number=number, reason=reason
            )
        return UserError.of("data.arrow_not_whole", file=self._file, number=number, reason=reason)

    def _require_text(self, field: str, kind: str, is_text: bool) -> None:
        if not is_text:
            raise UserError.of(
                "data.parquet_type", file=self._file, field=field, field_type=kind, which=WHICH
            )
