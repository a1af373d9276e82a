"""The kernels of attention, the choice among them, and the soft cap of scores and logits.

All kernels compute softmax(scale * query @ key.T) @ value over the tokens that a token attends to.
`choose_kernel` decides by the facts of an `AttentionCall` alone; `KERNELS` has a function for each
choice, and all of these functions are called alike:

    kernel(query, key, value, inputs) -> [b, n, s, d], not yet in the dtype of products

Query, key and value are [b, n, s, d] each; key and value may have fewer heads, each of which serves
several neighbouring heads of query. docs/performance.md has the measurements behind the choice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaprec.precision.gemm import slow_bf16, slow_half
from models import optional_parts
from models.attention import bf16_products, cpu_fused, flash_windows, sink_attention
from models.attention.flash_windows import Documents
from models.attention.packing import causal_mask
from models.attention.partial import AttentionRule
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo, attention_dropout
from parallel.linear import Widen


class Kernel(Enum):
    """A way to compute attention."""

    OVER_RANKS = "partial attention, over the keys of all ranks of cp"
    FUSED_OVER_RANKS = "flash attention on a GPU, for the keys of each rank of cp"
    FLASH_WINDOWS = "flash attention on a GPU, within windows and documents"
    UNFUSED = "matrix products and a softmax, all scores in memory"
    BF16_PRODUCTS = "bf16 matrix products on a CPU, head by head"
    SINKS = "a fused kernel, corrected for sinks"
    FP32_ON_CPU = "torch's fused kernel for a CPU, in FP32"
    TORCH_FUSED = "torch's scaled_dot_product_attention"


@dataclass(frozen=True)
class AttentionCall:
    """The facts that decide which kernel computes a call of attention.

    over_ranks: sequences are cut over the ranks of cp.
    parts_fuse: a fused kernel attends with this rank's queries to the keys of one rank of cp.
    restricted: attention is within a window or documents (of cut sequences alone).
    softcap, dropout, sinks: the scores have a soft cap, weights are dropped, heads have sinks.
    rounded_scores: the plan rounds scores to a narrower dtype than the sensitive one.
    sinks_fuse: a fused kernel that can be corrected for the sinks takes this query.
    flash_windows: attention is within windows or documents, and flash attention takes these.
    bf16_products: the query is bf16 on a CPU whose matrix products are faster than a fused kernel.
    slow_bf16: the query is bf16 on a CPU without instructions for bf16.
    """

    over_ranks: bool = False
    parts_fuse: bool = False
    restricted: bool = False
    softcap: bool = False
    dropout: bool = False
    sinks: bool = False
    rounded_scores: bool = False
    sinks_fuse: bool = False
    flash_windows: bool = False
    bf16_products: bool = False
    slow_bf16: bool = False


def choose_kernel(call: AttentionCall) -> Kernel:
    """Return the fastest kernel that computes what the call asks for."""
    if call.over_ranks:
        return _choose_over_ranks(call)
    # Fused kernels have no soft cap, and draw dropout from a generator that does not know the
    # layout: each layout would drop other weights.
    if call.softcap or call.dropout:
        return Kernel.UNFUSED
    # bf16 products know no sinks
    takes_bf16_products = call.bf16_products and not call.sinks
    # fused kernels round neither scores nor weights; bf16 products round both anyway
    if call.rounded_scores and not takes_bf16_products:
        return Kernel.UNFUSED
    # A corrected fused kernel takes 37 ms where unfused attention takes 104.
    if call.sinks:
        return Kernel.SINKS if call.sinks_fuse else Kernel.UNFUSED
    # Leaves out what a mask would only hide, so it needs no mask of tokens x tokens.
    if call.flash_windows:
        return Kernel.FLASH_WINDOWS
    # 20 ms against 39: torch's fused kernel is no faster in bf16 than in FP32 there.
    if takes_bf16_products:
        return Kernel.BF16_PRODUCTS
    # The fused kernel takes five times as long in bf16 as in FP32 there.
    if call.slow_bf16:
        return Kernel.FP32_ON_CPU
    return Kernel.TORCH_FUSED


def _choose_over_ranks(call: AttentionCall) -> Kernel:
    """Return the fastest kernel for a call whose keys lie on several ranks, so that the softmax is
    merged from parts."""
    needs_products = call.softcap or call.dropout or call.restricted
    fuses = call.parts_fuse and not needs_products
    return Kernel.FUSED_OVER_RANKS if fuses else Kernel.OVER_RANKS


class KernelInputs(NamedTuple):
    """The inputs of a kernel besides query, key and value.

    name: the logical name of the attention, which keys the random numbers of dropout.
    scale: the factor of scores; None: 1 / sqrt(d).
    sinks: [n], in the dtype of their master weights; None: without.
    microbatch: None: nothing is dropped (evaluation).
    mask: as `attn_mask` of `models.attention.attention.Attention`.
    """

    config: ModelConfig
    context: Context
    name: str
    scale: float | None
    sinks: nn.Parameter | None
    microbatch: MicrobatchInfo | None
    mask: Tensor | Documents | None

    @property
    def dropout(self) -> bool:
        """Return True if attention weights are dropped."""
        return self.microbatch is not None and self.config.attention_dropout > 0

    def window(self, query: Tensor) -> int:
        """Return the number of last tokens that a token attends to; 0: all earlier ones, also if
        the window is longer than the sequence."""
        window = self.config.window
        return window if window < query.shape[2] else 0

    def mask_of(self, query: Tensor) -> Tensor | None:
        """Return bool [s, s] or [b, 1, s, s], True where a token attends to another.

        None: a token attends to itself and all earlier ones, which kernels do without a mask.
        """
        # the documents keep their mask, which all layers of a stage share
        if isinstance(self.mask, Documents):
            return self.mask.mask(self.config.window)
        if self.mask is None and self.window(query):
            return self.causal_mask(query)
        return self.mask

    def causal_mask(self, query: Tensor) -> Tensor:
        """Return the mask that is the same in all samples: bool [s, s]."""
        return causal_mask(query.shape[2], self.config.window, None, query.device)

    def wide_sinks(self) -> Tensor | None:
        """Return the sinks in the sensitive dtype, so that their gradient is not rounded."""
        if self.sinks is None:
            return None
        return Widen.apply(self.sinks, self.context.plan.sensitive)


def describe_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> AttentionCall:
    """Return the facts by which the kernel of these tensors is chosen."""
    if inputs.context.cp.size > 1:
        return _describe_over_ranks(query, key, value, inputs)
    plan = inputs.context.plan
    rounded_scores = plan.scores != plan.sensitive
    in_documents = isinstance(inputs.mask, Documents)
    in_window = inputs.mask is None and inputs.window(query) > 0
    return AttentionCall(
        softcap=inputs.config.attention_softcap > 0,
        dropout=inputs.dropout,
        sinks=inputs.sinks is not None,
        rounded_scores=rounded_scores,
        sinks_fuse=inputs.sinks is not None and sink_attention.fuses(query),
        # A mask of tokens x tokens, which flash attention does not take, excludes it.
        flash_windows=(in_documents or in_window) and flash_windows.can_attend(query, key, value),
        bf16_products=bf16_products.is_faster(query, rounded_scores),
        slow_bf16=slow_bf16(query),
    )


def _describe_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> AttentionCall:
    """Return the facts about a call whose sequences are cut over the ranks of cp."""
    config = inputs.config
    context = inputs.context
    length = query.shape[2] * context.cp.size
    in_window = 0 < config.window < length
    # flash attention returns its logs of sums in FP32
    merges_in_fp32 = _dtype_of_sums(context) == torch.float32
    return AttentionCall(
        over_ranks=True,
        parts_fuse=merges_in_fp32 and flash_windows.can_attend(query, key, value),
        restricted=in_window or inputs.mask is not None,
        softcap=config.attention_softcap > 0,
        dropout=inputs.dropout,
        sinks=inputs.sinks is not None,
    )


def _dtype_of_sums(context: Context) -> torch.dtype:
    """Return the dtype of sums over the parts of keys."""
    return torch.promote_types(context.plan.sensitive, torch.float32)


def takes_groups(query: Tensor, masked: bool) -> bool:
    """Return True if torch's fused attention is given key and value with their own number of heads,
    of which it reads each for several query heads; otherwise they are repeated before.

    Flash attention on CUDA does so (meta tensors stand for a GPU's). With a mask torch takes
    another kernel, which does not. The kernel for CPUs would sum the gradients of a key/value head
    in half precision (tests/models/test_gqa.py).
    """
    return query.device.type in ("cuda", "meta") and query.dtype.itemsize == 2 and not masked


def _repeat_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return key and value with as many heads as query."""
    groups = query.shape[1] // key.shape[1]
    # Key/value heads already match: a repetition would copy them.
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def prepare_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with the heads and in the dtype that a fused kernel wants."""
    if not takes_groups(query, mask is not None):
        key, value = _repeat_heads(query, key, value)
    # In float16 the fused kernel of a CPU is slow, as products are.
    if query.dtype == torch.float16 and slow_half(query):
        return query.float(), key.float(), value.float()
    return query, key, value


def _over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
    fused: bool = False,
) -> Tensor:
    """Attend with this rank's tokens to those of all ranks of cp. Collective over cp.

    fused: by a fused kernel for the keys of each rank.
    """
    config = inputs.config
    context = inputs.context
    # under cp documents come as numbers of tokens' documents
    assert not isinstance(inputs.mask, Documents)
    # always given: kernels would compute it from the widths of their own parts
    scale = config.attention_scalar**-0.5 if inputs.scale is None else inputs.scale
    drop = partial(_drop_weights, inputs) if inputs.dropout else None
    rule = AttentionRule(scale, config.window, inputs.mask, drop, config.attention_softcap)
    return optional_parts.attend_over_ranks(
        query=query,
        key=key,
        value=value,
        cp=context.cp,
        rule=rule,
        ring=context.ring,
        wide_dtype=_dtype_of_sums(context),
        sinks=inputs.wide_sinks(),
        fused=fused,
    )


def _drop_weights(
    inputs: KernelInputs,
    weights: Tensor,
    queries: range,
    keys: range,
) -> Tensor:
    """Apply dropout to weights [b, n, queries, keys] of these positions."""
    return attention_dropout(
        weights,
        inputs.config.attention_dropout,
        inputs.context,
        f"{inputs.name}.weights",
        inputs.microbatch,
        (queries, keys),
    )


def _flash_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    """Attend by torch's flash attention, within the window and the documents."""
    documents = inputs.mask if isinstance(inputs.mask, Documents) else None
    window = inputs.window(query)
    return flash_windows.attend(query, key, value, documents, window, inputs.scale)


def _unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    """Attend with scores and weights in the plan's dtype of scores."""
    config = inputs.config
    scores_dtype = inputs.context.plan.scores
    product_dtype = scores_dtype
    # Where half-precision products are slow, they are computed in FP32 and rounded afterwards.
    if slow_half(query):
        product_dtype = torch.promote_types(scores_dtype, torch.float32)
    key, value = _repeat_heads(query, key, value)
    attends = inputs.mask_of(query)
    if attends is None:
        attends = inputs.causal_mask(query)
    # one name for all forms of the scores: another name would keep an earlier form in memory
    scores = query.to(product_dtype) @ key.to(product_dtype).transpose(2, 3)
    scores = scores / config.attention_scalar**0.5
    scores = softcap(scores, config.attention_softcap).to(scores_dtype)
    # The mask comes last: a soft cap would make minus infinity a finite score.
    scores = scores.masked_fill(~attends, float("-inf"))
    weights = sink_attention.softmax(scores, inputs.wide_sinks())
    weights = attention_dropout(
        weights,
        config.attention_dropout,
        inputs.context,
        f"{inputs.name}.weights",
        inputs.microbatch,
    )
    return weights.to(product_dtype) @ value.to(product_dtype)


def _bf16_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    return bf16_products.attend(query, key, value, inputs.mask_of(query), scale=inputs.scale)


def _sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    """Attend by a fused kernel whose result is corrected for the sinks."""
    mask = inputs.mask_of(query)
    query, key, value = prepare_fused(query, key, value, mask)
    sinks = inputs.wide_sinks()
    assert sinks is not None
    return sink_attention.attend(query, key, value, sinks, mask, inputs.scale)


def _fp32_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    """Attend by torch's fused kernel for a CPU, in FP32."""
    key, value = _repeat_heads(query, key, value)
    return cpu_fused.attend(query, key, value, inputs.mask_of(query), inputs.scale)


def _torch_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> Tensor:
    """Attend by torch's fused attention, which chooses a kernel itself."""
    mask = inputs.mask_of(query)
    query, key, value = prepare_fused(query, key, value, mask)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=inputs.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


KERNELS: dict[Kernel, Callable[[Tensor, Tensor, Tensor, KernelInputs], Tensor]] = {
    Kernel.OVER_RANKS: _over_ranks,
    Kernel.FUSED_OVER_RANKS: partial(_over_ranks, fused=True),
    Kernel.FLASH_WINDOWS: _flash_windows,
    Kernel.UNFUSED: _unfused,
    Kernel.BF16_PRODUCTS: _bf16_products,
    Kernel.SINKS: _sinks,
    Kernel.FP32_ON_CPU: _fp32_on_cpu,
    Kernel.TORCH_FUSED: _torch_fused,
}


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) in the dtype of x; x itself if cap is 0.

    As in Gemma 2: the result is x while x is small, and never exceeds the cap.
    """
    return _Softcap.apply(x, cap) if cap else x


class _Softcap(torch.autograd.Function):
    """Computes in FP32 or wider, and saves x: the loss overwrites logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        return _copy_wide(x).div_(cap).tanh_().mul_(cap).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        # 1 - tanh(x / cap)^2
        slope = _copy_wide(x).div_(ctx.cap).tanh_().square_().neg_().add_(1)
        return slope.mul_(grad).to(grad.dtype), None


def _copy_wide(x: Tensor) -> Tensor:
    """Return a copy of x in FP32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
