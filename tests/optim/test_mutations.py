"""The tests are tested: each well-known bug is put in on purpose, and the test that is there for it
must fail.

A bug is a function that patches the library inside the ranks of one launch. Beside it stands the
law that it breaks.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, layout_of
from megaprec.optim import grad_sync
from megaprec.optim.decision.consensus import StepNumbers
from megaprec.optim.decision.decision import StepDecision, StepSettings
from megaprec.optim.decision.grad_stats import statistics
from megaprec.optim.decision.scaler import DynamicGradScaler
from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.guards import step_agreement
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules import param_groups
from megaprec.optim.rules.row_factors import RowFactors
from megaprec.optim.state import update_tile
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.partial_grads import sum_partial
from megaprec.precision.plan import PrecisionPlan
from models.engine.passes import Passes
from parallel.layers import RowParallelLinear
from tests.checkpoint.test_checkpoint import resume_and_compare
from tests.layouts import Run, train
from tests.models import test_parity
from tests.optim.test_agree import require_branches_noticed
from tests.optim.test_amp import (
    plant_everywhere,
    require_nan_lowers_the_scale,
    require_scale_divided_out,
)
from tests.optim.test_groups import require_factors
from tests.optim.test_scaler import require_megatron_trace, require_state_round_trip
from tests.optim.test_state_precision import require_planned_travel, require_same_bits
from tests.ranks import run_ranks

Bug = Callable[[], None]
Law = Callable[[Bug, pytest.MonkeyPatch, Path], object]
INNER_UPDATE = ParallelAMPOptimizer._update


def the_scale_is_read_after_the_update() -> None:
    def update(
        self: ParallelAMPOptimizer,
        decision: StepDecision,
        settings: StepSettings,
        row_factors: RowFactors | None,
    ) -> None:
        later = deepcopy(self.scaler)
        later.update(decision.skip)
        wrong = replace(decision, scale=decision.scale * later.scale / self.scale)
        return INNER_UPDATE(self, wrong, settings, row_factors)

    ParallelAMPOptimizer._update = update


def the_loss_is_scaled_twice() -> None:
    inner = Passes.scaled_loss
    Passes.scaled_loss = lambda self, state, stage, logits, rows: (
        inner(self, state, stage, logits, rows) * self.optimizer.scale
    )


def found_inf_over(*axes: str) -> None:
    """Each rank hears of what is not finite on these axes only."""

    def exchange(self: ParallelAMPOptimizer, local: Tensor) -> StepNumbers:
        bad = (
            statistics(self._counted_grads, self._grads_counted_elsewhere, self.device)
            .isfinite()
            .logical_not()
            .any()
            .double()
        )
        for axis in axes:
            getattr(self, axis).max_(bad)
        shared = self.world.sum_(local).nan_to_num(0, 0, 0)
        shared[0] += torch.inf * bad if bad else 0
        return self._consensus.read(shared)

    ParallelAMPOptimizer._exchange = exchange


def found_inf_stays_in_the_pipeline_stage() -> None:
    found_inf_over("dp", "tp")


def found_inf_stays_in_the_dp_rank() -> None:
    found_inf_over("pp", "tp")


def found_inf_stays_in_the_tp_rank() -> None:
    found_inf_over("pp", "dp")


def bf16_is_not_checked() -> None:
    ParallelAMPOptimizer._exchange = lambda self, local: self._consensus.read(
        self.world.sum_(local).nan_to_num(0, 0, 0)
    )


def copies_are_not_checked() -> None:
    Buffer.counted_elsewhere = lambda self: []


def a_skipped_step_is_counted() -> None:
    def update(
        self: ParallelAMPOptimizer,
        decision: StepDecision,
        settings: StepSettings,
        row_factors: RowFactors | None,
    ) -> None:
        INNER_UPDATE(self, decision, settings, row_factors)
        self.applied_steps += decision.skip

    ParallelAMPOptimizer._update = update


def a_nan_is_a_good_step_to_the_scaler() -> None:
    tell = DynamicGradScaler.update
    inner = ParallelAMPOptimizer._clip_factor

    def factor(self: ParallelAMPOptimizer, norm: Tensor) -> Tensor:
        vars(self.scaler)["of_nan"] = norm.isnan()
        return inner(self, norm)

    ParallelAMPOptimizer._clip_factor = factor
    DynamicGradScaler.update = lambda self, found_inf: tell(self, found_inf * ~vars(self)["of_nan"])


def a_back_off_refills_the_hysteresis() -> None:
    inner = DynamicGradScaler.update

    def update(self: DynamicGradScaler, found_inf: Tensor) -> None:
        inner(self, found_inf)
        if self.hysteresis_tracker <= 0:
            self.hysteresis_tracker.fill_(self.scaling.hysteresis)

    DynamicGradScaler.update = update


def loading_loses_the_growth_counter() -> None:
    inner = DynamicGradScaler.load_state_dict
    DynamicGradScaler.load_state_dict = lambda self, state: inner(
        self, {**state, "growth_tracker": 0}
    )


def loading_loses_the_hysteresis_counter() -> None:
    inner = DynamicGradScaler.load_state_dict
    DynamicGradScaler.load_state_dict = lambda self, state: inner(
        self, {**state, "hysteresis_tracker": self.scaling.hysteresis}
    )


def tied_weights_count_twice() -> None:
    Layout.counts = lambda self, pp_rank: True


def copies_count_tp_times() -> None:
    inner = Buffer._pieces
    Buffer._pieces = lambda self, pp_rank: (
        replace(p, counts=p.counts or p.part.copy > 0) for p in inner(self, pp_rank)
    )


def dp_ranks_count_the_same() -> None:
    inner = Buffer.counted

    def counted(self: Buffer) -> list[tuple[int, int]]:
        self.share = 0, self.size
        return inner(self)

    Buffer.counted = counted


def padding_counts_as_zeros() -> None:
    inner = Buffer.counted

    def counted(self: Buffer) -> list[tuple[int, int]]:
        looked_at = sorted(inner(self) + self.counted_elsewhere())
        ends = (
            [0, *(last for _, last in looked_at)],
            [*(first for first, _ in looked_at), self.stop - self.start],
        )
        return inner(self) + [(a, b) for a, b in zip(*ends, strict=True) if a < b]

    Buffer.counted = counted


def the_clip_is_by_the_norm_of_the_own_slices() -> None:
    inner = ParallelAMPOptimizer._clip_factor

    def factor(self: ParallelAMPOptimizer, norm: Tensor) -> Tensor:
        return inner(self, statistics(self._counted_grads, (), self.device)[0].sqrt() / self.scale)

    ParallelAMPOptimizer._clip_factor = factor


def replace_sum_partial(instead: Callable[[Sequence[nn.Parameter], Axis], None]) -> None:
    grad_sync.sum_partial = instead


def shares_are_summed_after_the_norm() -> None:
    def update(
        self: ParallelAMPOptimizer,
        decision: StepDecision,
        settings: StepSettings,
        row_factors: RowFactors | None,
    ) -> None:
        for buffer in self.all_buffers():
            sum_partial(buffer.parameters, self.tp)
        INNER_UPDATE(self, decision, settings, row_factors)

    replace_sum_partial(lambda parameters, tp: None)
    ParallelAMPOptimizer._update = update


def shares_are_averaged() -> None:
    def average(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
        sum_partial(parameters, tp)
        for parameter in parameters:
            layout, gradient = layout_of(parameter), parameter.main_grad.view(-1)  # type: ignore[attr-defined]
            for part, first, last in layout.spans():
                gradient[first:last] /= part.copies if layout.partial else 1

    replace_sum_partial(average)


def copies_of_key_and_value_are_not_summed() -> None:
    replace_sum_partial(
        lambda parameters, tp: sum_partial(
            [p for p in parameters if len(layout_of(p).parts) < 3], tp
        )
    )


def tied_gradients_are_not_summed() -> None:
    inner = ParallelAMPOptimizer.step

    def step(
        self: ParallelAMPOptimizer,
        lr: float | None = None,
        loss: Tensor | None = None,
        counted_tokens: Tensor | float | None = None,
        further: Tensor | None = None,
        limits: StepLimits = NO_LIMITS,
        row_factors: RowFactors | None = None,
    ) -> StepReport:
        self._model_buffers.tied = []
        return inner(self, lr, loss, counted_tokens, further, limits, row_factors)

    ParallelAMPOptimizer.step = step


def gradients_are_averaged_over_dp() -> None:
    inner = Buffer.start_reduce

    def start_reduce(self: Buffer) -> Callable[[], None]:
        finish = inner(self)
        return lambda: (finish(), self.grads.div_(self.dp.size), None)[2]

    Buffer.start_reduce = start_reduce


def a_row_parallel_bias_is_added_by_every_rank() -> None:
    inner = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        y = inner(self, x)
        if self.bias is None:
            return y
        return y + (self.context.tp.size - 1) * self.bias

    RowParallelLinear.forward = forward


def parity(model: str, *layout: int, sequence: bool = False) -> Law:
    def law(bug: Bug, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        test_parity.require_plain_model(
            model, train(Run(test_parity.MODELS[model], sequence=sequence, before=bug), *layout)
        )

    return law


def planted(compute: str = "fp32", **axes: int) -> Law:
    def law(bug: Bug, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        run_ranks(plant_everywhere, axes, compute=compute, zero_size=0, when=(True,), before=bug)

    return law


def on_one_rank(law: Callable[[], None]) -> Law:
    return lambda bug, monkeypatch, folder: run_ranks(with_bug, {}, bug=bug, law=law)


def with_bug(mesh: DeviceMesh, bug: Bug, law: Callable[[], None]) -> None:
    bug()
    law()


def resumed(bug: Bug, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run_ranks(resume_and_compare, {}, folder=folder, before=bug)


def scaled(bug: Bug, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    require_scale_divided_out(before=bug)


def zero_off(bug: Bug, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run = Run(test_parity.MODELS["llama"], before=bug, zero_size=1)
    test_parity.require_plain_model("llama", train(run, 1, 1, 2))


LAWS: list[tuple[Bug, Law]] = [
    (the_scale_is_read_after_the_update, scaled),
    (the_loss_is_scaled_twice, scaled),
    (found_inf_stays_in_the_pipeline_stage, planted(pp=2)),
    (found_inf_stays_in_the_dp_rank, planted(dp=2)),
    (found_inf_stays_in_the_tp_rank, planted(tp=2)),
    (bf16_is_not_checked, planted("bf16")),
    (copies_are_not_checked, planted(tp=2)),
    (a_skipped_step_is_counted, planted()),
    (a_nan_is_a_good_step_to_the_scaler, on_one_rank(require_nan_lowers_the_scale)),
    (a_back_off_refills_the_hysteresis, on_one_rank(require_megatron_trace)),
    (loading_loses_the_growth_counter, on_one_rank(require_state_round_trip)),
    (loading_loses_the_growth_counter, resumed),
    (loading_loses_the_hysteresis_counter, resumed),
    (tied_weights_count_twice, parity("gpt2", 1, 2, 1)),
    (tied_gradients_are_not_summed, parity("gpt2", 1, 2, 1)),
    (the_clip_is_by_the_norm_of_the_own_slices, parity("llama", 1, 2, 1)),
    (dp_ranks_count_the_same, zero_off),
    (gradients_are_averaged_over_dp, parity("llama", 1, 1, 2)),
    (copies_count_tp_times, parity("llama", 2, 1, 1)),
    (padding_counts_as_zeros, parity("llama", 2, 1, 1)),
    (copies_of_key_and_value_are_not_summed, parity("llama", 2, 1, 1)),
    (a_row_parallel_bias_is_added_by_every_rank, parity("gpt2", 2, 1, 1)),
    (shares_are_summed_after_the_norm, parity("llama", 2, 1, 1, sequence=True)),
    (shares_are_averaged, parity("llama", 2, 1, 1, sequence=True)),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(("bug", "law"), LAWS, ids=lambda x: x.__name__ if x in dict(LAWS) else "")
def test_a_test_fails_if(
    bug: Bug, law: Law, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)) as raised:
        law(bug, monkeypatch, tmp_path)
    assert raised.type is AssertionError or "\nAssertionError" in str(raised.value), (
        "it failed for another reason"
    )


def no_bug() -> None:
    pass


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "law",
    [*dict.fromkeys((zero_off, resumed, planted("bf16"), on_one_rank(require_megatron_trace)))],
)
def test_and_holds_without_it(law: Law, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those laws that no other test takes in this layout."""
    law(no_bug, monkeypatch, tmp_path)


def gradients_travel_as_they_are_kept() -> None:
    inner = Buffer.__init__

    def init(
        self: Buffer, parameters: Sequence[nn.Parameter], plan: PrecisionPlan, **others: Any
    ) -> None:
        inner(self, parameters, replace(plan, reduce=plan.gradients), **others)

    setattr(Buffer, "__init__", init)  # noqa: B010  # its arguments are only passed on


def rounding_is_drawn_by_the_place_in_the_own_slice() -> None:
    update_tile.logical_indices = lambda part, first, last, device: torch.arange(
        last - first, device=device
    )


def the_last_group_that_matches_decides() -> None:
    inner = param_groups.factors
    param_groups.factors = lambda part, some: inner(part, some[::-1])


def missing_gradients_are_not_compared() -> None:
    step_agreement.missing_gradients = lambda buffers, by_position=False: []


STATE_LAWS: list[tuple[Bug, Callable[[Bug], None]]] = [
    (gradients_travel_as_they_are_kept, lambda bug: require_planned_travel("bf16", bug)),
    (
        rounding_is_drawn_by_the_place_in_the_own_slice,
        lambda bug: require_same_bits({"tp": 2}, ["no masters"], bug),
    ),
    (
        rounding_is_drawn_by_the_place_in_the_own_slice,
        lambda bug: require_same_bits({"dp": 2}, ["bf16 moments"], bug),
    ),
    (the_last_group_that_matches_decides, lambda bug: require_factors({"dp": 2}, bug)),
    (missing_gradients_are_not_compared, require_branches_noticed),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("bug", "law"), STATE_LAWS, ids=lambda x: x.__name__ if x in dict(STATE_LAWS) else ""
)
def test_a_test_of_what_is_kept_and_agreed_fails_if(bug: Bug, law: Callable[[Bug], None]) -> None:
    with pytest.raises(AssertionError):
        law(bug)
