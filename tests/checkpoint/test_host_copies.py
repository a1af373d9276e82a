"""Copies of a GPU's tensors lie one after the other in few blocks of host memory, which a thread
has ready before the first copies begin."""

import weakref
from dataclasses import replace
from threading import Event, current_thread, main_thread

import pytest
import torch
from torch import Tensor, nn

from megaprec.checkpoint import host_copies, snapshot
from megaprec.checkpoint.host_copies import (
    HostCopies,
    PinnedAhead,
    allocate_pinned,
    block_sizes,
    do_not_wait,
)
from megaprec.checkpoint.snapshot import copied_bytes, take_snapshot
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import PrecisionPlan, plan


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
    assert [len(block) for block in allocations.blocks] == [256, 512, 1024, 1024, 4096, 1024]


def test_what_torch_rounds_a_large_tensor_up_to_holds_more_copies() -> None:
    """Beside the masters of 151,936 words of 4,096 features lies the first of the moments, if these
    have 16 bits."""
    elements = 151936 * 4096
    assert block_sizes([4 * elements, 2 * elements, 2 * elements]) == [1 << 32, 1 << 31]


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


def optimizer_with(
    precision: PrecisionPlan, ema: float = 0.0, freeze: bool = False
) -> ParallelAMPOptimizer:
    """An optimizer of a few matrices, one of them larger than a block."""
    model = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(5))
    model.append(nn.Parameter(torch.randn(40, 40)))
    model[0].requires_grad_(not freeze)
    attach_whole(model)
    return ParallelAMPOptimizer([model], precision, ema=ema)


BF16 = plan("bf16")
KINDS = {
    "fp32": lambda: optimizer_with(plan("fp32")),
    "masters": lambda: optimizer_with(BF16),
    "split masters": lambda: optimizer_with(replace(BF16, remainders=True)),
    "weights alone": lambda: optimizer_with(replace(BF16, masters_in_checkpoint=False)),
    "no masters": lambda: optimizer_with(replace(BF16, masters=torch.bfloat16)),
    "moments of 16 bits": lambda: optimizer_with(replace(BF16, moments=torch.bfloat16)),
    "average": lambda: optimizer_with(BF16, ema=0.99),
    "frozen": lambda: optimizer_with(BF16, freeze=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_the_first_save_are_foretold(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is saved: so the first save finds each block that it asks for."""
    optimizer = KINDS[kind]()
    allocations = Allocations()
    monkeypatch.setattr(host_copies, "_SMALLEST_BLOCK", 1024)
    monkeypatch.setattr(host_copies, "LARGEST_BLOCK", 4096)
    monkeypatch.setattr(snapshot, "_goes_to_pinned_memory", lambda device: True)
    monkeypatch.setattr(snapshot, "HostCopies", lambda: HostCopies(allocations))
    monkeypatch.setattr(HostCopies, "wait_for_started", lambda self: do_not_wait)
    foretold = block_sizes(copied_bytes(optimizer))
    take_snapshot(optimizer, copy=True)
    assert foretold == [len(block) for block in allocations.blocks]
    assert len(foretold) > 3


def test_to_foretell_blocks_begins_no_average() -> None:
    optimizer = optimizer_with(BF16, ema=0.99)
    list(copied_bytes(optimizer))
    assert not any(buffer.ema_has_begun for buffer in optimizer.all_buffers())


def test_state_in_host_memory_needs_no_pinned_memory() -> None:
    assert not list(copied_bytes(optimizer_with(BF16)))


class Pinning:
    """Notes what a thread pins, and lets it go on when it may.

    most: blocks that can be pinned.
    """

    def __init__(self, most: int = 100) -> None:
        self.asked: list[int] = []
        self.alive: list[weakref.ref[Tensor]] = []
        self.in_main_thread = False
        self.may_go_on = Event()
        self.has_begun = Event()
        self._most = most

    def __call__(self, num_bytes: int) -> Tensor | None:
        self.in_main_thread |= current_thread() is main_thread()
        self.asked.append(num_bytes)
        self.has_begun.set()
        self.may_go_on.wait()
        if len(self.asked) > self._most:
            return None
        block = torch.empty(num_bytes, dtype=torch.uint8)
        self.alive.append(weakref.ref(block))
        return block

    def held(self) -> int:
        return sum(one() is not None for one in self.alive)


def test_a_thread_holds_all_blocks_until_the_first_save_takes_them() -> None:
    pinning = Pinning()
    with PinnedAhead([64, 128, 128], pinning) as ahead:
        # nothing has waited for the first block
        pinning.may_go_on.set()
        ahead.join()
        assert pinning.asked == [64, 128, 128]
        assert pinning.held() == 3, "torch would give a block that is free out again"
        ahead.release()
        assert pinning.held() == 0
    assert not pinning.in_main_thread


def test_a_save_that_comes_early_waits_for_one_block_and_no_other_is_begun() -> None:
    pinning = Pinning()
    with PinnedAhead([64, 128, 256], pinning) as ahead:
        pinning.has_begun.wait()
        # the save comes while the first block is pinned
        ahead._stopping.set()
        pinning.may_go_on.set()
        ahead.release()
        assert pinning.asked == [64]
        assert pinning.held() == 0


def test_a_run_that_ends_leaves_no_thread_and_no_memory() -> None:
    pinning = Pinning()
    pinning.may_go_on.set()
    with pytest.raises(KeyError), PinnedAhead([64] * 9, pinning) as ahead:
        raise KeyError
    assert pinning.held() == 0
    assert not ahead._thread.is_alive()


def test_what_cannot_be_pinned_is_left_to_the_save() -> None:
    pinning = Pinning(most=2)
    pinning.may_go_on.set()
    with PinnedAhead([64] * 9, pinning) as ahead:
        ahead.join()
        assert len(pinning.asked) == 3, "it asks for no more after a refusal"
        assert pinning.held() == 2
    assert pinning.held() == 0


def test_without_a_gpu_no_thread_begins() -> None:
    with PinnedAhead([]) as ahead:
        assert ahead._thread.ident is None
