"""A step reports what its routers did: each token of it once, whatever else is computed."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaprec.optim.decision.step_report import RouterReport, StepReport
from megaprec.precision.plan import LossScaling
from models.engine.engine import Engine
from models.feed_forward.router import Router
from models.feed_forward.router_tally import RouterSums
from parallel.activation_checkpoint import Recompute
from tests import oracle
from tests.layouts import Run, batches, make_engine, share_of, train_all
from tests.models.routers import require_routers
from tests.models.test_parity import MODELS

GLM = Run(MODELS["glm4_moe"], steps=2)
MIXTRAL = Run(MODELS["mixtral"], steps=2)
# as many layers of experts as there may be: all, and the module's beside them
AHEAD = Run({**MODELS["mixtral"], "mtp_layers": 1, "init_std": 0.2}, steps=2)


def reports(run: Run, evaluates: bool = False) -> list[StepReport]:
    """Those of a run in this process, which may evaluate the same samples before each step."""
    engine: Engine = make_engine(None, run)
    found = []
    for number, batch in enumerate(batches(run)):
        share = share_of(None, batch)
        if evaluates:
            engine.evaluate(share)
        found.append(engine.step(share, run.lr, number))
    return found


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "recompute", [Recompute(fraction=1.0), Recompute(("norm", "activation"))], ids=str
)
@pytest.mark.parametrize("run", [GLM, AHEAD], ids=["corrected", "ahead"])
def test_tokens_that_are_recomputed_or_evaluated_do_not_count(
    run: Run, recompute: Recompute
) -> None:
    usual = reports(run)
    assert all(len(report.routers) == (2 if run is GLM else 4) for report in usual)
    assert reports(replace(run, recompute=recompute)) == usual
    assert reports(run, evaluates=True) == usual
    # shares do not show that everything was counted twice
    engine = make_engine(None, replace(run, recompute=recompute))
    engine.accumulate(share_of(None, batches(run)[0]), 0)
    routers = [m for m in engine.stages[0].modules() if isinstance(m, Router)]
    assert len(routers) == len(usual[0].routers)
    for router in routers:
        assert router.tally.sums is not None
        sums = RouterSums.unpacked(router.tally.sums)
        assert sums.choices.sum() == run.samples * run.length * run.config.experts_per_token
        assert sums.samples == run.samples
        assert sums.probabilities.sum() == pytest.approx(run.samples * run.length, rel=1e-8)


@pytest.mark.parametrize("run", [GLM, MIXTRAL], ids=["corrected", "plain"])
def test_each_micro_batch_counts_once_however_many_there_are(run: Run) -> None:
    (four, *_), (one, *_) = (reports(replace(run, micro_batch=size)) for size in (2, 8))
    for router, whole in zip(four.routers, one.routers, strict=True):
        assert router.max_load == whole.max_load
        assert router.min_load == whole.min_load
        assert router.entropy == pytest.approx(whole.entropy, rel=1e-8)
        assert router.balance_loss == pytest.approx(whole.balance_loss, rel=1e-8)


def test_a_skipped_step_counts_once_although_it_is_run_again() -> None:
    """The replay finds the micro-batch: it computes all of them a second time."""
    sound = reports(MIXTRAL)
    scaling = LossScaling("constant", 1.0)
    found = reports(replace(MIXTRAL, steps=3, scaling=scaling, plant=(0, 1, math.inf)))
    assert [report.outcome for report in found] == ["applied", "skipped_overflow", "applied"]
    assert found[1].offenders[0].traced
    assert [report.routers for report in found[:2]] == [report.routers for report in sound]
    # the counts of the third step are of this step alone
    tokens = MIXTRAL.samples * MIXTRAL.length
    for router in found[2].routers:
        assert (router.max_load * tokens).is_integer()
        assert router.max_load <= 1


def test_experts_are_seen_where_nothing_before_them_is_trained() -> None:
    """A frozen router has no backward pass that could count."""
    engine = make_engine(None, MIXTRAL)
    (batch, *_) = batches(MIXTRAL)
    expected = engine.step(share_of(None, batch), MIXTRAL.lr, 0).routers[0]
    frozen = make_engine(None, MIXTRAL)
    for name, parameter in frozen.stages[0].named_parameters():
        if not name.startswith(("head", "layers.2", "final_norm")):
            parameter.requires_grad_(False)
    state = frozen.accumulate(share_of(None, batch), 0)
    further = frozen._step_sums.sum(state)
    assert further is not None
    unread = replace(report_of(()), further=tuple(further.tolist()))
    report = frozen._step_sums.read(unread, state)
    assert report.routers[0] == expected


def test_a_dense_model_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(None, Run(MODELS["llama"], steps=1))
    state = engine.accumulate(share_of(None, batches(Run(MODELS["llama"], steps=1))[0]), 0)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(type(engine.optimizer.world), "sum_", lambda axis, x: sent.append(x))
    assert engine._step_sums.sum(state) is None
    assert not sent


def report_of(routers: tuple[RouterReport, ...], outcome: Any = "applied") -> StepReport:
    return StepReport(outcome, 1.0, 1.0, 0, 0.0, (0,), 1.0, 0.1, routers=routers)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "runs"),
    [
        ({"cp": 2}, [MIXTRAL, GLM]),
        *(
            pytest.param(axes, runs, marks=pytest.mark.slow)
            for axes, runs in (
                ({"dp": 2}, [replace(GLM, options={"shard_gradients": True}), AHEAD]),
                ({"tp": 2, "cp": 2}, [replace(GLM, sequence=True), MIXTRAL]),
                ({"pp": 2, "cp": 2}, [replace(GLM, kind="zb-h1"), AHEAD]),
            )
        ),
    ],
    ids=str,
)
def test_every_layout_reports_the_plain_counts(axes: dict[str, int], runs: list[Run]) -> None:
    before = [result.before for result in train_all([replace(run, steps=0) for run in runs])]
    for run, weights, result in zip(runs, before, train_all(runs, **axes), strict=True):
        records: Any = oracle.train(run.config, weights, batches(run), run.lr, run.clip)
        for report, record in zip(result.reports, records, strict=True):
            require_routers(report, record)
            if run.config.z_loss:
                assert report.z_loss == pytest.approx(record["z_loss"], rel=1e-10)
