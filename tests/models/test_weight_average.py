"""Moving averages of models: equal to a plain loop's in every layout, and evaluated as weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import load_weights
from megaprec.comm.layout import Part
from models.engine.engine import Engine
from models.feed_forward.router import is_correction
from tests.fp8.test_weights import kept
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.other_systems import slow
from tests.ranks import run_ranks

DECAY = 0.75
CLOSE = 1e-12
EMA = {"ema": DECAY}
Tensors = dict[str, Tensor]
MOE: dict[str, Any] = {**MODELS["glm4_moe"], "kv_heads": 2}
LLAMA = Run(MODELS["llama"], steps=2, options=EMA)
RUNS = [
    LLAMA,
    Run(MODELS["gpt2"], steps=2, options={**EMA, "shard_gradients": True}, sequence=True),
    Run(MOE, steps=2, options=EMA, expert=2),
]


class Averages:
    """The averages of a state as a source of weights."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def read_range(self, kind: str, part: Part, first: int, last: int) -> Tensor:
        weight = self.tensors[f"{kind}/{part.name}"]
        average = self.tensors.get(f"ema/{part.name}", weight)
        return part.take(average).reshape(-1)[first:last]


def evaluated(engine: Engine, mesh: DeviceMesh | None, run: Run) -> float:
    return engine.evaluate(share_of(mesh, batches(run)[0]))


def trained(mesh: DeviceMesh | None, runs: Sequence[Run]) -> list[tuple[Tensors, float, Tensors]]:
    """Of each run the state, the loss of the averages, and the averages of a plain loop over the
    states after each step."""
    found: list[tuple[Tensors, float, Tensors]] = []
    for run in runs:
        engine = make_engine(mesh, run)
        tensors = engine.optimizer.state_dict()["tensors"]
        names = [key.removeprefix("weight/") for key in tensors if key.startswith("weight/")]
        averages = {name: tensors[f"weight/{name}"].double() for name in names}
        for number, batch in enumerate(batches(run)):
            engine.step(share_of(mesh, batch), run.lr, number)
            tensors = engine.optimizer.state_dict()["tensors"]
            for name in names:
                weight = tensors[f"weight/{name}"].double()
                averages[name] = DECAY * averages[name] + (1 - DECAY) * weight
        with engine.optimizer.averaged_weights():
            loss = evaluated(engine, mesh, run)
        found.append((tensors, loss, averages))
    return found


@pytest.fixture(scope="module")
def alone() -> list[tuple[Tensors, float, Tensors]]:
    return trained(None, [replace(run, expert=1, sequence=False) for run in RUNS])


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "axes",
    [{"dp": 2, "tp": 2}, *slow(({"pp": 2, "dp": 2, "tp": 2},), ({"cp": 2, "tp": 2},))],
    ids=str,
)
def test_averages_of_models_are_a_plain_loops_in_every_layout(
    axes: dict[str, int], alone: list[tuple[Tensors, float, Tensors]]
) -> None:
    """With experts on ranks of their own, whose routers' corrections have none."""
    first, *_ = run_ranks(trained, axes, runs=RUNS)
    for run, ours, single in zip(RUNS, first, alone, strict=True):
        tensors, loss, _ = ours
        _, loss_alone, averages = single
        assert loss == pytest.approx(loss_alone, rel=CLOSE)
        for name, average in averages.items():
            if is_correction(name):
                assert f"ema/{name}" not in tensors
                continue
            torch.testing.assert_close(
                tensors[f"ema/{name}"], average, rtol=CLOSE, atol=CLOSE, msg=f"{run}: {name}"
            )


def test_an_evaluation_of_the_average_is_that_of_a_model_with_these_weights(
    alone: list[tuple[Tensors, float, Tensors]],
) -> None:
    corrections = 0
    for run, (tensors, loss, _) in zip(RUNS, alone, strict=True):
        other = make_engine(None, replace(run, expert=1, sequence=False, options={}))
        load_weights(Averages(tensors), other.optimizer)
        assert evaluated(other, None, run) == loss
        corrections += any(map(is_correction, tensors))
    assert corrections == 1


def in_fp8(mesh: DeviceMesh | None, runs: Sequence[Run]) -> list[str]:
    """What an evaluation of the average of FP8 weights, after each step, does wrong."""
    wrong: list[str] = []
    for run in runs:
        engine = make_engine(mesh, run)
        without = make_engine(mesh, replace(run, options={}))
        loss = 0.0
        for number, batch in enumerate(batches(run)):
            share = share_of(mesh, batch)
            for each in (engine, without):
                each.step(share, run.lr, number)
            before = codes_of(engine)
            with engine.optimizer.averaged_weights():
                loss = evaluated(engine, mesh, run)
            if not all(map(torch.equal, before, codes_of(engine))):
                wrong.append(f"{run}: other codes or scales after it")
            if number and loss == evaluated(engine, mesh, run):
                wrong.append(f"{run}: the loss of the weights themselves")
        ours = engine.optimizer.state_dict()["tensors"]
        theirs = without.optimizer.state_dict()["tensors"]
        if not all(torch.equal(values, ours[key]) for key, values in theirs.items()):
            wrong.append(f"{run}: it changes later steps")
        if run.changes["fp8"].kind != "delayed":
            other = make_engine(mesh, replace(run, options={}))
            load_weights(Averages(ours), other.optimizer)
            if evaluated(other, mesh, run) != loss:
                wrong.append(f"{run}: not the loss of a model with these weights")
    return wrong


def codes_of(engine: Engine) -> list[Tensor]:
    tensors: list[Tensor] = []
    for buffer in engine.optimizer.all_buffers():
        weights = buffer.weights.view(torch.uint8) if buffer.has_fp8_weights else buffer.weights
        tensors += [weights, *buffer.saved().values()]
        tensors += [shard.param.inverse for shard in buffer.fp8_shards]
    return [values.clone() for values in tensors]


def test_averages_of_weights_that_are_fp8_codes_are_evaluated_as_codes() -> None:
    runs = [kept(kind, steps=2, micro_batch=4, options=EMA) for kind in ("delayed", "current")]
    assert run_ranks(in_fp8, {"dp": 2}, runs=runs) == [[], []]


def canonical(mesh: DeviceMesh | None, run: Run) -> Tensors:
    ((tensors, _, _),) = trained(mesh, [run])
    return tensors


@pytest.mark.slow
def test_canonical_averages_have_the_same_bits_in_every_layout() -> None:
    run = replace(LLAMA, compute="bf16", shards=2)
    ours, *_ = run_ranks(canonical, {"dp": 2}, run=run)
    theirs = canonical(None, run)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(values, ours[key]) for key, values in theirs.items())
