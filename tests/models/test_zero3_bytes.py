"""Under ZeRO-3 the bytes of weights known beforehand are those that a training step gathers."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.muon.rule import Muon
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.engine.passes import Share
from models.estimate.state import StateBytes
from models.estimate.whole_weights import passes_of_rank
from models.parameter_counts import num_parameters
from parallel.pipeline.kinds import schedule
from tests.models.test_state import (
    IN_FP8,
    KINDS,
    LENGTH,
    LLAMA,
    MODELS,
    Case,
    bytes_of,
    engine_of,
    foretold,
)
from tests.ranks import run_ranks
from tests.whole_gradients import counted_whole_gradients
from tests.whole_weights import counted_whole_weights
from tools.training.banner import print_memory

MICROBATCHES = 4
DEEP = {**LLAMA, "layers": 6}
BF16 = plan("bf16")
PLAIN = Case(DEEP, BF16, zero=3)
CASES = [
    PLAIN,
    replace(PLAIN, overlap=True),
    replace(PLAIN, keep=2),
    replace(PLAIN, keep=2, overlap=True),
    replace(PLAIN, keep=9),
    replace(PLAIN, keep_bytes=200_000),
    replace(PLAIN, keep_bytes=10**9, overlap=True),
    replace(PLAIN, kind="gpipe"),
    # norms in buckets of their own, and an average
    Case(DEEP, plan("bf16", keep_fp32=("*norm*",)), zero=3, ema=0.9),
    # a head that is the embedding, or on another rank
    Case({**MODELS["gpt2, tied"], "layers": 6}, BF16, zero=3, overlap=True),
    Case({**MODELS["mixtral"], "layers": 4}, BF16, zero=3, rule=Muon()),
    Case(LLAMA, IN_FP8, zero=3),
    # a module that runs after the head's weights were gathered, and reads them
    Case({**DEEP, "mtp_layers": 1}, BF16, zero=3, overlap=True),
    Case({**DEEP, "mtp_layers": 1}, BF16, zero=3, keep=1),
]
SPREAD = [
    Case({**MODELS["mixtral"], "layers": 4}, BF16, zero=3, expert=2, overlap=True),
]
STAGES = [
    replace(PLAIN, kind="interleaved"),
    replace(PLAIN, kind="interleaved", keep=1, overlap=True),
]


class Held(NamedTuple):
    """Bytes of a rank: between steps by kind, of whole weights and gradients in a step at most, and
    of whole weights after it."""

    by_kind: dict[str, int]
    weights: int
    gradients: int
    after: int


def held(mesh: DeviceMesh, cases: Sequence[Case], pp: int) -> list[Held]:
    """The bytes of this rank in two steps of each case."""
    return [held_in(mesh, case, pp) for case in cases]


def held_in(mesh: DeviceMesh, case: Case, pp: int) -> Held:
    ids = torch.arange(MICROBATCHES * LENGTH).view(MICROBATCHES, LENGTH) % 100
    with counted_whole_gradients() as gradients, counted_whole_weights() as weights:
        engine = engine_of(mesh, case, pp)
        for number in range(2):
            engine.step(Share(ids, ids), 1e-3, number)
        by_kind = bytes_of(engine)
    return Held(by_kind, weights.peak, gradients.peak, weights.now)


def whole_weights(case: Case, said: StateBytes, pp: int, rank: int) -> int:
    """The most bytes of whole weights of a pipeline rank that are foretold."""
    passes = passes_of_rank(schedule(case.kind, pp, MICROBATCHES), rank)
    return said.whole_weights.most_bytes(passes, case.overlap, case.keep, case.keep_bytes)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("axes", "cases"),
    [
        ({"dp": 2}, CASES),
        ({"dp": 2, "tp": 2}, [*CASES, *SPREAD]),
        ({"pp": 2, "dp": 2}, [*CASES, *STAGES]),
    ],
    ids=("dp2", "dp2-tp2", "pp2-dp2"),
)
def test_whole_weights_take_what_is_foretold(axes: dict[str, int], cases: list[Case]) -> None:
    pp, dp, tp = (axes.get(name, 1) for name in ("pp", "dp", "tp"))
    said = [foretold(case, pp, dp, tp) for case in cases]
    for rank, found in enumerate(run_ranks(held, axes, cases=cases, pp=pp)):
        for case, real, by_stage in zip(cases, found, said, strict=True):
            stage = rank // (dp * tp)
            expected = by_stage[stage]
            assert real.by_kind == {kind: getattr(expected, kind) for kind in KINDS}, case
            assert real.weights == whole_weights(case, expected, pp, stage), case
            assert real.gradients <= expected.arriving, case
            assert real.after == 0, "a step leaves none"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_bytes_of_a_parameter_are_those_of_its_state(zero: int) -> None:
    ranks = 8
    (said,) = foretold(replace(PLAIN, zero=zero), dp=ranks)
    on_every_rank, sharded = BF16.bytes_per_parameter(
        averages=2, shards_gradients=zero >= 2, shards_weights=zero == 3
    )
    assert (on_every_rank, sharded) == {1: (6, 12), 2: (2, 16), 3: (0, 18)}[zero]
    of_parameter = on_every_rank + sharded / ranks
    parameters = num_parameters(ModelConfig(**DEEP))
    assert said.total == pytest.approx(parameters * of_parameter, rel=0.02)


def said_of_memory(mesh: DeviceMesh, case: Case) -> str:
    text = StringIO()
    with redirect_stdout(text):
        print_memory(engine_of(mesh, case, pp=1).optimizer)
    return text.getvalue()


@pytest.mark.slow
def test_the_memory_that_is_said_has_no_bytes_on_every_rank() -> None:
    for said in run_ranks(said_of_memory, {"dp": 2}, case=Case(LLAMA, BF16, zero=3)):
        assert "memory     18/2 = 9 bytes a parameter for weights" in said


@pytest.mark.slow
def test_a_run_says_how_many_layers_it_has_room_to_keep() -> None:
    cases = [Case(DEEP, BF16, zero=3, keep_bytes=room) for room in (2, 200_000, 10**9)]
    for found in zip(
        *(run_ranks(said_of_memory, {"dp": 2}, case=case) for case in cases), strict=True
    ):
        none, some, every = (said.splitlines()[0] for said in found)
        assert none == "kept       no layer of rank 0: parallel.zero_keep has room for none"
        assert some.startswith(
            "kept       the last 3 of 6 layers of rank 0 whole during a step: 0."
        )
        assert every.startswith("kept       the last 6 of 6 layers of rank 0 whole")


def test_a_deep_model_has_few_of_its_weights_whole() -> None:
    deeper = Case({**LLAMA, "layers": 24}, BF16, zero=3)
    (sharded,) = foretold(deeper, dp=8)
    (whole,) = foretold(replace(deeper, zero=1), dp=8)
    assert whole_weights(deeper, sharded, 1, 0) < whole.weights / 8
    assert sharded.weights == pytest.approx(whole.weights / 8, rel=0.02)
    assert whole_weights(deeper, whole, 1, 0) == 0
    kept = whole_weights(replace(deeper, keep=24), sharded, 1, 0)
    assert kept == pytest.approx(whole.weights, rel=0.02)
