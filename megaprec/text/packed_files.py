"""A file of text, opened as what it holds: unpacked from gzip or zstd, with its damage named."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megaprec.errors import UserError
from megaprec.tokens.bounds import BUFFER, Fetching, Packed, Unpacking
from megaprec.tokens.places import is_remote, naming_url, openable, size_of

PACKED = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
}  # endings of files that are unpacked as they are read


@contextmanager
def naming_damage(file: Path, position: Callable[[], str]) -> Iterator[None]:
    """Raise UserError for a file that cannot be read or unpacked inside the context.

    position: returns the number of the line or item that is being read.
    """
    if is_remote(file):
        with naming_url(file):
            yield
        return
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
    """Open a file for reading; what it gives is not packed any more.

    It cannot become more than `bounds` says.
    """
    compression = PACKED.get(file.suffix.lower())
    if compression == "zstd":
        arrow = import_pyarrow(file)
        packed = Packed(file, _open_raw(file))
        stream = arrow.input_stream(packed, compression="zstd")
    elif compression == "gzip":
        packed = Packed(file, _open_raw(file))
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=packed))
    else:
        return open_packed(file)
    return io.BufferedReader(Unpacking(file, packed, stream), BUFFER)


def open_packed(file: Path) -> BinaryIO:
    """Open a file for reading, whose bytes come as they are."""
    # the files of some libraries cannot read a line of limited length
    return io.BufferedReader(_open_raw(file), BUFFER)


def _open_raw(file: Path) -> io.RawIOBase:
    if is_remote(file):
        return Fetching(file, openable(file), size_of(file))
    return open(file, "rb", buffering=0)


def import_pyarrow(file: Path) -> Any:
    """Return the package pyarrow. Raises UserError, which names the file that needs it."""
    try:
        import pyarrow  # noqa: PLC0415 (optional)
    except ImportError as problem:
        raise UserError.of("data.pyarrow_missing", file=file) from problem
    return pyarrow
