"""The laws of communication: collectives are linear maps with their transposes, and the same bits
arrive everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm import gloo
from megaprec.comm.axis import Axis
from parallel import collectives
from tests.ranks import run_ranks

# of what one rank holds when a tensor is cut
ROWS = 5
COLUMNS = 3


@dataclass(frozen=True)
class Case:
    """A collective, its plain meaning (all ranks' inputs -> all ranks' outputs), and the shapes it
    maps.

    A tensor that every rank holds alike is one tensor, so it counts once.
    """

    ours: Callable[[Tensor, Axis], Tensor]
    plain: Callable[[list[Tensor]], list[Tensor]]
    takes: Callable[[int], tuple[int, int]]
    copies_in: bool
    copies_out: bool


def part(n: int) -> tuple[int, int]:
    return ROWS, COLUMNS


def tall(n: int) -> tuple[int, int]:
    return n * ROWS, COLUMNS


def wide(n: int) -> tuple[int, int]:
    return ROWS, n * COLUMNS


def all_alike(x: Tensor, n: int) -> list[Tensor]:
    return [x] * n


CASES = {
    "copy": Case(collectives.copy, lambda xs: xs, part, True, False),
    "reduce": Case(
        collectives.reduce, lambda xs: all_alike(torch.stack(xs).sum(0), len(xs)), part, False, True
    ),
    "gather": Case(
        collectives.gather, lambda xs: all_alike(torch.cat(xs), len(xs)), part, False, False
    ),
    "reduce-scatter": Case(
        collectives.reduce_scatter,
        lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs))),
        tall,
        False,
        False,
    ),
    "split rows": Case(
        lambda x, axis: collectives.split(x, axis, 0),
        lambda xs: list(xs[0].chunk(len(xs))),
        tall,
        True,
        False,
    ),
    "split columns": Case(
        lambda x, axis: collectives.split(x, axis, 1),
        lambda xs: list(xs[0].chunk(len(xs), 1)),
        wide,
        True,
        False,
    ),
    "join rows": Case(
        lambda x, axis: collectives.join(x, axis, 0),
        lambda xs: all_alike(torch.cat(xs), len(xs)),
        part,
        False,
        True,
    ),
    "join columns": Case(
        lambda x, axis: collectives.join(x, axis, 1),
        lambda xs: all_alike(torch.cat(xs, 1), len(xs)),
        part,
        False,
        True,
    ),
}


def integers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small ones, so that sums are exact in every dtype; not contiguous, as what autograd hands
    over may be."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(-4, 5, tuple(reversed(shape)), generator=random, dtype=torch.int8)
    return made.permute(*reversed(range(len(shape)))).to(dtype)


def dot(xs: list[Tensor], ys: list[Tensor], copies: bool) -> float:
    pairs = list(zip(xs, ys, strict=True))[: 1 if copies else None]
    return sum((x.double() * y.double()).sum().item() for x, y in pairs)


def run_all_cases(mesh: DeviceMesh) -> dict[tuple[str, str], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By case and dtype: x, f(x), y, transposed f(y), as this rank sees them."""
    axis = Axis.of(mesh, "tp")
    found = {}
    for name, case in CASES.items():
        for dtype in (torch.float64, torch.bfloat16):
            x = integers(
                0 if case.copies_in else axis.rank, case.takes(axis.size), dtype
            ).requires_grad_()
            fx = case.ours(x, axis)
            y = integers(10 if case.copies_out else 10 + axis.rank, tuple(fx.shape), dtype)
            (fty,) = torch.autograd.grad(fx, x, y)
            found[name, str(dtype)] = x.detach(), fx.detach(), y, fty
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_backward_pass_of_a_collective_is_its_transpose(ranks: int) -> None:
    results = run_ranks(run_all_cases, {"tp": ranks})
    for name, case in CASES.items():
        for dtype in ("torch.float64", "torch.bfloat16"):
            xs, fxs, ys, ftys = (
                list(column) for column in zip(*(r[name, dtype] for r in results), strict=True)
            )
            for got, expected in zip(fxs, case.plain(xs), strict=True):
                assert torch.equal(got, expected), f"{name} of {dtype}"
                assert got.dtype == expected.dtype
            assert dot(fxs, ys, case.copies_out) == dot(xs, ftys, case.copies_in), (
                f"transposed {name} of {dtype}"
            )
            if case.copies_in:
                assert all(torch.equal(fty, ftys[0]) for fty in ftys), (
                    f"{name}: the gradient of a copy is not a copy"
                )


def test_an_axis_of_one_rank_needs_no_process_group() -> None:
    axis = Axis("tp")
    x = integers(0, (4, 3), torch.float64)
    for case in CASES.values():
        assert case.ours(x, axis) is x
    for same in (axis.sum_, axis.max_, axis.gather, axis.scatter_sum, axis.chunk):
        assert torch.equal(same(x.clone()), x)


def check_exchange(mesh: DeviceMesh) -> dict[str, Tensor]:
    axis = Axis.of(mesh, "tp")
    assert axis.group is not None
    for elements in sizes(axis.size):
        check_against_torch(axis, elements)
    check_rounding(axis)
    check_maximum(axis)
    check_in_place(axis)
    check_many_at_once(axis)
    check_refusals(axis)
    return {str(n): axis.sum_(randoms(axis.rank, n)) for n in sizes(axis.size)}


def sizes(ranks: int) -> list[int]:
    """Numbers of floats on both sides of the threshold."""
    ring = -(-gloo.RING_BYTES // (4 * (ranks - 1)))
    return [1, 7, 4096, ring - 1, ring, ring + 1]


def randoms(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).exp()


def check_against_torch(axis: Axis, elements: int) -> None:
    """Sums of integers have one right answer, so order does not matter."""
    x = integers(axis.rank, (elements,), torch.float32)
    expected = x.clone()
    dist.all_reduce(expected, group=axis.group)
    assert torch.equal(axis.sum_(x.clone()), expected), f"sum of {elements}"
    expected = x.clone()
    dist.all_reduce(expected, dist.ReduceOp.MAX, group=axis.group)
    assert torch.equal(axis.max_(x.clone()), expected), f"max of {elements}"
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x, group=axis.group)
    assert torch.equal(axis.gather(x), torch.cat(parts)), f"gather of {elements}"
    whole = integers(axis.rank, (axis.size * elements,), torch.float32)
    summed = torch.empty_like(x)
    dist.reduce_scatter(summed, list(whole.chunk(axis.size)), group=axis.group)
    assert torch.equal(axis.scatter_sum(whole), summed), f"scatter of {elements}"


def check_rounding(axis: Axis) -> None:
    """Small sums of halves are taken in FP32 and rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        all_ranks = torch.stack([randoms(r, 100) for r in range(axis.size)]).to(dtype)
        expected = all_ranks.float().sum(0).to(dtype)
        assert torch.equal(axis.sum_(all_ranks[axis.rank].clone()), expected)


def check_maximum(axis: Axis) -> None:
    x = torch.full((axis.size + 2,), -torch.inf)
    x[axis.rank] = torch.nan
    assert axis.max_(x).isnan().tolist() == [True] * axis.size + [False] * 2, (
        "NaN wins, on whichever rank it is"
    )
    assert axis.max_(torch.tensor(axis.rank)).item() == axis.size - 1


def check_in_place(axis: Axis) -> None:
    everyone = torch.cat([integers(r, (6,), torch.float32) for r in range(axis.size)])
    flat = torch.full_like(everyone, torch.nan)
    axis.chunk(flat).copy_(axis.chunk(everyone))
    axis.start_gather_(flat)()
    assert torch.equal(flat, everyone)
    own = axis.chunk(everyone).clone()
    flat = torch.full_like(everyone, torch.nan)
    axis.start_gather_from(own, flat)()
    assert torch.equal(flat, everyone)
    assert torch.equal(own, axis.chunk(everyone))
    flat = everyone * (axis.rank + 1)
    axis.start_scatter_sum_(flat)()
    assert torch.equal(axis.chunk(flat), axis.chunk(everyone) * sum(range(1, axis.size + 1)))


def check_many_at_once(axis: Axis) -> None:
    """Several are begun before the first is waited for, and they are finished in another order."""
    sums: list[tuple[Tensor, Callable[[], object], Tensor]] = []
    parts: list[tuple[Callable[[], Tensor], Tensor]] = []
    for i, n in enumerate((3, 2, 1000, gloo.RING_BYTES // 4)):
        everyone = torch.stack(
            [integers(10 * i + r, (n * axis.size,), torch.float32) for r in range(axis.size)]
        )
        own = everyone[axis.rank].clone()
        parts.append((axis.start_scatter_sum(everyone[axis.rank]), axis.chunk(everyone.sum(0))))
        sums.append((own, axis.start_sum_(own), everyone.sum(0)))
    for own, finish, expected in reversed(sums):
        finish()
        assert torch.equal(own, expected), f"a sum of {len(own)} got mixed up"
    for finish, expected in parts:
        assert torch.equal(finish(), expected), f"a part of {len(expected)} got mixed up"


def check_refusals(axis: Axis) -> None:
    with pytest.raises(
        ValueError,
        match=f"{axis.size + 1} elements of dim 0 do not divide by the {axis.size} ranks of tp",
    ):
        axis.chunk(torch.zeros(axis.size + 1))
    with pytest.raises(ValueError, match="do not divide"):
        axis.scatter_sum(torch.zeros(axis.size + 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchange_gives_what_torch_gives_and_every_rank_the_same_bits(ranks: int) -> None:
    results = run_ranks(check_exchange, {"tp": ranks})
    for size, first in results[0].items():
        assert all(torch.equal(result[size], first) for result in results), (
            f"the sums of {size} floats differ"
        )


def any_bits(seed: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all kinds: drawn bits are also subnormal, infinite and zeros of both signs."""
    drawn = torch.Generator().manual_seed(seed)
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = torch.randint(-(2**15), 2**15, (elements, dtype.itemsize // 2), generator=drawn)
    values = bits.to(torch.int16).view(widths[dtype.itemsize]).flatten().view(dtype).clone()
    values[values.isnan()] = -0.0
    values[::3] = -0.0
    return values


def check_scattered_sums(mesh: DeviceMesh) -> None:
    axis = Axis.of(mesh, "tp")
    gloo.PIECE_BYTES = gloo.RING_BYTES // 8
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        large = gloo.RING_BYTES // dtype.itemsize
        # below the threshold, at it, pieces of which the last one is short, and an odd number
        for elements in (64, large, large + 2 * axis.size * 7, 3 * large):
            mine = any_bits(axis.rank, axis.size * (elements // axis.size), dtype)
            whole = mine.clone()
            axis.sum_(whole)
            axis.start_scatter_sum_(mine)()
            got, expected = axis.chunk(mine), axis.chunk(whole)
            assert torch.equal(got.isnan(), expected.isnan()), (dtype, elements)
            # a zero's sign is a bit too
            numbers = got.isnan().logical_not()
            assert torch.equal(got[numbers], expected[numbers]), (dtype, elements)
            assert torch.equal(got[numbers].signbit(), expected[numbers].signbit())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_of_which_each_rank_keeps_a_chunk_has_the_bits_of_the_whole_sum(ranks: int) -> None:
    run_ranks(check_scattered_sums, {"tp": ranks})


def scattered_bytes(mesh: DeviceMesh) -> tuple[int, int]:
    """Bytes that this rank sends in a reduce-scatter, and the most that it receives at a time."""
    axis = Axis.of(mesh, "tp")
    gloo.PIECE_BYTES = gloo.RING_BYTES // 8
    inner = gloo._exchange
    sent = 0
    under_way: list[Tensor] = []

    def counted(outgoing: list[Tensor], incoming: list[Tensor], *rest: Any) -> Any:
        nonlocal sent
        sent += outgoing[1 - axis.rank].nbytes
        under_way.append(incoming[1 - axis.rank])
        return inner(outgoing, incoming, *rest)

    gloo._exchange = counted
    axis.start_scatter_sum_(torch.zeros(2 * gloo.RING_BYTES))()
    memory = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in under_way}
    return sent, sum(memory.values())


def test_two_ranks_that_keep_halves_of_a_sum_send_halves_and_hold_two_pieces_more() -> None:
    half = 4 * gloo.RING_BYTES
    assert run_ranks(scattered_bytes, {"tp": 2}) == [(half, gloo.RING_BYTES // 4)] * 2
