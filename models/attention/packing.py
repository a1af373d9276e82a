"""Packed samples, which hold several documents: attention and positions restricted to one document.

A sample is cut from a stream of documents, so it may end one document, hold others and begin one
more. By default the model ignores document boundaries. If boundaries are used, attention stays
within a document and positions restart with each document. A packed sample then has the same result
as its documents run one by one, except for quantities that are computed over a whole sample: the
angles of dynamic rotary scaling, which depend on the sample's length, and the load balance of
experts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaprec.comm.axis import Axis, copy_to_device
from parallel.sequence_cut import take_own_positions


@dataclass(frozen=True)
class Packing:
    """The document boundaries of samples.

    documents: int64 [b, s], the number of each token's document within its sample; None: attention
        covers the whole sample.
    positions: int64 [b, s], each token's position within its document; None: its position within
        the sample.
    counts: the number of documents of each sample, if the host has counted them.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None
    counts: tuple[int, ...] | None = None

    @property
    def document_counts(self) -> tuple[int, ...]:
        """Return the number of documents of each sample. Waits for a GPU if the host has not
        counted them before."""
        if self.counts is not None:
            return self.counts
        if self.documents is None:
            return ()
        # The first document begins with the sample; the others where the number changes.
        begins = self.documents[:, 1:] != self.documents[:, :-1]
        counts = begins.sum(1) + 1
        return tuple(counts.tolist())

    def rows(self, rows: slice) -> "Packing":
        """Return the packing of some of the samples. rows: their slice."""
        return Packing(
            documents=None if self.documents is None else self.documents[rows],
            positions=None if self.positions is None else self.positions[rows],
            counts=None if self.counts is None else self.counts[rows],
        )

    def cut(self, cp: Axis) -> "Packing":
        """Return the packing for this rank of cp: the positions of its own tokens, but the
        documents of whole samples: its queries attend to the keys of all ranks, whose documents
        they must know."""
        if self.positions is None:
            return self
        own_positions = take_own_positions(self.positions, cp, dim=1)
        return replace(self, positions=own_positions)

    def on(self, device: torch.device) -> "Packing":
        """Return this packing on a device, with its documents counted if it is a GPU."""
        counts = self.counts
        # Counted here, on the host: later the count would wait for the GPU.
        if device.type != "cpu" and self.documents is not None:
            counts = self.document_counts
        return Packing(
            documents=None if self.documents is None else copy_to_device(self.documents, device),
            positions=None if self.positions is None else copy_to_device(self.positions, device),
            counts=counts,
        )


UNPACKED = Packing()
"""The packing in which every sample is treated as one document."""


def causal_mask(
    length: int,
    window: int,
    documents: Tensor | None,
    device: torch.device,
    past: int = 0,
) -> Tensor:
    """Return the mask of causal attention, bool [s - past, s], or [b, 1, s, s] with documents: True
    where a token (row) attends to another (column).

    A token attends to itself and to earlier tokens, but not to tokens before its window (0: no
    window) or in other documents. The polarity is that of torch's scaled_dot_product_attention.
    length: number of tokens.
    documents: int64 [b, s], the number of each token's document within its sample; None: a sample
        is one document.
    past: number of first tokens that have no row, because they are only attended to; 0 if there are
        documents.
    """
    # row i is token past + i, which attends to columns up to past + i
    attends = torch.ones(length - past, length, dtype=torch.bool, device=device).tril(past)
    # not before the window: `window` diagonals are left, of which the last is the token itself
    if 0 < window < length:
        attends = attends.triu(past + 1 - window)
    if documents is None:
        return attends
    same_document = documents[:, :, None] == documents[:, None, :]
    return attends & same_document.unsqueeze(1)


def bias_of_mask(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where the mask is True, else minus infinity."""
    bias = torch.zeros(attends.shape, dtype=dtype, device=attends.device)
    return bias.masked_fill_(~attends, -torch.inf)
