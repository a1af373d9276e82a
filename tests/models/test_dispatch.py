"""The way of tokens to experts on other ranks: every row arrives, is computed once, and its
gradient comes back.

Ranks are threads of this process here, which meet where ranks would exchange messages.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.experts import ExpertAxes, describe_misfit
from megaprec.comm.layout import layout_of
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.feed_forward import dispatch
from models.feed_forward.dispatch import rows_of_rank, transpose_groups
from models.feed_forward.moe import MixtureOfExperts
from parallel.context import Context
from tests.ranks import run_ranks
from tests.refusals import sentence

RANKS = 2
EXPERTS = 4
CONFIG = ModelConfig(
    family="mixtral", layers=1, hidden=4, heads=2, ffn=6, experts=EXPERTS, init_std=0.5
)


@dataclass(frozen=True)
class Meeting(Axis):
    """An axis whose ranks are threads. board: what each rank sends."""

    board: list[Any] = field(default_factory=list, compare=False)
    barrier: Barrier = field(default_factory=lambda: Barrier(1), compare=False)

    def exchange(self, tensor: Tensor) -> Tensor:
        return torch.cat([some.chunk(self.size)[self.rank] for some in self._met(tensor)])

    def start_uneven_exchange(self, outgoing: Any, sizes: Any) -> Callable[[], list[Tensor]]:
        found = [some[self.rank] for some in self._met(outgoing)]
        assert [len(some) for some in found] == list(sizes), (
            "a rank expects other sizes than it is sent"
        )
        return lambda: found

    def _met(self, mine: Any) -> list[Any]:
        self.board[self.rank] = mine
        self.barrier.wait(600)
        found = [*self.board]
        self.barrier.wait(600)
        return found


@dataclass
class Routing:
    """What the routers of all ranks decide: tokens, weights and choices of each rank."""

    tokens: list[Tensor]
    weights: list[Tensor]
    chosen: list[Tensor]


def routing(number: int) -> Routing:
    """A random one: few tokens or many, none on a rank, some experts only, one expert only."""
    draw = torch.Generator().manual_seed(number)

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=draw))

    wanted = 1 + below(EXPERTS)  # experts that are chosen at all
    k = 1 + below(wanted)
    allowed = torch.randperm(EXPERTS, generator=draw)[:wanted]
    counts = [below((1, 4, 9)[below(3)]) for _ in range(RANKS)]
    tokens = [
        torch.randn(n, 1, 4, dtype=torch.float64, generator=draw).requires_grad_() for n in counts
    ]
    weights = [
        torch.rand(n, 1, k, dtype=torch.float64, generator=draw).requires_grad_() for n in counts
    ]
    ranked = [torch.rand(n, 1, wanted, generator=draw).argsort(-1)[..., :k] for n in counts]
    return Routing(tokens, weights, [allowed[one] for one in ranked])


def layer(axes: ExpertAxes | None) -> MixtureOfExperts:
    return MixtureOfExperts(CONFIG, Context(plan("fp64"), experts=axes, seed=5), "mlp").to(
        torch.float64
    )


def through(experts: MixtureOfExperts, given: Routing, rank: int) -> Tensor:
    experts.router.forward = lambda x, place: (given.weights[rank], given.chosen[rank])  # type: ignore[method-assign]
    return experts(given.tokens[rank], None)


def gradients(experts: MixtureOfExperts) -> dict[str, Tensor]:
    named = ((layout_of(p).parts[0].name, p.grad) for p in experts.experts.parameters())
    return {name: grad for name, grad in named if grad is not None}


def on_threads(work: Callable[[int, Axis], None]) -> None:
    """Calls work(rank, axis) on a thread for each rank; raises what one of them raised."""
    board = [None] * RANKS
    barrier = Barrier(RANKS)
    errors = list[BaseException]()

    def run(rank: int) -> None:
        try:
            work(rank, Meeting("expert", rank, RANKS, board=board, barrier=barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def require_same_as_alone(numbers: range) -> None:
    """Results and the gradients of tokens, weights and experts are those of one rank that holds all
    experts."""
    found: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(RANKS)}

    def work(rank: int, axis: Axis) -> None:
        experts = layer(ExpertAxes(axis, Axis("tp"), Axis("replicas")))
        for number in numbers:
            given = routing(number)
            experts.zero_grad()
            y = through(experts, given, rank)
            y.backward(torch.ones_like(y))
            found[rank].append(
                (y.detach(), given.tokens[rank].grad, given.weights[rank].grad, gradients(experts))
            )

    on_threads(work)
    alone = layer(None)
    for at, number in enumerate(numbers):
        given = routing(number)
        alone.zero_grad()
        results = [through(alone, given, rank) for rank in range(RANKS)]
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        expected = gradients(alone)
        ours: dict[str, Tensor] = {}
        for rank, y in enumerate(results):
            own, of_tokens, of_weights, of_experts = found[rank][at]
            close(own, y.detach())
            close(of_tokens, given.tokens[rank].grad)
            close(of_weights, given.weights[rank].grad)
            assert not ours.keys() & of_experts.keys(), "two ranks hold one expert"
            ours |= of_experts
        assert ours.keys() == expected.keys()
        for name, grad in expected.items():
            close(ours[name], grad)


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_random_routings_are_computed_as_on_one_rank() -> None:
    require_same_as_alone(range(20))


@pytest.mark.cases(0, slow=1)
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_a_thousand_random_routings_are_computed_as_on_one_rank(first: int) -> None:
    require_same_as_alone(range(first, first + 250))


def test_the_routings_of_this_law_have_every_extreme() -> None:
    drawn = [routing(number) for number in range(20)]
    counts = [[len(tokens) for tokens in one.tokens] for one in drawn]
    assert any(0 in some and any(some) for some in counts), (
        "a rank without tokens beside others with some"
    )
    assert any(0 < sum(some) < EXPERTS for some in counts), "fewer tokens than experts"
    used = [len(torch.cat([one.flatten() for one in each.chosen]).unique()) for each in drawn]
    assert {1, EXPERTS} <= set(used), "all tokens to one expert; all experts in use"


def test_a_wrong_order_of_rows_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "transpose_groups", lambda rows, counts: rows)
    with pytest.raises(AssertionError):
        require_same_as_alone(range(5))


def test_rows_are_regrouped_and_back() -> None:
    counts = [[2, 0, 1], [0, 3, 1]]
    names = [
        (i, j, n)
        for i, some in enumerate(counts)
        for j, count in enumerate(some)
        for n in range(count)
    ]
    rows = torch.tensor(names)
    turned = transpose_groups(rows, counts)
    assert [tuple(row) for row in turned.tolist()] == sorted(
        names, key=lambda name: (name[1], name[0], name[2])
    )
    assert torch.equal(transpose_groups(turned, [*zip(*counts, strict=True)]), rows)


@pytest.mark.parametrize(("tp", "slices"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 10])
def test_tensor_parallel_ranks_send_each_row_once_for_each_slice(
    tp: int, slices: int, count: int
) -> None:
    sent = []
    for rank in range(tp):
        axes = ExpertAxes(Axis("expert"), Axis("tp", rank % slices, slices), Axis("replicas"))
        sent += range(count)[rows_of_rank(count, Axis("tp", rank, tp), axes)]
    assert sorted(sent) == sorted([*range(count)] * slices)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 2, 2, 2), ""),
        ((2, 2, 4, 1), ""),
        ((1, 4, 2, 2), ""),
        (
            (2, 2, 4, 2),
            sentence(
                "comm.experts_ranks",
                expert=4,
                expert_tensor=2,
                expert_ranks=8,
                data=2,
                tensor=2,
                stage_size=4,
            ),
        ),
        (
            (4, 2, 3, 2),
            sentence(
                "comm.experts_ranks",
                expert=3,
                expert_tensor=2,
                expert_ranks=6,
                data=4,
                tensor=2,
                stage_size=8,
            ),
        ),
        ((4, 2, 1, 4), sentence("comm.experts_slices", expert_tensor=4, tensor=2)),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: tuple[int, int, int, int], said: str) -> None:
    found = describe_misfit(*sizes) or ""
    assert re.search(said, found) and bool(found) == bool(said)


def groups_of_experts(
    mesh: DeviceMesh, expert: int, slices: int
) -> list[tuple[int, int, list[int] | None]]:
    """Size, own rank and world ranks of the axes of experts: spread, slices and replicas."""
    axes = ExpertAxes.of(mesh, expert, slices)
    assert axes is not None
    return [
        (axis.size, axis.rank, dist.get_process_group_ranks(axis.group) if axis.group else None)
        for axis in (axes.spread, axes.tp, axes.replicas)
    ]


@pytest.mark.parametrize(("expert", "slices"), [(2, 2), (2, 1), (4, 1)])
def test_each_axis_of_experts_has_the_group_of_its_own_ranks(expert: int, slices: int) -> None:
    """Of world ranks in the order [replica, expert, slice]; an axis of one rank has none."""
    found = run_ranks(groups_of_experts, {"dp": 2, "tp": 2}, expert=expert, slices=slices)
    order = torch.arange(4).view(-1, expert, slices)
    for rank, axes in enumerate(found):
        replica, number, part = (order == rank).nonzero()[0].tolist()
        lines = [order[replica, :, part], order[replica, number], order[:, number, part]]
        for (size, own, ranks), line in zip(axes, map(Tensor.tolist, lines), strict=True):
            assert (size, line[own]) == (len(line), rank)
            assert ranks == (line if size > 1 else None)
