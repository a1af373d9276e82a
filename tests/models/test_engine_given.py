"""What an engine cannot be made of is refused by name, before anything is built."""

from typing import Any

import pytest

from megaprec import UserError, plan
from models import Engine, preset
from models.engine.options import EngineOptions
from parallel.pipeline import schedule

GOOD: dict[str, Any] = {
    "config": preset("llama-demo", vocab=8, layers=1, hidden=8, heads=2, ffn=8),
    "plan": plan("fp32"),
    "mesh": None,
    "schedule": schedule("1f1b", 1, 1),
    "options": EngineOptions(micro_batch=1, seq_length=4),
}


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("config", ["llama-demo", None, {"layers": 2}], "must be a ModelConfig"),
        ("config", [preset("llama-demo")], "config.vocab = 0"),
        ("plan", ["bf16", None], "must be a PrecisionPlan"),
        ("schedule", ["1f1b", None], "must be a Schedule"),
    ],
)
def test_an_argument_of_another_kind_and_a_vocabulary_that_nobody_knows_are_refused(
    name: str, values: list[Any], says: str
) -> None:
    for value in values:
        with pytest.raises(UserError, match=rf"^{name}.*{says.removeprefix('config')}"):
            Engine.build(**GOOD | {name: value})
