"""The laws of `tests/ranks.py`: what a rank says arrives, and nothing stays behind."""

import multiprocessing
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from tests import ranks
from tests.other_systems import slow
from tests.ranks import on_ranks, run_ranks


@on_ranks(pp=2, tp=2)
def test_a_rank_sees_three_axes_with_tp_the_fastest(mesh: DeviceMesh) -> None:
    pp, dp, tp = (Axis.of(mesh, name) for name in ("pp", "dp", "tp"))
    assert (pp.size, dp.size, tp.size) == (2, 1, 2)
    assert dist.get_rank() == 2 * pp.rank + tp.rank


@pytest.mark.parametrize("number", [3, 4])
@on_ranks(dp=2)
def test_parameters_and_fixtures_reach_the_ranks(
    mesh: DeviceMesh, number: int, tmp_path: Path
) -> None:
    assert number in (3, 4)
    assert tmp_path.exists()


def coordinates(mesh: DeviceMesh, factor: int) -> tuple[int, torch.Tensor]:
    return dist.get_rank() * factor, torch.full((2,), float(dist.get_rank()))


def test_values_come_back_by_rank() -> None:
    numbers, tensors = zip(*run_ranks(coordinates, {"dp": 3}, factor=10), strict=True)
    assert numbers == (0, 10, 20)
    assert torch.equal(torch.cat(tensors), torch.tensor([0.0, 0, 1, 1, 2, 2]))


def misbehave(mesh: DeviceMesh, how: str, folder: Path) -> None:
    rank = dist.get_rank()
    (folder / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1 and how == "fail":
        raise KeyError("it was me")
    if rank == 1 and how == "warn":
        warnings.warn("mind the gap", stacklevel=1)
    if rank == 1 and how == "die":
        os._exit(7)
    if rank == 1 and how == "hang":
        time.sleep(100)
    dist.barrier()


def seconds_of_a_start() -> float:
    """The seconds that two ranks take now, once their server is there."""
    run_ranks(coordinates, {"tp": 2}, factor=1)
    start = time.monotonic()
    run_ranks(coordinates, {"tp": 2}, factor=1)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fail", r"--- rank 1 ---(.|\n)*it was me"),
        ("warn", r"--- rank 1 ---(.|\n)*mind the gap"),
        ("die", r"--- rank 1 ---\nthe process died"),
        *slow(("hang", r"--- rank 1 ---\nnot done after [\d.]+ s(.|\n)*in misbehave")),
    ],
    ids=["fail", "warn", "die", "hang"],
)
def test_a_bad_rank_is_named_and_nobody_stays_behind(
    how: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "hang":
        monkeypatch.setattr(ranks, "SECONDS", max(2.0, 10 * seconds_of_a_start()))
    warnings.simplefilter("error")  # pytest restores it
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=says):
        run_ranks(misbehave, {"tp": 2}, how=how, folder=tmp_path)
    assert time.monotonic() - start < 300, "others do not wait until their own time is over"
    assert not multiprocessing.active_children()
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
