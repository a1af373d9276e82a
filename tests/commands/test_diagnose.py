"""`megaprec diagnose`: what each rank was doing when a run ended, from the records that the ranks
left."""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel.hangs.heartbeat import Beat
from tests.refusals import raises, shows
from tools import cli
from tools.training import hangs
from tools.training.hangs import FOLDER, EndRecord, put_aside_records, read_records, write_record


def beat(rank: int, doing: str = "update", waits: bool = True) -> Beat:
    return Beat(
        rank,
        f"node{rank}",
        "",
        100 + rank,
        "1",
        -1,
        0,
        "step",
        5,
        doing,
        1,
        waits,
        ("parallel/a.py:1 f",),
    )


def diagnose(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["diagnose", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_nccl_has_under_way_lies_beside_the_record_and_never_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bytes:
        raise RuntimeError("NCCL")

    for rank, transfers in enumerate((lambda: b'{"entries": []}', lambda: b"", broken)):
        monkeypatch.setattr(hangs, "transfers_under_way", transfers)
        write_record(tmp_path, EndRecord(rank=beat(rank), ranks=3, ended="left"))
    names = sorted(file.name for file in (tmp_path / FOLDER).iterdir())
    assert names == ["nccl-00000.json", *(f"rank-0000{rank}.json" for rank in range(3))]
    assert [record.rank.rank for record in read_records(tmp_path)] == [0, 1, 2]


def test_the_verdict_comes_first_and_a_rank_that_left_nothing_is_where_another_last_saw_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hung = beat(1, "forward of micro-batch 0 in stage 1", waits=False)
    for rank in (0, 2):
        record = EndRecord(
            rank=beat(rank),
            ranks=4,
            ended="left",
            verdict="rank 1 hangs",
            culprits=(1,),
            others=(hung,),
        )
        write_record(tmp_path, record)
    at = ", at parallel/a.py:1 f; "
    assert diagnose(tmp_path, capsys) == [
        "culprit    rank 1 hangs",
        f"rank 0     on node0 (process 100) waited in step 5, update{at}left",
        (
            "rank 1     on node1 (process 101) was in step 5, forward of micro-batch 0 in stage "
            f"1{at}left no record"
        ),
        f"rank 2     on node2 (process 102) waited in step 5, update{at}left",
        "rank 3     where it was is not known; left no record",
    ]


def test_without_a_verdict_the_culprit_is_the_rank_that_failed_or_the_one_that_left_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = EndRecord(rank=beat(0), ranks=2, ended="lost the connection to another rank")
    write_record(tmp_path, lost)
    assert diagnose(tmp_path, capsys)[0].startswith("culprit    rank 1, which left no record")
    write_record(
        tmp_path, EndRecord(rank=beat(1), ranks=2, ended="ValueError: a bug", culprits=(1,))
    )
    assert diagnose(tmp_path, capsys)[0] == "culprit    rank 1 on node1 failed: ValueError: a bug"
    write_record(tmp_path, EndRecord(rank=beat(1), ranks=2, ended=lost.ended))
    assert diagnose(tmp_path, capsys)[0].startswith("culprit    unknown")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"rank": 1}',
        b"[" * 5000,
        b'{"rank": {"rank": 1e400}}',
    ],
)
def test_a_damaged_record_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, EndRecord(rank=beat(0), ranks=2, ended="left"))
    (tmp_path / FOLDER / "rank-00001.json").write_bytes(content)
    assert cli.main(["diagnose", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert shows(line, "training.end_record_damaged") and "damaged" in line


def test_where_there_is_nothing_to_read_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "odd" / FOLDER / "rank-00000.json").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "file", tmp_path / "gone", tmp_path / "odd"):
        assert cli.main(["diagnose", str(folder)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_ranks_that_no_run_can_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, EndRecord(rank=beat(0), ranks=2, ended="left"))
    for change in ('"ranks":1000000000', '"ranks":-1', '"ranks":0', '"ranks":2,"culprits":[9]'):
        file = tmp_path / FOLDER / "rank-00000.json"
        file.write_text(file.read_text().replace(',"culprits":[]', "").replace('"ranks":2', change))
        assert cli.main(["diagnose", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        write_record(tmp_path, EndRecord(rank=beat(0), ranks=2, ended="left"))


def test_records_are_put_aside_when_the_next_run_begins_and_are_still_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, EndRecord(rank=beat(0), ranks=2, ended="left"))
    told = diagnose(tmp_path, capsys)
    put_aside_records(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    with raises("training.no_end_record"):
        read_records(tmp_path)
    since = "since      the run began again after this end, and has taken no step"
    assert diagnose(tmp_path, capsys) == [since, *told]
    # a start after an end in order changes nothing
    put_aside_records(tmp_path)
    assert diagnose(tmp_path, capsys) == [since, *told]
    # an end since then counts alone, and takes the place of the one before
    write_record(tmp_path, EndRecord(rank=beat(1), ranks=2, ended="failed"))
    newer = diagnose(tmp_path, capsys)
    assert newer[-1].endswith("failed") and not newer[0].startswith("since")
    put_aside_records(tmp_path)
    assert diagnose(tmp_path, capsys) == [since, *newer]


def test_a_heartbeat_is_told_as_the_last_one_and_a_look_as_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, words in ((7, "had its last heartbeat in step 5"), (0, "waited in step 5")):
        seen = replace(beat(1), beat=number)
        write_record(tmp_path, EndRecord(rank=beat(0), ranks=2, ended="left", others=(seen,)))
        assert words in diagnose(tmp_path, capsys)[-1]


def test_a_record_that_cannot_be_written_does_not_keep_a_rank_from_leaving(tmp_path: Path) -> None:
    (tmp_path / FOLDER).touch()
    write_record(tmp_path, EndRecord(rank=beat(0), ranks=1, ended="left"))
    assert (tmp_path / FOLDER).is_file()
