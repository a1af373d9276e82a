"""The communicators whose bytes `megaprec plan` counts are those that a step uses, on each rank.

Ranks train on the device of `tests.pretend`, whose groups note what is asked of them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.rules.rule_table import rule
from megaprec.precision.fp8_recipe import FP8Recipe
from tests import pretend
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_other_device import FAMILIES, LLAMA, MODEL, WHOLE, run
from tests.ranks import run_ranks
from tools.analysis.planning.communicators import (
    MIB,
    Communicator,
    communicator_bytes,
    communicators_of,
)
from tools.analysis.planning.memory import MemoryModel
from tools.analysis.planning.speed import passes_of
from tools.config.run_file import RunConfig, load_run


class Uses:
    """What one rank asks of one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.has_ring = False
        self.sources = set[int]()
        self.destinations = set[int]()

    def told(self) -> Communicator:
        return Communicator(self.size, self.has_ring, len(self.sources), len(self.destinations))


def watch_groups() -> list[Uses]:
    """Let all groups of the device note their uses, in the order of the first ones."""
    every: list[Uses] = []

    def noting(name: str, note: Callable[[Uses, Any], object]) -> None:
        inner = getattr(pretend._Group, name)

        def noted(self: Any, *arguments: Any) -> Any:
            if not hasattr(self, "uses"):
                self.uses = Uses(self.size())
                every.append(self.uses)
            note(self.uses, arguments)
            return inner(self, *arguments)

        setattr(pretend._Group, name, noted)

    def rings(uses: Uses, arguments: Any) -> None:
        uses.has_ring = True

    def all_to_all(uses: Uses, arguments: Any) -> None:
        others = range(1, uses.size)
        uses.sources.update(others)
        uses.destinations.update(others)

    for name in ("allreduce", "_allgather_base", "_reduce_scatter_base"):
        noting(name, rings)
    for name in ("all_gather_single", "reduce_scatter_single"):
        noting(name, rings)
    for name in ("all_to_all_single", "alltoall_base"):
        noting(name, all_to_all)
    noting("send", lambda uses, arguments: uses.destinations.add(arguments[1]))
    noting("recv", lambda uses, arguments: uses.sources.add(arguments[1]))
    return every


def used_by(mesh: DeviceMesh, one: Run) -> list[Communicator]:
    """The groups that this rank uses in its steps, and while its engine is built."""
    pretend.install()
    every = watch_groups()
    mesh = pretend.join(mesh)
    engine = make_engine(mesh, one)
    for number, batch in enumerate(batches(one)):
        engine.step(share_of(mesh, batch), one.lr, number)
    engine.optimizer.wait()
    return [uses.told() for uses in every]


def config_of(one: Run, axes: dict[str, int], *keys: str) -> RunConfig:
    """The run as `plan` knows it."""
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context"}
    words = [f"parallel.{names[axis]}={size}" for axis, size in axes.items()]
    words += [f"model.{key}={_toml(value)}" for key, value in one.model.items()]
    words += [
        "precision.compute=bf16",
        f"parallel.expert={one.expert}",
        f"parallel.sequence={str(one.sequence).lower()}",
        f"parallel.context_by={'ring' if one.ring else 'gather'}",
        f"train.micro_batch={one.micro_batch}",
        f"train.global_batch={one.samples}",
        f"train.seq_length={one.length}",
        "train.steps=2",
        f"data.vocab_size={one.model['vocab']}",
    ]
    return load_run(None, [*words, *keys]).on_device("cuda")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


FP8 = FP8Recipe("delayed", history_length=4)
WHOLE_LLAMA = {**LLAMA, **WHOLE}
CASES: dict[str, tuple[dict[str, int], Run, tuple[str, ...]]] = {
    "tensor": ({"tp": 2}, run(), ()),
    "data": ({"dp": 2}, run(), ()),
    "pipeline": ({"pp": 2}, run(), ()),
    "tied": ({"pp": 2}, run(model={**MODEL, "tied": True}), ()),
    "ring": ({"cp": 2}, run(model=MODEL), ()),
    "gather": ({"cp": 2}, run(model=MODEL, ring=False), ()),
    "tensor, pipeline": ({"tp": 2, "pp": 2}, run(), ()),
    "tensor, data": ({"tp": 2, "dp": 2}, run(sequence=True), ()),
    "data, pipeline": ({"dp": 2, "pp": 2}, run(), ()),
    "data, context": ({"dp": 2, "cp": 2}, run(model=MODEL), ()),
    "chunks": (
        {"pp": 2},
        run(kind="interleaved", chunks=2, model={**MODEL, "layers": 4}),
        ("parallel.schedule=interleaved", "parallel.chunks=2"),
    ),
    "experts": ({"dp": 2}, run(model=FAMILIES["mixtral"], expert=2), ()),
    "experts, replicas": ({"dp": 4}, run(model=FAMILIES["mixtral"], expert=2, micro_batch=2), ()),
    "experts, tensor": ({"tp": 2, "dp": 2}, run(model=FAMILIES["mixtral"], expert=2), ()),
    "shared by two": (
        {"dp": 4},
        run(zero_size=2, micro_batch=2),
        ("parallel.zero_size=2",),
    ),
    "muon": (
        {"tp": 2, "dp": 2},
        run(model=WHOLE_LLAMA, options={"rule": rule("muon")}),
        ("optimizer.name=muon",),
    ),
    "muon over replicas": (
        {"dp": 2},
        run(model=WHOLE_LLAMA, options={"rule": rule("muon")}),
        ("optimizer.name=muon",),
    ),
    "muon, data, pipeline": (
        {"dp": 2, "pp": 2},
        run(model=WHOLE_LLAMA | {"layers": 2}, options={"rule": rule("muon")}),
        ("optimizer.name=muon",),
    ),
    "amaxes": (
        {"tp": 2, "dp": 2},
        run(model=WHOLE_LLAMA, changes={"fp8": FP8}),
        ("fp8.kind=delayed", "fp8.history_length=4"),
    ),
}
FAST = ("tensor, pipeline", "data, context", "experts, tensor")


def require_told(name: str) -> None:
    axes, one, keys = CASES[name]
    config = config_of(one, axes, *keys)
    used = run_ranks(used_by, axes, one=one)
    pipeline = axes.get("pp", 1)
    ranks_of_stage = config.world_size // pipeline
    rank_of_stage = config.schedule.rank_of_stage
    for rank, groups in enumerate(used):
        told = communicators_of(config, rank_of_stage, rank // ranks_of_stage)
        assert Counter(told) == Counter(groups), (name, rank)


@pytest.mark.parametrize("name", FAST)
def test_the_groups_that_are_counted_are_those_that_a_step_uses(name: str) -> None:
    require_told(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_the_groups_that_are_counted_are_those_that_a_step_uses_in_other_layouts(
    name: str,
) -> None:
    require_told(name)


def has_group_of_sharers(mesh: DeviceMesh, one: Run) -> bool:
    optimizer = make_engine(mesh, one).optimizer
    return optimizer.shards.group is not optimizer.dp.group


def test_ranks_that_share_weights_have_a_group_of_their_own() -> None:
    """Which is counted: there layers are gathered beside the sums of gradients."""
    sizes: list[int] = []
    for stage, options in ((1, {}), (3, {"shard_weights": True, "shard_gradients": True})):
        one = run(options=options)
        config = config_of(one, {"dp": 2}, f"parallel.zero={stage}")
        sizes.append(communicator_bytes(config, (0,), 0))
        has_own_group = run_ranks(has_group_of_sharers, {"dp": 2}, one=one)
        assert has_own_group == [stage == 3] * 2
    assert sizes == [24 * 12 * MIB, 2 * 24 * 12 * MIB]


def test_the_bytes_of_a_group_are_those_of_its_connections() -> None:
    """Of eight H100s in one host one report (NVIDIA/nccl, issue 1685) has buffers of 10 and 2 MiB, 32
    channels to each peer, and 3.28 GB more after an all-to-all."""
    assert Communicator(8, has_ring=True).nbytes == 24 * 12 * MIB
    all_to_all = Communicator(8, sources=7, destinations=7)
    assert all_to_all.nbytes == 7 * 32 * 12 * MIB
    assert all_to_all.nbytes == pytest.approx(3.28e9, rel=0.15)
    receives = Communicator(2, sources=1)
    sends = Communicator(2, destinations=1)
    assert receives.nbytes == 32 * 10 * MIB
    assert sends.nbytes == 32 * 2 * MIB


def test_messages_to_other_hosts_share_a_pool() -> None:
    assert Communicator(2, sources=1, far=1).nbytes == 64 * MIB
    spread = Communicator(64, sources=63, destinations=63, far=56)
    assert spread.nbytes == 7 * 32 * 12 * MIB + 2 * 64 * MIB


def test_groups_of_one_rank_and_groups_on_cpus_cost_nothing() -> None:
    one = run()
    alone = config_of(one, {})
    assert communicator_bytes(alone, (0,), 0) == 0
    ranks = config_of(one, {"tp": 2})
    assert communicator_bytes(ranks, (0,), 0) == 24 * 12 * MIB
    on_cpu = MemoryModel("cpu").of(ranks.on_device("cpu"), passes_of(ranks))
    assert on_cpu[0].communicators == 0
    on_gpu = MemoryModel("cuda").of(ranks, passes_of(ranks))
    assert on_gpu[0].communicators == 24 * 12 * MIB
    assert on_gpu[0].by_kind()["communicators"] == 24 * 12 * MIB


def test_a_rank_in_the_middle_of_a_pipeline_has_four_channels() -> None:
    config = config_of(run(model={**MODEL, "layers": 4}), {"pp": 4})
    rank_of_stage = (0, 1, 2, 3)
    world = 24 * 12 * MIB
    first, second = (communicator_bytes(config, rank_of_stage, rank) for rank in (0, 1))
    assert first == world + 32 * 12 * MIB
    assert second == world + 2 * 32 * 12 * MIB
