"""Replicas that share out the drawing of initial weights have the bits of one that draws all."""

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from megaprec.comm.random import normal_part, normal_range
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine import shared_drawing
from models.engine.engine import Engine, build_stages
from models.engine.options import EngineOptions
from models.engine.shared_drawing import draw_weights
from models.parameter_counts import num_parameters
from parallel.pipeline.kinds import schedule
from tests.models.test_memory import allocations
from tests.ranks import run_ranks

LLAMA: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 61,
}
MODELS = {
    "llama": LLAMA,
    "gpt2, tied": {**LLAMA, "family": "gpt2", "kv_heads": 4, "max_positions": 16, "tied": True},
    "experts": {**LLAMA, "family": "mixtral", "experts": 4},
    "correction of routers": {
        **LLAMA,
        "family": "deepseek_v3",
        "experts": 4,
        "router_correction_speed": 0.001,
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "masters": {},
    "split": {"masters": "split"},
    "none": {"masters": "none", "rounding": "stochastic"},
}


def weights_of(engine: Engine) -> list[Tensor]:
    """This rank's weights and its slices of masters."""
    engine.optimizer.wait()
    weights = [weight.detach() for stage in engine.stages.values() for weight in stage.parameters()]
    masters = [buffer.saved()["weight"] for buffer in engine.optimizer.all_buffers()]
    return [tensor.clone() for tensor in (*weights, *masters)]


def draw_both(mesh: DeviceMesh, models: list[dict[str, Any]], changes: dict[str, Any]) -> int:
    """Draw whole and shared out; return the numbers that this rank has drawn shared out."""
    drawn = 0
    for model in models:
        config = ModelConfig(**model)
        options = EngineOptions(micro_batch=1, seq_length=8, seed=5)
        pp = mesh["pp"].size()
        arguments = (config, plan("bf16", **changes), mesh, schedule("1f1b", pp, 2))
        whole = weights_of(Engine.build(*arguments, options))
        engine = Engine.build(*arguments, replace(options, blank=True))

        def counted(part: Part, first: int, last: int, *others: Any) -> Tensor:
            nonlocal drawn
            drawn += last - first
            return normal_range(part, first, last, *others)

        shared_drawing.normal_range = counted
        draw_weights(engine.stages.values(), engine.optimizer, 5)
        for ours, expected in zip(weights_of(engine), whole, strict=True):
            assert torch.equal(ours, expected)
    return drawn


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "axes",
    [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}],
    ids=["data 2", "data 2 x tensor 2", "data 2 x pipeline 2"],
)
def test_initial_weights_that_are_shared_out_have_the_same_bits(
    axes: dict[str, int], name: str
) -> None:
    run_ranks(draw_both, axes, models=[*MODELS.values()], changes=PLANS[name])


def test_each_replica_draws_its_share() -> None:
    first, second = run_ranks(draw_both, {"dp": 2}, models=[LLAMA], changes={})
    elements = num_parameters(ModelConfig(**LLAMA))
    norms = 5 * LLAMA["hidden"]  # ones, which nobody draws
    assert first + second == elements - norms
    assert abs(first - second) < 0.2 * elements


class Start(NamedTuple):
    """Bytes of tensors while a run with ZeRO-3 starts: when its stages are built, and at most later
    beyond those that are held then; and of the weights of a layer and of the model in FP32."""

    built: int
    beyond: int
    layer: int
    model: int


def start_of(mesh: DeviceMesh, model: dict[str, Any], blank: bool) -> Start:
    """The start of a run, or of a loop of one's own, whose stages are not blank."""
    options = EngineOptions(micro_batch=1, seq_length=8, seed=5, blank=blank)
    config = ModelConfig(**model)
    with allocations() as building:
        stages = build_stages(config, plan("bf16"), mesh, schedule("1f1b", 1, 2), options)
    with allocations() as later:
        optimizer = stages.make_optimizer(shard_weights=True, shard_gradients=True)
        if blank:
            draw_weights(stages.by_number.values(), optimizer, 5)
    buffers = optimizer.all_buffers()
    held = sum(buffer.num_bytes() for buffer in buffers)
    built = sum(building)
    beyond = built + max(accumulate(later)) - held
    return Start(
        built, beyond, max(4 * buffer.size for buffer in buffers), 4 * num_parameters(config)
    )


@pytest.mark.slow
def test_no_rank_of_zero_3_has_the_whole_model_when_a_run_starts() -> None:
    model = {**LLAMA, "hidden": 64, "ffn": 96}
    deep, deeper = (
        run_ranks(start_of, {"dp": 2}, model={**model, "layers": layers}, blank=True)
        for layers in (24, 48)
    )
    for fewer, more in zip(deep, deeper, strict=True):
        assert more.built < more.layer / 100
        assert more.beyond < fewer.beyond + fewer.layer
    # a loop of one's own builds it whole first
    for start in run_ranks(start_of, {"dp": 2}, model={**model, "layers": 24}, blank=False):
        assert start.built >= start.model


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
def test_a_range_of_a_slice_is_drawn_as_the_whole_slice_is(dim: int | None) -> None:
    part = Part.cut("x", (6, 4, 8), dim, Axis("tp", 1, 2))
    whole = normal_part(part, 3, 0.5, torch.float32).flatten()
    for first in range(0, len(whole), 5):
        for last in range(first, len(whole) + 1, 7):
            drawn = normal_range(part, first, last, 3, 0.5, torch.float32)
            assert torch.equal(drawn, whole[first:last])
