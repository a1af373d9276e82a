"""Samples that hold several documents: what a token sees of the sample, and which position it is at.

A sample is cut out of a stream of documents, so it ends one, holds others and begins one more. By default a model is
not told. Where it is, attention stays within a document and positions begin anew with each; both together make a
packed sample the same as its documents one by one, but for what is computed over a whole sample: the angles of dynamic
rotary scaling, which depend on its length, and the balance of experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaprec.comm.axis import sent


@dataclass(frozen=True)
class Packing:
    """documents: int64 [b, s], the number of each token's document within its sample; None: attention sees all of it.

    positions: int64 [b, s], each token's position within its document; None: within its sample.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None

    def rows(self, rows: slice) -> "Packing":
        """Of some samples."""
        return Packing(*(x if x is None else x[rows] for x in (self.documents, self.positions)))

    def on(self, device: torch.device) -> "Packing":
        """The same on a device."""
        return Packing(*(x if x is None else sent(x, device) for x in (self.documents, self.positions)))


WHOLE = Packing()
"""Every sample is one document, or taken for one."""


def causal_mask(length: int, window: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """bool [s, s], or [b, 1, s, s] with documents: True where a token (row) attends to another (column).

    It attends to itself and to the tokens before it, but not to those before its window (0: it has none) or in other
    documents. The polarity is that of torch's scaled_dot_product_attention.
    """
    attends = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if 0 < window < length:
        attends = attends.triu(1 - window)
    if documents is None:
        return attends
    return attends & (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)
