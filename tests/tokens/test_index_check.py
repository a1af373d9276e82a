"""Laws of the recorded check of an index: large sets open without being read, and what has changed
is checked again."""

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaprec.errors import UserError
from megaprec.tokens import index_check, intact
from megaprec.tokens.files import with_suffix
from megaprec.tokens.index_check import Index, known_check
from megaprec.tokens.indexed import HEADER, IndexedDataset, IndexedWriter
from megaprec.tokens.intact import contents_of
from megaprec.tokens.samples import Resets, Samples
from tests.refusals import raises
from tools.bench.scale import sparse_set

TRILLIONS = 10 * 10**12  # tokens
DOCUMENTS = 10**10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sets of a hundred sequences count as large, and files that were written this moment as
    settled."""
    for name, value in {"LARGE": 100, "SPAN": 8, "SETTLED": -(10**12)}.items():
        monkeypatch.setattr(index_check, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(folder: Path, documents: int = 500) -> Path:
    with IndexedWriter(folder / "set", 1000) as writer:
        for n in range(documents):
            writer.add_document(np.arange(n % 7 + 1))
    return folder / "set"


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The full checks that are made from now on."""
    checks = list[str]()
    check = index_check._check_all

    def spy(index: Index) -> None:
        checks.append(index.path.name)
        check(index)

    monkeypatch.setattr(index_check, "_check_all", spy)
    return checks


def test_a_large_index_is_checked_once_and_again_when_it_or_its_tokens_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made(tmp_path)
    checks = spied(monkeypatch)
    for _ in range(3):
        IndexedDataset(prefix)
    assert len(checks) == 1
    IndexedDataset(prefix, again=True)
    assert len(checks) == 2
    idx = with_suffix(prefix, ".idx")
    os.utime(idx, ns=(0, idx.stat().st_mtime_ns + 1))
    IndexedDataset(prefix)
    assert len(checks) == 3
    made(tmp_path, 501)
    for _ in range(2):
        assert IndexedDataset(prefix).num_documents == 501
    assert len(checks) == 4
    with_suffix(prefix, ".checked").write_text("{}")
    IndexedDataset(prefix)
    assert len(checks) == 5


def test_a_file_that_has_just_changed_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_check, "SETTLED", 10**12)
    IndexedDataset(prefix := made(tmp_path))
    assert not with_suffix(prefix, ".checked").exists()


def test_a_folder_that_may_not_be_written_to_costs_a_check_at_each_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made(tmp_path)
    checks = spied(monkeypatch)

    def refused(path: Path, content: bytes) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(index_check, "write_whole", refused)
    for _ in range(2):
        IndexedDataset(prefix)
    assert len(checks) == 2


def test_the_range_of_ids_in_the_record_counts_for_blocks_that_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made(tmp_path)
    monkeypatch.setattr(intact, "WHOLE", 0)
    contents = contents_of(IndexedDataset(prefix))
    assert (contents.low, contents.high) == (0, 6)
    record = {"bin_sha256": "", "idx_sha256": contents.idx_sha256}
    for ids, expected in (([3, 999], (0, 999)), ([0, 4], (0, 6)), (None, (0, 6))):
        with_suffix(prefix, ".json").write_text(
            json.dumps({**record, "ids": ids} if ids else record)
        )
        contents = contents_of(IndexedDataset(prefix))
        assert (contents.low, contents.high) == expected
    for wrong in ("ab", [1], ["a", 2], 7):
        with_suffix(prefix, ".json").write_text(json.dumps({**record, "ids": wrong}))
        with raises("data.record_damaged"):
            contents_of(IndexedDataset(prefix))


def overwrite(file: Path, at: int, content: bytes) -> None:
    """Changes bytes and restores the time of change, as a failing disk does."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def pointers(sequences: int) -> int:
    return HEADER.size + 4 * sequences


@pytest.mark.parametrize(
    ("at", "content"),
    [
        (lambda s: HEADER.size + 4 * (s - 1), b"\x09"),  # the last length
        (lambda s: pointers(s) + 8 * (s - 1), b"\xff\xff"),  # the last pointer
        (lambda s: pointers(s) + 8 * s, b"\x01"),  # the first document
        (lambda s: pointers(s) + 8 * s + 8 * s, b"\x00"),  # the end of the last document
    ],
    ids=["length", "pointer", "first document", "last document"],
)
def test_damage_at_the_ends_is_caught_at_every_opening(
    at: Callable[[int], int], content: bytes, tmp_path: Path
) -> None:
    prefix = made(tmp_path)
    IndexedDataset(prefix)
    overwrite(with_suffix(prefix, ".idx"), at(500), content)
    assert (
        known_check(with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin").stat().st_size)
        is not None
    )
    with raises("data.index_corrupt"):
        IndexedDataset(prefix)


def test_damage_within_a_recorded_index_is_caught_by_its_random_places_or_its_digest(
    tmp_path: Path,
) -> None:
    prefix = made(tmp_path)
    IndexedDataset(prefix)
    before = contents_of(IndexedDataset(prefix))
    overwrite(with_suffix(prefix, ".idx"), pointers(500) + 8 * 250, b"\xff")
    caught = 0
    for _ in range(100):
        try:
            opened = IndexedDataset(prefix)
        except UserError:
            caught += 1
        else:
            assert contents_of(opened).idx_sha256 != before.idx_sha256
    # 16 places of 9 of 500 sequences catch one damaged one in a quarter of the openings
    assert caught > 5
    with raises("data.index_corrupt"):
        IndexedDataset(prefix, again=True)


def test_a_bin_of_another_size_is_refused(tmp_path: Path) -> None:
    prefix = made(tmp_path)
    IndexedDataset(prefix)
    with with_suffix(prefix, ".bin").open("ab") as file:
        file.write(b"\0\0")
    with raises(
        "data.index_corrupt", why=re.compile("describes [0-9]+ bytes of tokens where set.bin has")
    ):
        IndexedDataset(prefix)


def test_a_set_of_ten_trillion_tokens_opens_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_check, "SPAN", 1 << 10)
    read = list[int]()
    check = index_check._check_sequences

    def counted(index: Index, start: int, count: int, begin: int) -> int:
        read.append(20 * count)
        return check(index, start, count, begin)

    monkeypatch.setattr(index_check, "_check_sequences", counted)
    prefix = sparse_set(tmp_path, TRILLIONS, DOCUMENTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = IndexedDataset(prefix)
    batch = Samples(dataset, 4096, 0, True, resets=Resets(attention_mask=True)).batch(10**6, 2)
    assert (dataset.num_tokens, dataset.num_documents) == (TRILLIONS, DOCUMENTS)
    assert batch.documents is not None and batch.documents.shape == (2, 4096)
    assert sum(read) < 1 << 20, "bytes of the index that are read"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
