"""Print the counts of docs/gpu.md: python -m tests.models.counted_page.

Launches and bytes are counted on tensors without storage (`tests.launches`). Times are those bytes
at a speed of memory, and FLOPs at speeds of products and of attention: estimates of an H100, which
no GPU has confirmed. What only a GPU can tell, such as the time of a launch, is not in them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.fp8.quantize import quantize_both
from megaprec.optim.decision.grad_stats import statistics
from megaprec.optim.decision.one_pass import adamw_numbers, runs, update_in_one_pass
from megaprec.optim.model_buffers import buckets
from megaprec.optim.rules.update_rules import Step
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision import gemm
from megaprec.precision.fp8_recipe import FP8Recipe, Kind
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.estimate.storage import without_storage
from models.feed_forward import grouped_products
from models.feed_forward.moe import MixtureOfExperts
from models.parameter_counts import num_parameters
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.leaves import PLAIN
from tests.launches import Cost, Counting, Fused
from tests.models.test_launches import LLAMA_8B, LLAMA_70B, TOKENS, Rank, cost_of_layer, costs
from tests.optim.test_one_pass import RULE, AsOneLaunch, tile_of

# assumed of an H100 (SXM), whose data sheet has 989 TFLOP/s and 3.35 TB/s: what products, attention
# and memory reach
PRODUCTS = 680e12
ATTENTION_FORWARD = 550e12
ATTENTION_BACKWARD = 450e12
MEMORY = 2.7e12
PEAK = 989e12
UPDATED = 1 << 26  # weights, in four of the longest runs
LAYERS = 8  # of the step whose MFU is estimated
MICROBATCHES = 4
MIXTRAL: dict[str, Any] = {
    "family": "mixtral",
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 32000,
    "experts": 8,
    "layers": 1,
}


@dataclass(frozen=True)
class Part:
    """What a part of a step launches and moves, operator by operator and compiled."""

    name: str
    plain: Cost
    compiled: Cost

    def row(self) -> str:
        cells = [_cell(self.plain), _cell(self.compiled)]
        return f"| {self.name} | {' | '.join(cells)} |"


def _cell(cost: Cost) -> str:
    return f"{cost.launches:,} | {cost.bytes / 1e9:.2f} | {_milliseconds(cost):.2f}"


def _milliseconds(cost: Cost) -> float:
    return 1e3 * cost.bytes / MEMORY


def _sum(*some: Cost) -> Cost:
    return Cost(sum(cost.launches for cost in some), sum(cost.bytes for cost in some))


def parts() -> Iterator[Part]:
    """Yield the rows of the table, each of forward and backward pass together."""
    with patch.object(gemm, "add_product_", _wide_product):
        yield _of_layer(LAYER, Rank())
        yield _of_layer("the same, half of a sequence on each of two ranks", Rank(cp=2))
        yield _of_layer("a layer of Llama 3 70B on one of eight tensor ranks", _EIGHTH)
        yield _of_loss()
        yield _part("the experts of a layer of Mixtral 8x7B, on one GPU", _cost_of_experts)
    yield _part(UPDATE, _cost_of_update)
    for kind in ("delayed", "current", "rowwise", "blockwise"):
        name = f"FP8, {kind}: an input of {TOKENS:,} x {LLAMA_8B['hidden']:,}, both ways"
        yield _part(name, lambda fused, kind=kind: _cost_of_cast(kind, fused))


LAYER = "a layer of Llama 3 8B"
LOSS = f"the loss of {LLAMA_8B['vocab']:,} words"
UPDATE = f"norm, zeros and AdamW's update of {UPDATED:,} bf16 weights"
_EIGHTH = Rank(tp=8, model=LLAMA_70B)


def _part(name: str, cost: Callable[[bool], Cost]) -> Part:
    return Part(name, cost(False), cost(True))


def _wide_product(total: Tensor, a: Tensor, b: Tensor, *_: Any, **options: Any) -> None:
    """On a GPU the product of a weight gradient adds to its FP32 total by itself."""
    torch.mm(a, b)


def _of_layer(name: str, rank: Rank) -> Part:
    return _part(name, lambda fused: _sum(*cost_of_layer(fused, rank).values()))


def _of_loss() -> Part:
    def of_both_passes(fused: bool) -> Cost:
        measured = costs(1, fused)
        return _sum(measured["loss"], measured["loss backward"])

    return _part(LOSS, of_both_passes)


class _SumsInTriton:
    """In place of `grouped_sums`, whose kernel moves what a product moves."""

    def add_products_(self, totals: Tensor, *_: Any, **options: Any) -> None:
        torch.mm(totals[0], totals[0].t())


def _cost_of_experts(fused: bool) -> Cost:
    """Return the cost of a micro-batch that is not the first of its step."""
    config = ModelConfig(**MIXTRAL)
    precision = plan("bf16")
    counting = Counting()
    leaves = Fused(counting) if fused else PLAIN
    sums = _SumsInTriton()
    with (
        patch.object(grouped_products, "sums_in_triton", lambda _: sums),
        without_storage("cuda"),
    ):
        context = Context(precision, leaves=leaves)
        layer = MixtureOfExperts(config.with_zero_weights, context, "mlp")
        for bucket in buckets([*layer.parameters()], precision, 1, whole_groups=True):
            Buffer(bucket, precision, Axis("dp"), Axis("zero"), 0, torch.device("meta"))
        x = torch.empty(TOKENS, 1, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        info = MicrobatchInfo(0, torch.arange(1), torch.ones(()))
        for _ in range(2):
            counting.cost = Cost()
            with counting:
                y = layer(x, info)
                y.backward(torch.empty_like(y))
    assert counting.cost is not None
    return counting.cost


def _cost_of_cast(kind: Kind, fused: bool) -> Cost:
    counting = Counting()
    leaves = Fused(counting) if fused else PLAIN
    amaxes = list[Tensor]()
    with without_storage("cuda"):
        x = torch.empty(TOKENS, LLAMA_8B["hidden"], dtype=torch.bfloat16)
        scale = torch.ones(()) if kind == "delayed" else None
        note_amax = amaxes.append if kind == "delayed" else None
        with counting:
            counting.cost = Cost()
            recipe = FP8Recipe(kind)
            quantize_both(x, recipe, "input", scale, leaves=leaves, note_amax=note_amax)
    return counting.cost


def _cost_of_update(fused: bool) -> Cost:
    """Return the cost of norm, zeros and AdamW's update of as many weights as UPDATED says."""
    meta = torch.device("meta")
    tile = tile_of(UPDATED, meta)
    step = Step(0.1, 0.1, *torch.ones(3, device=meta).unbind())
    tiles_of_runs = [tile_of(stop - start, meta) for start, stop in runs(0, UPDATED)]
    counting = Counting()
    call = AsOneLaunch(counting)
    with counting, torch.no_grad():
        if fused:
            statistics([tile.grads], [], meta, call)
            numbers = adamw_numbers(RULE, step)
            for of_run in tiles_of_runs:
                update_in_one_pass(call, of_run, RULE, numbers, _refuse)
        else:
            statistics([tile.grads], [], meta)
            assert tile.masters is not None
            moments = [values for _, values in tile.moments]
            RULE.update_(tile.masters, tile.grads, moments, step)
            tile.weights.copy_(tile.masters)
    assert counting.cost is not None
    return counting.cost


def _refuse() -> None:
    raise AssertionError("not compiled")


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step of LAYERS layers of Llama 3 8B with its head, and FLOPs that count, as
    if attention were not causal."""

    seconds: float
    flops: float

    @property
    def mfu(self) -> float:
        return self.flops / self.seconds / PEAK


def estimate_of_layer(layer: Cost) -> Estimate:
    """Return the time of both passes of a layer in a micro-batch of TOKENS tokens."""
    hidden = LLAMA_8B["hidden"]
    key_value = hidden * LLAMA_8B["kv_heads"] // LLAMA_8B["heads"]
    weights = 2 * hidden * (hidden + key_value) + 3 * hidden * LLAMA_8B["ffn"]
    products = 6 * weights * TOKENS
    attention = 4 * TOKENS * TOKENS * hidden
    # half of the square is computed; the backward pass has five products where forward has two
    seconds = products / PRODUCTS + layer.bytes / MEMORY
    seconds += attention / 2 / ATTENTION_FORWARD + 2.5 * attention / 2 / ATTENTION_BACKWARD
    return Estimate(seconds, products + 3 * attention)


def estimate_of_step(layer: Cost, loss: Cost, update: Cost) -> Estimate:
    """Return the time of a step of MICROBATCHES micro-batches. update: of UPDATED weights."""
    one = estimate_of_layer(layer)
    hidden = LLAMA_8B["hidden"]
    words = LLAMA_8B["vocab"] * hidden
    head = 6 * words * TOKENS
    parameters = num_parameters(ModelConfig(**LLAMA_8B, layers=LAYERS))
    seconds = LAYERS * one.seconds + head / PRODUCTS + loss.bytes / MEMORY
    update_seconds = parameters / UPDATED * update.bytes / MEMORY
    flops = MICROBATCHES * (LAYERS * one.flops + head)
    return Estimate(MICROBATCHES * seconds + update_seconds, flops)


def lines() -> Iterator[str]:
    """Yield the table, and the estimates of a layer and of a step."""
    every = {part.name: part for part in parts()}
    yield "| of 8,192 tokens, both passes | launches | GB | ms | compiled: launches | GB | ms |"
    yield "|---|---|---|---|---|---|---|"
    for part in every.values():
        yield part.row()
    yield ""
    yield "| estimate | layer, ms | MFU | step, ms | tokens/s | MFU |"
    yield "|---|---|---|---|---|---|"
    layer, loss, update = (every[name] for name in (LAYER, LOSS, UPDATE))
    plain = (layer.plain, loss.plain, update.plain)
    compiled = (layer.compiled, loss.compiled, update.compiled)
    for name, of_way in (("operator by operator", plain), ("compiled", compiled)):
        of_layer = estimate_of_layer(of_way[0])
        step = estimate_of_step(*of_way)
        tokens_per_second = MICROBATCHES * TOKENS / step.seconds
        yield (
            f"| {name} | {1e3 * of_layer.seconds:.1f} | {of_layer.mfu:.0%} | "
            f"{1e3 * step.seconds:.0f} | {tokens_per_second:,.0f} | {step.mfu:.0%} |"
        )


if __name__ == "__main__":
    print("\n".join(lines()))
