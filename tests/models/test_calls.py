"""The step of a small model is mostly the work around its products: calls of functions, and
operators on few numbers. It is counted here, and may not grow unseen.

nanoGPT's step of the same model, with torch's AdamW, takes 3,600 calls and 780 operators.
"""

from functools import cache

import pytest
import torch

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.pipeline.kinds import schedule
from tests.work import calls_of, operators_of

LENGTH = 8
VOCAB = 65


def small_model(layers: int) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        layers=layers,
        hidden=16,
        heads=4,
        vocab=VOCAB,
        mlp="gelu_exact",
        bias=False,
        norm_bias=False,
        max_positions=LENGTH,
    )


@cache
def work_of_a_step(layers: int) -> tuple[int, int]:
    """Calls and operators of one process's step, once the first ones have set everything up."""
    options = EngineOptions(micro_batch=1, seq_length=LENGTH, seed=3)
    engine = Engine.build(small_model(layers), plan("fp32"), None, schedule("1f1b", 1, 1), options)
    ids = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    share = Share(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    for number in range(2):
        assert engine.step(share, 1e-3, number).changed
    calls = calls_of(lambda: engine.step(share, 1e-3, 2))
    operators = operators_of(lambda: engine.step(share, 1e-3, 3))
    return calls, len(operators)


# 834 and 104 with torch 2.13 and Python 3.11
@pytest.mark.parametrize(("number", "most"), [(0, 860), (1, 108)], ids=["calls", "operators"])
def test_a_layer_adds_few_calls_and_operators_to_a_step(number: int, most: int) -> None:
    assert (work_of_a_step(4)[number] - work_of_a_step(2)[number]) / 2 <= most


# 1,588 and 346
@pytest.mark.parametrize(("number", "most"), [(0, 1640), (1, 356)], ids=["calls", "operators"])
def test_a_step_without_its_layers_has_few_calls_and_operators(number: int, most: int) -> None:
    two = work_of_a_step(2)[number]
    four = work_of_a_step(4)[number]
    assert 2 * two - four <= most
