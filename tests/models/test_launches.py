"""Upper bounds of what one layer, and the loss, cost a GPU besides arithmetic: kernels launched and
bytes moved.

They are counted on tensors without storage, where every operator that is no view stands for one
launch, and a compiled leaf or region for one launch in each direction (Inductor makes of most of
them one kernel, of the heads' region three). A change that adds a kernel
to each layer fails here, and one that saves kernels lowers the bound.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.precision import gemm
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.layer import DecoderLayer
from models.decoder.stages import Cut, Stage
from models.estimate.storage import SimulatedAxis, without_storage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.leaves import PLAIN
from tests.launches import Cost, Counting, Fused

TOKENS = 8192
LLAMA_8B: dict[str, Any] = {
    "family": "llama",
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "max_positions": TOKENS,
}


@pytest.fixture(autouse=True)
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the product of a weight gradient adds to its FP32 total by itself."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor, *_: Any, **options: Any) -> None:
        torch.mm(a, b)

    monkeypatch.setattr(gemm, "add_product_", add_product_)


def costs(layers: int, fused: bool, cp: int = 1, ring: bool = True) -> dict[str, Cost]:
    """The costs of the passes of a stage with all of a model, on one of `cp` ranks that share each
    sequence."""
    config = ModelConfig(**LLAMA_8B, layers=layers)
    counting = Counting()
    costs = {name: Cost() for name in ("forward", "loss", "backward")}
    with without_storage("cuda"):
        context = Context(
            plan("bf16"),
            cp=SimulatedAxis("cp", 0, cp),
            ring=ring,
            leaves=Fused(counting) if fused else PLAIN,
        )
        stage = Stage(config.with_zero_weights, context, Cut(0, range(layers), True, True))
        for parameter in stage.parameters():
            parameter.data = parameter.data.bfloat16()  # as the optimizer does
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        ids = torch.zeros(TOKENS // cp, 1, dtype=torch.int64)
        info = MicrobatchInfo(0, torch.arange(1), torch.ones(()))
        with counting:
            counting.cost = costs["forward"]
            logits = stage(ids, info)
            counting.cost = costs["loss"]
            loss = stage.losses(logits, ids).sum()
            counting.cost = costs["backward"]
            loss.backward()
    return costs


def cost_of_layer(fused: bool, cp: int = 1, ring: bool = True) -> dict[str, Cost]:
    """The cost of each further layer."""
    deeper = costs(2, fused, cp, ring)
    shallower = costs(1, fused, cp, ring)
    return {name: deeper[name].without(shallower[name]) for name in ("forward", "backward")}


# fused: (launches, gigabytes) of a layer forward and backward, and of the loss forward
BOUNDS = {
    False: {"forward": (44, 4.45), "backward": (61, 9.63), "loss": (593, 33.7)},
    True: {"forward": (12, 1.65), "backward": (19, 2.12), "loss": (17, 4.21)},
}


@pytest.mark.parametrize("fused", BOUNDS, ids=["by operators", "by regions"])
def test_a_layer_and_the_loss_launch_no_more_kernels_and_move_no_more_bytes(fused: bool) -> None:
    measured = cost_of_layer(fused) | {"loss": costs(1, fused)["loss"]}
    for part, (launches, gigabytes) in BOUNDS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


# fused: (launches, gigabytes) of a layer of half the tokens; products over blocks of scores would
# launch 1,607 kernels forward and 1,869 backward, and move 84 GB
BOUNDS_OF_TWO_RANKS = {
    False: {"forward": (53, 2.62), "backward": (79, 5.74)},
    True: {"forward": (20, 1.15), "backward": (35, 1.90)},
}


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "gather"])
@pytest.mark.parametrize("fused", BOUNDS_OF_TWO_RANKS, ids=["by operators", "by regions"])
def test_a_layer_of_a_sequence_on_two_ranks_launches_no_more_kernels(
    fused: bool, ring: bool
) -> None:
    measured = cost_of_layer(fused, 2, ring)
    for part, (launches, gigabytes) in BOUNDS_OF_TWO_RANKS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


def test_an_operator_more_in_each_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cost_of_layer(fused=True)
    forward = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda *a, **o: forward(*a, **o).clone())
    after = cost_of_layer(fused=True)
    hidden = TOKENS * LLAMA_8B["hidden"] * 2
    assert after["forward"].launches == before["forward"].launches + 1
    assert after["forward"].bytes == before["forward"].bytes + 2 * hidden
