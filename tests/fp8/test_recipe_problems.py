"""A recipe whose settings do not go together is refused by the name of the one that is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megaprec.errors import UserError
from megaprec.precision import fp8_recipe
from megaprec.precision.fp8_recipe import FP8Recipe


def largest(history: Tensor) -> Tensor:
    return history.amax(0)


CURRENT: dict[str, Any] = {"kind": "current"}
FOUR_BITS: dict[str, Any] = {"kind": "nvfp4"}
# settings, each wrong in one way, and the code of the problem
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"history_length": 0}, "history_length"),
    ({"margin": 33}, "margin_range"),
    ({"margin": -33}, "margin_range"),
    ({**CURRENT, "margin": 1}, "margin"),
    ({**CURRENT, "calibrate": 1}, "calibrate"),
    ({**CURRENT, "history": "te"}, "history_kind"),
    ({"history": "te", "parameters": True}, "history_weights"),
    ({"history": "te", "calibrate": 1}, "history_weights"),
    ({"history": "te", "calibrating": True}, "history_weights"),
    ({"history": "te", "amax_algo": largest}, "history_function"),
    ({"parameters": True, "calibrate": 1}, "parameters_calibrated"),
    ({"parameters": True, "calibrating": True}, "parameters_calibrated"),
    ({"first_layers": -1}, "negative_layers"),
    ({"last_layers": -1}, "negative_layers"),
    ({"kind": "mx", "backend": "transformer_engine"}, "backend_kind"),
    ({**FOUR_BITS, "parameters": True}, "nvfp4_parameters"),
    ({**FOUR_BITS, "pad": True}, "nvfp4_pad"),
]
RIGHT: list[dict[str, Any]] = [
    {"margin": 32},
    {"margin": -32},
    {"history_length": 1, "margin": 1, "calibrate": 1, "amax_algo": largest},
    {"history": "te", "pad": True, "first_layers": 1, "last_layers": 1},
    {"parameters": True, "pad": True, "backend": "transformer_engine"},
    {**CURRENT, "parameters": True, "pad": True, "backend": "transformer_engine"},
    {"kind": "mx", "parameters": True, "pad": True},
    FOUR_BITS,
]


@pytest.mark.parametrize(("settings", "code"), WRONG)
def test_what_is_wrong_with_a_recipe_is_said_alone(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as refused:
        FP8Recipe(**settings)
    assert [problem.code for problem in refused.value.problems] == [f"fp8.{code}"]


@pytest.mark.parametrize("settings", RIGHT)
def test_settings_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    FP8Recipe(**settings)


def test_every_problem_of_a_recipe_is_tried() -> None:
    source = Path(fp8_recipe.__file__).read_text()
    codes = set(re.findall(r'Problem\.of\(\s*"fp8\.(\w+)"', source))
    assert codes == {code for _, code in WRONG}
