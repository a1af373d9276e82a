"""Under ZeRO-2 the bytes of gradients known beforehand are those that a training step holds."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.muon.rule import Muon
from megaprec.precision.plan import plan
from models.engine.passes import Share
from tests.models.test_state import (
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

LAYER = 20_000  # elements of a bucket: about those of a layer of these models
SMALL = 6_000
DEEP = {**LLAMA, "layers": 6}
BF16 = plan("bf16")
CASES = [
    Case(DEEP, BF16, zero=2, bucket=LAYER),
    Case(DEEP, BF16, zero=2, bucket=LAYER, overlap=True),
    # gradients that travel in another dtype, and norms in buckets of their own
    Case(DEEP, plan("bf16", keep_fp32=("*norm*",), reduce="bf16"), zero=2, bucket=LAYER),
    Case({**MODELS["gpt2, tied"], "layers": 6}, BF16, zero=2, bucket=LAYER),
    Case({**MODELS["mixtral"], "layers": 4}, BF16, zero=2, bucket=SMALL, rule=Muon()),
    Case(DEEP, BF16, zero=2),  # one bucket for all
]


class Held(NamedTuple):
    """Bytes of a rank: between steps by kind, and of whole gradients in a step."""

    by_kind: dict[str, int]
    peak: int
    after: int


def held(mesh: DeviceMesh, cases: Sequence[Case], pp: int) -> list[Held]:
    """The bytes of this rank in two steps of four micro-batches of each case."""
    return [held_in(mesh, case, pp) for case in cases]


def held_in(mesh: DeviceMesh, case: Case, pp: int) -> Held:
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % 100
    with counted_whole_gradients() as counted:
        engine = engine_of(mesh, case, pp)
        for number in range(2):
            engine.step(Share(ids, ids), 1e-3, number)
        by_kind = bytes_of(engine)
    return Held(by_kind, counted.peak, counted.now)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_whole_gradients_take_no_more_than_is_foretold(axes: dict[str, int]) -> None:
    pp, dp, tp = (axes.get(name, 1) for name in ("pp", "dp", "tp"))
    said = [foretold(case, pp, dp, tp) for case in CASES]
    for rank, found in enumerate(run_ranks(held, axes, cases=CASES, pp=pp)):
        for case, real, by_stage in zip(CASES, found, said, strict=True):
            expected = by_stage[rank // (dp * tp)]
            assert real.by_kind == {kind: getattr(expected, kind) for kind in KINDS}, case
            assert real.peak <= expected.arriving, case
            # a layer with many buckets counts as computed in the worst order
            assert real.peak > expected.arriving / 3 or case.bucket == SMALL, case
            assert real.after == 0, "a step leaves none"


def test_a_deep_model_holds_few_of_its_gradients_whole() -> None:
    deeper = Case({**LLAMA, "layers": 24}, BF16, zero=2, bucket=SMALL)
    (sharded,) = foretold(deeper, dp=8)
    (whole,) = foretold(Case({**LLAMA, "layers": 24}, BF16, bucket=SMALL), dp=8)
    assert sharded.arriving < whole.gradients / 8
    assert sharded.gradients == whole.gradients / 8
    assert whole.arriving == 0
