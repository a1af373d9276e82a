"""The closed forms of a layer's bytes and a walk of its operators grow together.

The closed forms count what fused kernels move; a walk counts every operator by itself, which moves
more. By how much is a constant of each part of a layer: of the activation function, of rotary
positions and heads, of norms and residual sums, and of the way to the experts and back. A layer
with an operator more or less changes it, and then the closed form has to be looked at.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from models.decoder.stages import Cut
from models.estimate.elementwise import LayerShare, forward_bytes
from tests.planning.walked import walked_bytes
from tools.config.run_file import RunConfig, load_run

TOKENS = 512
BASE: Mapping[str, Any] = {
    "layers": 2,
    "hidden": 512,
    "heads": 4,
    "head_dim": 128,
    "ffn": 1024,
    "vocab": 4096,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "dense": {"family": '"llama"'},
    "experts": {"family": '"mixtral"', "experts": 8, "experts_per_token": 2},
}
# family, what is doubled, and the bytes of the walk by those of the closed form
GROWTHS = (
    # reads gate and up and writes three times a half: the sigmoid, its product and the result
    ("dense", "ffn", 5 / 3),
    ("dense", "heads", 5.501953125),
    ("dense", "hidden", 3.501953125),
    ("experts", "ffn", 5 / 3),
    ("experts", "experts_per_token", 1.81640625),
)


def config_of(family: str, changed: str) -> RunConfig:
    """Return the run of a family with a size that is doubled; "": none."""
    model = {**BASE, **FAMILIES[family]}
    if changed:
        model[changed] *= 2
    keys = [f"model.{name}={value}" for name, value in model.items()]
    keys += [
        'precision.compute="bf16"',
        "train.steps=1",
        "train.global_batch=1",
        "train.micro_batch=1",
        f"train.seq_length={TOKENS}",
    ]
    return load_run(None, keys).on_device("cuda")


@cache
def walked(family: str, changed: str) -> int:
    """Return the bytes of the walk."""
    return walked_bytes(config_of(family, changed))


def closed(family: str, changed: str) -> float:
    """Return the bytes of the closed form."""
    config = config_of(family, changed)
    cut = Cut(1, range(1, 2), first=False, last=False)
    of_token = forward_bytes(config.sized_model, cut, cut.layers, config.plan, LayerShare())
    return TOKENS * of_token


@pytest.mark.parametrize(("family", "changed", "unfused"), GROWTHS)
def test_a_layers_bytes_grow_as_those_of_its_operators(
    family: str, changed: str, unfused: float
) -> None:
    walked_growth = walked(family, changed) - walked(family, "")
    closed_growth = closed(family, changed) - closed(family, "")
    assert walked_growth / closed_growth == pytest.approx(unfused, rel=1e-3)


def test_an_expert_layer_moves_more_than_a_dense_one_in_both() -> None:
    """Of as many tokens: its rows go to experts and come back."""
    assert walked("experts", "") > walked("dense", "")
    assert closed("experts", "") > closed("dense", "")
