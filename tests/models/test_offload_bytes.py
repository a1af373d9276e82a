"""Bytes of state in host memory known beforehand are those that an optimizer holds there, and those
of the tiles through which it travels are those on the device."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.update_rules import SGD
from megaprec.optim.state.host_memory import NUM_STAGED
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.estimate import state
from models.estimate.state import Sharding, StateBytes, state_bytes
from parallel.pipeline.kinds import schedule
from tests.given import declare
from tests.models.test_state import IN_FP8, LENGTH, LLAMA, MODELS, PLANS, Case
from tests.offload import CpuHostMemory
from tests.other_systems import slow
from tests.ranks import run_ranks

TILE = 1 << 13  # elements; buffers have several
STATE = ("masters", "moments", "ema")


def foretold(case: Case, dp: int, offload: bool) -> StateBytes:
    model = ModelConfig(**case.model)
    placed = schedule(case.kind, 1, 4).rank_of_stage
    cut = cuts(model, 1, LENGTH, (), placed)
    sharding = Sharding(1, dp, dp, ema=case.ema > 0, offload=offload)
    (said,) = state_bytes(model, case.plan, cut, placed, sharding, case.rule)
    return said


def held(mesh: DeviceMesh | None, cases: Sequence[Case]) -> list[tuple[int, int, int]]:
    """Of each case: bytes in host memory by the buffers' account and by their tensors, and those of
    the staging tiles after some steps."""
    return [held_in(mesh, case) for case in cases]


def held_in(mesh: DeviceMesh | None, case: Case) -> tuple[int, int, int]:
    memory = CpuHostMemory()
    memory.tile_elements = TILE
    engine = Engine.build(
        ModelConfig(**case.model),
        case.plan,
        mesh,
        schedule(case.kind, 1, 4),
        EngineOptions(micro_batch=1, seq_length=LENGTH),
        rule=case.rule,
        ema=case.ema,
        offload=memory,
    )
    optimizer = engine.optimizer
    for _ in range(2):
        declare(optimizer)
        assert optimizer.scale > 0
        optimizer.step(1e-3)
    buffers = optimizer.all_buffers()
    counted = sum(buffer.host_bytes() for buffer in buffers)
    tensors = 0
    for buffer in buffers:
        kept = [buffer.masters, buffer.remainder, buffer.ema, *buffer.state.values()]
        tensors += sum(each.nbytes for each in kept if each is not None and memory.holds(each))
    return counted, tensors, sum(len(staging._room) for staging in memory._staging)


CASES = [Case(LLAMA, precision, ema=0.9) for precision in PLANS.values()]
CASES += [Case(model, plan("bf16")) for model in MODELS.values()]
CASES += [
    Case(LLAMA, plan("bf16"), rule=SGD(0.0), ema=0.9),
    Case(MODELS["mixtral"], plan("bf16"), rule=Muon(), ema=0.9),
    Case(LLAMA, IN_FP8, rule=Muon(by_adamw=("*.0.mlp.*",))),
]


FEW = [*CASES[1:4:2], *CASES[-3:]]


@pytest.mark.parametrize(("dp", "cases"), [(1, FEW), *slow((1, CASES), (2, CASES))], ids=str)
def test_host_memory_and_the_tiles_on_their_way_take_what_is_foretold(
    dp: int, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "TILE_ELEMENTS", TILE)
    found = run_ranks(held, {"dp": dp}, cases=cases) if dp > 1 else [held(None, cases)]
    for ours in found:
        for case, (counted, tensors, staged) in zip(cases, ours, strict=True):
            said = foretold(case, dp, offload=True)
            assert (counted, tensors) == (said.host, said.host), case
            by_muon = isinstance(case.rule, Muon)
            # a matrix of Muon's sends masters and momentum one after the other
            assert staged <= said.staging if by_muon else staged == said.staging, case


@pytest.mark.cases(3, sample=4)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_device_keeps_all_but_state_and_a_few_tiles(case: Case) -> None:
    without = foretold(case, 1, offload=False)
    with_host = foretold(case, 1, offload=True)
    state_of = {kind: getattr(without, kind) for kind in STATE}
    kept = {kind: getattr(with_host, kind) for kind in STATE}
    assert with_host.host == sum(state_of.values()) - sum(kept.values())
    assert with_host.weights == without.weights and with_host.gradients == without.gradients
    assert with_host.total == without.total - with_host.host + with_host.staging
    assert without.host == without.staging == 0
    larger = replace(case, model={**case.model, "layers": 6})
    assert foretold(larger, 1, offload=True).host > with_host.host
    most = NUM_STAGED * 16 * state.TILE_ELEMENTS
    assert foretold(larger, 1, offload=True).staging <= most
