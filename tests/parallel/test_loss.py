"""The loss in blocks of tokens: the numbers of all tokens at once, in a small part of the
memory."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from models.estimate.storage import LiveMemory, SimulatedAxis
from parallel import loss
from parallel.leaves import PLAIN, LeafCall, Leaves
from parallel.loss import cross_entropy, cross_entropy_and_log_sum
from tests.ranks import run_ranks

# a micro-batch of Llama-3 8B
TOKENS = 8192
VOCAB = 128256
# bytes of FP32 logits in both passes and of a gradient beside the bf16 logits
WHOLE = (4 + 4 + 2) * TOKENS * VOCAB


@contextmanager
def blocks_of(elements: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "_BLOCK", elements)
        yield


TARGETS = torch.tensor([0, 11, 5, 6, 3, 8, 2])
WEIGHTS = torch.arange(1.0, 8, dtype=torch.float64)  # of the tokens
Z_LOSS = 0.3


def logits_of(rank: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(7, columns, generator=generator, dtype=torch.float64)


def both(
    elements: int, tp: Axis, dtype: torch.dtype, consume: bool, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of 7 tokens and the gradient of their logits, computed `elements` logits at a time."""
    part = Part.cut("head.weight", (12, 4), 0, tp)
    leaf = logits_of(tp.rank, part.local[0]).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    with blocks_of(elements):
        losses, log_sums = cross_entropy_and_log_sum(leaf * 1, TARGETS, part, tp, wide, consume)
        if z_loss:
            losses = losses + z_loss * log_sums.square()
        (losses * WEIGHTS.to(losses.dtype)).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def with_z_loss(mesh: DeviceMesh) -> None:
    tp = Axis.of(mesh, "tp")
    columns = 12 // tp.size
    whole = torch.cat([logits_of(rank, columns) for rank in range(tp.size)], 1).requires_grad_()
    plain = torch.nn.functional.cross_entropy(whole, TARGETS, reduction="none")
    plain = plain + Z_LOSS * whole.exp().sum(-1).log().square()
    (plain * WEIGHTS).sum().backward()
    assert whole.grad is not None
    wanted = whole.grad[:, tp.rank * columns :][:, :columns]
    for consume in (False, True):
        losses, grad = both(24, tp, torch.float64, consume, Z_LOSS)
        torch.testing.assert_close(losses, plain.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-13)
        again = both(1 << 20, tp, torch.float64, consume, Z_LOSS)
        assert torch.equal(grad, again[1])


def in_blocks(mesh: DeviceMesh) -> None:
    tp = Axis.of(mesh, "tp")
    for dtype in (torch.float64, torch.bfloat16):
        losses, grad = both(1 << 20, tp, dtype, consume=False)
        for elements in (1, 24, 1 << 20):
            for consume in (False, True):
                again, grad_again = both(elements, tp, dtype, consume)
                assert torch.equal(losses, again) and torch.equal(grad, grad_again)
    with_z_loss(mesh)


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_of_tokens_have_the_bits_of_all_at_once_and_a_z_loss_the_gradient_of_autograd(
    tp: int,
) -> None:
    run_ranks(in_blocks, {"tp": tp})


class AsTheyAre(Mapping[LeafCall, Any]):
    """Leaves that are compiled to themselves."""

    def __contains__(self, call: object) -> bool:
        return True

    def __getitem__(self, call: LeafCall) -> Any:
        return lambda *tensors: call.run(tensors)

    def __iter__(self) -> Iterator[LeafCall]:
        return iter(())

    def __len__(self) -> int:
        return 1


def unusual_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [9, 12] and targets: rows with infinities, a NaN, a target that is no word, and rows
    in which the first half is far larger than the second."""
    logits = torch.randn(9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 11, 5, 6, 3, -100, 2, 1, 10])
    logits[1, :6] = -math.inf
    logits[2, 6:] = -math.inf
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    logits[6, 8] = math.nan
    logits[7, :6] += 2000
    logits[8, :6] += 50
    return logits.to(dtype), targets


def in_one_read(mesh: DeviceMesh) -> None:
    tp = Axis.of(mesh, "tp")
    part = Part.cut("head.weight", (12, 4), 0, tp)
    for dtype, has_z_loss in product((torch.float64, torch.bfloat16), (False, True)):
        sensitive = torch.promote_types(dtype, torch.float32)
        eps = torch.finfo(sensitive).eps
        logits, targets = unusual_logits(dtype)
        own = logits[:, part.start : part.start + part.local[0]]
        seen = []
        for leaves in (PLAIN, Leaves(AsTheyAre())):
            given = own.clone().requires_grad_()
            losses, log_sums = cross_entropy_and_log_sum(
                given * 1, targets, part, tp, sensitive, True, leaves
            )
            trained = losses
            if has_z_loss:
                trained = losses + Z_LOSS * log_sums.square()
            trained.nan_to_num(0, 0, 0).sum().backward()
            seen.append((losses.detach(), given.grad))
        (plain, plain_grad), (losses, grad) = seen
        torch.testing.assert_close(losses, plain, rtol=8 * eps, atol=8 * eps, equal_nan=True)
        torch.testing.assert_close(
            grad, plain_grad, rtol=8 * torch.finfo(dtype).eps, atol=8 * eps, equal_nan=True
        )


@pytest.mark.parametrize("tp", [1, 2])
def test_the_loss_in_one_read_of_the_logits_is_that_in_two(tp: int) -> None:
    run_ranks(in_one_read, {"tp": tp})


def test_targets_that_torch_leaves_out_have_no_number_and_the_mean_of_the_others_is_torchs() -> (
    None
):
    logits = torch.randn(
        7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    plain = logits.detach().clone().requires_grad_()
    targets = torch.tensor([0, -100, 5, 6, -100, 8, 2])
    losses = cross_entropy(
        logits, targets, Part.cut("head.weight", (12, 4), 0, Axis("tp")), Axis("tp"), torch.float64
    )
    assert losses.isnan().tolist() == (targets == -100).tolist()
    mean = losses[targets != -100].mean()
    wanted = torch.nn.functional.cross_entropy(plain, targets)
    torch.testing.assert_close(mean, wanted)
    mean.backward()
    wanted.backward()
    torch.testing.assert_close(logits.grad, plain.grad)


class Head(torch.autograd.Function):
    """Logits in memory of their own, whose gradient is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("tp", [1, 2])
def test_the_loss_on_a_gpu_takes_less_than_a_tenth_of_logits_in_fp32(tp: int) -> None:
    """Bytes beside the logits in bf16, of an 8B model: on meta tensors, in the blocks of a GPU."""
    axis = SimulatedAxis("tp", 0, tp)
    part = Part.cut("head.weight", (VOCAB, 4), 0, axis)
    with torch.device("meta"), LiveMemory() as live:
        logits = torch.zeros(TOKENS, part.local[0], dtype=torch.bfloat16).requires_grad_()
        made = Head.apply(logits)
        before = live.begin()
        losses = cross_entropy(
            made, torch.zeros(TOKENS, dtype=torch.int64), part, axis, consume=True
        )
        del made
        forward = live.peak - before
        kept = live.begin()
        losses.sum().backward()
        backward = live.peak - kept
    assert forward + backward < 0.1 * WHOLE / tp, (forward, backward)


def test_logits_that_are_consumed_are_not_used_twice_in_silence() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    part = Part.cut("head.weight", (4, 4), 0, Axis("tp"))
    bounded = logits.tanh()  # torch keeps its result for its own backward pass
    losses = cross_entropy(
        bounded, torch.zeros(3, dtype=torch.int64), part, Axis("tp"), consume=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
