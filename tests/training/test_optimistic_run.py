"""A run whose stages step on a guess leaves what one leaves that agrees first: records, events,
checkpoints."""

from pathlib import Path

import pytest
import torch

from tests.runs import checkpoint, rewind, steps, tensors, train_on, write_run
from tools.journal.records import read_events

FP16 = [
    "precision.compute=fp16",
    "precision.initial_scale=4194304",
    "precision.growth_interval=2",
    "train.steps=12",
]
CHANGES = [
    *FP16,
    "train.eval_every=4",
    "optimizer.clip=0.85",
    "precision.hysteresis=1",
    "lr.warmup=4",
    "log.timeline=2",
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_a_run_leaves_the_same_records_and_checkpoints_and_can_be_resumed(
    run_file: Path, tmp_path: Path
) -> None:
    """Steps 3, 4, 6, 8, 9 and 12 are settled at once, to be saved or evaluated."""
    before = train_on(run_file, *CHANGES, f"train.folder={tmp_path / 'before'}", pipeline=2)
    after = train_on(
        run_file,
        *CHANGES,
        "optimizer.validation=after",
        f"train.folder={tmp_path / 'after'}",
        pipeline=2,
    )
    records = steps(before)
    assert any(record["outcome"] == "applied" and record["grad_norm"] > 0.85 for record in records)
    assert any(record["outcome"] == "applied" and record["grad_norm"] < 0.85 for record in records)
    assert len({record["outcome"] for record in records}) == 2
    assert steps(after) == records
    assert read_events(before) == read_events(after)
    resumed = rewind(after, tmp_path / "resumed", 9)
    train_on(
        run_file, *CHANGES, "optimizer.validation=after", f"train.folder={resumed}", pipeline=2
    )
    assert steps(resumed) == records
    for folder in (after, resumed):
        ours, theirs = (tensors(checkpoint(one, 12)) for one in (folder, before))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
