"""The laws of what a step takes beside its arithmetic: messages, waits of the host, memory. A second
message, wait or copy changes no number, so that no other law sees it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import LossScaling, plan
from models.estimate.storage import LiveMemory
from tests import pretend
from tests.given import declare
from tests.layouts import Run, batches, make_engine, share_of
from tests.logical import Case, give, make_optimizer
from tests.ranks import run_ranks

# every method of `Axis` that communicates
COLLECTIVES = [
    name
    for name in vars(Axis)
    if name.startswith("start_")
    or name in ("sum_", "max_", "gather", "scatter_sum", "exchange", "barrier")
]


class Sent(NamedTuple):
    """A collective: of which axis and kind, and how many elements this rank gives."""

    axis: str
    kind: str
    elements: int


class Messages:
    """Notes the collectives of all axes, those that others are made of not."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._depth = 0
        for name in COLLECTIVES:
            setattr(Axis, name, self._noting(name, getattr(Axis, name)))

    def _noting(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def noting(axis: Axis, *given: Any, **named: Any) -> Any:
            tensors = [one for one in given if isinstance(one, Tensor)]
            if axis.size > 1 and not self._depth:
                self.sent.append(Sent(axis.name, name, sum(one.numel() for one in tensors)))
            self._depth += 1
            try:
                return inner(axis, *given, **named)
            finally:
                self._depth -= 1

        return noting


def messages_of_steps(mesh: DeviceMesh, cases: list[Case]) -> list[tuple[list[Sent], int]]:
    """The collectives of a step that compares nothing between ranks, and the elements of all
    buffers, for each case."""
    messages = Messages()
    found = []
    for case in cases:
        optimizer = make_optimizer(mesh, case)
        optimizer.checks_loop = False
        for step in range(2):
            give(optimizer, step)
            messages.sent.clear()
            optimizer.step(1e-2)
            optimizer.wait()
        elements = sum(buffer.grads.numel() for buffer in optimizer.all_buffers())
        found.append((messages.sent[:], elements))
    return found


SCALED = LossScaling("dynamic", 2.0**4)
WAYS = [
    Case("bf16"),
    Case("fp16", {"scaling": SCALED}, clip=1.0),
    Case("fp32", options={"norm": 3.0}, clip=1.0),
    Case("bf16", {"masters": "split"}, {"ema": 0.9}),
    Case("bf16", options={"overlap": True}, rule=("sgd", {})),
]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_step_asks_all_ranks_once_for_a_few_numbers(axes: dict[str, int]) -> None:
    for found in run_ranks(messages_of_steps, axes, cases=WAYS):
        for case, (sent, _) in zip(WAYS, found, strict=True):
            asked = [one for one in sent if one.axis == "world"]
            assert [one.kind for one in asked] == ["sum_"], (case, sent)
            assert asked[0].elements < 64, (case, sent)


def test_a_step_sends_each_gradient_once_and_under_zero_each_weight_once() -> None:
    cases = [Case("bf16", options={"zero_size": size}) for size in (1, 2)]
    for found in run_ranks(messages_of_steps, {"dp": 2}, cases=cases):
        for case, (sent, elements) in zip(cases, found, strict=True):
            over_replicas = [one for one in sent if one.axis != "world"]
            times = case.options["zero_size"]
            assert sum(one.elements for one in over_replicas) == times * elements, (case, sent)


def world_messages_of_engine(mesh: DeviceMesh, runs: list[Run]) -> list[list[str]]:
    """The collectives over all ranks of an engine's second step, for each run."""
    messages = Messages()
    found = []
    for run in runs:
        engine = make_engine(mesh, run)
        for number, batch in enumerate(batches(run)[:2]):
            share = share_of(mesh, batch)
            messages.sent.clear()
            engine.step(share, run.lr, number)
        found.append([one.kind for one in messages.sent if one.axis == "world"])
    return found


LLAMA = {
    "family": "llama", "layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64,
}  # fmt: skip


def test_an_engines_step_asks_all_ranks_once_and_once_more_for_numbers_beside_the_loss() -> None:
    runs = [Run(LLAMA, "bf16"), Run({**LLAMA, "z_loss": 0.1}, "bf16")]
    for dense, with_z_loss in run_ranks(world_messages_of_engine, {"dp": 2}, runs=runs):
        assert dense == ["sum_"]
        assert with_z_loss == ["sum_"] * 2


class Large(nn.Module):
    """A parameter that is larger than what a step works on at a time, and a small one."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(elements))
        self.small = nn.Parameter(torch.ones(64))
        attach_whole(self)


# plan, and options of the optimizer
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("fp32", {}, {}),
    "bf16": ("bf16", {}, {"clip": 1.0}),
    "fp16": ("fp16", {"scaling": SCALED}, {"clip": 1.0}),
    "split masters": ("bf16", {"masters": "split"}, {}),
    "bf16 moments": ("bf16", {"moments": "bf16"}, {}),
    "L3 norm": ("bf16", {}, {"norm": 3.0}),
    "largest gradient": ("bf16", {}, {"norm": float("inf")}),
}


def peak_of_a_step(name: str, elements: int) -> int:
    """The most bytes that the second step of the optimizer takes at a time, by one of `PLANS`."""
    compute, changes, options = PLANS[name]
    parts = [Large(elements)]
    optimizer = ParallelAMPOptimizer(parts, plan(compute, **changes), average=False, **options)
    live = LiveMemory()
    for _ in range(2):
        declare(optimizer)
        assert optimizer.scale is not None  # of FP16, which must be asked for
        live = LiveMemory()
        with torch.no_grad(), live:
            optimizer.step(1e-3)
    return live.peak


@pytest.mark.parametrize("name", PLANS)
def test_a_step_takes_no_more_memory_for_a_larger_buffer(name: str) -> None:
    smaller, larger = 5 << 18, 7 << 18
    added = peak_of_a_step(name, larger) - peak_of_a_step(name, smaller)
    assert added < (larger - smaller) / 10  # bytes: a mask would take one an element


def waits_of_optimizers(mesh: DeviceMesh, names: list[str]) -> list[list[str]]:
    """Operators that the host waited for in the third step, by each of `PLANS`."""
    pretend.install()
    mesh = pretend.join(mesh)
    found = []
    for name in names:
        compute, changes, options = PLANS[name]
        module = nn.Linear(8, 8, device=pretend.NAME)
        attach_whole(module)
        optimizer = ParallelAMPOptimizer(
            [module], plan(compute, **changes), mesh, average=False, **options
        )
        for _ in range(3):
            declare(optimizer)
            assert optimizer.scale is not None  # of FP16, which must be asked for
            pretend.waits.clear()
            optimizer.step(1e-3)
        found.append(pretend.waits[:])
    return found


def test_the_host_waits_once_a_step_of_the_optimizer() -> None:
    (found,) = run_ranks(waits_of_optimizers, {}, names=[*PLANS])
    assert dict(zip(PLANS, map(len, found), strict=True)) == dict.fromkeys(PLANS, 1), found


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::copy_":
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_parameters_that_are_where_they_belong_are_not_copied_before_a_step() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    attach_whole(net)
    optimizer = ParallelAMPOptimizer([net], plan("fp32"))
    (buffer,) = {id(buffer): buffer for buffer in optimizer.all_buffers()}.values()
    with Copies() as copies:
        assert buffer.reclaim_parameters() == []
    assert copies.elements == 0
    moved = list(net.parameters())[2]
    moved.data = moved.data.clone()
    with Copies() as copies:
        assert buffer.reclaim_parameters() == []
    assert copies.elements == moved.numel()
