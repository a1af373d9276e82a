"""The largest attention logit of each head: the products of queries and keys times their factor,
of tokens that attend to each other, before a soft cap.

Fused attention computes logits and does not return them. They are computed once more here, by
blocks of rows, so that memory is bounded: a second product of queries and keys, forward only, which
is half of what attention multiplies in a forward pass. It is in the dtype of attention on a GPU, in
FP32 or wider on a CPU.
"""

import torch
from torch import Tensor

from models.attention.flash_windows import Documents
from models.attention.kernels import KernelInputs

MOST_LOGITS = 1 << 24  # of a block, of all samples and heads


class LargestLogits:
    """The largest logits of this rank's heads, over the passes of a step: float64 [n]."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.values = torch.empty(heads, dtype=torch.float64, device=device)
        self.clear()

    def clear(self) -> None:
        """Begin a new step."""
        self.values.fill_(-torch.inf)

    @torch.no_grad()
    def note(self, query: Tensor, key: Tensor, inputs: KernelInputs) -> None:
        """Take in the logits of a micro-batch.

        query: [b, n, s, d]. key: [b, groups, s, d].
        """
        found = largest_logits(query, key, inputs)
        torch.maximum(self.values, found, out=self.values)


def largest_logits(query: Tensor, key: Tensor, inputs: KernelInputs) -> Tensor:
    """Return the largest logit of each head of query [b, n, s, d]: float64 [n].

    Key may have fewer heads than query. Sequences must not be cut over ranks.
    """
    samples, heads, length, _ = query.shape
    factor = inputs.config.attention_scalar**-0.5
    rows_of_block = max(1, MOST_LOGITS // (samples * heads * length))
    largest = query.new_full((heads,), -torch.inf, dtype=torch.float64)
    # [b, groups, heads of a group, s, d], so that no key is copied
    grouped = _for_products(query).unflatten(1, (key.shape[1], -1))
    keys = _for_products(key).unsqueeze(2).transpose(3, 4)
    for first in range(0, length, rows_of_block):
        stop = min(first + rows_of_block, length)
        # no row attends to a later token
        products = grouped[..., first:stop, :] @ keys[..., :stop]
        logits = products.flatten(1, 2)  # [b, n, rows, columns]
        logits.masked_fill_(~_attends(inputs, first, stop, query.device), -torch.inf)
        of_block = logits.amax((0, 2, 3)).double()
        torch.maximum(largest, of_block, out=largest)
    return largest * factor


def _for_products(x: Tensor) -> Tensor:
    """Return x in the dtype of the products: half precision is slow on a CPU, and float16 has too
    small a range for what is about to be clipped."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _attends(inputs: KernelInputs, first: int, stop: int, device: torch.device) -> Tensor:
    """Return bool [rows, stop] or [b, 1, rows, stop], True where a token of the rows [first, stop)
    attends to another."""
    if isinstance(inputs.mask, Tensor):
        return inputs.mask[..., first:stop, :stop]
    rows = torch.arange(first, stop, device=device)[:, None]
    columns = torch.arange(stop, device=device)
    attends = columns <= rows
    window = inputs.config.window
    if window:
        attends &= columns > rows - window
    if isinstance(inputs.mask, Documents):
        numbers = inputs.mask.numbers
        same_document = numbers[:, first:stop, None] == numbers[:, None, :stop]
        attends = attends & same_document.unsqueeze(1)
    return attends
