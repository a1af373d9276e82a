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

# Of a block of rows, over all samples and heads: 64 MiB in FP32.
MOST_LOGITS = 1 << 24


class LargestLogits:
    """The largest logits of this rank's heads, over the passes of a step.

    values: float64 [n], -inf before the first pass.
    """

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
        of_microbatch = largest_logits(query, key, inputs)
        torch.maximum(self.values, of_microbatch, out=self.values)


def largest_logits(query: Tensor, key: Tensor, inputs: KernelInputs) -> Tensor:
    """Return the largest logit of each head over all samples and all pairs of tokens that attend:
    float64 [n].

    query: [b, n, s, d]. key: [b, groups, s, d], of which each head serves n / groups neighbouring
    heads of query. inputs: what else decides the attention. Sequences must not be cut over ranks.
    """
    samples, heads, length, _ = query.shape
    logits_of_row = samples * heads * length
    rows_of_block = max(1, MOST_LOGITS // logits_of_row)
    # the products of queries and keys, which the factor of scores multiplies at the end
    largest_products = query.new_full((heads,), -torch.inf, dtype=torch.float64)
    # Queries are grouped by their head of key, so that no key is copied.
    groups = key.shape[1]
    queries = _for_products(query)
    queries = queries.unflatten(1, (groups, -1))  # [b, groups, n / groups, s, d]
    keys = _for_products(key)
    keys = keys.unsqueeze(2).mT  # [b, groups, 1, d, s]
    for first in range(0, length, rows_of_block):
        stop = min(first + rows_of_block, length)
        # no row attends to a token after the last row of the block
        products = queries[..., first:stop, :] @ keys[..., :stop]
        by_head = products.flatten(1, 2)  # [b, n, rows, columns]
        attends = _attends(inputs, first, stop, query.device)
        by_head.masked_fill_(~attends, -torch.inf)
        largest_of_block = by_head.amax((0, 2, 3))  # [n]
        largest_of_block = largest_of_block.double()
        torch.maximum(largest_products, largest_of_block, out=largest_products)
    factor = inputs.config.attention_scalar**-0.5
    return largest_products * factor


def _for_products(x: Tensor) -> Tensor:
    """Return x in the dtype of the products: bf16 stays on a GPU, all else becomes FP32 or wider.

    Half precision is slow on a CPU, and float16 overflows with logits that are too large, which are
    those of interest here.
    """
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide)


def _attends(inputs: KernelInputs, first: int, stop: int, device: torch.device) -> Tensor:
    """Return bool [rows, stop] or [b, 1, rows, stop]: True where a token of the rows from `first`
    to before `stop` attends to a token of the columns from 0 to before `stop`."""
    # a mask of the whole sequences, which has window and documents in it
    if isinstance(inputs.mask, Tensor):
        return inputs.mask[..., first:stop, :stop]
    row_numbers = torch.arange(first, stop, device=device)
    rows = row_numbers[:, None]
    columns = torch.arange(stop, device=device)
    attends = columns <= rows
    window = inputs.config.window
    if window:
        # the token itself is one of the window
        attends &= columns > rows - window
    if isinstance(inputs.mask, Documents):
        document_of_token = inputs.mask.numbers  # [b, s]
        document_of_row = document_of_token[:, first:stop, None]
        document_of_column = document_of_token[:, None, :stop]
        same_document = document_of_row == document_of_column
        of_all_heads = same_document.unsqueeze(1)
        attends = attends & of_all_heads
    return attends
