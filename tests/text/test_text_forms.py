"""Tables, pages, notebooks and other encodings give the text that their formats say; patterns and
lists name files in order; bad files and rows are left out exactly, counted and listed."""

import csv
import gzip
import io
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megaprec.errors import Problem, UserError
from megaprec.text.build import build, prepare
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.text.training import train_sentencepiece
from tests.refusals import raises
from tests.text.test_text import documents
from tools.cli import main

PARTS = (
    "plain",
    ",",
    "\t",
    '"',
    "\n",
    "\r\n",
    "é",
    "\U0001f600",
    " ",
    "",
    "''",
    ";",
    "x" * 200_000,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"good text number {number}, of some length" for number in range(200)]
    return load_tokenizer(train_sentencepiece(texts, folder / "small", 300, False))


LINE_3 = re.compile(r"x\.csv:3$")


def table(rows: Sequence[Sequence[str]], separator: str) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator).writerows(rows)
    return stream.getvalue()


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_table_gives_the_column_that_was_written(
    tmp_path: Path, suffix: str, separator: str, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    draw = random.Random(encoding + suffix)
    texts = ["".join(draw.choices(PARTS, k=draw.randint(1, 4))) for _ in range(50)]
    rows = [[str(number), text, "other"] for number, text in enumerate(texts)]
    content = table([["id", "body", "rest"], *rows], separator).encode(encoding)
    path = tmp_path / f"x{suffix}{'.gz' if pack is gzip.compress else ''}"
    path.write_bytes(pack(content))
    options = TextOptions(field="body", encoding=encoding)
    assert [*documents(open_source(str(path), options)).values()] == texts


def test_rows_of_a_table_are_named_by_the_line_they_begin_at(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('text,n\n"one\ntwo",1\n\nthree,2\n')
    assert documents(open_source(str(tmp_path / "x.csv"))) == {
        "x.csv:2": "one\ntwo",
        "x.csv:5": "three",
    }


@pytest.mark.parametrize(
    ("content", "code", "fields"),
    [
        ("id,body\n1,a\n", "data.field_missing", {"names": "id, body"}),
        ("", "data.source_empty", {}),
        ("text,text\na,b\n", "data.column_twice", {"column_count": 2}),
        ("text,n\na,1\nb\n", "data.row_fields", {"where": LINE_3, "count": 1, "columns": 2}),
        ("text,n\na,1\nb,2,3\n", "data.row_fields", {"where": LINE_3, "count": 3}),
        ('text,n\na,1\n"b,2\n', "data.table_broken", {"line": 3}),
        ('text,n\n"a"b,1\n', "data.table_broken", {"line": 2}),
    ],
)
def test_a_broken_table_is_refused_with_its_line(
    tmp_path: Path, content: str, code: str, fields: dict[str, object]
) -> None:
    (tmp_path / "x.csv").write_text(content)
    with raises(code, **fields):
        list(open_source(str(tmp_path / "x.csv")))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "utf-16", "utf-16-le", "shift_jis"])
def test_plain_text_of_another_encoding_comes_as_it_was_written(
    tmp_path: Path, encoding: str
) -> None:
    text = {"latin-1": "Füße\r\n", "cp1251": "Привет\n", "shift_jis": "日本語\n"}.get(
        encoding, "é\U0001f600\r\n"
    )
    path = tmp_path / "x.txt"
    path.write_bytes((text * 1000).encode(encoding))
    assert documents(open_source(str(path), TextOptions(encoding=encoding))) == {
        "x.txt": text * 1000
    }
    with pytest.raises(UserError):
        list(open_source(str(path)))


@pytest.mark.parametrize("encoding", ["ascii", "shift_jis", "utf-16-le", "utf-8"])
def test_the_line_that_is_not_of_the_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "x.txt"
    bad = b"\x00\xdc" if encoding == "utf-16-le" else b"\xff"
    path.write_bytes("one\ntwo\n".encode(encoding) + bad)
    code = "data.not_utf8_in_line" if encoding == "utf-8" else "data.not_of_encoding"
    with raises(code) as error:
        list(open_source(str(path), TextOptions(encoding=encoding)))
    (problem,) = error.value.problems
    assert problem.fields.get("line") == 3 or problem.fields["reason"].endswith("in line 3")


@pytest.mark.parametrize(
    "name", ["none-such", "rot13", "base64", "zlib", "punycode", "IDNA", "undefined", "a\0b", ""]
)
def test_an_encoding_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.txt").write_text("text")
    with raises("data.encoding_unknown"):
        open_source(str(tmp_path / "x.txt"), TextOptions(encoding=name))


PAGE = (
    "<html><head><title>Title</title><style>p {{}}</style><script>var x = 1;</script>{meta}</head>"
    "<body><h1>Head</h1><p>Café &amp; <b>bo</b>ld.</p><p>Two<br>lines</p><pre>a  b\n c</pre>"
    "<a href='http://example.org/secret'>link</a></body></html>"
)
PAGE_TEXT = "Head\n\nCafé & bold.\n\nTwo\nlines\n\na  b\n c\nlink"


@pytest.mark.parametrize(
    ("meta", "encoding", "given"),
    [
        ("", "utf-8", "utf-8"),
        ("", "utf-8-sig", "utf-8"),
        ("", "utf-16", "utf-8"),
        ("", "latin-1", "latin-1"),
        ('<meta charset="iso-8859-1">', "latin-1", "utf-8"),
        (
            "<meta http-equiv=Content-Type content='text/html; charset=windows-1252'>",
            "cp1252",
            "utf-8",
        ),
    ],
)
def test_a_page_is_its_text_in_its_own_encoding(
    tmp_path: Path, meta: str, encoding: str, given: str
) -> None:
    path = tmp_path / "x.html"
    path.write_bytes(PAGE.format(meta=meta).encode(encoding))
    found = documents(open_source(str(path), TextOptions(encoding=given)))
    assert {name: text.strip() for name, text in found.items()} == {"x.html": PAGE_TEXT}


@pytest.mark.parametrize("meta", ["", "<meta charset=utf-8>", "<meta charset=no-such>"])
def test_a_page_that_is_not_of_its_encoding_is_refused(tmp_path: Path, meta: str) -> None:
    path = tmp_path / "x.html"
    path.write_bytes(PAGE.format(meta=meta).encode("latin-1"))
    with raises("data.page_encoding"):
        list(open_source(str(path)))


def notebook(*cells: tuple[str, object]) -> str:
    return json.dumps(
        {
            "cells": [
                {"cell_type": kind, "source": source, "outputs": [{"text": "an output"}]}
                for kind, source in cells
            ],
            "nbformat": 4,
        }
    )


def test_a_notebook_is_the_sources_of_its_cells(tmp_path: Path) -> None:
    cells = [("markdown", ["# Head\n", "text"]), ("code", "x = 1\nx"), ("code", []), ("raw", "é")]
    (tmp_path / "x.ipynb").write_text(notebook(*cells))
    found = documents(open_source(str(tmp_path / "x.ipynb")))
    assert found == {"x.ipynb": "# Head\ntext\n\nx = 1\nx\n\né"}


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "no json",
        '{"worksheets": []}',
        '{"cells": 1}',
        '{"cells": [{"source": "x"}]}',
        notebook(("code", 3)),
        notebook(("code", [1])),
    ],
)
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.ipynb").write_text(content)
    with raises("data.not_a_notebook"):
        list(open_source(str(tmp_path / "x.ipynb")))


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")


def test_a_pattern_is_the_files_and_folders_that_match_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "b/two.md", "a/one.md", "a/in/three.md", "a/x.txt", "c.md", "a/.hidden.md")
    assert [*documents(open_source("**/*.md")).values()] == [
        "text of a/in/three.md",
        "text of a/one.md",
        "text of b/two.md",
        "text of c.md",
    ]
    assert [*documents(open_source("[ab]")).values()] == [
        "text of a/in/three.md",
        "text of a/one.md",
        "text of a/x.txt",
        "text of b/two.md",
    ]
    with raises("data.pattern_without_match"):
        open_source("*.rst")


def test_a_file_whose_name_is_a_pattern_is_itself(tmp_path: Path) -> None:
    write(tmp_path, "[a].txt", "a.txt")
    assert documents(open_source(f"{tmp_path}/[a].txt")) == {"[a].txt": "text of [a].txt"}


def test_a_list_is_read_in_its_order_and_each_file_once(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a.txt", "in/c.txt")
    names = [f"{tmp_path}/b.txt", f"{tmp_path}/in", f"{tmp_path}/*.txt"]
    source = open_source(names)
    assert [*documents(source).values()] == ["text of b.txt", "text of in/c.txt", "text of a.txt"]
    assert source.left_out == {"named twice": 1}
    assert source.name == ", ".join(names)


def test_excluded_files_and_folders_are_left_out_by_name_or_path(tmp_path: Path) -> None:
    write(
        tmp_path, "a.txt", "a.min.txt", "build/b.txt", "build/in/c.txt", "src/build.txt", "src/d.md"
    )
    options = TextOptions(exclude=("*.min.txt", "build", "src/*.md"))
    source = open_source(str(tmp_path), options)
    assert [*documents(source)] == ["a.txt", "src/build.txt"]
    assert source.left_out == {
        "excluded by *.min.txt": 1,
        "excluded by build": 1,
        "excluded by src/*.md": 1,
    }


def test_a_pattern_that_excludes_nothing_is_named_too(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.log.txt")
    source = open_source(str(tmp_path), TextOptions(exclude=("*.log.txt", "*.lgo")))
    assert source.left_out == {"excluded by *.log.txt": 1, "excluded by *.lgo": 0}


def test_the_standard_library_is_no_part_of_a_list(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    with raises("data.library_in_list"):
        open_source(["python", f"{tmp_path}/a.txt"])


def mixed_folder(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Write files of many kinds; return the documents, and the beginnings of what is bad."""
    texts: dict[str, str] = {}
    bad: list[str] = []
    for number in range(10):
        good = f"good text number {number}"
        plain = {
            f"{number}.txt": good,
            f"{number}.md": f"# {good}",
            f"{number}.py": f"x = {number}",
            f"deep/{number}.rst": good,
        }
        for name, text in plain.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            texts[name] = text
        lines = [json.dumps({"text": good}), "not json", json.dumps({"text": 3}), json.dumps({})]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
        texts[f"{number}.jsonl:1"] = good
        bad += [f"{folder}/{number}.jsonl:{line}" for line in (2, 3, 4)]
        (folder / f"l{number}.json").write_text(json.dumps([good, 3, {"text": good}]))
        texts |= {f"l{number}.json:1": good, f"l{number}.json:3": good}
        bad.append(f"{folder}/l{number}.json:2")
        (folder / f"{number}.csv").write_text(f"id,text\n1,{good}\n2\n3,{good}\n")
        texts |= {f"{number}.csv:2": good, f"{number}.csv:4": good}
        bad.append(f"{folder}/{number}.csv:3")
        (folder / f"c{number}.csv").write_text(f"id,body\n1,{good}\n")
        (folder / f"{number}.html").write_text(f"<p>{good}</p>")
        texts[f"{number}.html"] = f"{good}\n"
        (folder / f"h{number}.html").write_bytes(b"<p>\xff</p>")
        bad.append(f"{folder}/h{number}.html")
        (folder / f"{number}.ipynb").write_text(notebook(("code", good)))
        texts[f"{number}.ipynb"] = good
        (folder / f"n{number}.ipynb").write_text("{}")
        bad.append(f"{folder}/n{number}.ipynb")
        # the damage is at the end: nothing of the text before it may be taken
        (folder / f"d{number}.txt").write_bytes(b"line\n" * 500_000 + b"\xff\n")
        bad.append(f"{folder}/d{number}.txt")
        (folder / f"z{number}.txt.gz").write_bytes(gzip.compress(good.encode() * 99)[:-9])
        bad.append(f"{folder}/z{number}.txt.gz")
        (folder / f"{number}.pdf").write_bytes(b"%PDF-")
        (folder / f"{number}.json").write_text('{"a": 1}')
        (folder / f".{number}").write_text("hidden")
    return texts, bad


@pytest.mark.slow
def test_of_many_kinds_of_files_what_is_read_left_out_and_bad_is_exact(tmp_path: Path) -> None:
    texts, bad = mixed_folder(tmp_path)
    source = open_source(str(tmp_path), TextOptions(skip_bad=len(bad)))
    skipped: list[Problem] = []
    pieces = [*source.reading(skipped.append)]
    assert dict(pieces) == texts
    assert sorted(map(_place, skipped)) == sorted(bad)
    assert source.left_out == {
        ".pdf": 10,
        ".json that is no list": 10,
        ".csv without a column 'text'": 10,
        "hidden": 10,
    }
    with raises("data.skip_bad_exceeded", most=len(bad) - 1):
        list(open_source(str(tmp_path), TextOptions(skip_bad=len(bad) - 1)))


def _place(problem: Problem) -> str:
    """Return the file, or the file and line, of a problem."""
    return str(problem.fields.get("where") or problem.fields["file"])


def test_a_build_without_bad_rows_has_the_bytes_of_the_good_ones_and_a_list_of_the_others(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    good = [json.dumps({"text": f"good text number {number}"}) for number in range(50)]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    mixed = [line for text in good for line in (text, "bad")]
    (tmp_path / "mixed.jsonl").write_text("\n".join(mixed))
    build(open_source(str(tmp_path / "good.jsonl")), tokenizer, tmp_path / "good")
    source = open_source(str(tmp_path / "mixed.jsonl"), TextOptions(skip_bad=50))
    result = build(source, tokenizer, tmp_path / "mixed")
    assert result.skipped == 50
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"mixed{suffix}").read_bytes() == (
            tmp_path / f"good{suffix}"
        ).read_bytes()
    listed = (tmp_path / "mixed.skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in listed] == [
        f"{tmp_path}/mixed.jsonl:{number}" for number in range(2, 101, 2)
    ]
    again = prepare(source, tmp_path / "mixed", tokenizer=tokenizer.path)
    assert (again.reused, again.skipped) == (True, 50)
    # one that skips nothing does not take it for its own
    with raises("data.build_exists"):
        prepare(
            open_source(str(tmp_path / "mixed.jsonl")), tmp_path / "mixed", tokenizer=tokenizer.path
        )


def test_a_build_tells_what_it_left_out_and_refuses_one_more(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text\n" + "good text\n" * 9 + "a,b\n" * 3)
    args = ["data", "build", str(path), str(tmp_path / "set"), "--tokenizer", str(tokenizer.path)]
    assert main([*args, "--skip-bad", "3"]) == 0
    assert f"bad files and rows left out: 3, named in {tmp_path}/set.skipped.txt" in (
        capsys.readouterr().out
    )
    for limit in ("2", "0", "-1"):
        assert main([*args[:3], str(tmp_path / "other"), *args[4:], "--skip-bad", limit]) == 2
    assert not [*tmp_path.glob("other*")]


def test_several_sources_of_a_command_are_one_text(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "b.txt", "a.txt")
    sources = [f"{tmp_path}/b.txt", f"{tmp_path}/a.txt"]
    assert (
        main(["data", "build", *sources, f"{tmp_path}/set", "--tokenizer", str(tokenizer.path)])
        == 0
    )
    assert "2 documents" in capsys.readouterr().out


def test_an_error_names_the_limit_and_the_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\nbad\nbad\n{}\n')
    with pytest.raises(UserError) as error:
        list(open_source(str(path), TextOptions(skip_bad=2)))
    first, *others = error.value.problems
    assert first.code == "data.skip_bad_exceeded"
    assert [line.partition(": ")[0] for line in others] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1251", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["x.txt", "x.csv"])
def test_utf8_is_not_read_in_another_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    """Each of these would decode it to other characters, mostly without an error."""
    file = tmp_path / name
    file.write_text("text\n" + "häßlich\n" * 8, "utf-8")
    with raises("data.utf8_instead", encoding=encoding):
        list(open_source(str(file), TextOptions(encoding=encoding)))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-32", "gb18030"])
def test_text_of_its_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    text = "häßlich é\n" * 40
    (tmp_path / "x.txt").write_bytes(text.encode(encoding))
    options = TextOptions(encoding=encoding)
    assert "".join(piece for _, piece in open_source(str(tmp_path / "x.txt"), options)) == text


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_table_with_another_separator_is_refused_in_a_folder_too(
    tmp_path: Path, separator: str
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "x.csv").write_text(f"id{separator}text\n1{separator}a\n")
    for name in (tmp_path, tmp_path / "x.csv"):
        with raises("data.other_separator", separator=separator):
            list(open_source(str(name)))


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\nsize 5\n", b"{\\rtf1 x}"]
)
def test_what_stands_for_a_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with raises("data.not_utf8"):
        list(open_source(str(tmp_path / "x.txt")))
