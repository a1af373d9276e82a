"""Reader of shards of MosaicML's streaming format MDS (version 2), whose documents are the samples,
counted from 1.

A shard is little-endian:

    u32        N, the number of samples
    u32[N + 1] byte at which each sample begins, and the end of the last
    JSON       its settings: the names, encodings and sizes of the columns
    samples    a u32 for each column without a fixed size, its bytes; then all columns

Only columns of texts and of JSON are decoded. A column of pickles could run code, and is never
read.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.parsing import parse_json
from megaprec.text.json_list import row_value
from megaprec.text.packed_files import naming_damage, open_unpacked
from megaprec.text.pieces import WHICH, OnFault
from megaprec.tokens.bounds import MAX_HEADER, MAX_ITEM

U32 = struct.Struct("<I")
MOST_SAMPLES = 1 << 24  # of a shard
TEXT_ENCODINGS = ("str", "json")
PICKLE = "pkl"


@dataclass(frozen=True)
class _Columns:
    """The columns of a shard. sizes: in bytes, 0 for one without a fixed size."""

    names: list[str]
    encodings: list[str]
    sizes: list[int]


def mds_rows(
    file: Path, fields: Sequence[str], on_fault: OnFault
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each sample, and those of `fields` that it has. If the shard has none of
    them, yield the names of its columns with None, which the caller's error lists.

    on_fault: called with the error of a sample that has a text that cannot be decoded.
    Raises UserError for a field that is no text, and for a shard that is damaged.
    """
    with naming_damage(file, lambda: "1"), open_unpacked(file) as stream:
        offsets, columns = _read_head(file, stream)
        num_samples = len(offsets) - 1
        wanted = {name for name in columns.names if name in fields}
        _require_texts(file, columns, wanted)
        for number, (begin, end) in enumerate(pairwise(offsets), 1):
            size = int(end) - int(begin)
            if size > MAX_ITEM:
                raise UserError.of("data.mds_size", file=file, number=number, most=MAX_ITEM)
            sample = stream.read(size)
            if len(sample) < size:
                raise _damaged(file, f"it ends within sample {number} of {num_samples}")
            values = _values(file, sample, number, columns)
            try:
                yield number, _decoded(values, columns, wanted, fields)
            except ValueError as problem:
                where = f"{file}:{number}"
                on_fault(UserError.of("data.mds_sample", where=where, problem=problem))
        if stream.read(1):
            raise _damaged(file, "there is more after its last sample")


def _read_head(file: Path, stream: BinaryIO) -> tuple[NDArray[np.uint32], _Columns]:
    """Return the bytes at which the samples begin, and the columns. Raises UserError."""
    num_samples = _read_num_samples(file, stream)
    table_size = U32.size * (num_samples + 1)
    table = stream.read(table_size)
    if len(table) < table_size:
        raise _damaged(file, "it ends within its table of samples")
    offsets = np.frombuffer(table, "<u4")
    # the settings lie between the table and the first sample
    settings_size = int(offsets[0]) - U32.size - table_size
    if settings_size < len("{}") or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(file, "its table of samples is not in order")
    if settings_size > MAX_HEADER:
        raise _damaged(file, f"its settings would have {settings_size} bytes")
    columns = _read_settings(file, stream.read(settings_size))
    return offsets, columns


def _read_num_samples(file: Path, stream: BinaryIO) -> int:
    """Return the number of samples, with which a shard begins. Raises UserError."""
    head = stream.read(U32.size)
    if len(head) == U32.size:
        (num_samples,) = U32.unpack(head)
        if num_samples <= MOST_SAMPLES:
            return num_samples
    raise _damaged(file, "its first bytes are no number of samples")


def _read_settings(file: Path, text: bytes) -> _Columns:
    """Return the columns that the settings of a file, JSON, state. Raises UserError."""
    try:
        settings = parse_json(text)
        version = settings["version"]
        names = [str(name) for name in settings["column_names"]]
        encodings = [str(encoding) for encoding in settings["column_encodings"]]
        sizes = [_size(size) for size in settings["column_sizes"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise _damaged(file, "its settings cannot be read") from problem
    if version != 2:
        raise _damaged(file, f"it is of version {version}, and only version 2 is read")
    if not len(names) == len(encodings) == len(sizes):
        raise _damaged(file, "its columns have not as many names, encodings and sizes")
    return _Columns(names, encodings, sizes)


def _size(value: Any) -> int:
    """Return the size of a column, 0 for one without a fixed size. Raises ValueError."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= MAX_ITEM:
        raise ValueError(f"{value!r} is no size of a column")
    return int(value)


def _require_texts(file: Path, columns: _Columns, wanted: set[str]) -> None:
    """Raise UserError for a column of `wanted` that is no text."""
    for name, encoding in zip(columns.names, columns.encodings, strict=True):
        if name in wanted and encoding not in TEXT_ENCODINGS:
            kind = f"{encoding}, not a text"
            if encoding == PICKLE:
                kind = "a pickle, which may run code and is not read"
            raise UserError.of("data.mds_column", file=file, field=name, kind=kind, which=WHICH)


def _values(file: Path, sample: bytes, number: int, columns: _Columns) -> list[bytes]:
    """Return the bytes of each column of a sample. Raises UserError."""
    # the sizes of columns without a fixed one stand first
    num_sizes = columns.sizes.count(0)
    head_size = U32.size * num_sizes
    # a sample that is too short is damaged, which its columns show
    head = sample.ljust(head_size, b"\0")
    stated_sizes = iter(struct.unpack_from(f"<{num_sizes}I", head))
    values: list[bytes] = []
    begin = head_size
    for fixed_size in columns.sizes:
        size = fixed_size or next(stated_sizes)
        end = begin + size
        values.append(sample[begin:end])
        begin = end
    if begin != len(sample):
        raise _damaged(file, f"the columns of sample {number} take {begin} of {len(sample)} bytes")
    return values


def _decoded(
    values: Sequence[bytes], columns: _Columns, wanted: set[str], fields: Sequence[str]
) -> dict[str, Any]:
    """Return the wanted columns of a sample; if none is, all names with None. Raises ValueError."""
    if not wanted:  # so that the error names what there is
        return dict.fromkeys(columns.names)
    row: dict[str, Any] = {}
    for name, encoding, value in zip(columns.names, columns.encodings, values, strict=True):
        if name not in wanted:
            continue
        text = value.decode()
        if encoding == "json":
            row[name] = row_value(text, fields)
        else:
            row[name] = text
    return row


def _damaged(file: Path, reason: str) -> UserError:
    return UserError.of("data.mds_damaged", file=file, reason=reason)
