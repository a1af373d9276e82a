"""An engine refuses arguments that it cannot train with before anything is built, and goes on after
a step that ended in an error."""

import math
from typing import Any

import pytest
import torch

from megaprec import plan
from megaprec.errors import UserError
from megaprec.kinds import UnknownArgument
from models import Engine, EngineOptions, Share, preset
from parallel.pipeline import schedule
from tests.refusals import raises

CONFIG = preset("llama-demo", layers=1, hidden=8, heads=2, ffn=8, vocab=16)
OPTIONS = EngineOptions(micro_batch=1, seq_length=4)
ONE_STAGE = schedule("1f1b", 1, 2)


def test_a_vocabulary_that_nobody_knows_is_refused() -> None:
    config = preset("llama-demo", layers=1, hidden=8, heads=2, ffn=8)
    with raises("model.vocab_unknown"):
        Engine.build(config, plan("fp32"), None, ONE_STAGE, OPTIONS)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("config", "llama-demo", "model.config_kind"),
        ("config", {"layers": 1}, "model.config_kind"),
        ("plan", "fp32", "precision.not_a_plan"),
        ("schedule", "1f1b", "model.schedule_kind"),
        ("options", {"micro_batch": 1, "seq_length": 4}, "model.options_kind"),
        ("options", None, "model.options_kind"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(name: str, value: Any, code: str) -> None:
    arguments: dict[str, Any] = {
        "config": CONFIG,
        "plan": plan("fp32"),
        "mesh": None,
        "schedule": ONE_STAGE,
        "options": OPTIONS,
    }
    with raises(code):
        Engine.build(**{**arguments, name: value})


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None])
@pytest.mark.parametrize("name", ["micro_batch", "seq_length"])
def test_a_size_that_is_no_whole_number_is_refused(name: str, size: Any) -> None:
    with raises("parallel.degree", name=name):
        EngineOptions(**{"micro_batch": 1, "seq_length": 4, name: size})


def test_an_option_that_there_is_not_is_refused_with_the_one_meant() -> None:
    options: dict[str, Any] = {"microbatch": 1, "seq_length": 4}
    with pytest.raises(UnknownArgument, match="did you mean micro_batch"):
        EngineOptions(**options)


def _share(ids: torch.Tensor) -> Share:
    return Share(ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("dtype", "lr"),
    [
        (torch.int64, -1.0),  # refused by the optimizer, after all passes
        (torch.int64, math.nan),
        (torch.float32, 1e-2),  # refused by the embedding, in the first pass
    ],
)
def test_the_step_after_one_that_failed_trains_what_it_would_have_trained(
    dtype: torch.dtype, lr: float
) -> None:
    ids = torch.arange(10).view(2, 5)
    losses: list[list[float]] = []
    for fails in (False, True):
        engine = Engine.build(CONFIG, plan("fp32"), None, ONE_STAGE, OPTIONS)
        if fails:
            with pytest.raises(UserError):
                engine.step(_share(ids.flip(1).to(dtype)), lr, number=0)
        reports = [engine.step(_share(ids), 1e-2, number=number) for number in range(2)]
        losses.append([report.loss for report in reports])
    assert losses[0] == losses[1]
