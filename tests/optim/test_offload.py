"""Masters and moments in host memory have the bits of those on the device.

Both memories are the CPU's here, and no copy between them runs before somebody waits for it
(`tests.offload`). Tiles are short, so that a buffer has many.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megaprec.checkpoint.save_load import load, save
from megaprec.checkpoint.snapshot import take_snapshot
from megaprec.comm.layout import attach_whole
from megaprec.comm.main_grad import begin_cleared
from megaprec.diagnose.held_state import digest_held_state, find_strayed
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state import host_memory
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.optim.state.host_memory import NUM_STAGED, HostMemory
from megaprec.precision.plan import plan
from tests.layouts import Run, train_all
from tests.logical import Case, differing, give, make_optimizer, results, train
from tests.offload import CpuHostMemory, LateTransport
from tests.optim.test_weight_average import PLANS as AVERAGED
from tests.optim.test_zero_families import EIGHT_EXPERTS, FAMILIES, require_same_training
from tests.ranks import run_ranks
from tests.refusals import sentence

PLANS: dict[str, Case] = {
    **AVERAGED,
    "fp64": Case("fp64"),
    "no average": Case("bf16"),
    "skipped": Case("fp16", bad=(1, 3), fine=8),
    "moments in bf16": Case("bf16", {"moments": "bf16"}),
    "sgd without momentum": Case("fp32", rule=("sgd", {"momentum": 0.0})),
    "clipped": Case("bf16", {"masters": "split", "moments": "bf16"}, clip=0.5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero 1": {"bucket": 64},
    "no zero": {"zero_size": 1},
    "zero 2": {"shard_gradients": True},
    "overlap": {"overlap": True, "bucket": 64},
    "canonical": {"canonical": True},
}
BF16 = Case("bf16", options={"ema": 0.9})


def on_host(case: Case) -> Case:
    return replace(case, options={**case.options, "offload": CpuHostMemory()})


def require_same(cases: list[Case], axes: dict[str, int]) -> None:
    """Each case has the same bits with and without host memory."""
    both = results([*cases, *map(on_host, cases)], axes)
    for case, without, with_host in zip(cases, both, both[len(cases) :], strict=False):
        assert not differing(with_host, without), case
        assert with_host.numbers == without.numbers, case
        assert str(with_host.reports) == str(without.reports), case


@pytest.mark.parametrize("name", PLANS)
def test_state_in_host_memory_has_the_same_bits_in_every_precision(name: str) -> None:
    require_same([PLANS[name], replace(PLANS[name], restart=2)], {})


@pytest.mark.filterwarnings("ignore:.* weights rounded to bfloat16 only")
@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}, {"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_state_in_host_memory_has_the_same_bits_in_every_layout(
    axes: dict[str, int], tmp_path: Path
) -> None:
    cases = [replace(BF16, options=options) for options in OPTIONS.values()]
    cases[-1] = replace(cases[-1], compute="fp32")
    if "tp" in axes:
        cases.pop()
    cases += [PLANS["muon"], PLANS["split masters"], replace(PLANS["stochastic"], restart=2)]
    for number, case in enumerate((BF16, PLANS["narrow checkpoint"])):
        cases.append(replace(case, restart=2, folder=tmp_path / str(number)))
    require_same(cases, axes)


STAGES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"shard_gradients": True},
    3: {"shard_weights": True, "overlap": True},
}


@pytest.mark.cases(0, sample=3)
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("stage", STAGES)
def test_every_family_has_the_same_bits_under_zero(model: str, stage: int) -> None:
    has_experts = EIGHT_EXPERTS.items() <= FAMILIES[model].items()
    run = Run(
        FAMILIES[model],
        "bf16",
        options={**STAGES[stage], "bucket": 300, "ema": 0.9},
        expert=2 if has_experts else 1,
        micro_batch=4,
        steps=2,
    )
    with_host = replace(run, options={**run.options, "offload": CpuHostMemory()})
    require_same_training(*train_all([run, with_host], 1, 1, 2))


def sharded_by_torch(mesh: DeviceMesh) -> list[dict[str, Tensor]]:
    """The state of a model of `fully_shard` after some steps, without host memory and with."""
    states: list[dict[str, Tensor]] = []
    x = torch.linspace(-1, 1, 128).view(8, 16).bfloat16()
    for memory in (None, CpuHostMemory()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).bfloat16()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        attach_whole(model)
        precision = plan("bf16", gradients="bf16", reduce="bf16")
        optimizer = ParallelAMPOptimizer([model], precision, lr=1e-2, ema=0.9, offload=memory)
        for _ in range(3):
            loss = (model(x) - x.sum(-1, keepdim=True)).float().square().mean()
            loss.backward()
            assert optimizer.step(loss=loss.detach()).changed
        states.append(optimizer.state_dict()["tensors"])
    return states


@pytest.mark.slow
def test_a_model_of_fully_shard_has_the_same_bits() -> None:
    for without, with_host in run_ranks(sharded_by_torch, {"dp": 2}):
        assert is_same(with_host, without)


# From here on on one process.


def optimizer_of(case: Case) -> ParallelAMPOptimizer:
    return train(None, case)[0]


def state_of(optimizer: ParallelAMPOptimizer) -> dict[str, Tensor]:
    """Masters, moments and average by name, and what layers read."""
    held = {f"held {n}": b.own_weights.clone() for n, b in enumerate(optimizer.all_buffers())}
    return {**optimizer.state_dict()["tensors"], **held}


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


RESUMED = {name: PLANS[name] for name in ("bf16", "split masters", "stochastic", "muon")}


def go_on(case: Case, source: ParallelAMPOptimizer, folder: Path | None) -> dict[str, Tensor]:
    """The state of an optimizer of `case` that loads from `source`, and takes two more steps."""
    resumed = make_optimizer(None, case)
    if folder is None:
        resumed.load_state_dict(source.state_dict())
    else:
        load(save(folder, 1, source, {}), resumed)
    for step in (4, 5):
        give(resumed, step)
        assert resumed.step(case.lr).changed
    return state_of(resumed)


def require_resumable(case: Case, folder: Path | None) -> None:
    """A run with host memory resumes into one without, and the other way round."""
    expected = go_on(case, optimizer_of(case), folder and folder / "expected")
    into_host = go_on(on_host(case), optimizer_of(case), folder and folder / "into")
    from_host = go_on(case, optimizer_of(on_host(case)), folder and folder / "from")
    assert is_same(into_host, expected), "resumed into host memory"
    assert is_same(from_host, expected), "resumed from host memory"


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("with_files", [False, True])
def test_a_run_resumes_with_host_memory_and_without(
    name: str, with_files: bool, tmp_path: Path
) -> None:
    require_resumable(RESUMED[name], tmp_path if with_files else None)


def masters_keep_what_they_were(inner: Callable[..., None]) -> Callable[..., None]:
    def restore(self: Buffer, name: str, start: int, values: Tensor) -> None:
        is_built = hasattr(self, "_versions")
        if name == "weight" and self.memory is not None and is_built:
            self.own_weights[start : start + len(values)].copy_(values)
            return
        inner(self, name, start, values)

    return restore


def moments_are_of_a_stale_step(inner: Callable[..., None]) -> Callable[..., None]:
    def restore(self: Buffer, name: str, start: int, values: Tensor) -> None:
        if name not in self.state or self.memory is None:
            inner(self, name, start, values)

    return restore


@pytest.mark.parametrize("plant", [masters_keep_what_they_were, moments_are_of_a_stale_step])
def test_a_load_that_leaves_old_masters_or_moments_is_found(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Buffer, "restore", plant(Buffer.restore))
    with pytest.raises(AssertionError, match="resumed into host memory"):
        require_resumable(BF16, None)


def arrives_early(inner: Any) -> Any:
    return lambda self, copy, after: inner(self, copy, ())


def nothing_is_known_of_the_last_pass(inner: Any) -> Any:
    def visit(self: HostMemory, owner: object, tiles: Any, written: Any = None) -> Any:
        self._last.clear()
        return inner(self, owner, tiles, written)

    return visit


def the_device_goes_on(inner: Any) -> Any:
    return lambda self, mark: None


def moments_stay(inner: Any) -> Any:
    def visit(self: HostMemory, owner: object, tiles: Any, written: Any = None) -> Any:
        return inner(self, owner, tiles, ("masters", "remainder") if written is None else written)

    return visit


@pytest.mark.parametrize(
    ("kind", "name", "plant"),
    [
        (LateTransport, "arrive", arrives_early),
        (LateTransport, "hold_device", the_device_goes_on),
        (CpuHostMemory, "visit", moments_stay),
        (CpuHostMemory, "visit", nothing_is_known_of_the_last_pass),
    ],
)
def test_a_copy_that_is_too_early_or_missing_is_found(
    kind: type, name: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # buffers of one tile too, which follows itself
    cases = [BF16, replace(BF16, options={**BF16.options, "bucket": 64})]
    monkeypatch.setattr(kind, name, plant(getattr(kind, name)))
    with pytest.raises(AssertionError):
        require_same(cases, {})


def test_a_save_needs_no_second_copy_and_a_copy_does_not_change() -> None:
    optimizer = optimizer_of(on_host(BF16))
    shared = {
        tensor.untyped_storage().data_ptr()
        for tensors in take_snapshot(optimizer, copy=False).files.values()
        for tensor in tensors.values()
    }
    memory = optimizer.all_buffers()[0].memory
    assert isinstance(memory, HostMemory)
    assert shared == memory._addresses
    copied = take_snapshot(optimizer, copy=True)
    copied.wait()
    before = {
        (file, key): tensor.clone()
        for file, tensors in copied.files.items()
        for key, tensor in tensors.items()
    }
    give(optimizer, 4)
    assert optimizer.step(1e-2).changed
    for (file, key), tensor in before.items():
        assert torch.equal(copied.files[file][key], tensor)


@pytest.mark.parametrize("name", ["bf16", "split masters", "stochastic", "no masters"])
def test_digests_are_the_same_and_strayed_weights_are_found(name: str) -> None:
    case = PLANS[name]
    plain, with_host = optimizer_of(case), optimizer_of(on_host(case))
    ours, expected = (
        {held.key: held.digest.tolist() for held in digest_held_state(one.all_buffers(), [])}
        for one in (with_host, plain)
    )
    assert ours == expected
    buffers = with_host.all_buffers()
    assert not any(find_strayed(buffers, with_host.applied_steps).values())
    with torch.no_grad():
        buffers[0].own_weights[0] += 1
    strayed = find_strayed(buffers, with_host.applied_steps)
    has_masters = buffers[0].masters is not None and name != "no masters"
    assert any(strayed.values()) == has_masters


@pytest.mark.parametrize("name", ["bf16", "split masters", "stochastic", "fp32"])
def test_weights_that_a_loop_writes_become_masters(name: str) -> None:
    states: list[dict[str, Tensor]] = []
    for case in (PLANS[name], on_host(PLANS[name])):
        optimizer = optimizer_of(case)
        for parameter in optimizer.all_buffers()[0].parameters:
            parameter.data.clamp_(-0.5, 0.5)
        give(optimizer, 4)
        assert optimizer.step(1e-3).changed
        states.append(state_of(optimizer))
    assert is_same(*states)
    largest = max(values.abs().max() for key, values in states[0].items() if "held" in key)
    assert largest < 0.6


def test_the_average_stands_in_for_the_weights_and_goes_again() -> None:
    seen: list[list[Tensor]] = []
    for case in (BF16, on_host(BF16)):
        optimizer = optimizer_of(case)
        before = state_of(optimizer)
        with optimizer.averaged_weights():
            seen.append([buffer.own_weights.clone() for buffer in optimizer.all_buffers()])
        assert is_same(state_of(optimizer), before)
    assert all(map(torch.equal, *seen))


def linear(size: int, memory: HostMemory | None) -> ParallelAMPOptimizer:
    model = nn.Linear(size, size)
    attach_whole(model)
    return ParallelAMPOptimizer([model], plan("bf16"), lr=1e-3, offload=memory)


def test_the_device_holds_a_few_tiles_whatever_the_size() -> None:
    staged: list[int] = []
    for size in (64, 256):
        memory = CpuHostMemory()
        optimizer = linear(size, memory)
        for _ in range(2):
            for parameter in optimizer.all_buffers()[0].parameters:
                begin_cleared(parameter).fill_(1.0)
            assert optimizer.step().changed
        staged.append(sum(len(each._room) for each in memory._staging))
        in_host_memory = sum(buffer.host_bytes() for buffer in optimizer.all_buffers())
        assert in_host_memory >= 12 * size * size
    assert staged == [NUM_STAGED * 12 * CpuHostMemory.tile_elements] * 2


def test_a_cpu_and_what_is_no_memory_are_refused() -> None:
    with pytest.raises(UserError, match=sentence("optimizer.offload_on_cpu")):
        linear(4, HostMemory())
    for value in (True, "host", "cpu"):
        with pytest.raises(UserError, match=sentence("optimizer.offload_kind", value=value)):
            linear(4, value)  # type: ignore[arg-type]


def test_memory_is_taken_in_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SMALLEST_BLOCK", 1 << 10)
    memory = HostMemory()
    values = [memory.zeros(count, torch.float32) for count in (3, 5, 200, 1000)]
    assert len({each.untyped_storage().data_ptr() for each in values}) == 2
    for number, each in enumerate(values):
        each.fill_(number)
    assert [each.tolist() for each in values] == [
        [number] * count for number, count in enumerate((3, 5, 200, 1000))
    ]
    assert all(map(memory.holds, values)) and not memory.holds(torch.ones(3))
