"""Sums over micro-batches are one tree: the same bits in every order of their ends and on any
number of dp ranks."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import Layout, Part, attach, attach_whole
from megaprec.comm.tree import add_by_tree
from megaprec.optim.canonical.microbatch_sums import MicrobatchTree
from megaprec.optim.canonical.requirements import canonical_conflicts
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.precision.plan import plan
from tests.ranks import on_ranks, run_ranks
from tests.refusals import raises, shows


def values_of(count: int, missing: float = 0.0) -> list[Tensor | None]:
    """Return a value of each micro-batch, of very different sizes, or None."""
    generator = torch.Generator().manual_seed(count)
    chance = random.Random(count)
    sizes = torch.logspace(-3, 4, count)
    values = [torch.randn(3, 5, generator=generator) * size for size in sizes]
    return [None if chance.random() < missing else value for value in values]


def by_definition(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return running sums over the largest odd divisor of the micro-batches, then adjacent
    pairs."""
    odd = len(values)
    while odd % 2 == 0:
        odd //= 2
    level = []
    for first in range(0, len(values), odd):
        run = values[first]
        for value in values[first + 1 : first + odd]:
            run = added(run, value)
        level.append(run)
    while len(level) > 1:
        level = [added(*level[n : n + 2]) for n in range(0, len(level), 2)]
    return level[0]


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is not None and other is not None:
        return one + other
    if one is None:
        return other
    return one


def in_tree(
    values: Sequence[Tensor | None], order: Sequence[int]
) -> tuple[Tensor | None, MicrobatchTree]:
    """Return the sum that a tree makes of values that arrive in this order, and the tree."""
    arriving = torch.full((3, 5), torch.nan)
    tree = MicrobatchTree(arriving)
    done = False
    for _ in range(2):  # a tree serves many steps
        tree.begin(len(values))
        for number in order:
            assert not done or number == order[0]
            value = values[number]
            arriving.fill_(torch.nan) if value is None else arriving.copy_(value)
            done = tree.end(number, value is not None)
    return (arriving if done else None), tree


@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0])
def test_a_tree_adds_as_defined_in_every_order_of_arrival(missing: float) -> None:
    for count in (*range(1, 17), 20, 24, 31, 32, 48):
        values = values_of(count, missing)
        expected = by_definition(values)
        orders = [list(range(count)), list(reversed(range(count)))]
        orders += [random.Random(seed).sample(range(count), count) for seed in range(5)]
        for order in orders:
            total, _ = in_tree(values, order)
            assert (total is None) == (expected is None)
            assert total is None or expected is None or torch.equal(total, expected), (count, order)


def test_another_order_of_additions_has_other_bits() -> None:
    """The values of these tests tell orders of addition apart."""
    values = [v for v in values_of(16) if v is not None]
    one_by_one = values[0]
    for value in values[1:]:
        one_by_one = one_by_one + value
    assert not torch.equal(one_by_one, add_by_tree(values))


def test_the_nodes_of_dp_ranks_are_nodes_of_the_whole_tree() -> None:
    for count in (1, 2, 4, 6, 8, 12, 24, 32, 40):
        values = values_of(count)
        dp = 1
        while count % dp == 0:
            ranks = [
                in_tree(values[n : n + count // dp], range(count // dp))[0]
                for n in range(0, count, count // dp)
            ]
            total = add_by_tree([node for node in ranks if node is not None])
            expected = by_definition(values)
            assert expected is not None
            assert torch.equal(total, expected), (count, dp)
            dp *= 2


@pytest.mark.parametrize(
    ("count", "kept"), [(1, 0), (2, 1), (8, 3), (32, 5), (3, 1), (12, 3), (24, 4)]
)
def test_a_tree_keeps_a_gradient_for_each_level_and_one_for_a_running_sum(
    count: int, kept: int
) -> None:
    _, tree = in_tree(values_of(count), range(count))
    assert tree.num_bytes() == kept * 3 * 5 * 4


class Net(nn.Module):
    """Two layers of odd sizes, and one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 1)
        self.expert = nn.Linear(13, 1)

    def forward(self, x: Tensor, expert: bool) -> Tensor:
        hidden = self.first(x).tanh()
        if expert:
            return self.second(hidden) + self.expert(hidden)
        return self.second(hidden)


def trained(
    mesh: DeviceMesh | None, samples: int, **options: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train a plain model for three steps in a plain loop; return what is reported, and the
    state."""
    net = Net()
    attach_whole(net)
    average = None if mesh is None else False
    optimizer = ParallelAMPOptimizer(
        [net], plan("fp32"), mesh, lr=0.1, average=average, canonical=True, **options
    )
    dp, size = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh["dp"].size())
    count = samples // size
    generator = torch.Generator().manual_seed(0)
    reports = []
    for _ in range(3):
        data = torch.randn(samples, 3, 7, generator=generator)
        losses = []
        for number in range(count):
            sample = dp * count + number
            loss = (
                net(data[sample], expert=samples == 4 or sample % 3 != 1).square().sum() / samples
            )
            (loss * optimizer.scale).backward()
            optimizer.end_microbatch(number, count)
            losses.append(loss.detach())
        report = optimizer.step(loss=torch.stack(losses))
        reports.append((report.loss, report.grad_norm, report.num_zeros, report.outcome))
    return reports, optimizer.state_dict()["tensors"]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"zero_size": 1},
    {"clip": 1e-2, "norm": 3.0},
    {"norm": float("inf"), "clip": 1e-2},
    {"rule": "sgd", "bucket": 1},
    {"norm": 1.5},
]


def train_rank(mesh: DeviceMesh, samples: int) -> list[Any]:
    return [trained(mesh, samples, **with_rule(options)) for options in VARIANTS]


def with_rule(options: dict[str, Any]) -> dict[str, Any]:
    return options | ({"rule": rule(options["rule"])} if "rule" in options else {})


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("samples", "dp"), [(6, 2), (12, 4), (8, 2), (4, 4)])
def test_a_plain_loop_trains_the_same_bits_on_any_number_of_dp_ranks(samples: int, dp: int) -> None:
    alone = [
        trained(None, samples, **with_rule({k: v for k, v in o.items() if k != "zero_size"}))
        for o in VARIANTS
    ]
    for rank in run_ranks(train_rank, {"dp": dp}, samples=samples):
        for (reports, state), (expected, whole) in zip(rank, alone, strict=True):
            assert reports == expected
            assert [name for name in whole if not torch.equal(whole[name], state[name])] == []


def optimizer_of(net: nn.Module, **options: Any) -> ParallelAMPOptimizer:
    attach_whole(net)
    return ParallelAMPOptimizer([net], plan("fp32"), lr=0.1, canonical=True, **options)


def test_a_step_without_the_ends_of_its_micro_batches_is_refused() -> None:
    net = nn.Linear(3, 1)
    optimizer = optimizer_of(net)
    net(torch.ones(2, 3)).sum().backward()
    with raises("optimizer.canonical_unannounced", name="weight", ends="no end of a micro-batch"):
        optimizer.step(loss=torch.zeros(1))
    optimizer.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    optimizer.end_microbatch(0, 2)
    with raises("optimizer.canonical_unannounced", ends="the ends of 1 of 2 micro-batches"):
        optimizer.step(loss=torch.zeros(2))


def test_contradicting_micro_batches_are_refused() -> None:
    net = nn.Linear(3, 1)
    optimizer = optimizer_of(net)
    with raises("optimizer.microbatch_number", microbatch=2, count=2, last=1):
        optimizer.end_microbatch(2, 2)
    optimizer.end_microbatch(0, 2)
    with raises("optimizer.microbatch_end", count=2, announced=3):
        optimizer.end_microbatch(1, 3)
    net(torch.ones(2, 3)).sum().backward()
    with raises("optimizer.canonical_two_gradients", name="weight", microbatch=0):
        optimizer.end_microbatch(0, 2)


def test_losses_must_be_as_many_as_micro_batches() -> None:
    net = nn.Linear(3, 1)
    optimizer = optimizer_of(net)
    for number in range(2):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.end_microbatch(number, 2)
    with raises("optimizer.canonical_losses", num_losses=1, count=2):
        optimizer.step(loss=torch.zeros(()))


def test_settings_whose_sums_depend_on_the_layout_are_refused_by_name() -> None:
    assert list(canonical_conflicts(plan("bf16"), 4)) == []
    assert shows(next(canonical_conflicts(plan("bf16"), 6)), "optimizer.canonical_ranks", ranks=6)
    assert shows(
        next(canonical_conflicts(plan("bf16", reduce="bf16"), 2)),
        "optimizer.canonical_reduce",
        reduce="bf16",
    )
    net = nn.Linear(3, 1)
    assert isinstance(net.weight, nn.Parameter)
    attach(net.weight, Layout((Part("w", (1, 3)),), tied=(0, 1, 2)))
    with raises("optimizer.canonical_tied", name="w"):
        optimizer_of(net)


@on_ranks(dp=2)
def test_an_average_over_dp_ranks_is_refused(mesh: DeviceMesh) -> None:
    net = nn.Linear(3, 1)
    attach_whole(net)
    with raises("optimizer.canonical_average"):
        ParallelAMPOptimizer([net], plan("fp32"), mesh, lr=0.1, canonical=True, average=True)
