"""What a plan advises the run can have, has not got already, and makes the kind of time less that it
is advised for."""

from collections.abc import Iterator
from typing import Any

import pytest

from models.estimate.gpus import gpu_named
from tools.analysis.planning.bottleneck import (
    NAMES,
    _Way,
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
    "ZeRO-2": {"parallel.data": 16, "parallel.zero": 2},
    "ZeRO-3": {"parallel.data": 16, "parallel.zero": 3},
    "ZeRO-3, layers kept": {"parallel.data": 16, "parallel.zero": 3, "parallel.zero_keep": 16},
    "sequences cut": {"parallel.context": 4, "parallel.tensor": 2, "parallel.sequence": True},
    "experts": EXPERTS,
    "FP8": {"fp8.kind": "current", "parallel.data": 4},
    "canonical": {"train.numerics": "canonical", "train.threads": 1, "parallel.data": 4},
    "attention recomputed": {"parallel.recompute": "selective"},
    "activations recomputed": {
        "parallel.recompute": "selective",
        "parallel.recompute_modules": ["activation", "norm"],
    },
    "some layers recomputed": {"parallel.recompute": "full", "parallel.recompute_layers": 2},
    "too few layers to recompute one": {
        "parallel.recompute": "full",
        "parallel.recompute_fraction": 0.2,
        "parallel.pipeline": 4,
    },
    "async tensor": {
        "parallel.tensor": 4,
        "parallel.sequence": True,
        "parallel.async_tensor": True,
        "train.compile": "off",
    },
    "cuts": {"parallel.pipeline": 4, "parallel.cuts": [3, 4, 5, 4]},
    "a length that tensor ranks do not divide": {"parallel.tensor": 8, "train.seq_length": 4100},
    "one micro-batch": {"train.global_batch": 1, "train.compile": "off"},
    "one micro-batch in a pipeline": {"train.global_batch": 1, "parallel.pipeline": 4},
    "nothing to shard over": {"parallel.data": 4, "parallel.zero": False, "parallel.zero_size": 1},
    "a window": {"model.window": 512},
}
FAST = ("canonical", "one micro-batch")


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
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return _toml([*value])
    return repr(value).replace("'", '"')


def rank_seconds_of_token(keys: dict[str, Any]) -> dict[str, float]:
    """Return the time of each kind that all ranks together take for a token."""
    config, predicted, _ = predict(keys)
    by_kind = seconds_by_kind(predicted)
    ranks_of_token = config.world_size / config.tokens_per_step
    return {kind: seconds * ranks_of_token for kind, seconds in by_kind.items()}


def advised(keys: dict[str, Any]) -> Iterator[_Way]:
    """Yield the advice for each kind of time that a run has."""
    config, predicted, assumed = predict(keys)
    by_kind = shares(predicted)
    for kind in NAMES:
        if by_kind[kind] > 1e-6:
            yield from _ways_to_less(kind, config, predicted, assumed)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_an_advice_can_be_followed_and_makes_its_kind_of_time_less_for_each_token(
    name: str,
) -> None:
    keys = RUN | RUNS[name]
    before = rank_seconds_of_token(keys)
    ways = [*advised(keys)]
    for way in ways:
        after = rank_seconds_of_token({**keys, **way.change})
        assert after[way.kind] < before[way.kind], way
    assert ways


def test_an_advice_names_the_keys_that_it_changes() -> None:
    for name in FAST:
        for way in advised(RUN | RUNS[name]):
            assert any(key in way.text for key in way.change), way


def test_what_a_run_has_is_not_advised() -> None:
    keys = {"parallel.tensor": 2, "parallel.sequence": True, "fp8.kind": "current"}
    changed = {key for way in advised(RUN | keys) for key in way.change}
    assert not changed & {"train.compile", "parallel.sequence", "fp8.kind", "parallel.recompute"}


def test_traffic_of_experts_is_not_laid_to_tensor_ranks() -> None:
    config, predicted, assumed = predict(
        RUN | EXPERTS | {"parallel.data": 32, "parallel.expert": 8}
    )
    (way,) = _ways_to_less("tp", config, predicted, assumed)
    assert way.text == "fewer ranks of parallel.expert"


def test_advice_is_a_list_with_or_before_its_last() -> None:
    config, predicted, assumed = predict(RUN | {"train.compile": "off", "parallel.tensor": 2})
    _, advice = describe_bottleneck(config, predicted, assumed)
    assert advice == (
        'less by train.compile = "block", larger micro-batches (train.micro_batch) or fewer tensor '
        "ranks (parallel.tensor)"
    )


def test_a_step_that_no_key_makes_less_is_told_so() -> None:
    """With all products in FP8 and nothing made again."""
    keys = RUN | {"fp8.kind": "current", "model.hidden": 8192, "model.heads": 64}
    config, predicted, assumed = predict(keys | {"model.ffn": 65536, "train.seq_length": 512})
    assert describe_bottleneck(config, predicted, assumed)[1] == "which no key makes less"
