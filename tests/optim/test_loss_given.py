"""The loss that a step reports is the loss, however many ranks hold it, and ranks that differ about
it are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.errors import UserError
from megaprec.optim.decision.step_report import describe
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from parallel.context import Context
from parallel.plain_modules import parallelize
from tests.ranks import run_ranks
from tests.refusals import shows

Given = Callable[[Tensor, Axis, Axis], Tensor | None]


def model_of(tp: Axis, prefix: str = "") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return parallelize(
        layers, Context(plan("fp32"), tp), {"0": "column", "1": "row"}, prefix=prefix
    )


def loss_of(model: nn.Module, replica: int) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(replica))
    return model(x).square().mean()


GIVEN: dict[str, Given] = {
    "all": lambda loss, tp, pp: loss,
    "first": lambda loss, tp, pp: loss if tp.rank == 0 else None,
    "zeros": lambda loss, tp, pp: loss if tp.rank == 0 else loss * 0,
    "last alone": lambda loss, tp, pp: loss if tp.rank == 1 else None,
    "rounded": lambda loss, tp, pp: loss * (1 + 1e-6 * tp.rank),
    "parts": lambda loss, tp, pp: loss * (1 + tp.rank),
    "not a number": lambda loss, tp, pp: loss / 0 * 0 if tp.rank == 1 else loss,
    "all stages": lambda loss, tp, pp: loss,
    "last stage": lambda loss, tp, pp: loss if pp.rank == 1 else None,
}


def reported(mesh: DeviceMesh, given: list[str]) -> dict[str, list[float] | str]:
    """What a step reports and what it should, the mean over replicas or their sum; or the line that
    refuses it."""
    tp = Axis.of(mesh, "tp")
    pp = Axis.of(mesh, "pp")
    dp = Axis.replicas(mesh)
    answers: dict[str, list[float] | str] = {}
    for name in given:
        for average in (False, True):
            model = model_of(tp, f"stage{pp.rank}.")
            optimizer = ParallelAMPOptimizer([model], plan("fp32"), mesh, lr=1e-2, average=average)
            losses = [loss_of(model, replica).item() for replica in range(dp.size)]
            expected = sum(losses) / (dp.size if average else 1)
            loss = loss_of(model, dp.rank)
            loss.backward()
            try:
                report = optimizer.step(loss=GIVEN[name](loss.detach(), tp, pp))
                answers[f"{name}, average={average}"] = [report.loss, expected]
            except UserError as error:
                answers[f"{name}, average={average}"] = str(error)
    return answers


REFUSED = {
    "parts": "optimizer.losses_differ_over_tensor_ranks",
    "last alone": "optimizer.losses_differ_over_tensor_ranks",
    "all stages": "optimizer.loss_on_all_stages",
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "given"),
    [
        ({"tp": 2}, ["all", "first", "zeros", "rounded", "parts", "last alone", "not a number"]),
        ({"dp": 2, "tp": 2}, ["all", "first"]),
        ({"cp": 2, "tp": 2}, ["all"]),
        ({"pp": 2}, ["last stage", "all stages"]),
    ],
    ids=str,
)
def test_the_reported_loss_is_the_loss_whichever_ranks_give_it_or_every_rank_refuses(
    axes: dict[str, int], given: list[str]
) -> None:
    for answers in run_ranks(reported, axes, given=given):
        for name, answer in answers.items():
            kind = name.split(",")[0]
            if kind in REFUSED:
                assert shows(answer, REFUSED[kind])
                continue
            loss, expected = answer
            if kind == "not a number":
                assert loss != loss
                continue
            assert loss == pytest.approx(expected, rel=1e-5)


SOME: dict[str, tuple[int, ...]] = {"all": (0, 1), "first": (0,), "second": (1,), "none": ()}


def of_replicas(mesh: DeviceMesh | None, canonical: bool) -> dict[str, float | str]:
    """What a step reports if some replicas give it their loss, by whether it is to be averaged and
    by who gives it."""
    dp = Axis.replicas(mesh) if mesh else Axis("dp")
    answers: dict[str, float | str] = {}
    for average in (False,) if canonical else (False, True):
        for name, given in SOME.items():
            model = model_of(Axis("tp"))
            optimizer = ParallelAMPOptimizer(
                [model], plan("fp32"), mesh, lr=1e-2, average=average, canonical=canonical
            )
            loss = loss_of(model, dp.rank)
            loss.backward()
            if canonical:
                optimizer.end_microbatch(0, 1)
            try:
                report = optimizer.step(loss=loss.detach() if dp.rank in given else None)
                answers[f"{name} {average}"] = report.loss
                assert report.outcome == "applied"
                assert report.offenders == ()
            except UserError as error:
                answers[f"{name} {average}"] = str(error)
    return answers


@pytest.mark.parametrize("canonical", [False, True])
def test_a_loss_that_no_rank_gave_is_reported_as_nan_and_a_mean_of_some_replicas_is_refused(
    canonical: bool,
) -> None:
    model = model_of(Axis("tp"))
    first, second = (loss_of(model, replica).item() for replica in (0, 1))
    shares = {"all": first + second, "first": first, "second": second}
    for answers in run_ranks(of_replicas, {"dp": 2}, canonical=canonical):
        assert {name: answers[f"{name} False"] for name in shares} == pytest.approx(
            shares, rel=1e-6
        )
        assert answers["none False"] != answers["none False"]
        if canonical:
            continue
        assert answers["all True"] == pytest.approx((first + second) / 2, rel=1e-6)
        assert answers["none True"] != answers["none True"]
        for name in ("first", "second"):
            assert shows(
                str(answers[f"{name} True"]),
                "optimizer.loss_on_some_replicas",
                num_given=1,
                size=2,
            )
    alone = of_replicas(None, canonical)
    assert alone["none False"] != alone["none False"]
    assert alone["first False"] == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_step_that_is_skipped_for_its_loss_alone_names_the_loss(loss: float) -> None:
    model = model_of(Axis("tp"))
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=1e-2)
    loss_of(model, 0).backward()
    report = optimizer.step(loss=torch.tensor(loss))
    assert report.outcome == "skipped_overflow"
    (offender,) = report.offenders
    assert (offender.name, offender.nans, offender.infs) == (
        "loss",
        int(loss != loss),
        int(loss == loss),
    )
    assert "loss (stage 0, tensor rank 0)" in describe(report)
