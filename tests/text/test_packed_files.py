"""Zstd and Parquet: the same documents as plain JSON lines, and one line that names file and place
if they are bad."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megaprec.errors import UserError
from megaprec.text.build import build
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import load_tokenizer
from megaprec.tokens.bounds import Packed
from tests.refusals import raises, sentence
from tests.text.test_text import documents
from tests.text.test_tokenizer import hugging_face

TEXTS = [
    "one",
    "zwei\nZeilen",
    "",
    "三😀\0",
    "x" * 5000,
    *(f"text number {n}" for n in range(2000)),
]
LINES = [json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(TEXTS)]


def write_zstd(path: Path, *frames: bytes) -> Path:
    for content in frames:
        with (
            pyarrow.OSFile(str(path) + ".one", "wb") as file,
            pyarrow.CompressedOutputStream(file, "zstd") as stream,
        ):
            stream.write(content)
        with path.open("ab") as whole:
            whole.write(Path(str(path) + ".one").read_bytes())
        Path(str(path) + ".one").unlink()
    return path


def write_parquet(path: Path, values: Any = TEXTS, kind: Any = None, **options: Any) -> Path:
    column = pyarrow.array(values, type=kind or pyarrow.string())
    table = pyarrow.table({"id": list(range(len(column))), "text": column})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def test_zstd_is_the_same_as_plain_also_in_several_frames(tmp_path: Path) -> None:
    path = write_zstd(tmp_path / "x.jsonl.zst", b"".join(LINES[:1000]), b"".join(LINES[1000:]))
    assert list(documents(open_source(str(path))).values()) == TEXTS
    assert list(documents(open_source(str(path))))[:2] == ["x.jsonl.zst:1", "x.jsonl.zst:2"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": pyarrow.large_string()},
        {"kind": pyarrow.string_view()},
        {"kind": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())},
        {"compression": "zstd", "row_group_size": 100},
        {"compression": "none", "data_page_size": 100},
    ],
)
def test_parquet_is_one_document_a_row(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_parquet(tmp_path / "x.parquet", **options)
    found = documents(open_source(str(path)))
    assert list(found.values()) == TEXTS
    assert list(found)[-1] == f"x.parquet:{len(TEXTS)}"


def test_a_folder_may_hold_all_kinds(tmp_path: Path) -> None:
    write_zstd(tmp_path / "a.jsonl.zst", b'{"text": "a"}\n')
    write_parquet(tmp_path / "b.parquet", ["b"])
    (tmp_path / "c.txt").write_text("c")
    assert list(documents(open_source(str(tmp_path))).values()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"plain",
        lambda data: (
            data[:6] + b"\xff" * 30 + data[36:]
        ),  # a flipped bit elsewhere may decode: there is no checksum
    ],
)
def test_a_broken_zstd_file_is_named_with_the_line(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = write_zstd(tmp_path / "x.jsonl.zst", b"".join(LINES))
    path.write_bytes(damage(path.read_bytes()))
    with raises("data.file_not_whole", compression="zstd"):
        list(open_source(str(path)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"PAR1",
        lambda data: (
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        ),
    ],
)
def test_a_broken_parquet_file_is_named_with_the_row(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = write_parquet(tmp_path / "x.parquet", compression="none", write_page_checksum=True)
    path.write_bytes(damage(path.read_bytes()))
    with raises("data.parquet_not_whole") as error:
        list(open_source(str(path)))
    assert len(error.value.problems) == 1 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "kind", "why"),
    [
        (
            ["a", None],
            None,
            sentence("data.field_null", where=re.compile(r"x\.parquet:2: field 'text'")),
        ),
        ([1, 2], pyarrow.int64(), sentence("data.parquet_type", field_type="int64")),
        ([b"a"], pyarrow.binary(), sentence("data.parquet_type", field_type="binary")),
        (
            [["a"]],
            pyarrow.list_(pyarrow.string()),
            sentence("data.parquet_type", field_type=re.compile("^list")),
        ),
    ],
)
def test_a_column_that_is_no_text_is_refused(
    tmp_path: Path, values: list[Any], kind: Any, why: str
) -> None:
    path = write_parquet(tmp_path / "x.parquet", values, kind)
    with pytest.raises(UserError, match=why):
        list(open_source(str(path)))
    with raises("data.field_missing", field="body", names="id, text"):
        list(open_source(str(path), TextOptions(field="body")))


def test_a_field_that_is_two_columns_is_refused_and_other_columns_may_be_given_twice(
    tmp_path: Path,
) -> None:
    columns = [pyarrow.array([text]) for text in ("a", "b", "c")]
    table = pyarrow.Table.from_arrays(columns, names=["text", "n", "n"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert documents(open_source(str(tmp_path / "x.parquet"))) == {"x.parquet:1": "a"}
    with raises("data.column_twice", column_count=2, field="n"):
        list(open_source(str(tmp_path / "x.parquet"), TextOptions(field="n")))


def test_a_column_with_a_dot_in_its_name_is_not_a_part_of_another(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"a": [{"b": "part"}], "a.b": ["text"]}), tmp_path / "x.parquet"
    )
    assert [*open_source(str(tmp_path / "x.parquet"), TextOptions(field="a.b"))] == [
        ("x.parquet:1", "text")
    ]


def test_bytes_that_are_no_utf8_are_named_with_the_row(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xff\xfe")],
    )
    path = write_parquet(tmp_path / "x.parquet", bad)
    with raises("data.not_utf8", file=re.compile("x.parquet:2: field 'text'$")):
        list(open_source(str(path)))


def test_a_file_that_breaks_off_leaves_no_data_set(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(hugging_face(tmp_path / "tokenizer.json"))
    path = write_zstd(tmp_path / "x.jsonl.zst", b"".join(LINES))
    path.write_bytes(path.read_bytes()[:-7])
    before = {file.name for file in tmp_path.iterdir()}
    with raises("data.file_not_whole", compression="zstd"):
        build(open_source(str(path)), tokenizer, tmp_path / "out", workers=2)
    assert {file.name for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.zst"])
def test_without_the_package_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=sentence("data.pyarrow_missing", file=name)):
        open_source(str(tmp_path / name))


def test_four_mib_from_which_nothing_comes_are_read_and_no_byte_more() -> None:
    file = Path("padding.gz")
    packed = Packed(file, io.BytesIO(bytes(2**23)))  # type: ignore[arg-type]
    assert len(packed.read(2**22)) == 2**22
    packed.has_become_some()
    assert len(packed.read(2**22)) == 2**22
    with raises("data.packed_nothing", file=file, size=2**22):
        Packed(file, io.BytesIO(bytes(2**23))).read(2**22 + 1)  # type: ignore[arg-type]
