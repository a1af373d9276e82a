"""Windows and documents on a GPU: what is asked of the flash kernel is what the mask says, and no
mask is made.

The kernel itself runs on a GPU only (tests/gpu/test_windows.py). Here a plain one in float64 takes
its place, written from the interface of torch's `varlen_attn`.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaprec.precision.plan import plan
from models.attention import flash_windows
from models.attention.flash_windows import Documents, attend
from models.attention.packing import Packing, causal_mask
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.stages import Stage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo

S = 24


def numbers(seed: int, samples: int = 2) -> Tensor:
    """Documents of random lengths, down to one token."""
    begins = (
        torch.rand(samples, S, generator=torch.Generator().manual_seed(seed))
        < (0.0, 0.2, 0.9)[seed % 3]
    )
    begins[:, 0] = False
    return begins.long().cumsum(1)


def documents(seed: int) -> Documents:
    return Documents(numbers(seed), sum(Packing(numbers(seed)).document_counts))


def plain_kernel(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *rest: Any, **more: Any
) -> list[Tensor]:
    """Sequences [b, s, n, d], or [tokens, n, d] cut at `starts`, one after the other."""
    same, longest, _, drop, causal, debug = rest
    assert same is starts and not drop and not debug
    if starts is None:
        return [torch.stack([_sequence(*one, causal, **more) for one in zip(q, k, v, strict=True)])]
    pieces = [slice(*ends) for ends in pairwise(starts.tolist())]
    assert (
        pieces[0].start == 0
        and pieces[-1].stop == len(q)
        and max(p.stop - p.start for p in pieces) <= longest
    )
    return [torch.cat([_sequence(q[p], k[p], v[p], causal, **more) for p in pieces])]


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    place = torch.arange(len(q))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    behind = place[:, None] - place
    seen = behind >= (0 if causal or window_size_right == 0 else -len(q))
    if window_size_left is not None:
        seen &= behind <= window_size_left
    scores = torch.einsum("qnd,knd->nqk", q, k) * (scale or q.shape[-1] ** -0.5)
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [0, 1, 5, S - 1])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_kernel_is_asked_for_what_the_mask_says(
    seed: int | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_windows, "flash_attention", plain_kernel)
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(S, 2, n, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2))
    # strides as those of the model
    q, k, v = (x.permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v))
    within = None if seed is None else documents(seed)
    ours = attend(q, k, v, within, window, 0.3)
    mask = causal_mask(S, window, None if within is None else within.numbers, q.device)
    theirs = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    wanted = torch.randn(ours.shape, generator=random, dtype=torch.float64)
    for one, other in zip(
        *(torch.autograd.grad(y, (q, k, v), wanted) for y in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_documents_begin_where_their_numbers_change() -> None:
    found = Documents(torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]]), 4)
    assert found.starts.tolist() == [0, 2, 5, 6, 12] and found.starts.dtype == torch.int32
    assert found.mask(2) is found.mask(2), "layers share a mask"
    assert torch.equal(found.mask(2), causal_mask(6, 2, found.numbers, torch.device("cpu")))


def test_documents_are_counted_before_they_are_sent_to_a_gpu_and_not_for_a_cpu() -> None:
    packing = Packing(torch.tensor([[0, 0, 1], [0, 1, 2], [0, 0, 0]]))
    sent = packing.on(torch.device("meta"))
    assert sent.counts == (2, 3, 1) and sent.rows(slice(1, 3)).counts == (3, 1)
    assert packing.on(torch.device("cpu")).counts is None and packing.rows(slice(2)).counts is None
    assert sent.on(torch.device("meta")).counts == (2, 3, 1), (
        "meta tensors have no numbers to count"
    )


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (
            x.untyped_storage().nbytes() // x.itemsize
            for x in tree_leaves(result)
            if isinstance(x, Tensor)
        )
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest(compute: str, window: int, packed: bool) -> int:
    """The most elements of a tensor in both passes of a stage on a GPU's tensors, with 256
    tokens."""
    length = 256
    config = ModelConfig(
        family="mistral",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=32,
        vocab=64,
        window=window,
        max_positions=length,
    )
    with torch.device("meta"):
        stage = Stage(config.with_zero_weights, Context(plan(compute)), cuts(config, 1, length)[0])
        given = torch.zeros(1, length, dtype=torch.int64) if packed else None
        with Largest() as seen:
            ids = torch.zeros(length, 1, dtype=torch.int64)
            place = MicrobatchInfo(0, torch.zeros(1, dtype=torch.int64))
            y = stage(ids, place, Packing(given, counts=(7,) if packed else None))
            stage.losses(y, ids).sum().backward()
    return seen.elements


@pytest.mark.parametrize(("window", "packed"), [(100, False), (0, True), (100, True)])
def test_no_tensor_of_tokens_by_tokens_is_made_on_a_gpu(window: int, packed: bool) -> None:
    assert largest("bf16", window, packed) < 256 * 256
    assert largest("fp32", window, packed) >= 256 * 256, "the kernel takes half precision only"
