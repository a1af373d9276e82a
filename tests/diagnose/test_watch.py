"""Skipped steps are told apart: a searching scale, instability, and what will not recover."""

import json
from math import nan

import pytest

from megaprec.diagnose.overflow_monitor import OverflowMonitor
from megaprec.optim.decision.step_report import StepReport
from megaprec.precision.plan import LossScaling

DYNAMIC = LossScaling("dynamic", initial=8.0, minimum=1.0)


def watched(scaling: LossScaling, steps: str, scale: float, patience: int = 3) -> OverflowMonitor:
    """After steps such as "..xn": a dot is applied, an x skipped, an n skipped with a loss that is
    NaN."""
    watch = OverflowMonitor(scaling, patience)
    for step in steps:
        loss = nan if step == "n" else 1.0
        watch.note(
            StepReport(
                "applied" if step == "." else "skipped_overflow",
                loss,
                1.0,
                0,
                0.0,
                (0,),
                scale,
                0.1,
            )
        )
    return watch


@pytest.mark.parametrize(
    ("scaling", "steps", "scale", "hopeless"),
    [
        (DYNAMIC, "xxx", 1.0, True),
        (DYNAMIC, "xxx", 2.0, False),
        (DYNAMIC, "xx.xx", 1.0, False),
        (DYNAMIC, "xx", 1.0, False),
        (DYNAMIC, ".nnn", 2.0**32, True),
        (DYNAMIC, ".nnxnn", 2.0**32, False),
        (DYNAMIC, "nn.nn", 2.0**32, False),
        (LossScaling("none"), "..xxx", 1.0, True),
        (LossScaling("constant", 1024.0), "xxx", 1024.0, True),
    ],
)
def test_training_is_hopeless_after_as_many_skips_in_a_row_as_are_borne_that_no_lower_scale_helps(
    scaling: LossScaling, steps: str, scale: float, hopeless: bool
) -> None:
    assert watched(scaling, steps, scale).hopeless == hopeless


@pytest.mark.parametrize(
    ("scaling", "steps", "scale", "said"),
    [
        (DYNAMIC, "xxxx", 4.0, "4 in a row at the start: normal"),
        (DYNAMIC, "." * 999 + "x", 4.0, "1 in the last 1000 steps: normal while the scale adapts"),
        (
            DYNAMIC,
            "." * 50 + "x." * 20,
            4.0,
            "20 in the last 90 steps: more than an adapting scale explains",
        ),
        (
            DYNAMIC,
            ".nn",
            4.0,
            (
                "2 in a row in which the loss itself was not finite, which a lower scale cannot "
                "help: this"
            ),
        ),
        (DYNAMIC, "." + "x" * 12, 1.0, "12 in a row at the minimum scale: this will not recover"),
        (LossScaling("none"), ".x", 1.0, "1 in the last 2 steps: without a loss scale"),
        (
            LossScaling("constant", 2.0**22),
            ".x",
            2.0**22,
            "1 in the last 2 steps: the gradients do not fit; lower prec",
        ),
        (
            LossScaling("constant", 2.0**22),
            "xx",
            2.0**22,
            "2 in a row at a constant scale: this will not recover",
        ),
        (
            LossScaling("none"),
            ".xx",
            1.0,
            "2 in a row and there is no scale to lower: this will not recover",
        ),
    ],
)
def test_the_advice_says_whether_to_care(
    scaling: LossScaling, steps: str, scale: float, said: str
) -> None:
    assert said in watched(scaling, steps, scale).advice()


@pytest.mark.parametrize("scaling", [DYNAMIC, LossScaling("constant", 4.0), LossScaling("none")])
def test_no_scale_is_blamed_or_trusted_where_the_loss_itself_is_not_finite(
    scaling: LossScaling,
) -> None:
    watch = watched(scaling, ".", 4.0)
    for _ in range(2):
        watch.note(
            StepReport("skipped_overflow", float("nan"), float("nan"), 0, 0.0, (0,), 4.0, 0.1)
        )
        assert "lower the learning rate" in watch.advice()
        assert "normal" not in watch.advice()
        assert "loss_scale" not in watch.advice()


@pytest.mark.parametrize(("steps", "more"), [(".nn", "n"), ("xx", "x")])
def test_a_watch_goes_on_counting_where_it_was_saved_and_has_hope_again_when_it_had_lost_it(
    steps: str, more: str
) -> None:
    saved = json.loads(json.dumps(watched(DYNAMIC, steps, 1.0).state_dict()))
    for left, hopeless in (
        (saved, True),
        (watched(DYNAMIC, steps + more, 1.0).state_dict(), False),
    ):
        resumed = OverflowMonitor(DYNAMIC, 3)
        resumed.load_state_dict(left)
        assert not resumed.hopeless
        resumed.note(StepReport("skipped_overflow", nan, 1.0, 0, 0.0, (0,), 1.0, 0.1))
        assert resumed.hopeless == hopeless
