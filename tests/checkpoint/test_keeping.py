"""A save removes older checkpoints that saves into its folder have made, as far as it may, and
nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megaprec import save
from megaprec.checkpoint.keeping import RECORD, Keep, best_made_here, damage_of_record
from megaprec.checkpoint.saving import Saving
from megaprec.errors import UserError
from tests.checkpoint.test_checkpoint import names, saved, small
from tests.refusals import sentence


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(folder.glob("step_*"))]


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (1, 20, [20, 40, 50]),
        (2, 0, [40, 50]),
        ("all", 0, [10, 20, 30, 40, 50]),
        ("all", 20, [10, 20, 30, 40, 50]),
        (2, 30, [30, 40, 50]),
        (9, 7, [10, 20, 30, 40, 50]),
    ],
)
def test_the_newest_stay_and_those_of_each_multiple(
    keep: int | str, every: int, left: list[int], tmp_path: Path
) -> None:
    optimizer = small()
    for step in range(10, 60, 10):
        save(tmp_path, step, optimizer, {}, keep=keep, keep_every=every)  # type: ignore[arg-type]
    assert steps_in(tmp_path) == left


def test_the_best_is_the_oldest_of_the_lowest_that_are_there_and_no_nan(tmp_path: Path) -> None:
    optimizer = small()
    losses = {1: 3.0, 2: 2.0, 3: float("nan"), 4: 2.0, 5: float("inf")}
    for step, loss in losses.items():
        keep = Keep(1, best={"eval_loss": 1.0})
        given = {"eval_loss": loss, "eval_loss/x": -float(step)}
        assert not Saving(tmp_path, step, optimizer, {}, keep, losses=given).finish().problem
    Saving(tmp_path, 6, optimizer, {}, Keep(1, best={"eval_loss": 1.0})).finish()
    assert steps_in(tmp_path) == [2, 6]
    best = best_made_here(tmp_path, {"eval_loss": 1.0})
    assert best is not None and (best.path.name, best.loss) == ("step_00000002", 2.0)
    assert best_made_here(tmp_path, {"eval_loss/y": 1.0}) is None
    # one that is no longer there is not the best, and neither is a line that is damaged
    shutil.rmtree(best.path)
    with (tmp_path / RECORD).open("a") as record:
        record.write('{"step": 6, "losses": {"eval_loss": "low"}}\n{"losses": 3}\n')
    assert best_made_here(tmp_path, {"eval_loss": 1.0}) is None


def test_the_best_of_several_evaluations_has_the_lowest_weighted_mean(tmp_path: Path) -> None:
    optimizer = small()
    losses = {1: (4.0, 1.0), 2: (2.0, 2.0), 3: (1.0, 3.5), 4: (0.0, None)}
    for weights, kept, mean in (
        ({"eval_loss": 1.0, "eval_loss/x": 1.0}, 2, 2.0),
        ({"eval_loss": 0.1, "eval_loss/x": 0.4}, 1, 1.6),
        ({"eval_loss": 3.0, "eval_loss/x": 1.0}, 3, 1.625),
    ):
        folder = tmp_path / str(kept)
        for step, (own, of_set) in losses.items():
            # an evaluation that lacks one of them is none
            given = {"eval_loss": own} | ({} if of_set is None else {"eval_loss/x": of_set})
            keep = Keep(1, best=weights)
            assert not Saving(folder, step, optimizer, {}, keep, losses=given).finish().problem
        assert steps_in(folder) == sorted({kept, 4})
        best = best_made_here(folder, weights)
        assert best is not None and best.loss == pytest.approx(mean, rel=1e-12)


def test_a_checkpoint_that_was_copied_into_the_folder_stays(tmp_path: Path) -> None:
    elsewhere = saved(tmp_path / "elsewhere", 1)
    folder = tmp_path / "here"
    shutil.copytree(elsewhere, folder / elsewhere.name)
    for step in range(2, 6):
        saved(folder, step, keep=1)
    assert steps_in(folder) == [1, 5]
    assert names(folder / elsewhere.name) == names(elsewhere)


def test_a_checkpoint_that_was_put_in_place_of_one_that_was_saved_stays(tmp_path: Path) -> None:
    other = saved(tmp_path / "elsewhere", 1, value=7.0)
    folder = tmp_path / "here"
    shutil.rmtree(saved(folder, 1))
    shutil.copytree(other, folder / other.name)
    saved(folder, 2, keep=1)
    assert steps_in(folder) == [1, 2]


def test_a_checkpoint_that_was_moved_away_and_back_is_still_the_folders_own(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    first = saved(folder, 1)
    first.rename(tmp_path / "away")
    saved(folder, 2)
    (tmp_path / "away").rename(first)
    saved(folder, 3, keep=1)
    assert steps_in(folder) == [3]


def test_neither_a_link_nor_what_it_points_to_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    first = saved(folder, 1)
    first.rename(tmp_path / "big disk")
    first.symlink_to(tmp_path / "big disk")
    for step in (2, 3, 4):
        saved(folder, step, keep=1)
    assert names(folder) == ["step_00000001", "step_00000004"]
    assert first.is_symlink()
    assert len(names(tmp_path / "big disk")) == 3


def test_a_save_overwrites_no_checkpoint_of_its_step_that_was_put_there(tmp_path: Path) -> None:
    other = saved(tmp_path / "elsewhere", 2, value=7.0)
    folder = tmp_path / "here"
    saved(folder, 1)
    shutil.copytree(other, folder / other.name)
    why = (
        "was in the way of a save and is step_00000002.other now: no save into this folder made it"
    )
    with pytest.warns(UserWarning, match=f"step_00000002 {why}"):
        saved(folder, 2)
    assert names(folder) == ["step_00000001", "step_00000002", "step_00000002.other"]
    assert names(folder / "step_00000002.other") == names(other)


def test_a_record_that_cannot_be_written_costs_a_warning_and_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    for step in (1, 2, 3):
        with pytest.warns(
            UserWarning,
            match=r"\.saved\.jsonl: it is no regular file .* no save removes the checkpoint",
        ):
            saved(tmp_path, step, keep=1)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_line_of_the_record_that_is_torn_costs_nothing_but_its_own_removal(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1)
    record = tmp_path / RECORD
    record.write_bytes(record.read_bytes()[:-30])
    for step in (2, 3, 4):
        saved(tmp_path, step, keep=1)
    assert steps_in(tmp_path) == [1, 4]


NO_SAVES = (
    b"{", b"5", b"\xff\xfe", b"{}", b"null", b"[" * 100_000, b"\x00",
    b'{"step": 1}', b'{"step": true, "digest": "a"}', b'{"step": 1.0, "digest": "a"}',
    b'{"step": 1, "digest": 5}', b'{"step": 1, "digest": "a", "losses": null}',
    b'{"step": 1, "digest": "a", "losses": {"eval_loss": "1"}}',
    b'{"step": 1, "digest": "a", "losses": {"eval_loss": true}}',
    b'{"step": 1, "digest": "a", "losses": {"eval_loss": NaN}}',
    b'{"step": 1, "digest": "a", "losses": {"eval_loss": -Infinity}}',
)  # fmt: skip


def test_each_line_that_is_no_record_of_a_save_is_found_and_counts_for_nothing(
    tmp_path: Path,
) -> None:
    optimizer = small()
    for step, loss in ((1, 2.0), (2, 1.0)):
        Saving(tmp_path, step, optimizer, {}, Keep(2), losses={"eval_loss": loss}).finish()
    assert damage_of_record(tmp_path) == ("", [])
    record = tmp_path / RECORD
    digest = json.loads(record.read_bytes().splitlines()[1])["digest"].encode()
    odd = [line.replace(b'"a"', b'"' + digest + b'"') for line in NO_SAVES]
    good = record.read_bytes().splitlines()
    record.write_bytes(b"\n".join([good[0], *odd, b"", good[1], b""]))
    assert damage_of_record(tmp_path) == ("", [*range(2, 2 + len(odd))])
    best = best_made_here(tmp_path, {"eval_loss": 1.0})
    assert best is not None and (best.path.name, best.loss) == ("step_00000002", 1.0)


def test_a_record_that_cannot_be_read_is_told_and_a_missing_one_is_none(tmp_path: Path) -> None:
    assert damage_of_record(tmp_path) == ("", [])
    (tmp_path / RECORD).mkdir()
    problem, lines = damage_of_record(tmp_path)
    assert RECORD in problem and not lines


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "none", None])
def test_what_is_no_rule_is_refused(keep: object, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=sentence("checkpoint.keep_value", all="all"),
    ):
        save(tmp_path, 1, small(), {}, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=sentence("checkpoint.keep_every_value", keep_every=-1)):
        save(tmp_path, 1, small(), {}, keep_every=-1)


@pytest.mark.parametrize("newest", [1, 2, 3, 9])
@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("later", [0, 1, 2, 5])
def test_what_goes_later_is_what_goes_save_by_save(newest: int, every: int, later: int) -> None:
    """The rule applied at once is the rule applied after each save."""
    keep = Keep(newest, every)
    there = [1, 2, 3, 4, 6]
    foretold = keep.expired(there, later)
    gone = list[int]()
    for step in [None, *range(100, 100 + later)]:
        there += [] if step is None else [step]
        expired = keep.expired(there)
        gone += expired
        there = [one for one in there if one not in expired]
    assert foretold == sorted(step for step in gone if step < 100)
