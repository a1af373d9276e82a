"""The statistics of a step are those that numpy computes in float64 of a plain model's weights and
gradients, in every layout."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.diagnose.module_trace import trace_modules
from megaprec.diagnose.tensor_statistics import Moments, StepStatistics, TensorStatistics
from megaprec.precision.plan import LossScaling
from models.engine.engine import Engine
from parallel.activation_checkpoint import Recompute
from tests import oracle
from tests.layouts import Run, assemble, batches, fragments, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks

NOISE = 1e-12  # of sums that would be zero if no rounding were
WATCHED = 1  # the number of the step, from 0
RUNS = {
    "llama": Run(MODELS["llama"]),
    "gpt2, tied": Run(MODELS["gpt2"]),
    "mixtral": Run(MODELS["mixtral"]),
}
# tp, pp, dp, and what else differs
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "alone": ((1, 1, 1), {}),
    "tensor and pipeline": ((2, 2, 1), {"recompute": Recompute(fraction=1.0)}),
    "sequence, ZeRO-1": ((2, 1, 2), {"sequence": True}),
    "pipeline, ZeRO-2": ((1, 2, 2), {"options": {"shard_gradients": True}}),
    "ZeRO-3": ((1, 1, 4), {"options": {"shard_weights": True}}),
    "replicas, scaled loss": ((1, 1, 2), {"zero_size": 1, "scaling": LossScaling(initial=1024.0)}),
}


def layers_of(engine: Engine) -> dict[str, nn.Module]:
    return {
        f"layers.{number}": layer
        for stage in engine.stages.values()
        for number, layer in stage.layers.items()
    }


def watched(mesh: DeviceMesh | None, run: Run) -> StepStatistics:
    """The statistics of one step of a run, on one rank."""
    engine = make_engine(mesh, run)
    statistics = TensorStatistics(engine.optimizer, layers_of(engine))
    for number, batch in enumerate(batches(run)[:WATCHED]):
        engine.step(share_of(mesh, batch), run.lr, number)
    with statistics.watching():
        engine.step(share_of(mesh, batches(run)[WATCHED]), run.lr, WATCHED)
    found = statistics.result()
    engine.optimizer.wait()
    assert statistics not in engine.optimizer.observers
    return found


def by_numpy(tensor: Tensor) -> Moments:
    """The statistics by their definition."""
    values = tensor.detach().double().numpy().ravel()
    mean = values.mean()
    spread = values - mean
    variance = (spread**2).mean()
    kurtosis = (spread**4).mean() / variance**2 if variance else math.nan
    return Moments(
        mean=float(mean),
        rms=float(np.sqrt((values**2).mean())),
        largest=float(np.abs(values).max()),
        zeros=float((values == 0).mean()),
        kurtosis=float(kurtosis),
    )


@cache
def plain(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after the step, and its gradients, of a plain model with torch's AdamW."""
    run = RUNS[name]
    engine = make_engine(None, run)
    buffers = engine.optimizer.all_buffers()
    first = assemble([fragments(buffers, lambda buffer: buffer.saved()["weight"])])
    records = oracle.train(run.config, first, batches(run), run.lr, run.clip)
    before = cast("dict[str, Tensor]", records[WATCHED - 1]["weights"])
    after = cast("dict[str, Tensor]", records[WATCHED]["weights"])
    gradients = cast("dict[str, Tensor]", records[WATCHED]["grads"])
    return before, after, gradients


@cache
def sizes_of_outputs(name: str) -> dict[str, float]:
    """The root mean square of each layer's output, of one process, by numpy."""
    run = RUNS[name]
    engine = make_engine(None, run)
    for number, batch in enumerate(batches(run)[:WATCHED]):
        engine.step(share_of(None, batch), run.lr, number)
    seen: dict[str, list[Tensor]] = {layer_name: [] for layer_name in layers_of(engine)}

    def keep(layer_name: str, output: Tensor) -> None:
        seen[layer_name].append(output.detach())

    trace_modules(layers_of(engine), keep)
    engine.step(share_of(None, batches(run)[WATCHED]), run.lr, WATCHED)
    return {
        layer_name: float(np.sqrt((torch.cat(outputs, 1).numpy() ** 2).mean()))
        for layer_name, outputs in seen.items()
    }


def assert_same(found: Mapping[str, Moments], tensors: Mapping[str, Tensor], kind: str) -> None:
    assert found.keys() == tensors.keys(), kind
    for name, tensor in tensors.items():
        expected = by_numpy(tensor)
        if 0 < expected.rms < NOISE:  # a key's bias, on which no attention depends
            assert found[name].rms < NOISE
            continue
        torch.testing.assert_close(
            tuple(found[name]),
            tuple(expected),
            rtol=1e-7,
            atol=1e-12,
            equal_nan=True,
            msg=lambda text, name=name: f"{kind} {name}: {text}",
        )


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RUNS)
def test_statistics_are_those_of_a_plain_model(name: str, layout: str) -> None:
    (tensor, pipeline, data), changes = LAYOUTS[layout]
    run = replace(RUNS[name], **changes)
    ranks = run_ranks(watched, {"pp": pipeline, "dp": data, "tp": tensor}, run=run)
    first = ranks[0]
    assert all(str(found) == str(first) for found in ranks), "ranks found different statistics"
    before, after, gradients = plain(name)
    assert_same(first.weights, after, "weight")
    updates = {key: after[key] - before[key] for key in after}
    assert_same(first.updates, updates, "update")
    assert_same(first.gradients, gradients, "gradient")
    torch.testing.assert_close(dict(first.outputs), sizes_of_outputs(name), rtol=1e-7, atol=0)


def test_a_tensor_of_ones_with_little_spread_loses_no_digits() -> None:
    """As weights of norms are: the mean is a million times as large as the spread."""
    torch.manual_seed(0)
    values = 1 + 1e-6 * torch.randn(4096, dtype=torch.float64)
    run = RUNS["llama"]
    engine = make_engine(None, run)
    (buffer, *_) = engine.optimizer.all_buffers()
    owned = next(buffer.owned_pieces())
    length = len(owned.span)
    own = values[:length]
    statistics = TensorStatistics(engine.optimizer, {})
    weights = buffer.own_weights if buffer.masters is None else buffer.masters
    weights[owned.in_shard] = own
    share = share_of(None, batches(run)[0])
    with statistics.watching():
        engine.step(share, 0.0, 0)
    found = statistics.result().weights[owned.piece.part.name]
    torch.testing.assert_close(tuple(found), tuple(by_numpy(own)), rtol=1e-6, atol=0)


def test_a_skipped_step_has_updates_of_zero() -> None:
    run = replace(RUNS["llama"], plant=(0, WATCHED, math.inf), compute="fp16")
    found = watched(None, run)
    assert {moments.largest for moments in found.updates.values()} == {0.0}
    assert not all(math.isfinite(moments.rms) for moments in found.gradients.values())
