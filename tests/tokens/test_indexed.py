"""The `.bin/.idx` pair is Megatron's to the byte, and a broken one is never read."""

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaprec.errors import UserError
from megaprec.tokens import index_check, indexed
from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.intact import check_vocabulary, contents_of
from tests.refusals import raises, sentence


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def assemble(prefix: Path, lengths: list[int], documents: list[int], **change: Any) -> Path:
    """A pair put together by hand, with ids 0, 1, 2, … as int32 unless a field is changed."""
    field = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": 4,
        "ids": "<i4",
        "modes": b"",
        "tail": b"",
    } | change
    total = sum(map(abs, lengths))
    itemsize = np.dtype(field["ids"]).itemsize
    pointers = field.get("pointers", [sum(lengths[:i]) * itemsize for i in range(len(lengths))])
    idx = field["magic"] + struct.pack(
        "<QBQQ", field["version"], field["code"], len(lengths), len(documents)
    )
    idx += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    idx += struct.pack(f"<{len(documents)}q", *documents) + field["modes"] + field["tail"]
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(np.arange(total).astype(field["ids"]).tobytes())
    return prefix


def test_written_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "v1.2", [[7, 8, 9], [10], [11, 12]])
    assert (tmp_path / "v1.2.bin").read_bytes() == struct.pack("<6H", 7, 8, 9, 10, 11, 12)
    assert (tmp_path / "v1.2.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<QQ", 3, 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "<u2"), (65500, "<i4")])
def test_ids_are_stored_as_megatron_chooses(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    dataset = IndexedDataset(write(tmp_path / "x", [[0, vocab_size - 1]], vocab_size))
    assert dataset.dtype == np.dtype(dtype)
    assert dataset.tokens(0, 2).tolist() == [0, vocab_size - 1]


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 4)  # so that checks and sums cross chunk borders
    documents = [list(range(i, i + i % 5)) for i in range(23)]
    dataset = IndexedDataset(write(tmp_path / "x", documents))
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == documents
    assert dataset.document_lengths().tolist() == [len(ids) for ids in documents]
    stream = [token for ids in documents for token in ids]
    assert dataset.num_tokens == len(stream)
    assert dataset.tokens(3, 20).dtype == np.int64
    assert all(dataset.tokens(i, 9).tolist() == stream[i : i + 9] for i in range(len(stream) - 8))
    assert dataset.token_range() == (min(stream), max(stream))
    assert dataset.max_token() == max(stream)


def test_a_document_may_have_many_sequences_or_none(tmp_path: Path) -> None:
    dataset = IndexedDataset(assemble(tmp_path / "x", [2, 3, 1], [0, 2, 2, 3], modes=bytes(3)))
    assert [dataset.document(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5]]
    assert dataset.document_lengths().tolist() == [5, 0, 1]


def test_a_document_longer_than_a_sequence_can_say_becomes_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "LONGEST_SEQUENCE", 5)
    with IndexedWriter(tmp_path / "x", 1000) as writer:
        for part in ([1, 2, 3], [4, 5, 6], [7]):
            writer.extend(part, np.zeros(0, np.int64))
        writer.extend([], np.zeros(1, np.int64))
    dataset = IndexedDataset(tmp_path / "x")
    assert (dataset.num_documents, dataset.num_sequences) == (1, 2)
    assert dataset.document(0).tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("code", range(1, 9))
def test_every_dtype_code_is_read(tmp_path: Path, code: int) -> None:
    ids = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[code]
    dataset = IndexedDataset(assemble(tmp_path / "x", [3, 2], [0, 1, 2], code=code, ids=ids))
    assert dataset.document(1).dtype == np.dtype(ids)
    assert dataset.document(1).tolist() == [3, 4]
    if ids[1] == "f":
        with raises("data.not_token_ids"):
            dataset.tokens(0, 5)
    else:
        assert dataset.tokens(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_an_empty_data_set_has_no_tokens(tmp_path: Path) -> None:
    dataset = IndexedDataset(assemble(tmp_path / "x", [], [0]))
    assert (dataset.num_documents, dataset.num_tokens, dataset.max_token()) == (0, 0, -1)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("begins with b'MMIDIDY", {"magic": b"MMIDIDY\x00\x00"}),
        ("version 2", {"version": 2}),
        ("dtype code 9", {"code": 9}),
        ("dtype code 0", {"code": 0}),
        ("too long", {"tail": b"123"}),
        (
            "sequence 1 begins at byte 12 where the lengths before it end at byte 8",
            {"pointers": [0, 12]},
        ),
        ("sequence 0 begins at byte 4", {"pointers": [4, 12]}),
        ("sequence 1 has a negative length", {"lengths": [2, -3]}),
        ("run from 0 to 1 where they should run from 0 to 2", {"documents": [0, 1, 1]}),
        ("run from 1 to 2", {"documents": [1, 2]}),
        ("are empty", {"documents": []}),
        ("document 1 ends before it begins", {"documents": [0, 2, 1, 2]}),
        ("document 1 ends before it begins", {"documents": [0, 2, -1, 2]}),
        ("describes 20 bytes of tokens where x.bin has 10", {"ids": "<u2", "pointers": [0, 8]}),
    ],
)
def test_a_corrupt_index_is_refused_by_what_is_wrong(
    tmp_path: Path, why: str, change: dict
) -> None:
    shape = {"lengths": [2, 3], "documents": [0, 1, 2]}
    with pytest.raises(UserError) as error:
        IndexedDataset(assemble(tmp_path / "x", **(shape | change)))
    assert why in str(error.value)
    assert str(tmp_path / "x.idx") in str(error.value)


def test_an_index_without_ends_of_documents_has_a_document_for_each_sequence(
    tmp_path: Path,
) -> None:
    """As Megatron's own builder writes it if nobody ends a document, and as Megatron reads it."""
    dataset = IndexedDataset(assemble(tmp_path / "x", [3, 1, 2], [0]))
    documents = [dataset.document(number).tolist() for number in range(dataset.num_documents)]
    assert documents == [[0, 1, 2], [3], [4, 5]]
    assert dataset.document_lengths().tolist() == [3, 1, 2]
    assert dataset.documents_of(0, 6).tolist() == [0, 0, 0, 1, 2, 2]
    (note,) = dataset.notes
    assert note == (
        f"{tmp_path}/x.idx has no ends of documents: each of its sequences is taken for a document"
    )


def test_sequences_that_are_no_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_check, "CHUNK", 2)
    with raises("data.multimodal_sequence", path=re.compile("x.idx$"), sequence=2, modes=1):
        IndexedDataset(assemble(tmp_path / "x", [2, 3, 1], [0, 2, 2, 3], modes=b"\0\0\1"))


def test_the_oldest_format_is_named_and_not_called_corrupt(tmp_path: Path) -> None:
    prefix = assemble(tmp_path / "x", [2], [0, 1], magic=b"TNTIDX\x00\x00\x01")
    with raises("data.old_index_format", path=re.compile("x.idx$")) as error:
        IndexedDataset(prefix)
    assert "corrupt" not in str(error.value)


def test_an_index_cut_anywhere_is_refused(tmp_path: Path) -> None:
    idx = Path(f"{write(tmp_path / 'x', [[1, 2], [3]])}.idx")
    whole = idx.read_bytes()
    for size in range(len(whole)):
        idx.write_bytes(whole[:size])
        with raises("data.index_corrupt", why=re.compile("^(truncated|it begins with)")):
            IndexedDataset(tmp_path / "x")


def test_an_index_that_claims_absurd_counts_is_refused_at_once(tmp_path: Path) -> None:
    idx = Path(f"{write(tmp_path / 'x', [[1]])}.idx")
    idx.write_bytes(idx.read_bytes()[:18] + struct.pack("<QQ", 2**63, 2**63))
    with raises("data.index_corrupt", why=re.compile("^truncated")):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("change", [b"", b"123456", b"1234567890"])
def test_a_bin_of_another_size_is_refused(tmp_path: Path, change: bytes) -> None:
    write(tmp_path / "x", [[1, 2], [3, 4]])
    (tmp_path / "x.bin").write_bytes(change)
    with pytest.raises(
        UserError, match=f"describes 8 bytes of tokens where x.bin has {len(change)}"
    ):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_half_is_named(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / f"x{suffix}").unlink()
    with raises("data.data_set_missing", path=tmp_path / f"x{suffix}"):
        IndexedDataset(tmp_path / "x")


def test_tokens_and_documents_out_of_range_are_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "x", [[1, 2], [3]]))
    for index in (-1, 2):
        with raises("data.document_missing"):
            dataset.document(index)
    for start, length in ((-1, 1), (0, 4), (3, 1), (1, -1)):
        with raises("data.token_range_outside"):
            dataset.tokens(start, length)


@pytest.mark.parametrize("ids", [[-1], [1, -5], [-5, 1], [5, 1000], [1000, 5], [70000]])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, ids: list[int]) -> None:
    with raises(
        "data.ids_outside_vocabulary",
        prefix=re.compile("x$"),
        vocab_size=1000,
        first_id=max(ids, key=abs),
        document=1,
    ):
        write(tmp_path / "x", [[1], ids])
    assert os.listdir(tmp_path) == []


def test_a_vocabulary_must_hold_every_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 2)
    dataset = IndexedDataset(write(tmp_path / "x", [[1, 2, 41], [3, 4]]))
    check_vocabulary(dataset, contents_of(dataset), 42)
    said = sentence(
        "data.vocabulary_too_small",
        low=1,
        high=41,
        vocab=41,
        first=re.compile(r"x\.bin, token 2"),
        needed=42,
    )
    with pytest.raises(UserError, match=said):
        check_vocabulary(dataset, contents_of(dataset), 41)


def test_negative_ids_are_in_no_vocabulary(tmp_path: Path) -> None:
    assemble(tmp_path / "x", [2], [0, 1], code=2, ids="i1")
    (tmp_path / "x.bin").write_bytes(struct.pack("<2b", 3, -4))
    dataset = IndexedDataset(tmp_path / "x")
    with raises(
        "data.vocabulary_too_small",
        first=re.compile("the first is -4 in document 0 of .*, token 1$"),
        low=-4,
        high=3,
        needed=4,
    ):
        check_vocabulary(dataset, contents_of(dataset), 100)


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with IndexedWriter(tmp_path / "x", 10) as writer:
            writer.add_document([1])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_publishing_leaves_no_readable_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, renames: int
) -> None:
    if older:
        write(tmp_path / "x", [[9, 9]])
    done = []
    replace = os.replace

    def crash(part: str, path: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        replace(part, path)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", [[1, 2]])
    with raises("data.data_set_missing"):
        IndexedDataset(tmp_path / "x")
    assert not list(tmp_path.glob("*.part"))
