"""The laws of virtual ranks: a sum is one tree, whatever the number of processes that hold its
leaves."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.virtual import VirtualAxis, tree_sum
from tests.ranks import on_ranks
from tests.refusals import raises

ALONE = Axis("tp")


def leaves_of(
    size: int, dtype: torch.dtype = torch.float32, rows: int = 24, scale: float = 1e4
) -> list[Tensor]:
    """Leaves whose sum depends on the order: their magnitudes differ."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.rand(size, rows, 5, generator=generator) * 4 - 2
    return list(
        (torch.randn(size, rows, 5, generator=generator) * scale**exponents).to(dtype).unbind()
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal, this tells 0.0 from -0.0."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_the_tree_adds_adjacent_pairs_and_an_odd_last_one_goes_up() -> None:
    a, b, c, d, e, f = leaves_of(6)
    assert same_bits(tree_sum([a, b, c, d, e, f]), ((a + b) + (c + d)) + (e + f))
    assert same_bits(tree_sum([a, b, c, d, e]), ((a + b) + (c + d)) + e)
    assert same_bits(tree_sum([a]), a)
    assert not torch.equal(tree_sum([a, b, c, d]), ((a + b) + c) + d), (
        "these leaves do not tell orders apart"
    )


def test_half_precision_leaves_are_added_in_fp32_and_rounded_once() -> None:
    halves = leaves_of(8, torch.bfloat16)
    total = VirtualAxis(ALONE, 8).sum(halves)
    assert total.dtype == torch.bfloat16
    assert same_bits(total, tree_sum([half.float() for half in halves]).to(torch.bfloat16))
    assert tree_sum([half.double() for half in halves]).dtype == torch.float64


def require_same(mesh: DeviceMesh | None, size: int, dtype: torch.dtype) -> None:
    """All collectives over the processes of `mesh` give the bits that one process gives."""
    whole = VirtualAxis(ALONE, size)
    shared = VirtualAxis(Axis.of(mesh, "tp"), size)
    leaves = leaves_of(size, dtype, rows=4 * size)
    leaves[0][0], leaves[1][0] = -0.0, -0.0
    own = [leaves[v] for v in shared.ranks]
    assert same_bits(shared.sum(own), whole.sum(leaves))
    assert same_bits(shared.max(own), whole.max(leaves))
    assert same_bits(shared.gather(own), torch.cat(leaves))
    chunks = whole.sum(leaves).chunk(size)
    for v, part in zip(shared.ranks, shared.scatter_sum(own), strict=True):
        assert same_bits(part.contiguous(), chunks[v].contiguous())


@pytest.mark.parametrize("size", [1, 2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_scattered_sum_is_a_chunk_of_the_sum(size: int, dtype: torch.dtype) -> None:
    if size == 1:
        leaves = leaves_of(1, dtype)
        assert same_bits(VirtualAxis(ALONE, 1).sum(leaves), leaves[0])
    else:
        require_same(None, size, dtype)


@on_ranks(tp=2)
def test_two_processes_have_the_bits_of_one(mesh: DeviceMesh) -> None:
    for size in (2, 4, 6, 8, 12):
        for dtype in (torch.float32, torch.bfloat16):
            require_same(mesh, size, dtype)


@pytest.mark.slow
@on_ranks(tp=3)
def test_three_processes_have_the_bits_of_one(mesh: DeviceMesh) -> None:
    for size in (3, 6, 12, 9):
        require_same(mesh, size, torch.float32)


@pytest.mark.slow
@on_ranks(tp=4)
def test_four_processes_have_the_bits_of_one(mesh: DeviceMesh) -> None:
    for size in (4, 8, 12):
        require_same(mesh, size, torch.float32)


@pytest.mark.slow
@on_ranks(tp=8)
def test_eight_processes_have_the_bits_of_one(mesh: DeviceMesh) -> None:
    require_same(mesh, 8, torch.bfloat16)


def test_one_process_adds_its_leaves_where_they_are() -> None:
    """To gather them takes a copy of all."""

    class Copying(Axis):
        def gather(self, tensor: Tensor) -> Tensor:
            pytest.fail("there is nobody else")

    leaves = leaves_of(4)
    assert same_bits(VirtualAxis(Copying("tp"), 4).sum(leaves), tree_sum(leaves))


def test_a_maximum_keeps_a_nan() -> None:
    leaves: Sequence[Tensor] = [torch.tensor([1.0, torch.nan]), torch.tensor([2.0, 0.0])]
    assert VirtualAxis(ALONE, 2).max(leaves).isnan().tolist() == [False, True]


def test_virtual_ranks_must_divide_evenly() -> None:
    with raises("comm.virtual_ranks_uneven", virtual_ranks=3, processes=2, axis="tp"):
        VirtualAxis(Axis("tp", 0, 2), 3)
    with pytest.raises(
        ValueError, match="24 elements of dim 0 do not divide by the 5 virtual ranks"
    ):
        VirtualAxis(ALONE, 5).scatter_sum(leaves_of(5))
    with pytest.raises(ValueError, match="3 tensors were given for the 4 virtual ranks"):
        VirtualAxis(ALONE, 4).sum(leaves_of(3))
