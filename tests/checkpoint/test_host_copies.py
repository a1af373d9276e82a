"""Copies of a GPU's tensors lie one after the other in few blocks of host memory."""

import pytest
import torch
from torch import Tensor, nn

from megaprec.checkpoint import host_copies, snapshot
from megaprec.checkpoint.host_copies import HostCopies, allocate_pinned, do_not_wait
from megaprec.checkpoint.snapshot import take_snapshot
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan


class Allocations:
    """Ordinary memory in place of pinned memory."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def __call__(self, num_bytes: int) -> Tensor:
        self.blocks.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.blocks[-1]


def test_copies_of_any_dtype_and_shape_keep_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "_SMALLEST_BLOCK", 256)
    monkeypatch.setattr(host_copies, "LARGEST_BLOCK", 1024)
    allocations = Allocations()
    copies = HostCopies(allocations)
    shapes = [(3,), (), (5, 7), (0,), (300,), (2, 2), (1,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.float64]
    originals = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in shapes]
    copied = [copies.start(values) for values in originals]
    for one, other in zip(copied, originals, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    blocks = {block.untyped_storage().data_ptr() for block in allocations.blocks}
    assert {values.untyped_storage().data_ptr() for values in copied} <= blocks


def test_blocks_grow_up_to_a_largest_one_and_for_a_larger_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "_SMALLEST_BLOCK", 256)
    monkeypatch.setattr(host_copies, "LARGEST_BLOCK", 1024)
    allocations = Allocations()
    copies = HostCopies(allocations)
    for num_bytes in (100, 100, 500, 700, 900, 4000, 100):
        copies.start(torch.zeros(num_bytes, dtype=torch.uint8))
    assert [len(block) for block in allocations.blocks] == [256, 512, 1024, 1024, 4000, 1024]


def test_memory_that_cannot_be_pinned_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(size: int, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refuse)
    assert len(allocate_pinned(64)) == 64


def test_without_copies_there_is_nothing_to_wait_for() -> None:
    assert HostCopies(Allocations()).wait_for_started() is do_not_wait


def test_a_large_buffer_is_copied_in_pieces_no_larger_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinned memory is rounded up to a power of two: one block for the experts of a layer could be
    gigabytes too large."""
    model = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(9))
    model.append(nn.Parameter(torch.randn(40, 40)))  # larger than a block by itself
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("bf16"))
    whole = take_snapshot(optimizer, copy=True)
    pieces: list[int] = []
    copy_to_cpu = snapshot._on_cpu

    def noted(values: Tensor, copy: bool, copies: HostCopies) -> Tensor:
        pieces.append(values.nbytes)
        return copy_to_cpu(values, copy, copies)

    monkeypatch.setattr(snapshot, "_on_cpu", noted)
    monkeypatch.setattr(host_copies, "LARGEST_BLOCK", 4096)
    cut = take_snapshot(optimizer, copy=True)
    larger = 40 * 40 * 4
    assert {size for size in pieces if size > 4096} <= {larger}
    assert len(pieces) > 10
    assert cut.entries == whole.entries and cut.files.keys() == whole.files.keys()
    for file, tensors in whole.files.items():
        assert all(torch.equal(cut.files[file][name], tensors[name]) for name in tensors)
