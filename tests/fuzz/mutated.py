"""Good files of every form that texts and data sets have, and changed ones: bits that flip, lengths
and counts that are others, pieces that are cut off, put in from another file, doubled or nested."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from tests.fuzz.hostile import mds, mds_settings
from tests.fuzz.mutate import bytes_changed

ROWS = [f"row {number}: some text, “quoted”, of é and 数字\n" * 3 for number in range(60)]
EXTREMES = [0, 1, -1, 127, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62]
EXTREMES += [(1 << 63) - 1, -(1 << 63), 1 << 20, 1 << 26]
NESTED = [b"[" * 2000, b'{"a":' * 2000, b"<div>" * 2000, b'"' * 2000, b"<!--" * 500, b"\0" * 5000]


def _jsonl() -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


def _csv() -> bytes:
    quoted = [row.replace('"', '""') for row in ROWS]
    lines = [f'"{row}",{number}\n' for number, row in enumerate(quoted)]
    return "".join(["text,number\n", *lines]).encode()


def _page() -> bytes:
    rows = "".join(f"<tr><td>{row}<td colspan=3>b</tr>" for row in ROWS)
    return f'<html><meta charset="utf-8"><table>{rows}</table><ul><li>a</ul></html>'.encode()


def _notebook() -> bytes:
    cells = [{"cell_type": "code", "source": [row], "outputs": []} for row in ROWS]
    return json.dumps({"cells": cells, "nbformat": 4}).encode()


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, row in enumerate(ROWS[:8]):
            content = row.encode()
            member = tarfile.TarInfo(f"{'long/' * (number * 6)}{number:04}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _mds() -> bytes:
    texts = [row.encode() for row in ROWS]
    samples = [struct.pack("<I", len(text)) + text for text in texts]
    return mds(mds_settings(), [*map(len, samples)], b"".join(samples))


def _table() -> pyarrow.Table:
    lists = [[row[:5], row[:3]] for row in ROWS]
    kinds = pyarrow.array([f"kind {number % 3}" for number in range(len(ROWS))])
    return pyarrow.table({"text": ROWS, "lists": lists, "kind": kinds.dictionary_encode()})


def _arrow(as_file: bool = False, compression: str | None = None, coded: bool = False) -> bytes:
    table = _table()
    if coded:
        table = table.set_column(0, "text", table.column("text").dictionary_encode())
    stream = io.BytesIO()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    new = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with new(stream, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=20)
    return stream.getvalue()


def _parquet(compression: str, coded: bool = False, version: str = "1.0") -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(
        _table(),
        stream,
        compression=compression,
        use_dictionary=coded,
        data_page_version=version,
        row_group_size=25,
    )
    return stream.getvalue()


def _zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


GOOD: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: "".join(ROWS).encode(),
    "a.txt.gz": lambda: gzip.compress("".join(ROWS).encode()),
    "a.txt.zst": lambda: _zstd("".join(ROWS).encode()),
    "a.jsonl": _jsonl,
    "a.jsonl.gz": lambda: gzip.compress(_jsonl()),
    "a.jsonl.zst": lambda: _zstd(_jsonl()),
    "a.json": lambda: json.dumps([*ROWS[:30], *({"text": row} for row in ROWS[30:])]).encode(),
    "a.csv": _csv,
    "a.csv.gz": lambda: gzip.compress(_csv()),
    "a.html": _page,
    "a.ipynb": _notebook,
    "a.tar": _tar,
    "a.tar.gz": lambda: gzip.compress(_tar()),
    "a.mds": _mds,
    "a.mds.zst": lambda: _zstd(_mds()),
    "stream.arrow": _arrow,
    "file.arrow": lambda: _arrow(as_file=True),
    "lz4.arrow": lambda: _arrow(compression="lz4"),
    "zstd.arrow": lambda: _arrow(as_file=True, compression="zstd"),
    "coded.arrow": lambda: _arrow(coded=True),
    "plain.parquet": lambda: _parquet("none"),
    "snappy.parquet": lambda: _parquet("snappy", coded=True),
    "zstd.parquet": lambda: _parquet("zstd", version="2.0"),
}


def changed(rng: Random, content: bytes, other: bytes) -> bytes:
    """A file with one to three changes. other: of which pieces are put in."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = _changed_once(rng, content, other)
    return content


def _changed_once(rng: Random, content: bytes, other: bytes) -> bytes:
    kind = rng.randrange(6)
    at = rng.randrange(len(content) + 1)
    if kind == 0:
        return bytes_changed(rng, content)
    if kind == 1:  # bits flip
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 2, 4, 16))):
            if flipped:
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:  # a length or count is another
        size = rng.choice((1, 2, 4, 8))
        value = rng.choice(EXTREMES) % (1 << 8 * size)
        # most lengths lie at multiples of their size
        at -= at % size
        return content[:at] + value.to_bytes(size, "little") + content[at + size :]
    if kind == 3:  # cut off, at either end
        return content[:at] if rng.random() < 0.7 else content[at:]
    if kind == 4:  # a piece of another file
        begin = rng.randrange(len(other) + 1)
        return content[:at] + other[begin : begin + rng.choice((8, 64, 1000))] + content[at:]
    return content[:at] + rng.choice(NESTED) + content[at:]


def write_case(folder: Path, name: str, seed: int) -> None:
    """Write a changed file under its name. The same seed gives the same file."""
    rng = Random(f"{name} {seed}")
    other = GOOD[rng.choice([*GOOD])]()
    (folder / name).write_bytes(changed(rng, GOOD[name](), other))
