"""Masters and moments in host memory, beside a device that forgives nothing (`tests.pretend`).

What the device computes with is on the device, what lies in host memory is there, and weights have
the bits of a run without.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.diagnose.held_state import digest_held_state
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.state.host_memory import HostMemory
from tests import pretend
from tests.layouts import Run, batches, make_engine, share_of, train_rank
from tests.models.test_other_device import (
    FAMILIES,
    LOWERED,
    emulate,
    fp8,
    require_same,
    run,
)
from tests.models.test_waits import waits_of_steps
from tests.ranks import run_ranks

EMA = {"ema": 0.9}
RUNS = {
    "families": [run(model=model, options=EMA) for model in FAMILIES.values()],
    "held otherwise": [
        run(changes={"masters": "split"}, options=EMA),
        run(changes={"masters": "none", "rounding": "stochastic", "moments": "bf16"}),
        run(changes={"keep_fp32": ("*norm.weight", "*mlp*")}),
    ],
    "fp32": [run("fp32", options=EMA)],
    "skipped": [run(plant=(0, 1, float("inf")), scaling=LOWERED)],
    "muon": [run(options={"rule": rule("muon"), **EMA})],
    "fp8": [fp8("delayed", parameters=True), fp8("current", parameters=True)],
}
TOGETHER = [run(options={"overlap": True, "bucket": 3000, **EMA})]
TOGETHER += [run(zero_size=1), fp8("current", parameters=True)]


def on_host(one: Run) -> Run:
    return replace(one, options={**one.options, "offload": HostMemory()})


def train_both(mesh: DeviceMesh, runs: Sequence[Run]) -> None:
    """On the CPU, and then on the device with host memory."""
    pretend.install()
    emulate()
    with sdpa_kernel(SDPBackend.MATH):  # a CPU has a fused kernel of its own
        expected = train_rank(mesh, runs)
        mesh = pretend.join(mesh)
        for one, there in zip(runs, expected, strict=True):
            require_same(one, train_rank(mesh, [on_host(one)])[0], there)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", RUNS)
def test_one_rank_trains_on_the_device_with_state_in_host_memory(name: str) -> None:
    run_ranks(train_both, {}, runs=RUNS[name])


@pytest.mark.slow
def test_ranks_train_together_with_state_in_host_memory() -> None:
    run_ranks(train_both, {"dp": 2}, runs=TOGETHER)


def look_at_places(mesh: DeviceMesh, one: Run) -> None:
    pretend.install()
    mesh = pretend.join(mesh)
    engine = make_engine(mesh, one)
    for number, batch in enumerate(batches(one)):
        assert engine.step(share_of(mesh, batch), one.lr, number).changed
    buffers = engine.optimizer.all_buffers()
    for buffer in buffers:
        kept = [buffer.masters, buffer.remainder, buffer.ema, *buffer.state.values()]
        places = {values.device.type for values in kept if values is not None}
        assert places == {"cpu"}
        assert buffer.own_weights.device.type == pretend.NAME
        assert buffer.local_grads.device.type == pretend.NAME
    assert all(held.digest.device.type == pretend.NAME for held in digest_held_state(buffers, []))


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_state_lies_on_the_host_and_all_else_on_the_device(masters: str) -> None:
    changes = {"masters": masters} if masters == "split" else {}
    run_ranks(look_at_places, {}, one=on_host(run(options=EMA, changes=changes)))


def test_the_host_waits_once_a_step_with_state_in_its_memory() -> None:
    """Copies between the two are queued as all other work is."""
    runs = [run(), run(changes={"masters": "split"}), run(options=EMA)]
    for waits in run_ranks(waits_of_steps, {}, runs=list(map(on_host, runs)))[0]:
        assert len(waits) == 1, waits
