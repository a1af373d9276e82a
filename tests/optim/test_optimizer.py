"""The laws of the optimizer: torch's AdamW and clipping, however its state is cut."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole, parameters_of
from megaprec.errors import Problem
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.decoder.cutting import build, cuts
from models.parameter_counts import num_parameters
from parallel.context import Context
from tests.given import declare
from tests.layouts import Run, train_all
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks
from tests.refusals import raises

CLOSE = 1e-12
CPU = torch.device("cpu")
LR = 1e-2
SAMPLES = 12
WIDTH = 5
Step = tuple[StepReport, list[Tensor]]  # and the weights after it


class Net(nn.Module):
    """An ordinary torch module; its sizes divide by nothing."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(width, 7 * width)
        self.norm = nn.LayerNorm(7 * width)
        self.last = nn.Linear(7 * width, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(torch.relu(self.first(x))))
        return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum(-1)


def batch(step: int, width: int) -> Tensor:
    return torch.randn(
        SAMPLES, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def ours(
    compute: str,
    clip: float,
    mesh: DeviceMesh | None = None,
    *,
    width: int = WIDTH,
    zero_size: int = 0,
    scaling: LossScaling | None = None,
) -> list[Step]:
    """Four steps on this rank's share of the samples."""
    if compute == "fp16":
        scaling = LossScaling("constant", 1024.0)
    made = plan(compute, scaling)
    model = Net(width, made.masters)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer(
        [model], made, mesh, average=False, clip=clip, zero_size=zero_size
    )
    steps: list[Step] = []
    for step in range(4):
        loss = model(optimizer.dp.chunk(batch(step, width)).to(made.compute)).sum() / SAMPLES
        (loss * optimizer.scale).backward()
        optimizer.reduce()
        report = optimizer.step(LR, loss.detach())
        steps.append((report, [p.detach().clone() for p in model.parameters()]))
    return steps


def torchs(
    dtype: torch.dtype, clip: float, *, width: int = WIDTH, fused: bool = False
) -> list[tuple[float, float, list[Tensor]]]:
    """Loss, norm and weights of the same steps by torch alone."""
    model = Net(width, dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=fused
    )
    steps = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(step, width).to(dtype)).sum() / SAMPLES
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
        optimizer.step()
        steps.append((loss.item(), norm.item(), [p.detach().clone() for p in model.parameters()]))
    return steps


def require_torchs_steps(steps: list[Step], clip: float) -> None:
    for (report, weights), (loss, norm, expected) in zip(
        steps, torchs(torch.float64, clip), strict=True
    ):
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(loss, rel=CLOSE)
        assert report.grad_norm == pytest.approx(norm, rel=CLOSE)
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=CLOSE, atol=CLOSE * theirs.abs().max().item()
            )


@pytest.mark.parametrize("clip", [0.0, 1.0, 6.0])
def test_without_a_process_group_it_is_torchs_adamw_with_clipping(clip: float) -> None:
    steps = ours("fp64", clip)
    require_torchs_steps(steps, clip)
    if clip == 6.0:
        assert len({report.grad_norm > clip for report, _ in steps}) == 2, (
            "some steps clip and some do not"
        )


@pytest.mark.parametrize("clip", [0.0, 6.0])
def test_the_loss_scale_is_divided_out_of_a_step(clip: float) -> None:
    require_torchs_steps(ours("fp64", clip, scaling=LossScaling("constant", 1024.0)), clip)


def test_unclipped_fp32_steps_are_torchs_fused_adamw_to_the_last_bit() -> None:
    """Where vectors of elements fit: a width of 64. The last elements of others are rounded as
    scalars."""
    for (_, weights), (_, _, expected) in zip(
        ours("fp32", 0.0, width=64), torchs(torch.float32, 0.0, width=64, fused=True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(weights[:-2], expected[:-2], strict=True))
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def steps_on_rank(
    mesh: DeviceMesh, sizes: Sequence[int], clip: float
) -> dict[tuple[str, int], list[Step]]:
    return {
        (compute, size): ours(compute, clip, mesh, zero_size=size)
        for compute in ("fp64", "fp32", "bf16", "fp16")
        for size in sizes
    }


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("dp", "sizes", "clip"),
    [(2, (0, 1), 1.0), (3, (0, 1), 1.0), (4, (0, 1), 1.0), (4, (0, 2), 0.0)],
    ids=str,
)
def test_zero_on_off_and_over_a_part_are_the_same_bits_on_every_rank(
    dp: int, sizes: tuple[int, ...], clip: float
) -> None:
    """Over a part, ranks count other elements, so the last bit of the norm may differ, and weights
    that it clips."""
    ranks = run_ranks(steps_on_rank, {"dp": dp}, sizes=sizes, clip=clip)
    for compute in ("fp64", "fp32", "bf16", "fp16"):
        expected = ranks[0][compute, 0]
        for steps in (rank[compute, size] for rank in ranks for size in sizes):
            for (report, weights), (first_report, first_weights) in zip(
                steps, expected, strict=True
            ):
                if not clip:
                    assert report.grad_norm == pytest.approx(first_report.grad_norm, rel=1e-15)
                    report = replace(report, grad_norm=first_report.grad_norm)
                assert report == first_report
                assert all(torch.equal(a, b) for a, b in zip(weights, first_weights, strict=True))
    require_torchs_steps(ranks[0]["fp64", 0], clip)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", [(1, 2, 2), (2, 1, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
def test_zero_on_and_off_and_overlap_train_the_same_model_bit_for_bit(
    layout: tuple[int, int, int],
) -> None:
    run = Run(MODELS["gpt2"], compute="bf16")
    on, *others = train_all(
        [run, replace(run, zero_size=1), replace(run, options={"overlap": True})], *layout
    )
    assert on.num_elements == num_parameters(run.config)
    for other in others:
        assert (other.reports, other.num_elements) == (on.reports, on.num_elements)
        for name, weight in on.after.items():
            assert torch.equal(other.after[name], weight), name
            assert all(
                torch.equal(a[name], b[name]) for a, b in zip(on.grads, other.grads, strict=True)
            ), name


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_logical_element_is_counted_by_exactly_one_rank(model: str, tp: int) -> None:
    config = ModelConfig(**MODELS[model])
    for pp, dp, zero in product((1, 2, 3), (1, 2, 3), (True, False)):
        counted: dict[str, Tensor] = {}
        for p, d, t in product(range(pp), range(dp), range(tp)):
            context = Context(plan("fp32"), Axis("tp", t, tp))
            stages = build(config, context, cuts(config, pp, 8), range(pp), p)
            for parameter in parameters_of(stages.values()):
                shards = Axis("zero", d, dp) if zero else Axis("zero")
                count(Buffer([parameter], context.plan, Axis("dp", d, dp), shards, p, CPU), counted)
        assert sum(c.numel() for c in counted.values()) == num_parameters(config)
        assert all((c == 1).all() for c in counted.values()), f"{pp=} {dp=} {zero=}"


def count(buffer: Buffer, counted: dict[str, Tensor]) -> None:
    """Adds one to every logical element that the buffer counts. What it does not count it must hold
    as a copy."""
    flags = torch.zeros(buffer.size, dtype=torch.int32)
    for ranges, flag in ((buffer.counted(), 1), (buffer.counted_elsewhere(), 2)):
        for first, last in ranges:
            flags[buffer.start + first : buffer.start + last] += flag
    elements = torch.zeros_like(flags)
    for piece in buffer.pieces:
        elements[piece.start : piece.stop] = 1
        part = piece.part
        whole = counted.setdefault(part.name, torch.zeros(part.shape, dtype=torch.int32))
        part.take(whole).add_((flags[piece.start : piece.stop] == 1).view(part.local))
    held = slice(buffer.start, buffer.stop)
    assert torch.equal((flags[held] > 0).int(), elements[held]), (
        "padding is looked at, or an element is not"
    )
    assert flags.max() <= 2, "an element is looked at twice"


def adopted(compute: str = "fp32", **options: Any) -> tuple[Net, ParallelAMPOptimizer]:
    model = Net(WIDTH, torch.float32)
    attach_whole(model)
    return model, ParallelAMPOptimizer(
        [model], plan(compute, on_nonfinite=options.pop("on_nonfinite", "skip")), **options
    )


def test_biases_and_norms_do_not_decay() -> None:
    model, optimizer = adopted(weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    declare(optimizer)  # gradients of zero
    report = optimizer.step(0.1)
    assert (report.grad_norm, report.num_zeros, report.zero_ratio) == (
        0.0,
        optimizer.num_elements,
        1.0,
    )
    for name, p in model.named_parameters():
        factor = 0.95 if name in ("first.weight", "last.weight") else 1.0
        torch.testing.assert_close(p, before[name] * factor, rtol=1e-6, atol=0)
        assert torch.equal(p, before[name]) == (factor == 1.0)


def test_a_frozen_parameter_is_left_alone() -> None:
    model = Net(WIDTH, torch.float32)
    model.first.requires_grad_(False)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"))
    assert optimizer.num_elements == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_masters_are_made_of_the_values_before_they_are_rounded(compute: str) -> None:
    model, optimizer = adopted(compute)
    (buffer,) = optimizer.all_buffers()
    for parameter, start, (name, exact) in zip(
        buffer.parameters,
        buffer.starts,
        sorted(Net(WIDTH, torch.float32).named_parameters(), key=lambda x: x[1].dim() < 2),
        strict=True,
    ):
        assert torch.equal(
            buffer.saved()["weight"][start : start + exact.numel()], exact.detach().view(-1)
        ), name
        assert torch.equal(parameter, exact.to(parameter.dtype)), name
        assert parameter.dtype == optimizer.plan.compute
    assert not torch.equal(model.first.weight.float(), Net(WIDTH, torch.float32).first.weight), (
        "nothing was rounded"
    )


def test_a_parameter_without_a_layout_is_refused() -> None:
    with raises("optimizer.layout_missing", path="first.weight", shape="(35, 5)"):
        ParallelAMPOptimizer([Net(WIDTH, torch.float32)], plan("fp32"))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_asked_to_raise_it_raises_and_changes_nothing(where: str, bad: float) -> None:
    model, optimizer = adopted(on_nonfinite="raise")
    model(batch(0, WIDTH).float()).sum().backward()
    optimizer.step(LR)
    state = {name: t.clone() for b in optimizer.all_buffers() for name, t in b.saved().items()}
    weights = [p.detach().clone() for p in model.parameters()]
    if where == "gradient":
        optimizer.all_buffers()[0].grads[3] = bad
    declare(optimizer)
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step(LR, torch.tensor(bad if where == "loss" else 1.0))
    assert optimizer.saved_numbers()["steps"] == 1
    assert all(
        torch.equal(t, state[name])
        for b in optimizer.all_buffers()
        for name, t in b.saved().items()
    )
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_finite_gradients_of_any_size_are_not_taken_for_an_overflow() -> None:
    """Whose squares FP32 could not hold."""
    _, optimizer = adopted(clip=0.0)
    optimizer.all_buffers()[0].grads[:7] = 3e38
    declare(optimizer)
    report = optimizer.step(LR)
    assert report.outcome == "applied"
    assert report.grad_norm == pytest.approx(3e38 * 7**0.5, rel=1e-6)


def norm_of_whole_parameters(mesh: DeviceMesh) -> tuple[float, int]:
    """Of gradients that are all one."""
    model = nn.Linear(3, 5)
    attach_whole(model, Axis.of(mesh, "tp"))
    optimizer = ParallelAMPOptimizer([model], plan("fp64"), mesh)
    for buffer in optimizer.all_buffers():
        for piece in buffer.pieces:
            buffer.grads[piece.start : piece.stop] = 1
    declare(optimizer)
    optimizer.reduce()
    return optimizer.step(LR).grad_norm, optimizer.num_elements


def test_parameters_that_every_tensor_rank_holds_whole_count_once() -> None:
    assert run_ranks(norm_of_whole_parameters, {"tp": 2}) == [(20**0.5, 20)] * 2


def refused_layout(mesh: DeviceMesh) -> str:
    model = nn.Linear(3, 5)
    attach_whole(model)  # as if there were one tensor rank
    with pytest.raises(ValueError, match="weight") as caught:
        ParallelAMPOptimizer([model], plan("fp32"), mesh)
    return str(caught.value)


def test_a_layout_for_another_number_of_tensor_ranks_is_refused() -> None:
    said = Problem.of(
        "optimizer.layout_with_copies_of_other_ranks", name="weight", shards=1, copies=1, ranks=2
    )
    assert run_ranks(refused_layout, {"tp": 2}) == [said] * 2


def test_a_frozen_parameter_joins_the_others_in_dtype_and_stays_as_it_is() -> None:
    model = Net(WIDTH, torch.float32)
    model.first.weight.requires_grad_(False)
    before = model.first.weight.to(torch.bfloat16)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("bf16"))
    model(batch(0, WIDTH).bfloat16()).sum().backward()
    optimizer.reduce()
    assert optimizer.step(LR).outcome == "applied"
    assert torch.equal(model.first.weight, before)


def test_a_step_reduces_what_was_not_reduced_and_nothing_is_reduced_twice() -> None:
    run_ranks(reduce_by_step, {"dp": 2})


def reduce_by_step(mesh: DeviceMesh) -> None:
    reports = []
    for by_hand in (True, False):
        model = Net(WIDTH, torch.float64)
        attach_whole(model)
        optimizer = ParallelAMPOptimizer([model], plan("fp64"), mesh, average=False)
        loss = model(optimizer.dp.chunk(batch(0, WIDTH))).sum()
        loss.backward()
        if by_hand:
            optimizer.reduce()
            with pytest.raises(RuntimeError, match="twice"):
                optimizer.reduce()
        reports.append(optimizer.step(LR, loss.detach()))
    assert reports[0] == reports[1]


@pytest.mark.parametrize(("checks", "compared"), [(True, [1, 2, 4, 8]), (False, [])])
def test_ranks_of_a_loop_are_compared_ever_more_rarely_and_those_of_an_engine_never(
    checks: bool, compared: list[int]
) -> None:
    _, optimizer = adopted()
    optimizer.checks_loop = checks
    found: list[int] = []
    optimizer._compare_ranks = lambda loss: found.append(optimizer._num_attempted)
    for _ in range(9):
        declare(optimizer)
        optimizer.step(0.1)
    assert found == compared
