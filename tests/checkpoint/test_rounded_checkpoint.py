"""Checkpoints without masters: what they hold, what a run that goes on from one has lost, and that
it is told so."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load, save
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.runs import checkpoint, rewind, steps, tensors, train, train_on, write_run

MODEL = MODELS["llama"]
KEPT = {"keep_fp32": ("*norm.weight",)}
ROUNDED = {"masters_in_checkpoint": False}
NARROW = 23  # of 30 logical weights those that are not norms


def run(**changes: Any) -> Run:
    return Run(MODEL, "bf16", changes={**KEPT, **changes})


def weights(optimizer: ParallelAMPOptimizer) -> list[torch.Tensor]:
    return [buffer.weights.clone() for buffer in optimizer.all_buffers()]


def saved(optimizer: ParallelAMPOptimizer) -> list[torch.Tensor]:
    return [
        values.clone() for buffer in optimizer.all_buffers() for values in buffer.saved().values()
    ]


def all_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def require_rounded(mesh: DeviceMesh | None, folder: Path, changes: dict[str, Any]) -> None:
    """Saves without masters after one step and goes on in a new model, beside one whose masters are
    rounded by hand."""
    first = make_engine(mesh, run(**changes, **ROUNDED))
    again = make_engine(mesh, run(**changes))
    data = batches(run())
    first.step(share_of(mesh, data[0]), 1e-2, 0)
    path = save(folder, 1, first.optimizer, {})
    held = {name: Store(path).read("weight", name) for name in Store(path).shapes("weight")}
    narrow = [name for name, values in held.items() if values.dtype == torch.bfloat16]
    assert (len(narrow), len(held)) == (NARROW, 30) and not any("norm" in name for name in narrow)
    lost = again.optimizer.world.rank == 0
    with warnings.catch_warnings(record=True, action="always") as said:
        load(path, again.optimizer)
    assert len(said) == lost
    if lost:
        assert f"holds {NARROW} of 30 weights rounded to bfloat16 only: fp32 masters begin" in str(
            said[0].message
        )
    assert all_equal(weights(first.optimizer), weights(again.optimizer)), (
        "not the weights that were trained"
    )
    by_hand = first.optimizer
    for buffer in by_hand.all_buffers():
        exact = buffer._tile(0, buffer.stop - buffer.start).wide_masters().clone()
        buffer.restore("weight", 0, buffer.own_weights.float())
        if buffer.weights.dtype == torch.bfloat16:
            assert not torch.equal(exact, buffer._tile(0, len(exact)).wide_masters()), (
                "no bits to lose"
            )
    for engine in (first, again):
        engine.step(share_of(mesh, data[1]), 1e-2, 1)
    assert all_equal(weights(first.optimizer), weights(again.optimizer))
    for one, other in zip(by_hand.all_buffers(), again.optimizer.all_buffers(), strict=True):
        assert torch.equal(*(b._tile(0, b.stop - b.start).wide_masters() for b in (one, other)))
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


@pytest.mark.parametrize("masters", [{}, {"masters": "split"}, {"rounding": "stochastic"}], ids=str)
def test_a_run_goes_on_from_rounded_weights_as_if_its_masters_had_been_rounded(
    masters: dict[str, Any], tmp_path: Path
) -> None:
    require_rounded(None, tmp_path, masters)


@pytest.mark.slow
def test_so_it_does_in_a_layout_and_one_rank_says_what_is_lost(tmp_path: Path) -> None:
    run_ranks(require_rounded, {"tp": 2, "dp": 2}, folder=tmp_path, changes={})


def test_masters_of_a_checkpoint_are_taken_up_by_a_run_that_will_not_save_its_own(
    tmp_path: Path,
) -> None:
    first = make_engine(None, run())
    again = make_engine(None, run(**ROUNDED))
    first.step(share_of(None, batches(run())[0]), 1e-2, 0)
    # and says nothing: warnings are errors
    load(save(tmp_path, 1, first.optimizer, {}), again.optimizer)
    pairs = zip(first.optimizer.all_buffers(), again.optimizer.all_buffers(), strict=True)
    assert all(
        a.masters is not None and b.masters is not None and torch.equal(a.masters, b.masters)
        for a, b in pairs
    )
    assert all_equal(weights(first.optimizer), weights(again.optimizer))


def test_nothing_is_lost_where_there_were_no_masters(tmp_path: Path) -> None:
    legacy = {"masters": "none", "moments": "bf16", "gradients": "bf16", "rounding": "stochastic"}
    first, again = (make_engine(None, run(**legacy, **ROUNDED)) for _ in range(2))
    first.step(share_of(None, batches(run())[0]), 1e-2, 0)
    load(save(tmp_path, 1, first.optimizer, {}), again.optimizer)
    assert all_equal(saved(first.optimizer), saved(again.optimizer))


@pytest.mark.slow
def test_a_resumed_run_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    nxd = ["precision.nxd={}"]
    whole = train_on(file, *nxd)
    assert {
        v.dtype for k, v in tensors(checkpoint(whole, 3)).items() if k.startswith("weight")
    } == {torch.bfloat16}
    resumed = rewind(whole, tmp_path / "resumed", step=3)
    capsys.readouterr()
    assert train(file, *nxd, f"train.folder={resumed}") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert (
        len(said) == 1
        and "step_00000003 holds 21 of 21 weights rounded to bfloat16 only" in said[0]
    )
    assert [record["step"] for record in steps(resumed)] == [1, 2, 3, 4, 5, 6]
