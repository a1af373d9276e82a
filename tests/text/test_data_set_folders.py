"""Data sets of `datasets`, MDS and WebDataset are the texts that their own libraries wrote, in their
order; what is damaged, cut off or no text is refused by name."""

import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from webdataset.writer import TarWriter

from megaprec.text.chats import load_chats
from megaprec.text.readers import TextOptions
from megaprec.text.sources import open_source
from tests.refusals import raises
from tests.text.chat_material import MARKED, make_tokenizer, turns

TEXTS = ["one é", "two\nlines", "", "four 😀", "five"]


def texts_of(name: Path | str, **options: Any) -> list[str]:
    return [text for _, text in open_source(str(name), TextOptions(**options))]


def loaded(folder: Path) -> Any:
    return datasets.load_from_disk(str(folder))


def saved(folder: Path, shards: int = 2) -> Path:
    rows = {"text": TEXTS, "number": [*range(len(TEXTS))]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder), num_shards=shards)
    return folder


@pytest.mark.parametrize("shards", [1, 2])
def test_a_saved_data_set_is_the_texts_that_datasets_loads(tmp_path: Path, shards: int) -> None:
    folder = saved(tmp_path / "set", shards)
    # a cache of a map, which is no part of the data set
    (folder / "cache-1.arrow").write_bytes(
        (folder / f"data-00000-of-0000{shards}.arrow").read_bytes()
    )
    assert texts_of(folder) == [*loaded(folder)["text"]] == TEXTS
    selected = loaded(folder).select([4, 0])
    selected.save_to_disk(str(tmp_path / "selected"))
    assert texts_of(tmp_path / "selected") == ["five", "one é"]
    one = folder / f"data-00000-of-0000{shards}.arrow"
    assert texts_of(one) == TEXTS[: 5 if shards == 1 else 3]


def test_conversations_of_a_saved_data_set_are_read(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, MARKED)
    rows = {"messages": [turns("a", "b"), turns("c", "d", "e", "f")]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    chats = load_chats("tokenizer", tokenizer)
    parquet = tmp_path / "rows.parquet"
    loaded(tmp_path / "set").to_parquet(parquet)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows["messages"]))
    found = [texts_of(name, chats=chats) for name in (tmp_path / "set", parquet, lines)]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_a_folder_of_splits_is_refused_and_one_of_them_is_read(tmp_path: Path) -> None:
    split = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "set"))
    with raises("data.folder_of_splits", names="train, test"):
        open_source(str(tmp_path / "set"))
    assert texts_of(tmp_path / "set" / "train") == TEXTS


def test_a_saved_data_set_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", 1)
    file = folder / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    # at the end of a batch, where Arrow's own reader sees no damage
    file.write_bytes(content[:-8])
    with raises("data.arrow_not_whole"):
        texts_of(folder)
    file.write_bytes(content[: len(content) // 2])
    with raises("data.arrow_not_whole"):
        texts_of(folder)
    file.unlink()
    with raises("data.description_unfit"):
        open_source(str(folder))
    state = json.loads((folder / "state.json").read_text())
    for changed in ({"_data_files": [{"filename": "../x.arrow"}]}, {"_indices_files": [1]}):
        (folder / "state.json").write_text(json.dumps(state | changed))
        with raises("data.description_unfit"):
            open_source(str(folder))


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    with raises("data.parquet_type", field="number"):
        texts_of(saved(tmp_path / "set"), field="number")


# MDS: mosaicml-streaming needs older versions of numpy and transformers than this project, so its
# bytes are written here as its documentation and its writer have them.


def shard_of(samples: Sequence[dict[str, bytes]], encodings: dict[str, str]) -> bytes:
    """A shard of MDS whose columns have no fixed sizes, but for int, of 8 bytes."""
    names = sorted(encodings)
    sizes = [8 if encodings[name] == "int" else None for name in names]
    settings = {
        "column_encodings": [encodings[name] for name in names],
        "column_names": names,
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    config = json.dumps(settings, sort_keys=True).encode()
    bodies = [
        b"".join(
            struct.pack("<I", len(sample[name]))
            for name, size in zip(names, sizes, strict=True)
            if size is None
        )
        + b"".join(sample[name] for name in names)
        for sample in samples
    ]
    begin = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [begin + sum(map(len, bodies[:number])) for number in range(len(bodies) + 1)]
    head = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets)
    return head + config + b"".join(bodies)


def write_mds(folder: Path, is_packed: bool = False, encoding: str = "str") -> Path:
    """Two shards of texts, numbers and pickles."""
    folder.mkdir()
    encodings = {"text": encoding, "n": "int", "junk": "pkl"}
    shards = []
    for number, part in enumerate((TEXTS[:3], TEXTS[3:])):
        values = [json.dumps(text) if encoding == "json" else text for text in part]
        samples = [{"text": v.encode(), "n": bytes(8), "junk": b"\x80\x04."} for v in values]
        raw = shard_of(samples, encodings)
        name = f"shard.{number:05}.mds"
        packed = None
        if is_packed:
            content = pyarrow.compress(raw, codec="zstd", asbytes=True)
            (folder / f"{name}.zstd").write_bytes(content)
            packed = {"basename": f"{name}.zstd", "bytes": len(content), "hashes": {}}
        else:
            (folder / name).write_bytes(raw)
        shards.append(
            {
                "format": "mds",
                "version": 2,
                "compression": "zstd:3" if is_packed else None,
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "zip_data": packed,
                "samples": len(part),
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


@pytest.mark.parametrize(("is_packed", "encoding"), [(False, "str"), (True, "str"), (True, "json")])
def test_mds_is_read_in_the_order_of_its_index(
    tmp_path: Path, is_packed: bool, encoding: str
) -> None:
    assert texts_of(write_mds(tmp_path / "set", is_packed, encoding)) == TEXTS


def test_a_column_of_pickles_is_never_read(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "set")
    with raises("data.mds_column", field="junk"):
        texts_of(folder, field="junk")
    with raises("data.mds_column", field="n"):
        texts_of(folder, field="n")
    with raises("data.field_missing", names="junk, n, text"):
        texts_of(folder, field="nosuch")


def test_mds_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "set")
    file = folder / "shard.00001.mds"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:20], b"", b"\xff" * 200, content + b"x"):
        file.write_bytes(damaged)
        with raises("data.description_unfit"):
            open_source(str(folder))
        with raises("data.source_empty" if not damaged else "data.mds_damaged"):
            texts_of(file)
    file.unlink()
    with raises("data.description_unfit"):
        open_source(str(folder))


def test_settings_of_mds_that_no_writer_writes_are_refused(tmp_path: Path) -> None:
    content = shard_of([{"text": b"x"}], {"text": "str"})
    begin = content.index(b"{")
    end = content.index(b"}") + 1
    settings = json.loads(content[begin:end])
    deep = b"[" * 100_000
    minus = json.dumps(settings | {"column_sizes": [-4]}).encode()
    for changed in (deep, minus):
        first = 4 + 8 + len(changed)
        head = struct.pack("<3I", 1, first, first + len(content) - end)
        file = tmp_path / "x.mds"
        file.write_bytes(head + changed + content[end:])
        with raises("data.mds_damaged"):
            texts_of(file)


def test_webdataset_is_the_samples_that_its_writer_wrote(tmp_path: Path) -> None:
    for name, ending in (("a.tar", "txt"), ("b.tar", "json"), ("c.tar.gz", "txt")):
        with TarWriter(str(tmp_path / name)) as writer:
            for number, text in enumerate(TEXTS):
                value = {"text": text} if ending == "json" else text
                sample = {"__key__": f"deep/{number:04}", ending: value, "cls": 3}
                writer.write(sample)
        assert texts_of(tmp_path / name) == TEXTS
    assert texts_of(tmp_path / "*.tar*") == TEXTS * 3


def archive_of(members: Sequence[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ([("a.jpg", b"x")], "data.tar_no_text"),
        ([("a.txt", b"x"), ("a.txt", b"y")], "data.tar_member_twice"),
        ([("README", b"x")], "data.tar_member"),
        ([("a.txt", b"\xff")], "data.not_utf8"),
        ([("a.txt", b"x\0")], "data.not_utf8"),
        ([("a.json", b"[1]")], "data.row_not_object"),
        ([("a.json", b'{"text": "x", "text": "y"}')], "data.row_not_json_object"),
    ],
)
def test_a_sample_that_is_no_text_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]], code: str
) -> None:
    file = tmp_path / "x.tar"
    file.write_bytes(archive_of(members))
    with raises(code):
        texts_of(file)


def test_an_archive_that_is_cut_off_is_refused_wherever_it_is(tmp_path: Path) -> None:
    whole = archive_of([("a.txt", b"x" * 600), ("b.txt", b"y")])
    file = tmp_path / "x.tar"
    # within a member, between two members, and before the end of the archive
    for size in (700, 1536, 2560, 3000):
        file.write_bytes(whole[:size])
        with raises("data.tar_cut_off"):
            texts_of(file)
    file.write_bytes(whole)
    assert texts_of(file) == ["x" * 600, "y"]


@pytest.mark.parametrize("name", ["x.tar", "x.arrow", "x.mds"])
def test_a_text_with_the_name_of_another_form_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("id,text\n1,hello\n" * 99)
    code = {"x.tar": "tar_cut_off", "x.arrow": "arrow_not_whole", "x.mds": "mds_damaged"}[name]
    with raises(f"data.{code}"):
        texts_of(tmp_path / name)
