"""Attention within windows and documents on a GPU, without a mask of tokens x tokens.

torch's flash attention takes a window, and documents as lengths: samples are laid end to end, and
each document is a sequence of its own. Both leave out what a mask would only hide, so time and
memory grow with the tokens that are attended to. The kernel exists in half precision; other dtypes
need a mask (`models.attention.packing.causal_mask`).

The host must know how many documents there are, but not where they begin: it counts them before
they are sent.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megaprec.torch_private import flash_attention
from models.attention.packing import causal_mask

# Features of a head: the kernel takes no more, and these in multiples of 8.
WIDEST = 256
# The kernel would draw it from a generator that does not know the layout.
_NO_DROPOUT = 0.0


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch.

    numbers: int64 [b, s], the number of each token's document within its sample.
    count: how many there are in all samples together.
    """

    numbers: Tensor
    count: int
    _masks: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def starts(self) -> Tensor:
        """Return where each document begins in the samples laid end to end, and where the last one
        ends: int32 [count + 1], the cu_seqlens of flash attention."""
        is_same = self.numbers[:, 1:] == self.numbers[:, :-1]
        # False for the first token of a sample, which begins a document
        same_as_before = F.pad(is_same, (1, 0))
        # the number of each token's document among those of all samples
        document_of_token = (~same_as_before).flatten().cumsum(0) - 1
        lengths = torch.zeros(self.count, dtype=torch.int64, device=document_of_token.device)
        lengths.scatter_add_(0, document_of_token, torch.ones_like(document_of_token))
        ends = lengths.cumsum(0)
        return F.pad(ends, (1, 0)).to(torch.int32)

    def mask(self, window: int) -> Tensor:
        """Return the mask of attention within these documents, which layers share: bool [b, 1, s,
        s]."""
        # Kept, because all layers of one window have the same.
        if window not in self._masks:
            self._masks[window] = causal_mask(
                self.numbers.shape[1], window, self.numbers, self.numbers.device
            )
        return self._masks[window]


def can_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> bool:
    """Return True if `attend` takes these tensors [b, n, s, d] (meta tensors stand for a GPU's)."""
    if query.device.type not in ("cuda", "meta"):
        return False
    if query.dtype not in (torch.bfloat16, torch.float16):
        return False
    # ROCm has a kernel of its own, against which these arguments were not checked.
    if query.shape[-1] % 8 or query.shape[-1] > WIDEST or torch.version.hip:
        return False
    # torch cannot say which kernel it takes for tensors without storage.
    if query.device.type == "meta":
        return True
    grouped = query.shape[1] != key.shape[1]
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, grouped)
    return torch.backends.cuda.can_use_flash_attention(params)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    window: int,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention of query, key, value [b, n, s, d] as [b, n, s, d].

    Key and value may have fewer heads than query.
    documents: None: each sample is one document.
    window: 0: a token attends to all earlier ones of its document.
    scale: None: 1 / sqrt(d).
    """
    # The kernel wants [b, s, n, d], or samples end to end: [b * s, n, d].
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    samples, length = query.shape[:2]
    if documents is None:
        return _flash(query, key, value, None, length, window, scale).transpose(1, 2)
    output = _flash(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        documents.starts,
        length,
        window,
        scale,
    )
    return output.unflatten(0, (samples, length)).transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    longest: int,
    window: int,
    scale: float | None,
) -> Tensor:
    """Return torch's flash attention of [b, s, n, d], or of sequences [tokens, n, d] that begin at
    `starts`.

    longest: the number of tokens of the longest sequence, or more.
    """
    output, *_ = flash_attention(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        _NO_DROPOUT,
        not window,  # a window has its right end at the token itself
        False,  # no mask of dropout, for debugging
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    return output
