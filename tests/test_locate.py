"""A skipped step names what broke it, on every rank alike."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.events import StepReport
from tests.layouts import Run, batches, make_engine, share_of, train
from tests.ranks import run_ranks

MODEL = {"family": "llama", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 37}
TARGET = "layers.1.mlp.down.weight"


def step_with_a_bad_parameter(mesh: DeviceMesh, zero_size: int) -> StepReport:
    """Spoils three gradient elements of one tensor on tensor rank 1 before they are reduced."""
    run = Run(MODEL, compute="fp32", zero_size=zero_size, steps=1)
    engine = make_engine(mesh, run)
    reduce = engine.optimizer.reduce

    def spoil(chunk: int = 0) -> None:
        for buffer in engine.optimizer.all_buffers():
            for piece in buffer.pieces:
                if piece.part.name == TARGET and mesh.get_local_rank("tp") == 1 and mesh.get_local_rank("dp") == 0:
                    buffer.grads[piece.start] = float("inf")
                    buffer.grads[piece.stop - 2 : piece.stop] = float("nan")
        reduce(chunk)

    engine.optimizer.reduce = spoil  # type: ignore[method-assign]
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


@pytest.mark.parametrize("zero_size", [0, 1], ids=["zero", "whole"])
def test_the_offender_is_named_with_its_stage_its_tensor_rank_and_its_counts(zero_size: int) -> None:
    reports = run_ranks(step_with_a_bad_parameter, {"pp": 2, "dp": 2, "tp": 2}, zero_size=zero_size)
    for report in reports:
        assert report.outcome == "skipped_overflow"
        assert len(report.offenders) == 1
        (found,) = report.offenders
        assert (found.name, found.stage, found.tp_rank, found.infs, found.nans) == (TARGET, 1, 1, 1, 2)
        assert found.elements == 16 * 24 // 2
        assert 0 < found.largest_finite < torch.inf


def test_a_clean_step_names_nobody() -> None:
    assert all(report.offenders == () for report in train(Run(MODEL, steps=1)).reports)


def step_with_another_scale(mesh: DeviceMesh, tracker: str) -> str:
    engine = make_engine(mesh, Run(MODEL, compute="fp16", steps=1))
    if mesh.get_rank() == 1:
        getattr(engine.optimizer.scaler, tracker).mul_(2).add_(1)
    with pytest.raises(RuntimeError) as caught:
        engine.step(share_of(mesh, batches(Run(MODEL, steps=1))[0]), 1e-2, 0)
    return str(caught.value)


@pytest.mark.parametrize("tracker", ["scale", "growth_tracker", "hysteresis_tracker"])
def test_a_rank_with_another_scaler_state_stops_every_rank(tracker: str) -> None:
    said = run_ranks(step_with_another_scale, {"pp": 2, "tp": 2}, tracker=tracker)
    assert all("disagree about the loss scaler" in message for message in said)
