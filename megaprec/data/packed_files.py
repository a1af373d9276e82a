"""A file of text, opened as what it holds: unpacked from gzip or zstd, with its damage named."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megaprec.errors import UserError

PACKED = {".gz": "gzip", ".zst": "zstd"}  # endings of files that are unpacked as they are read


@contextmanager
def naming_damage(file: Path, position: Callable[[], str]) -> Iterator[None]:
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


def open_unpacked(file: Path) -> BinaryIO:
    """Open a file for reading; what it gives is not packed any more."""
    suffix = file.suffix.lower()
    if suffix == ".zst":
        stream = import_pyarrow(file).input_stream(str(file), compression="zstd")
        return io.BufferedReader(stream, 1 << 16)
    return gzip.open(file, "rb") if suffix == ".gz" else open(file, "rb")  # pyright: ignore[reportReturnType]


def import_pyarrow(file: Path) -> Any:
    """Return the package pyarrow. Raises UserError, which names the file that needs it."""
    try:
        import pyarrow  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.pyarrow_missing", file=file) from problem
    return pyarrow
