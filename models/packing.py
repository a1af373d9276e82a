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


def hidden_pairs(length: int, window: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """bool [s, s], or [b, 1, s, s] with documents: True where a token (row) does not attend to another.

    Those are the tokens after it, those before its window (0: it has none) and those of other documents.
    """
    pairs = torch.ones(length, length, dtype=torch.bool, device=device)
    hidden = pairs.triu(1) | pairs.tril(-window) if 0 < window < length else pairs.triu(1)
    if documents is None:
        return hidden
    return hidden | (documents[:, :, None] != documents[:, None, :]).unsqueeze(1)
