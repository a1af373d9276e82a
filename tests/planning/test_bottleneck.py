"""What a plan advises makes the kind of time less that it is advised for, and the run has not got it
already."""

from collections.abc import Iterator
from typing import Any

import pytest

from models.estimate.gpus import gpu_named
from tools.analysis.planning.bottleneck import (
    NAMES,
    _ways_to_less,
    describe_bottleneck,
    seconds_by_kind,
    shares,
)
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.reached import assumptions_of
from tools.analysis.planning.search import plan_run
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import Prediction
from tools.config.run_file import RunConfig, load_run

RUN: dict[str, Any] = {
    "model.family": "llama",
    "model.layers": 16,
    "model.hidden": 1024,
    "model.heads": 16,
    "model.ffn": 2816,
    "model.vocab": 8192,
    "precision.compute": "bf16",
    "train.steps": 10,
    "train.global_batch": 64,
    "train.micro_batch": 1,
    "train.seq_length": 4096,
}
EXPERTS: dict[str, Any] = {
    "model.family": "mixtral",
    "model.experts": 8,
    "parallel.data": 8,
    "parallel.expert": 8,
}
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "not compiled": {"train.compile": "off"},
    "recomputed": {"parallel.recompute": "full", "parallel.recompute_fraction": 1.0},
    "tensor ranks": {"parallel.tensor": 8, "train.compile": "off"},
    "pipeline": {"parallel.pipeline": 4, "train.global_batch": 8},
    "stages on each rank": {
        "parallel.pipeline": 2,
        "parallel.schedule": "interleaved",
        "parallel.chunks": 4,
    },
    "replicas": {"parallel.data": 16, "parallel.zero": False, "parallel.overlap": False},
    "sequences cut": {"parallel.context": 4, "parallel.tensor": 2, "parallel.sequence": True},
    "experts": EXPERTS,
    "FP8": {"fp8.kind": "current", "parallel.data": 4},
}


def changes_of(way: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that an advice changes."""
    if way.startswith("fewer ranks of "):
        axis = way.removeprefix("fewer ranks of ")
        return {axis: keys[axis] // 2}
    return {
        "less recomputation": {"parallel.recompute": "none", "parallel.recompute_fraction": 0.0},
        "FP8": {"fp8.kind": "current"},
        "shorter sequences": {"train.seq_length": keys["train.seq_length"] // 2},
        "a window": {"model.window": 512},
        'train.compile = "block"': {"train.compile": "block"},
        "sequence parallelism": {"parallel.sequence": True},
        "larger micro-batches": {"train.micro_batch": 2},
        "fewer tensor ranks": {"parallel.tensor": keys.get("parallel.tensor", 1) // 2},
        "more micro-batches": {"train.global_batch": 2 * keys["train.global_batch"]},
        "more micro-batches a step": {"train.global_batch": 2 * keys["train.global_batch"]},
        "several stages on each rank (parallel.chunks)": {
            "parallel.schedule": "interleaved",
            "parallel.chunks": 2,
        },
        "fewer pipeline ranks": {"parallel.pipeline": keys.get("parallel.pipeline", 1) // 2},
        "parallel.overlap": {"parallel.overlap": True},
        "ZeRO": {"parallel.zero": True},
    }[way]


def predict(keys: dict[str, Any]) -> tuple[RunConfig, Prediction, Assumptions]:
    """Return a run on H100s, and its prediction."""
    overrides = [f"{key}={_toml(value)}" for key, value in keys.items()]
    config = load_run(None, overrides).on_device("cuda")
    gpu = gpu_named("H100")
    assert gpu
    assumed = assumptions_of(gpu, config.plan)
    assert assumed
    predicted = plan_run(config, MemoryModel("cuda"), assumed).prediction
    assert predicted
    return config, predicted, assumed


def _toml(value: object) -> str:
    """Return a value as in a run file."""
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def rank_seconds_of_token(keys: dict[str, Any]) -> dict[str, float]:
    """Return the time of each kind that all ranks together take for a token."""
    config, predicted, _ = predict(keys)
    by_kind = seconds_by_kind(predicted)
    ranks_of_token = config.world_size / config.tokens_per_step
    return {kind: seconds * ranks_of_token for kind, seconds in by_kind.items()}


def advised(keys: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each kind of time that a run has, and a change that makes it less."""
    config, predicted, assumed = predict(keys)
    by_kind = shares(predicted)
    for kind in NAMES:
        if by_kind[kind] > 1e-6:
            for way in _ways_to_less(kind, config, predicted, assumed):
                yield kind, way


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_advice_makes_its_kind_of_time_less_for_each_token(name: str) -> None:
    keys = RUN | RUNS[name]
    before = rank_seconds_of_token(keys)
    ways = [*advised(keys)]
    for kind, way in ways:
        after = rank_seconds_of_token(keys | changes_of(way, keys))
        assert after[kind] < before[kind], (kind, way)
    assert ways


def test_what_a_run_has_is_not_advised() -> None:
    keys = RUN | {"parallel.tensor": 2, "parallel.sequence": True, "fp8.kind": "current"}
    config, predicted, assumed = predict(keys)
    ways = [way for kind in NAMES for way in _ways_to_less(kind, config, predicted, assumed)]
    assert not {*ways} & {
        'train.compile = "block"',
        "sequence parallelism",
        "FP8",
        "less recomputation",
    }


def test_traffic_of_experts_is_not_laid_to_tensor_ranks() -> None:
    config, predicted, assumed = predict(
        RUN | EXPERTS | {"parallel.data": 32, "parallel.expert": 8}
    )
    ways = [*_ways_to_less("tp", config, predicted, assumed)]
    assert ways == ["fewer ranks of parallel.expert"]


def test_a_step_that_no_key_makes_less_is_told_so() -> None:
    """With all products in FP8 and nothing made again."""
    keys = RUN | {"fp8.kind": "current", "model.hidden": 8192, "model.heads": 64}
    config, predicted, assumed = predict(keys | {"model.ffn": 65536, "train.seq_length": 512})
    assert describe_bottleneck(config, predicted, assumed)[1] == "which no key makes less"
