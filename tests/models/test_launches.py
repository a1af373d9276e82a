"""Upper bounds of what one layer, the loss, and FP8 casts cost a GPU besides arithmetic: kernels
launched and bytes moved.

They are counted on tensors without storage, where every operator that is no view stands for one
launch, and a compiled leaf or region for one launch in each direction (Inductor makes of most of
them one kernel, of the heads' region three). A rank of any layout is counted alone; messages are
none of its launches. A change that adds a kernel to each layer fails here, and one that saves
kernels lowers the bound.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.fp8.quantize import quantize_both
from megaprec.fp8.state import ROLES
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
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
LLAMA_70B = {**LLAMA_8B, "hidden": 8192, "heads": 64, "ffn": 28672}


@pytest.fixture(autouse=True)
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the product of a weight gradient adds to its FP32 total by itself."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor, *_: Any, **options: Any) -> None:
        torch.mm(a, b)

    monkeypatch.setattr(gemm, "add_product_", add_product_)


PASSES = ("forward", "loss", "loss backward", "backward")


@dataclass(frozen=True)
class Rank:
    """One rank of a layout, with a stage that holds all of a model. Its tp ranks share the
    activations between products."""

    tp: int = 1
    cp: int = 1
    ring: bool = True
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)


ALONE = Rank()


def costs(layers: int, fused: bool, rank: Rank = ALONE) -> dict[str, Cost]:
    """The costs of the passes of a rank."""
    config = ModelConfig(**rank.model, layers=layers)
    counting = Counting()
    costs = {name: Cost() for name in PASSES}
    with without_storage("cuda"):
        context = Context(
            plan("bf16"),
            SimulatedAxis("tp", 0, rank.tp),
            rank.tp > 1,
            cp=SimulatedAxis("cp", 0, rank.cp),
            ring=rank.ring,
            leaves=Fused(counting) if fused else PLAIN,
        )
        stage = Stage(config.with_zero_weights, context, Cut(0, range(layers), True, True))
        for parameter in stage.parameters():
            parameter.data = parameter.data.bfloat16()  # as the optimizer does
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
        ids = torch.zeros(TOKENS // rank.cp, 1, dtype=torch.int64)
        info = MicrobatchInfo(0, torch.arange(1), torch.ones(()))
        with counting:
            counting.cost = costs["forward"]
            logits = stage(ids, info)
            counting.cost = costs["loss"]
            loss = stage.losses(logits, ids).sum()
            counting.cost = costs["loss backward"]
            (gradient,) = torch.autograd.grad(loss, logits)
            counting.cost = costs["backward"]
            logits.backward(gradient)
    return costs


def cost_of_layer(fused: bool, rank: Rank = ALONE) -> dict[str, Cost]:
    """The cost of each further layer."""
    deeper = costs(2, fused, rank)
    shallower = costs(1, fused, rank)
    return {name: deeper[name].without(shallower[name]) for name in ("forward", "backward")}


# fused: (launches, gigabytes) of a layer and of the loss. The bf16 logits have 2.10 gigabytes:
# fused, the loss reads them once, and its backward pass reads and overwrites them once.
BOUNDS = {
    False: {
        "forward": (44, 4.45),
        "backward": (61, 9.39),
        "loss": (593, 33.7),
        "loss backward": (522, 46.3),
    },
    True: {
        "forward": (11, 1.52),
        "backward": (19, 2.12),
        "loss": (6, 2.11),
        "loss backward": (3, 4.21),
    },
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fused", BOUNDS, ids=["by operators", "by regions"])
def test_a_layer_and_the_loss_launch_no_more_kernels_and_move_no_more_bytes(fused: bool) -> None:
    of_one = costs(1, fused)
    of_loss = {name: of_one[name] for name in ("loss", "loss backward")}
    measured = cost_of_layer(fused) | of_loss
    for part, (launches, gigabytes) in BOUNDS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


# fused: (launches, gigabytes) of a layer of half the tokens; products over blocks of scores would
# launch 1,607 kernels forward and 1,869 backward, and move 84 GB
BOUNDS_OF_TWO_RANKS = {
    False: {"forward": (53, 2.62), "backward": (79, 5.62)},
    True: {"forward": (20, 1.15), "backward": (35, 1.90)},
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "gather"])
@pytest.mark.parametrize("fused", BOUNDS_OF_TWO_RANKS, ids=["by operators", "by regions"])
def test_a_layer_of_a_sequence_on_two_ranks_launches_no_more_kernels(
    fused: bool, ring: bool
) -> None:
    measured = cost_of_layer(fused, Rank(cp=2, ring=ring))
    for part, (launches, gigabytes) in BOUNDS_OF_TWO_RANKS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


BOUNDS_OF_EIGHT_RANKS = {
    False: {"forward": (46, 1.39), "backward": (62, 2.62)},
    True: {"forward": (13, 0.68), "backward": (21, 0.83)},
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fused", BOUNDS_OF_EIGHT_RANKS, ids=["by operators", "by regions"])
def test_a_layer_of_70b_on_eight_tensor_ranks_launches_no_more_kernels(fused: bool) -> None:
    measured = cost_of_layer(fused, Rank(tp=8, model=LLAMA_70B))
    for part, (launches, gigabytes) in BOUNDS_OF_EIGHT_RANKS[fused].items():
        assert measured[part].launches <= launches, part
        assert measured[part].bytes <= gigabytes * 1e9, part


@pytest.mark.slow
def test_an_operator_more_in_each_layer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cost_of_layer(fused=True)
    forward = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda *a, **o: forward(*a, **o).clone())
    after = cost_of_layer(fused=True)
    hidden = TOKENS * LLAMA_8B["hidden"] * 2
    assert after["forward"].launches == before["forward"].launches + 1
    assert after["forward"].bytes == before["forward"].bytes + 2 * hidden


# of one matrix: (launches, bytes an element) by operators, and as leaves. Two bytes are read by
# each leaf, and two are written: the codes of the matrix and of its transpose. A delayed cast finds
# the amax for the scales of later steps too, in the same leaf.
CAST_BOUNDS: dict[Kind, dict[bool, tuple[int, float]]] = {
    "delayed": {False: (13, 47.01), True: (1, 4.01)},
    "current": {False: (24, 47.01), True: (2, 6.01)},
    "rowwise": {False: (46, 106.1), True: (1, 4.01)},
    "blockwise": {False: (48, 123.3), True: (1, 4.07)},
}


@pytest.mark.parametrize("fused", [False, True], ids=["by operators", "by leaves"])
@pytest.mark.parametrize("kind", CAST_BOUNDS)
def test_fp8_casts_launch_no_more_kernels_and_move_no_more_bytes(kind: Kind, fused: bool) -> None:
    launches, bytes_per_element = CAST_BOUNDS[kind][fused]
    recipe = FP8Recipe(kind)
    amaxes = list[Tensor]()
    for role in ROLES:
        counting = Counting()
        leaves = Fused(counting) if fused else PLAIN
        with without_storage("cuda"):
            x = torch.empty(TOKENS, LLAMA_8B["hidden"], dtype=torch.bfloat16)
            scale = torch.ones(()) if kind == "delayed" else None
            with counting:
                counting.cost = Cost()
                note_amax = amaxes.append if kind == "delayed" else None
                quantize_both(x, recipe, role, scale, leaves=leaves, note_amax=note_amax)
        assert counting.cost.launches <= launches, role
        assert counting.cost.bytes <= bytes_per_element * x.numel(), role
