"""`log.digests`: what a run writes to digests.jsonl, and which runs write the same."""

from pathlib import Path

import pytest

from tests.runs import rewind, train, train_on, write_run
from tools.journal.records import DIGESTS, read_digests, read_metrics
from tools.verify.prove.first_difference import by_step, first_parting


@pytest.mark.slow
def test_every_nth_step_and_every_loaded_state_has_a_line_and_a_resume_repeats_them(
    tmp_path: Path,
) -> None:
    file = write_run(tmp_path)
    assert train(file, "log.digests=2") == 0
    whole = read_digests(tmp_path / "run")
    assert [record["step"] for record in whole] == [2, 4, 6]
    assert [record["loss"] for record in whole] == [
        record["loss"] for record in read_metrics(tmp_path / "run")[1::2]
    ]
    rewind(tmp_path / "run", tmp_path / "again", 3)
    assert (
        train(
            file, "log.digests=2", f"train.folder={tmp_path}/again", f"data.cache={tmp_path}/data"
        )
        == 0
    )
    again = read_digests(tmp_path / "again")
    assert [(record["step"], "loaded" in record) for record in again] == [
        (2, False),
        (3, True),
        (4, False),
        (6, False),
    ]
    assert first_parting(by_step(again), by_step(whole)) is None


def test_a_run_without_digests_writes_no_file(tmp_path: Path) -> None:
    assert train(write_run(tmp_path), "train.steps=1") == 0
    assert not (tmp_path / "run" / DIGESTS).exists()


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["parallel.zero=false"], ["parallel.zero=true"]),
        (["parallel.recompute=none"], ["parallel.recompute=full"]),
        (
            ["fp8.kind=delayed", "fp8.pad=true"],
            ["fp8.kind=delayed", "fp8.pad=true", "checkpoint.every=1"],
        ),
    ],
)
def test_keys_that_change_no_bit_change_no_digest(
    one: list[str], other: list[str], tmp_path: Path
) -> None:
    file = write_run(tmp_path)
    found = []
    for name, keys in (("one", one), ("other", other)):
        folder = train_on(
            file, "log.digests=1", "train.steps=4", "precision.compute=bf16", f"train.folder={tmp_path}/{name}",
            f"data.cache={tmp_path}/data", *keys, data=2, tensor=2,
        )  # fmt: skip
        found.append(by_step(read_digests(folder)))
    assert sorted(found[0]) == sorted(found[1]) == [1, 2, 3, 4]
    assert first_parting(*found) is None
    assert ("fp8" in found[0][1]["tensors"]) == ("fp8.kind=delayed" in one)
