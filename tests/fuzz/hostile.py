"""Files that are small, and would be gigabytes, hours or a crash to a reader that trusts them; each
case writes its file into a folder and returns what to give to `megaprec data build`."""

import gzip
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc

MIB = 1 << 20
FILL = 64 * MIB  # bytes that one packed member of a bomb has
TIMES = 96  # members: 6 GiB

Write = Callable[[Path], list[str]]


def packed(head: bytes, fill: bytes, times: int = TIMES, end: bytes = b"") -> bytes:
    """Several members of gzip, which are one file: `head`, FILL bytes of `fill` as often as
    `times`, and `end`."""
    filled = gzip.compress(fill * (FILL // len(fill)), 9)
    return gzip.compress(head) + filled * times + gzip.compress(end)


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The block of a member, of any size: beyond eight digits it is written in base 256."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.type = kind
    return member.tobuf(tarfile.GNU_FORMAT)


def tar_of(*blocks: bytes) -> bytes:
    """An archive of headers and contents, each filled up to whole blocks."""
    padded = [block + bytes(-len(block) % tarfile.BLOCKSIZE) for block in blocks]
    return b"".join(padded) + bytes(20 * tarfile.BLOCKSIZE)


def mds(settings: bytes, sizes: list[int], samples: bytes = b"") -> bytes:
    """A shard of MDS with these sizes of samples."""
    begin = 4 + 4 * (len(sizes) + 1) + len(settings)
    offsets = [begin]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    table = struct.pack(f"<I{len(offsets)}I", len(sizes), *offsets)
    return table + settings + samples


def mds_settings(**changes: object) -> bytes:
    """The settings of a shard with one column of texts."""
    settings = {
        "version": 2,
        "format": "mds",
        "column_names": ["text"],
        "column_encodings": ["str"],
        "column_sizes": [None],
    }
    return json.dumps(settings | changes).encode()


def _file(name: str, content: Callable[[], bytes]) -> Write:
    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(content())
        return [name]

    return write


def _deep_tree(folder: Path) -> list[str]:
    """A folder with 1,500 folders one in the other, made link by link of relative names."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    return ["d"]


def _padded(name: str, content: bytes) -> Write:
    """A packed file with 3 GiB of zeros behind it, which take no room on a disk."""

    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        os.truncate(folder / name, 3 << 30)
        return [name]

    return write


def _skipped_frames() -> bytes:
    """Frames of zstd that hold no text, 48 MiB of them."""
    frame = struct.pack("<II", 0x184D2A50, 0)
    return frame * (48 * MIB // len(frame))


def _links_to_the_parent(folder: Path) -> list[str]:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "a.md").write_text("a text\n")
    for name in ("one", "two"):
        (inner / name).symlink_to("..")
    return ["inner/**/*.rst"]


def _arrow_dictionary(folder: Path) -> list[str]:
    """A table whose indices lie outside of its dictionary."""
    indices = pyarrow.array([0, 10**6], pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, ["a"], safe=False)
    batch = pyarrow.record_batch({"text": column})
    with pyarrow.ipc.new_stream(folder / "x.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    return ["x.arrow"]


def _arrow_offsets(folder: Path) -> list[str]:
    """A table whose texts lie outside of their buffer."""
    batch = pyarrow.record_batch({"text": ["abc", "def"]})
    with pyarrow.ipc.new_stream(folder / "x.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    right = struct.pack("<3i", 0, 3, 6)
    wrong = struct.pack("<3i", 0, 3, 1 << 30)
    file = folder / "x.arrow"
    file.write_bytes(file.read_bytes().replace(right, wrong))
    return ["x.arrow"]


def _pax(record: bytes) -> bytes:
    size = len(record) + 3
    while len(line := f"{size} ".encode() + record + b"\n") != size:
        size = len(line)
    return line


def _pages(body: bytes) -> Callable[[], bytes]:
    return lambda: b"<html>" + body + b"<p>text</p></html>"


HOSTILE: dict[str, Write] = {
    "a member of 2**80 bytes": _file(
        "x.tar", lambda: tar_of(tar_header("a.txt", 1 << 80), b"some text")
    ),
    "a member of less than 0 bytes": _file(
        "x.tar", lambda: tar_of(tar_header("a.txt", -5), b"some text")
    ),
    "a member that is skipped, of 2**80 bytes": _file(
        "x.tar", lambda: tar_of(tar_header("a.jpg", 1 << 80), b"some text")
    ),
    "a long name of 6 GiB": _file(
        "x.tar.gz",
        lambda: packed(tar_header("././@LongLink", TIMES * FILL, tarfile.GNUTYPE_LONGNAME), b"n"),
    ),
    "a pax header of 6 GiB": _file(
        "x.tar.gz", lambda: packed(tar_header("pax", TIMES * FILL, tarfile.XHDTYPE), b"n")
    ),
    "a global pax header of 6 GiB": _file(
        "x.tar.gz", lambda: packed(tar_header("pax", TIMES * FILL, tarfile.XGLTYPE), b"n")
    ),
    "a pax record of a GNU sparse file": _file(
        "x.tar",
        lambda: tar_of(
            tar_header("pax", len(_pax(b"GNU.sparse.map=0,x")), tarfile.XHDTYPE),
            _pax(b"GNU.sparse.map=0,x"),
            tar_header("a.txt", 9),
            b"some text",
        ),
    ),
    "a pax record of a size that is none": _file(
        "x.tar",
        lambda: tar_of(
            tar_header("pax", len(_pax(b"size=x")), tarfile.XHDTYPE),
            _pax(b"size=x"),
            tar_header("a.txt", 9),
            b"some text",
        ),
    ),
    "5,000 pax headers before one member": _file(
        "x.tar",
        lambda: tar_of(
            *[tar_header("pax", 9, tarfile.XHDTYPE), _pax(b"b=1234")] * 5000,
            tar_header("a.txt", 9),
            b"some text",
        ),
    ),
    "an old GNU sparse member": _file(
        "x.tar", lambda: tar_of(tar_header("a.txt", 9, tarfile.GNUTYPE_SPARSE), b"some text")
    ),
    "6 GiB behind the end of an archive": _file(
        "x.tar.gz", lambda: packed(tar_of(tar_header("a.txt", 9), b"some text"), b"\0")
    ),
    "a line of CSV of 6 GiB": _file("x.csv.gz", lambda: packed(b"text\n", b"a")),
    "a header of CSV of 6 GiB": _file("x.csv.gz", lambda: packed(b"text", b"a")),
    "a row of CSV of 6 GiB in quoted lines": _file(
        "x.csv.gz", lambda: packed(b"text\n", b'"a\n",')
    ),
    "a line of CSV of commas": _file("x.csv.gz", lambda: packed(b"text\n", b",", 1)),
    "a line of JSON of lists": _file("x.jsonl.gz", lambda: packed(b'{"a": [', b"[],", 1)),
    "a line of JSON of lists, whole": _file(
        "x.jsonl", lambda: b'{"text": [' + b"[]," * (20 * MIB) + b"[]]}\n"
    ),
    "an item of JSON of lists": _file(
        "x.json", lambda: b'[{"text": [' + b"[]," * (20 * MIB) + b"[]]}]\n"
    ),
    "a notebook of lists": _file(
        "x.ipynb", lambda: b'{"cells": [' + b"[]," * (20 * MIB) + b"[]]}\n"
    ),
    "6 GiB of empty lines": _file("x.jsonl.gz", lambda: packed(b"", b"\n")),
    "6 GiB of spaces before a list": _file("x.json.gz", lambda: packed(b"", b" ")),
    "6 GiB of one item of a list": _file("x.json.gz", lambda: packed(b'["', b"a")),
    "6 GiB of plain text": _file("x.txt.gz", lambda: packed(b"text", b"a")),
    "3 GiB of padding behind a packed text": _padded("x.txt.gz", gzip.compress(b"text")),
    "48 MiB of packed parts without a text": _file(
        "x.txt.gz", lambda: gzip.compress(b"") * (48 * MIB // len(gzip.compress(b"")))
    ),
    "48 MiB of skipped frames": _file("x.jsonl.zst", _skipped_frames),
    "a page of 6 GiB": _file("x.html.gz", lambda: packed(b"<p>text", b"a")),
    "a sample of MDS of 4 GiB": _file(
        "x.mds.gz", lambda: packed(mds(mds_settings(), [(1 << 32) - 999]), b"a", 63)
    ),
    "settings of MDS of 4 GiB": _file(
        "x.mds.gz", lambda: packed(struct.pack("<III", 1, (1 << 32) - 9, (1 << 32) - 5), b"a", 64)
    ),
    "a table of MDS of 2**26 samples": _file(
        "x.mds.gz",
        lambda: packed(struct.pack("<I", 1 << 26), struct.pack("<I", (1 << 28) + 100), 5, b"{}"),
    ),
    "an endless size of a column of MDS": _file(
        "x.mds", lambda: mds(mds_settings(column_sizes=[float("inf")]), [5], b"\1\0\0\0a")
    ),
    "a size of a column of MDS that is a text": _file(
        "x.mds", lambda: mds(mds_settings(column_sizes=["1"]), [5], b"\1\0\0\0a")
    ),
    "a page in punycode": _file("x.html", _pages(b'<meta charset="punycode">')),
    "a page in no encoding": _file("x.html", _pages(b'<meta charset="undefined">')),
    "a page of names of hosts": _file("x.html", _pages(b'<meta charset="idna">\xff..')),
    "a row that is nested deep": _file(
        "x.jsonl", lambda: b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n"
    ),
    "folders 1,500 deep": _deep_tree,
    "two links to the parent": _links_to_the_parent,
    "indices outside of a dictionary": _arrow_dictionary,
    "texts outside of their buffer": _arrow_offsets,
}


# which are texts, or refused
NESTED_PAGES: dict[str, Write] = {
    "a page of 200,000 marks in each other": _file("x.html", _pages(b"<div>" * 200_000)),
    "a page of 50,000 lists in each other": _file("x.html", _pages(b"<ul><li>a" * 50_000)),
    "a page of 3,000 tables in each other": _file("x.html", _pages(b"<table><tr><td>a" * 3000)),
}

TEMPLATES: dict[str, str] = {
    "loops for a year": "{% for a in range(99999) %}" * 3 + "a" + "{% endfor %}" * 3,
    "25 loops in each other": "{% for a in [1] %}" * 25 + "a" + "{% endfor %}" * 25,
    "200 conditions in each other": "{% if 1 %}" * 200 + "a" + "{% endif %}" * 200,
    "brackets 3,000 deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists 90 deep": "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
    "100,000 signs of minus": "{{ " + "-" * 100_000 + "1 }}",
    "a text that doubles": "{% set n = namespace(t='ab') %}{% for a in range(60) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a wide number": "{{ '%9999999999d' % 1 }}",
    "a padded text": "{{ 'a'.center(99999999999) }}",
    "a repeated text": "{{ 'ab' * 99999999999 }}",
    "a tower of powers": "{{ 9 ** (9 ** 9) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a draw": "{{ messages | random }}",
    "a draw by name": "{{ [messages] | map('random') | list }}",
    "text without a meaning": "{{ lipsum() }}",
    "text without a meaning by another name": "{% set a = lipsum %}{{ a() }}",
    "an address": "{{ joiner() }}",
    "no end of a block": "{% if",
}


def _header(content: bytes, length: int | None = None) -> Callable[[], bytes]:
    """A file of safetensors whose header has this content, and says that it has this length."""
    said = len(content) if length is None else length
    return lambda: struct.pack("<Q", said) + content + bytes(8)


def _tensor(shape: list[int], end: int) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()


WEIGHTS: dict[str, Callable[[], bytes]] = {
    "a header of 2**63 bytes": _header(b"{}", 1 << 63),
    "a header of 2**64 - 1 bytes": _header(b"{}", (1 << 64) - 1),
    "a header of 99 MB of spaces": lambda: _header(b"{" + b" " * 98_999_998 + b"}")(),
    "a header of 4 GB": lambda: _header(b"{}", 4 << 30)(),
    "a header of lists in each other": _header(b"[" * 20_000),
    "a header of objects in each other": _header(b'{"a":' * 500 + b"1" + b"}" * 500),
    "a tensor of 2**124 elements": _header(_tensor([1 << 62, 1 << 62], 8)),
    "a tensor of less than no elements": _header(_tensor([-2], 8)),
    "a tensor of no elements of 2**62": _header(_tensor([0, 1 << 62], 0)),
    "a million tensors": lambda: _header(
        b"{"
        + b",".join(
            b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number
            for number in range(1_000_000)
        )
        + b"}"
    )(),
    "a header of empty lists": lambda: _header(
        b'{"__metadata__":{"a":[' + b"[]," * 20_000_000 + b"[]]}}"
    )(),
}
