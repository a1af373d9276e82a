"""The column of a table that holds the texts."""

from collections.abc import Sequence
from pathlib import Path

from megaprec.errors import UserError
from megaprec.text.pieces import WHICH

OTHER_SEPARATORS = (",", ";", "\t", "|")  # that tables may have by mistake


def require_column(file: Path, header: Sequence[str], field: str) -> int:
    """Return the number of the column of the text. Raises UserError unless there is one."""
    if field not in header:
        for separator in OTHER_SEPARATORS:
            if len(header) == 1 and field in header[0].split(separator):
                raise UserError.of("data.other_separator", file=file, separator=separator)
        names = ", ".join(header) or "none"
        raise UserError.of("data.field_missing", where=file, field=field, names=names, which=WHICH)
    if header.count(field) > 1:
        raise UserError.of(
            "data.column_twice",
            file=file,
            column_count=header.count(field),
            field=field,
            which=WHICH,
        )
    return header.index(field)
