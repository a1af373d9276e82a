"""What travels while the model computes changes no bit, begins when it can, and is waited for by
who needs it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole, layout_of
from megaprec.optim.grad_sync import GradReducer, ParamGatherer, in_forward_order
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.cutting import build, cuts
from parallel.context import Context
from tests.layouts import Result, Run, train_all
from tests.models.test_parity import MODELS

CPU = torch.device("cpu")
SMALL = 300  # elements of a bucket: most matrices of these models get one of their own


def require_same_bits(one: Result, other: Result) -> None:
    assert other.reports == one.reports
    for name, weight in one.after.items():
        assert torch.equal(other.after[name], weight), name
        assert all(
            torch.equal(a[name], b[name]) for a, b in zip(one.grads, other.grads, strict=True)
        ), name


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "layout", [(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=lambda x: "tp{} pp{} dp{}".format(*x)
)
@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral"])
def test_overlap_by_buckets_trains_the_same_model_bit_for_bit(
    model: str, layout: tuple[int, int, int]
) -> None:
    run = Run(MODELS[model], compute="bf16", sequence=layout[0] > 1, options={"bucket": SMALL})
    runs = [run, replace(run, zero_size=1)]
    if layout[1] > 1:
        four = {**MODELS[model], "layers": 4}
        runs = [
            replace(run, model=four, kind=kind, chunks=n)
            for kind, n in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))
        ]
    early = [replace(run, options={"bucket": SMALL, "overlap": True}) for run in runs]
    results = train_all([*runs, *early], *layout)
    for plain, overlapped in zip(results[: len(runs)], results[len(runs) :], strict=True):
        assert any(report.outcome == "applied" for report in plain.reports)
        require_same_bits(plain, overlapped)


class Net(nn.Module):
    """Three layers in a list, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        self.head = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.head


def buffers_of(net: Net, done: Callable[[str, int], None]) -> list[Buffer]:
    """A buffer for each weight of the net, layers first; `done` is told what is begun and ended,
    and of which."""
    attach_whole(net)
    parameters = [*(layer.weight for layer in net.layers), net.head]
    buffers = [Buffer([p], plan("fp32"), Axis("dp"), Axis("zero"), 0, CPU) for p in parameters]  # type: ignore[list-item]
    for n, buffer in enumerate(buffers):

        def start_reduce(n: int = n) -> Callable[[], None]:
            done("sum", n)
            return lambda: done("end", n)

        def start_collect(n: int = n) -> Callable[[], None]:
            return lambda: done("arrived", n)

        buffer.start_reduce, buffer.start_all_gather = start_reduce, start_collect  # type: ignore[method-assign]
    return buffers


def test_sums_begin_while_the_last_backward_pass_goes_on_in_one_order_and_end_in_the_step() -> None:
    net = Net()
    seen = list[str]()
    sums = GradReducer(
        [buffers_of(net, lambda what, n: seen.append(f"{what} {n}"))], Axis("tp"), early=True
    )
    for n, layer in enumerate(net.layers):
        layer.register_full_backward_pre_hook(
            lambda module, grad, n=n: seen.append(f"backward {n}")
        )
    x = torch.ones(2, 3, requires_grad=True)
    net(x).sum().backward()
    assert seen == ["backward 2", "backward 1", "backward 0"], (
        "nothing is summed before the pass that completes it"
    )
    seen.clear()
    sums.expect(0)
    net(x).sum().backward()
    expected = ["backward 2", "sum 3", "backward 1", "sum 2", "backward 0", "sum 1", "sum 0"]
    assert sorted(seen) == sorted(expected)
    assert [s for s in seen if s.startswith("sum")] == ["sum 3", "sum 2", "sum 1", "sum 0"]
    assert seen.index("sum 3") < seen.index("backward 0"), "the head's sum waits for the whole pass"
    sums.reduce(0)
    assert sorted(seen) == sorted(expected)
    sums.finish()
    assert [s for s in seen if s.startswith("end")] == ["end 3", "end 2", "end 1", "end 0"]


def test_a_sum_of_first_and_last_weights_holds_up_no_other() -> None:
    """As one of all norms does, which is complete when the whole pass is over."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    first, second, third, last = net.parameters()
    plans = {"ends": [first, last], "second": [second], "third": [third]}
    buffers: Any = [SimpleNamespace(name=name, parameters=kept) for name, kept in plans.items()]
    for given in permutations(buffers):
        in_order: Any = in_forward_order(net, given)
        assert [buffer.name for buffer in in_order] == ["ends", "second", "third"]


def test_a_weight_that_the_pass_does_not_reach_holds_up_no_sum_for_good() -> None:
    net = Net()
    seen = list[str]()
    sums = GradReducer(
        [buffers_of(net, lambda what, n: seen.append(f"{what} {n}"))], Axis("tp"), early=True
    )
    sums.expect(0)
    net.layers[0](torch.ones(2, 3)).sum().backward()
    assert seen == [], "the head comes first in the order that all ranks keep"
    sums.finish()
    assert sorted(seen) == sorted(f"{what} {n}" for n in range(4) for what in ("sum", "end"))


def test_a_stage_waits_for_its_table_each_layer_for_itself_and_the_head_comes_last() -> None:
    config = ModelConfig(**MODELS["llama"])
    (stage,) = build(config, Context(plan("fp32")), cuts(config, 1, 8), [0], 0).values()
    optimizer = ParallelAMPOptimizer([stage], plan("fp32"), overlap=True, bucket=1)
    seen: list[str] = []
    for buffer in optimizer.all_buffers():
        name = layout_of(buffer.parameters[0]).parts[0].name
        buffer.start_all_gather = lambda name=name: lambda: seen.append(name)  # type: ignore[method-assign]
    for block in stage.layers.values():
        block.register_forward_pre_hook(lambda module, args: seen.append(f"{module.name} runs"))
    ids = torch.zeros(8, 2, dtype=torch.int64)
    stage.losses(stage(ids), ids).sum().backward()
    seen.clear()
    optimizer.step(1e-3)
    assert seen == []
    stage(ids)
    assert seen[0] == "embedding.weight" and set(seen[-2:]) == {"head.weight", "final_norm.weight"}
    seen = seen[1:-2]
    of_layers = [name.split(".")[1].split()[0] for name in seen]
    assert of_layers == sorted(of_layers), "a layer waits for no other"
    assert all(
        seen[n - 1].startswith(name.split()[0])
        for n, name in enumerate(seen)
        if name.endswith("runs")
    )


@pytest.mark.parametrize("early", [False, True])
def test_an_update_ends_with_all_weights_there_unless_layers_wait_for_their_own(
    early: bool,
) -> None:
    net = Net()
    seen = list[str]()
    buffers = buffers_of(net, lambda what, n: seen.append(f"{what} {n}"))
    weights = ParamGatherer([net], buffers, early=early)
    for buffer in buffers:
        weights.begin(buffer)
    weights.finish_update()
    assert seen == ([] if early else [f"arrived {n}" for n in range(4)])


def test_a_layer_waits_for_its_own_weights_and_the_model_for_all_others() -> None:
    net = Net()
    seen = list[int]()
    buffers = buffers_of(net, lambda what, n: seen.append(n))
    arrivals = ParamGatherer([net], buffers, early=True)
    for buffer in buffers:
        arrivals.begin(buffer)
    arrivals.finish_update()
    assert seen == []
    net.layers[1](torch.ones(1, 3))
    assert seen == [1]
    net(torch.ones(1, 3))
    assert seen == [1, 3, 0, 2]


@pytest.mark.parametrize("ask", ["load_saved_numbers", "averaged_weights"])
def test_weights_that_are_under_way_arrive_before_others_take_their_place(ask: str) -> None:
    net = Net()
    attach_whole(net)
    optimizer = ParallelAMPOptimizer([net], plan("fp32"), overlap=True, bucket=1, ema=0.9)
    seen = list[str]()

    def start_all_gather() -> Callable[[], None]:
        seen.append("begun")
        return lambda: seen.append("arrived")

    numbers = optimizer.saved_numbers()
    for buffer in optimizer.all_buffers():
        buffer.start_all_gather = start_all_gather  # type: ignore[method-assign]
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step(1e-3)
    assert seen == ["begun"] * 4
    if ask == "averaged_weights":
        with optimizer.averaged_weights():
            pass
    else:
        optimizer.load_saved_numbers(numbers)
    assert seen[4:8] == ["arrived"] * 4


@pytest.mark.parametrize(("bucket", "sizes"), [(1, [9, 9, 9, 9]), (10, [18, 18]), (100, [36])])
def test_a_bucket_is_full_with_the_parameter_that_reaches_its_size(
    bucket: int, sizes: list[int]
) -> None:
    net = Net()
    attach_whole(net)
    optimizer = ParallelAMPOptimizer([net], plan("fp32"), bucket=bucket)
    assert [
        sum(p.numel() for p in buffer.parameters) for buffer in optimizer.all_buffers()
    ] == sizes
