"""A skipped step names what broke it and where it began, on every rank alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_report import LOSS, NonFiniteStep, Offender, StepReport
from megaprec.precision.plan import LossScaling, plan
from models.decoder.stages import Stage
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.pipeline.instructions import Instruction, Op
from parallel.pipeline.schedules import complete
from tests.layouts import LENGTH, Run, batches, make_engine, share_of, train
from tests.ranks import run_ranks

MODEL = {
    "family": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 37,
}
TARGET = "layers.1.mlp.down.weight"
LAYOUTS = [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, {"pp": 2, "dp": 2}]
RARE = 36  # a token that no batch has


def spoil_when_reduced(engine: Engine, mesh: DeviceMesh) -> None:
    """Spoils three gradient elements of one tensor on tensor rank 1 before they are reduced."""
    reduce = engine.optimizer.reduce

    def spoil(chunk: int = 0) -> None:
        for buffer in engine.optimizer.all_buffers():
            for piece in buffer.pieces:
                if (
                    piece.part.name == TARGET
                    and mesh.get_local_rank("tp") == 1
                    and mesh.get_local_rank("dp") == 0
                ):
                    buffer.grads[piece.start] = float("inf")
                    buffer.grads[piece.stop - 2 : piece.stop] = float("nan")
        reduce(chunk)

    engine.optimizer.reduce = spoil  # type: ignore[method-assign]


def step_with_a_bad_parameter(mesh: DeviceMesh, zero_size: int) -> StepReport:
    run = Run(MODEL, compute="fp32", zero_size=zero_size, steps=1)
    engine = make_engine(mesh, run)
    spoil_when_reduced(engine, mesh)
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("zero_size", [0, 1], ids=["zero", "whole"])
def test_the_offender_is_named_with_its_stage_its_tensor_rank_and_its_counts(
    zero_size: int,
) -> None:
    reports = run_ranks(step_with_a_bad_parameter, {"pp": 2, "dp": 2, "tp": 2}, zero_size=zero_size)
    for report in reports:
        assert report.outcome == "skipped_overflow"
        assert len(report.offenders) == 1
        (found,) = report.offenders
        assert (found.name, found.stage, found.tp_rank, found.infs, found.nans) == (
            TARGET,
            1,
            1,
            1,
            2,
        )
        assert found.elements == 16 * 24 // 2
        assert 0 < found.largest_finite < torch.inf
        assert (found.traced, found.microbatch, found.samples) == (True, None, None), (
            "no micro-batch did it"
        )


def test_a_clean_step_names_nobody() -> None:
    assert all(report.offenders == () for report in train(Run(MODEL, steps=1)).reports)


# --- where it began


def began(found: Offender) -> tuple[int | None, int | None, tuple[int, int] | None]:
    return found.microbatch, found.dp_rank, found.samples


def step_with_a_bad_sample(mesh: DeviceMesh, sample: int) -> StepReport:
    """The rare token stands in one sample, and what is looked up for it is infinite."""
    run = Run(MODEL, compute="fp32", steps=1, masked=False)
    engine = make_engine(mesh, run)
    batch = batches(run)[0]
    for stage in engine.stages.values():
        if stage.cut.first:
            ids = range(
                stage.embedding.part.start,
                stage.embedding.part.start + stage.embedding.part.local[0],
            )
            if RARE in ids:
                stage.embedding.weight.data[RARE - ids.start] = torch.inf
    batch[0][sample, 3] = RARE
    return engine.step(share_of(mesh, batch), 1e-2, 0)


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_bad_sample_is_found_by_its_micro_batch_and_dp_rank_in_every_layout(
    axes: dict[str, int],
) -> None:
    """Of 8 samples in micro-batches of two, the sixth is bad: its micro-batch has samples 4 and
    5."""
    where = (0, 1, (4, 6)) if "dp" in axes else (2, 0, (4, 6))
    for report in run_ranks(step_with_a_bad_sample, axes, sample=5):
        assert report.outcome == "skipped_overflow"
        assert {began(found) for found in report.offenders} == {where}
        loss = report.offenders[0]
        assert (loss.name, loss.stage, loss.infs + loss.nans) == (LOSS, axes.get("pp", 1) - 1, 1)
        assert len(report.offenders) == 6


def poison_backward(stage: Stage, layer: str, sample: int) -> None:
    """Makes the gradient that flows into `layer` infinite in the micro-batch that has the
    sample."""

    def hook(
        block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> None:
        microbatch = named["microbatch"]
        if microbatch is not None and sample in microbatch.samples.tolist():
            output.register_hook(lambda grad: torch.full_like(grad, torch.inf))

    if layer in stage.layers:
        stage.layers[layer].register_forward_hook(hook, with_kwargs=True)


def step_with_bad_gradients(mesh: DeviceMesh, on_nonfinite: str = "skip") -> StepReport:
    """Sample 5 spoils layer 1 and all before it, sample 3 layer 0 and all before it. The loss stays
    as it was."""
    run = Run(MODEL, compute="fp32", steps=1)
    engine = make_engine(mesh, run)
    object.__setattr__(engine.optimizer.plan, "on_nonfinite", on_nonfinite)
    for stage in engine.stages.values():
        poison_backward(stage, "1", 5)
        poison_backward(stage, "0", 3)
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_each_offender_has_its_own_beginning(axes: dict[str, int]) -> None:
    with_dp = "dp" in axes
    late = (0, 1, (4, 6)) if with_dp else (2, 0, (4, 6))
    # with dp sample 3 is in the second micro-batch of rank 0
    early = (0, 1, (4, 6)) if with_dp else (1, 0, (2, 4))
    for report in run_ranks(step_with_bad_gradients, axes):
        assert report.outcome == "skipped_overflow"
        assert torch.isfinite(torch.tensor(report.loss))
        assert len(report.offenders) == 5
        for found in report.offenders:
            assert began(found) == (late if found.name.startswith("layers.1.") else early), found


def step_with_a_bad_head(mesh: DeviceMesh) -> StepReport:
    """On tensor rank 3 the gradient of query, key and value of layer 0 is infinite in the third
    micro-batch."""
    run = Run(MODEL, compute="fp32", steps=1)
    engine = make_engine(mesh, run)
    calls = iter(range(99))

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if next(calls) % 4 == 2 and mesh.get_local_rank("tp") == 3:
            output.register_hook(lambda grad: torch.full_like(grad, torch.inf))

    engine.stages[0].get_submodule("layers.0.attention.qkv").register_forward_hook(hook)
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


@pytest.mark.slow
def test_a_rank_that_shares_a_slice_learns_from_the_one_whose_share_was_bad() -> None:
    """Ranks 2 and 3 have the second of two key heads between them, so that on both it is bad in the
    end."""
    for report in run_ranks(step_with_a_bad_head, {"tp": 4}):
        assert {began(found) for found in report.offenders} == {(2, 0, (4, 6))}
        keys = [
            found.tp_rank
            for found in report.offenders
            if found.name == "layers.0.attention.key.weight"
        ]
        assert keys == [2, 3]


def step_of_several_chunks(mesh: DeviceMesh) -> StepReport:
    """Four layers as four stages on two ranks, in turn; sample 5 spoils layer 2 and all before
    it."""
    run = Run({**MODEL, "layers": 4}, compute="fp32", steps=1)
    rows: list[list[Instruction]] = [[], []]
    for op, order in ((Op.FORWARD, range(4)), (Op.BACKWARD, reversed(range(4)))):
        for stage in order:
            rows[stage % 2] += [Instruction(op, stage, microbatch) for microbatch in range(4)]
    engine = Engine.build(
        run.config,
        plan("fp32"),
        mesh,
        complete(rows, (0, 1, 0, 1)),
        EngineOptions(micro_batch=2, seq_length=LENGTH, seed=3),
    )
    for stage in engine.stages.values():
        poison_backward(stage, "2", 5)
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


def test_several_chunks_on_a_rank_are_told_apart_from_the_clean_one() -> None:
    for report in run_ranks(step_of_several_chunks, {"pp": 2}):
        assert len(report.offenders) == 5
        assert {began(found) for found in report.offenders} == {(2, 0, (4, 6))}
        assert not any(found.name.startswith("layers.3.") for found in report.offenders)


def raised(mesh: DeviceMesh) -> str:
    with pytest.raises(NonFiniteStep) as caught:
        step_with_bad_gradients(mesh, "raise")
    assert all(found.traced for found in caught.value.report.offenders)
    return str(caught.value)


def test_a_step_that_is_to_raise_says_as_much_on_every_rank() -> None:
    said = run_ranks(raised, {"dp": 2})
    assert said[0] == said[1]
    assert "first in micro-batch 0 of dp rank 1, samples 4 to 5 of the batch" in said[0]


def infinite_loss(mesh: DeviceMesh) -> StepReport:
    """The loss of the last sample is infinite, yet its gradient is finite."""
    run = Run(MODEL, compute="fp32", steps=1, masked=False)
    engine = make_engine(mesh, run)
    stage = engine.stages.get(engine.last_stage)
    if stage is not None:
        inner = stage.losses
        seen = iter(range(99))

        def losses(logits: Tensor, targets: Tensor) -> Tensor:
            last = (
                next(seen) % (4 // engine.dp.size) == 4 // engine.dp.size - 1
                and engine.dp.rank == engine.dp.size - 1
            )
            return inner(logits, targets) + (torch.inf if last else 0)

        stage.losses = losses  # type: ignore[method-assign]
    return engine.step(share_of(mesh, batches(run)[0]), 1e-2, 0)


@pytest.mark.cases(2, sample=1)
@pytest.mark.parametrize("axes", [{}, {"pp": 2, "tp": 2}, {"dp": 2}], ids=str)
def test_an_infinite_loss_with_finite_gradients_is_found_too(axes: dict[str, int]) -> None:
    for report in run_ranks(infinite_loss, axes):
        assert report.outcome == "skipped_overflow"
        (found,) = report.offenders
        assert (found.name, found.infs, found.nans) == (LOSS, 1, 0)
        assert began(found) == ((1, 1, (6, 8)) if "dp" in axes else (3, 0, (6, 8)))


def searching(mesh: DeviceMesh, scale: float) -> list[StepReport]:
    scaling = LossScaling("dynamic", scale, minimum=scale / 4, hysteresis=1)
    run = Run(MODEL, compute="fp16", scaling=scaling, steps=4)
    engine = make_engine(mesh, run)
    return [engine.step(share_of(mesh, batch), 1e-2, n) for n, batch in enumerate(batches(run))]


def test_a_scale_on_its_first_way_down_is_not_traced_until_it_can_fall_no_further() -> None:
    (reports,) = run_ranks(searching, {}, scale=2.0**100)
    assert [report.outcome for report in reports] == ["skipped_overflow"] * 4
    assert [all(found.traced for found in report.offenders) for report in reports] == [
        False,
        False,
        True,
        True,
    ]


# --- ranks that disagree


def step_with_another_scale(mesh: DeviceMesh, tracker: str) -> str:
    engine = make_engine(mesh, Run(MODEL, compute="fp16", steps=1))
    if mesh.get_rank() == 1:
        getattr(engine.optimizer.scaler, tracker).mul_(2).add_(1)
    with pytest.raises(RuntimeError) as caught:
        engine.step(share_of(mesh, batches(Run(MODEL, steps=1))[0]), 1e-2, 0)
    return str(caught.value)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("tracker", ["scale", "growth_tracker", "hysteresis_tracker"])
def test_a_rank_with_another_scaler_state_stops_every_rank(tracker: str) -> None:
    said = run_ranks(step_with_another_scale, {"pp": 2, "tp": 2}, tracker=tracker)
    assert all("disagree about the loss scaler" in message for message in said)
