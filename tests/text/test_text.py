"""Sources give the same documents in the same order every time, and say what is wrong with a bad
one."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megaprec.errors import Problem, UserError
from megaprec.text import json_list, readers
from megaprec.text import sources as module
from megaprec.text.readers import TextOptions
from megaprec.text.sources import TextSource, left_out_words, open_source
from tests.refusals import raises, sentence, shows
from tools.cli import main


def documents(source: TextSource) -> dict[str, str]:
    """Name and text of each document, its pieces joined."""
    return {
        name: "".join(text for _, text in pieces)
        for name, pieces in groupby(source, key=lambda piece: piece[0])
    }


def jsonl(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
        )
    )
    return path


def test_the_standard_library_is_its_sources_without_tests() -> None:
    found = documents(open_source("python"))
    assert {"json/decoder.py", "asyncio/base_events.py", "argparse.py"} <= set(found)
    assert "def raw_decode(self, s, idx=0):" in found["json/decoder.py"]
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert sum(map(len, found.values())) > 5_000_000


def test_the_beginning_of_the_standard_library_is_varied_and_always_the_same() -> None:
    some = list(open_source("python", TextOptions(max_chars=1_000_000)))
    assert some == list(open_source("python", TextOptions(max_chars=1_000_000)))
    assert some == list(open_source("python"))[: len(some) - 1] + some[-1:]
    assert len({name.partition("/")[0] for name, _ in some}) > 10, (
        "modules and packages of many subjects"
    )


def test_a_file_is_one_document_kept_to_the_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "one\r\n\n  two\ttwo é\U0001f600\r three, which is a long line\nend" * 3
    (tmp_path / "a.log").write_bytes(text.encode())
    for size in (1, 2, 3, 5, 7, 1000):
        monkeypatch.setattr(readers, "PIECE_CHARS", size)
        source = open_source(str(tmp_path / "a.log"))
        assert documents(source) == {"a.log": text}
        assert max(len(piece) for _, piece in source) <= 2 * size


def test_large_files_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 10)
    (tmp_path / "a.txt").write_text("1234567\n" * 9)
    pieces = [text for _, text in open_source(str(tmp_path / "a.txt"))]
    assert len(pieces) > 3
    assert all(text.endswith("\n") for text in pieces)


def test_a_folder_is_its_texts_by_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.py", "c.rst", ".hidden.txt", ".git/x.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    jsonl(tmp_path / "d.jsonl", {"text": "one"}, {"text": "two"})
    found = documents(open_source(str(tmp_path)))
    assert list(found) == ["a/y.py", "a/z.md", "b.txt", "c.rst", "d.jsonl:1", "d.jsonl:2"]
    assert found["a/z.md"] == "text of a/z.md"


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    (tmp_path / "out" / "b.txt").write_text("b")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    assert list(documents(open_source(str(tmp_path / "in")))) == ["a.txt"]


def test_jsonl_is_one_document_a_line_plain_or_zipped(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "x.jsonl", {"text": "a\nb"}, b"\n", {"n": 1, "text": "é\u2028"}, b'{"text": ""}'
    )
    expected = {"x.jsonl:1": "a\nb", "x.jsonl:3": "é\u2028", "x.jsonl:4": ""}
    assert documents(open_source(str(path))) == expected
    zipped = tmp_path / "x.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert list(documents(open_source(str(zipped))).values()) == list(expected.values())


def test_the_text_field_can_be_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", {"content": "right", "text": "wrong"})
    assert documents(open_source(str(path), TextOptions(field="content"))) == {"x.jsonl:1": "right"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json\n", sentence("data.row_not_json_object")),
        (b'{"text": "cut', sentence("data.row_not_json_object")),
        (b'{"text": "\xff"}\n', sentence("data.row_not_json_object")),
        (b"[" * 100_000 + b"\n", sentence("data.row_not_json_object")),
        (b"[1]\n", sentence("data.row_not_object", kind="a list", field="text")),
        (b'"text"\n', sentence("data.row_not_object", kind="a text", field="text")),
        (
            b'{"body": "x", "id": 1}\n',
            sentence("data.field_missing", field="text", names="body, id"),
        ),
        (b"{}\n", sentence("data.field_missing", field="text", names="none")),
        (b'{"text": 3}\n', sentence("data.field_not_text", field="text", value=3)),
        (b'{"text": null}\n', sentence("data.field_not_text", field="text", value="null")),
        (b'{"text": "\\ud800"}\n', sentence("data.half_surrogate_in_row")),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    path = jsonl(tmp_path / "x.jsonl", {"text": "good"}, b"\n", line)
    with pytest.raises(UserError) as error:
        list(open_source(str(path)))
    assert str(error.value).startswith(f"{path}:3: ")
    assert re.search(why, str(error.value))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"plain", lambda data: data[:12] + b"\xff" * 40]
)
def test_a_broken_gzip_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(
        damage(
            gzip.compress(
                b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(999))
            )
        )
    )
    with raises("data.file_not_whole", compression="gzip"):
        list(open_source(str(path)))


@pytest.mark.parametrize("limit", [1, 4, 5, 7, 100])
def test_a_limit_is_kept_to_the_character(tmp_path: Path, limit: int) -> None:
    path = jsonl(tmp_path / "x.jsonl", *({"text": text} for text in ("abcd", "efg", "hi")))
    assert (
        "".join(documents(open_source(str(path), TextOptions(max_chars=limit))).values())
        == "abcdefghi"[:limit]
    )


def test_what_lies_behind_the_limit_is_not_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", {"text": "abcd"}, b"not json")
    assert documents(open_source(str(path), TextOptions(max_chars=4))) == {"x.jsonl:1": "abcd"}


def test_the_line_of_the_first_byte_that_is_not_utf8_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.txt"
    for size in (5, 1 << 20):  # a letter of two bytes may lie in two pieces
        monkeypatch.setattr("megaprec.text.readers.PIECE_CHARS", size)
        for good in (0, 1, 7):
            file.write_bytes("schön\n".encode() * good + "Köln\nKöln".encode("latin-1"))
            with pytest.raises(
                UserError,
                match=sentence(
                    "data.not_utf8_in_line", file=file, reason=re.compile(f"in line {good + 1}$")
                ),
            ):
                list(open_source(str(file)))


def test_text_that_is_not_utf8_is_an_error_but_in_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_bytes("é".encode("latin-1"))
    (tmp_path / "b.py").write_text("fine")
    with raises("data.not_utf8_in_line"):
        list(open_source(str(tmp_path)))
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert documents(open_source("python")) == {"b.py": "fine"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, sentence("data.source_missing")),
        ({}, sentence("data.folder_without_text")),
        ({"a.png": "x"}, sentence("data.folder_without_text")),
        ({"a.txt": ""}, sentence("data.source_empty")),
    ],
)
def test_a_missing_or_empty_text_is_refused_at_once(
    tmp_path: Path, content: dict | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "d").mkdir()
        for name, text in content.items():
            (tmp_path / "d" / name).write_text(text)
    with pytest.raises(UserError, match=why):
        open_source(str(tmp_path / "d"))


def test_a_limit_below_one_is_refused() -> None:
    with raises("data.max_chars_zero"):
        open_source("python", TextOptions(max_chars=0))


def test_the_identity_changes_with_files_field_and_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    seen = [
        open_source(str(path)).identity(),
        open_source(str(path), TextOptions(field="x")).identity(),
    ]
    seen.append(open_source(str(path), TextOptions(max_chars=2)).identity())
    path.write_text("four")
    seen.append(open_source(str(path)).identity())
    (tmp_path / "b.txt").write_text("x")
    seen.append(open_source(str(tmp_path)).identity())
    assert all(one != other for i, one in enumerate(seen) for other in seen[:i])
    assert open_source(str(path)).identity() == seen[3]


def test_a_file_whose_name_is_no_utf8_is_read_and_known_again(tmp_path: Path) -> None:
    name = b"caf\xe9.txt"
    Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("text", encoding="utf-8")
    source = open_source(str(tmp_path))
    assert [*source] == [(os.fsdecode(name), "text")]
    assert source.identity() == open_source(str(tmp_path)).identity()


def test_the_size_is_told_where_file_sizes_tell_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345")
    assert open_source(str(tmp_path)).total_chars() == 5
    assert open_source(str(tmp_path), TextOptions(max_chars=3)).total_chars() == 3
    assert open_source(str(jsonl(tmp_path / "x.jsonl", {"text": "x"}))).total_chars() is None


@pytest.mark.parametrize("name", ["plain.txt.gz", "PLAIN.TXT.GZ", "notes.md.gz", "any.gz"])
def test_packed_text_is_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress("é and\r\n so on".encode()))
    assert documents(open_source(str(tmp_path / name))) == {name: "é and\r\n so on"}


def test_a_json_list_is_one_document_an_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["one", "", 'two ]}, "x', "\u2028é" * 50, "end"]
    items = [{"id": 1, "text": text} if number % 2 else text for number, text in enumerate(texts)]
    for size in (1, 2, 3, 1000):
        monkeypatch.setattr(json_list, "READ", size)
        for indent in (None, 2):
            (tmp_path / "x.json").write_text(
                f" \n{json.dumps(items, indent=indent, ensure_ascii=False)}\n "
            )
            found = documents(open_source(str(tmp_path / "x.json")))
            assert found == {f"x.json:{number}": text for number, text in enumerate(texts, 1)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"text": "x"}', sentence("data.json_list_of_other")),
        ("", sentence("data.source_empty")),
        (
            '["a", 3]',
            sentence("data.row_not_object", where=re.compile(r"x\.json:2"), kind=3, field="text"),
        ),
        (
            '[{"text": "a"}, {"body": "b", "id": 1}]',
            sentence(
                "data.field_missing", where=re.compile(r"x\.json:2"), field="text", names="body, id"
            ),
        ),
        (
            '["a", "b"',
            sentence(
                "data.json_list_broken",
                file=re.compile(r"x\.json"),
                number=3,
                reason="the list breaks off",
            ),
        ),
        ('["a", "b', sentence("data.json_list_broken", file=re.compile(r"x\.json"), number=2)),
        (
            '["a" "b"]',
            sentence(
                "data.json_list_broken",
                file=re.compile(r"x\.json"),
                number=2,
                reason="'\"' where , or ] is expected",
            ),
        ),
        (
            '["a"] []',
            sentence(
                "data.json_list_broken",
                file=re.compile(r"x\.json"),
                number=2,
                reason="there is more after the end of the list",
            ),
        ),
        ("[" * 100_000, sentence("data.json_list_broken", file=re.compile(r"x\.json"), number=1)),
        (
            '["\\ud800"]',
            sentence("data.half_surrogate_in_row", where=re.compile(r"x\.json:1"), what="the item"),
        ),
    ],
)
def test_what_is_no_list_of_texts_is_refused_with_the_item(
    tmp_path: Path, content: str, why: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError) as error:
        list(open_source(str(tmp_path / "x.json")))
    assert re.search(why, str(error.value))


def test_a_wrong_field_names_those_that_there_are_and_where_the_field_is_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as error:
        list(open_source(str(jsonl(tmp_path / "x.jsonl", {"body": "x", "id": 1}))))
    where = "data.text_field in a run file, --text-field in a command"
    assert shows(
        str(error.value),
        "data.field_missing",
        names="body, id",
        which=re.compile(f"name the field that holds the text: {where}"),
    )


def test_every_file_of_a_folder_is_read_or_counted_by_the_reason_why_not(tmp_path: Path) -> None:
    read = {"a.txt", "B.MD", "c.txt.gz", "d.json", "sub/e.rst"}
    left = ["x.docx", "sub/y.docx", "z.log.gz", "settings.json", "LICENSE", ".hidden.txt", "p.pdf"]
    for name in (*read, *left):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = '["of a list"]' if name == "d.json" else f'{{"text": "{name}"}}'
        (tmp_path / name).write_bytes(
            gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        )
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    source = open_source(str(tmp_path))
    assert {name.removesuffix(":1") for name in documents(source)} == read
    reasons = [
        ".docx",
        ".log.gz",
        ".json that is no list",
        "without ending",
        "hidden",
        ".pdf",
        "links to folders",
    ]
    assert source.left_out == dict.fromkeys([*reasons, "broken links or devices"], 1) | {".docx": 2}
    (tmp_path / "empty.txt").touch()
    assert open_source(str(tmp_path)).left_out == {**source.left_out, "empty": 1}
    assert left_out_words(source.left_out)[:2] == ["2 .docx", "1 .json that is no list"]


@pytest.mark.parametrize(
    ("begins", "why"),
    [
        (gzip.compress(b"x", mtime=0), "must end in .gz"),
        (b"%PDF-1.4 \xff", "it is a PDF"),
        (b"PK\x03\x04\xff", "a zip archive"),
        (b"PK\x03\x04 and no byte that is not UTF-8", "a zip archive"),
        (b"%PDF-1.4 and no byte that is not UTF-8", "it is a PDF"),
        (b'\x04"M\x18 and no byte that is not UTF-8', "packed by lz4"),
        (bz2.compress(b"x"), "packed by bzip2"),
        (lzma.compress(b"x"), "packed by xz"),
        (b"ARROW1\0\0and no byte that is not UTF-8", "an Arrow table"),
        ("x".encode("utf-16"), "it is UTF-16 or UTF-32: convert it to UTF-8"),
    ],
)
def test_a_file_of_another_form_says_which(tmp_path: Path, begins: bytes, why: str) -> None:
    (tmp_path / "x.txt").write_bytes(begins)
    with raises("data.not_utf8") as error:
        list(open_source(str(tmp_path / "x.txt")))
    assert why in str(error.value)


def test_plain_text_with_zero_bytes_is_refused_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 4)
    for content, line in (("hello".encode("utf-16-le"), 1), (b"one\ntwo\nthr\0ee\n", 3)):
        (tmp_path / "x.txt").write_bytes(content)
        with pytest.raises(
            UserError,
            match=sentence(
                "data.zero_byte", file=re.compile(r"x\.txt$"), line=line, zero=re.compile("UTF-16")
            ),
        ):
            list(open_source(str(tmp_path / "x.txt")))


@pytest.mark.parametrize(
    ("form", "code_of_list"),
    [("utf-16", "data.not_json_list"), ("utf-16-le", "data.json_list_broken")],
)
def test_json_that_is_utf16_is_said_to_be(tmp_path: Path, form: str, code_of_list: str) -> None:
    for name, text, code in (
        ("x.jsonl", '{"text": "a"}\n{"text": "b"}\n', "data.row_not_json"),
        ("x.json", '["a", "b"]', code_of_list),
    ):
        (tmp_path / name).write_bytes(text.encode(form))
        with raises(code) as refused:
            list(open_source(str(tmp_path / name)))
        assert re.search(rf"{name}.*UTF-16.*convert it to UTF-8", str(refused.value))


def test_text_may_begin_with_the_letters_of_another_form(tmp_path: Path) -> None:
    for text in ("PAR1 is a golf score", "%PDFLaTeX", "BZh9", "ARROW1", "PK"):
        (tmp_path / "x.txt").write_text(text)
        assert documents(open_source(str(tmp_path / "x.txt"))) == {"x.txt": text}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("x.zip", "unpack it"),
        ("x.jsonl.bz2", "pack it by gzip or zstd"),
        ("x.txt.xz", "pack it by gzip or zstd"),
        ("x.jsonl.lz4", "pack it by gzip or zstd"),
        ("x.tgz", "name it .tar.gz"),
        ("x.feather", "write it as .parquet or .jsonl"),
    ],
)
def test_a_form_that_a_folder_leaves_out_is_no_plain_text_when_given_by_name(
    tmp_path: Path, name: str, remedy: str
) -> None:
    text = b"id,text\n1,hello\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(UserError) as error:
        open_source(str(tmp_path / name))
    assert str(error.value).startswith(f"{tmp_path / name}: ") and remedy in str(error.value)
    (tmp_path / "a.txt").write_text("a")
    assert list(documents(open_source(str(tmp_path)))) == ["a.txt"]


@pytest.mark.parametrize("name", ["x.ndjson", "x.jsonlines", "X.NDJSON.gz"])
def test_other_names_of_jsonl_are_jsonl(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    for source in (tmp_path / name, tmp_path):
        assert documents(open_source(str(source))) == {f"{name}:1": "a", f"{name}:2": "b"}
        assert open_source(str(source)).total_chars() is None


def test_a_mark_of_byte_order_is_no_part_of_a_text(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf"
    (tmp_path / "x.txt").write_bytes(marked + "é and \ufeff inside".encode())
    (tmp_path / "x.jsonl").write_bytes(marked + b'{"text": "one"}\n')
    (tmp_path / "x.json").write_bytes(marked + b'["one"]')
    assert documents(open_source(str(tmp_path / "x.txt"))) == {"x.txt": "é and \ufeff inside"}
    for name in ("x.jsonl", "x.json"):
        assert documents(open_source(str(tmp_path / name))) == {f"{name}:1": "one"}


@pytest.mark.parametrize("command", ["build", "init", "train", "verify"])
def test_all_bad_files_and_rows_of_a_folder_are_told_at_once(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows without the field or with another value, no JSON, no UTF-8, a file that is cut off, rows
    that are null."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    rows = [
        '{"text": "good"}',
        '{"body": 1}',
        "no JSON",
        '{"body": 2}',
        '{"text": 7}',
        '{"text": "also good"}',
    ]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "text" / "b.txt").write_bytes(b"good\n\xff\xfe bad\n")
    (tmp_path / "text" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 900)[:-20])
    table = pyarrow.table({"text": ["good", None, "x", None]})
    pyarrow.parquet.write_table(table, tmp_path / "text" / "d.parquet")
    (tmp_path / "text" / "e.json").write_text('["good", 3, {"text": null}]')
    (tmp_path / "text" / "f.txt").write_text("good " * 300)
    run = (
        "[model]\nlayers = 1\nhidden = 8\nheads = 1\n[data]\nsource = 'text'\n[train]\nsteps = "
        "1\nglobal_batch = 1\n"
    )
    (tmp_path / "run.toml").write_text(f"{run}micro_batch = 1\nseq_length = 8\n")
    commands = {
        "build": ["data", "build", "text", "tokens", "--vocab-size", "300"],
        "init": ["init", "text", "-o", "new.toml"],
        "train": ["train", "run.toml"],
        "verify": ["data", "verify", "text"],
    }
    assert main(commands[command]) == 2
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "text/" in line]
    wanted = (
        sentence("data.field_missing", where=re.compile("text/a.jsonl:2$"), field="text"),
        sentence("data.row_not_json_object", where=re.compile("text/a.jsonl:3$")),
        sentence("data.field_not_text", where=re.compile("text/a.jsonl:5$"), field="text", value=7),
        sentence("data.not_utf8", file=re.compile("text/b.txt$")),
        "text/c.jsonl.gz:",
        sentence("data.field_null", where=re.compile("text/d.parquet:2: field 'text'$")),
        "text/e.json:2: ",
        sentence(
            "data.field_not_text", where=re.compile("text/e.json:3$"), field="text", value="null"
        ),
    )
    assert [sum(bool(re.search(one, line)) for line in lines) for one in wanted] == [1] * 8
    assert "; so 1 more in this file" in next(line for line in lines if "a.jsonl:2" in line)


def test_of_many_bad_files_the_first_are_told_and_the_others_counted(tmp_path: Path) -> None:
    for number in range(100, 130):
        (tmp_path / f"{number}.jsonl").write_text("[1]\n" * 3)
    with pytest.raises(UserError) as error:
        list(open_source(str(tmp_path)))
    assert len(error.value.problems) == 21
    assert error.value.problems[0].startswith(f"{tmp_path}/100.jsonl:1: ")
    assert error.value.problems[0].endswith("; so 2 more in this file")
    assert error.value.problems[-1] == Problem.of(
        "data.other_bad_rows", name=tmp_path, at_least="", num_others=30
    )
    assert error.value.codes == ("data.row_not_object",) * 20 + ("data.other_bad_rows",)


def test_a_record_with_two_texts_is_refused_and_not_cut_to_one(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"text": "a \\"text\\""}\n{"text": "first", "text": "second"}\n'
    )
    (tmp_path / "x.json").write_text('["a", {"text": "first", "n": 1, "text": "second"}]')
    for name, code in (
        ("x.jsonl", "data.row_not_json_object"),
        ("x.json", "data.json_list_broken"),
    ):
        with raises(code) as refused:
            documents(open_source(str(tmp_path / name)))
        assert re.search(rf"{name}:2: .*field 'text' is given twice", str(refused.value))


@pytest.mark.parametrize(
    ("field", "other"), [("text", "te\\u0078t"), ("a/b", "a\\/b"), ("té", "t\\u00E9"), ("té", "té")]
)
def test_two_spellings_of_a_field_are_one_field(tmp_path: Path, field: str, other: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"{field}": "first", "{other}": "second"}}\n')
    with raises(
        "data.row_not_json_object",
        where=re.compile("x.jsonl:1$"),
        problem=re.compile("is given twice"),
    ):
        documents(open_source(str(tmp_path / "x.jsonl"), TextOptions(field=field)))
