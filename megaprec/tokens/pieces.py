"""Samples cut into shorter sequences that follow each other."""

import torch
from torch import Tensor

from megaprec.tokens.samples import Batch


def in_pieces(batch: Batch, pieces: int) -> Batch:
    """Return a batch in which each sample is cut into so many sequences of equal length, in order.

    Targets stay those of their tokens, so none is lost at a cut. Documents and positions are
    counted from the beginning of a sequence, as `Batch` says of samples. Ids and sources are those
    of the sample. `pieces` must divide the length of the samples.
    """

    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(pieces * len(values), -1)

    documents = cut(batch.documents)
    if documents is not None:
        documents = documents - documents[:, :1]
    positions = cut(batch.positions)
    if positions is not None:
        # of a document that began before the sequence: the place within the sequence
        positions = positions.minimum(torch.arange(positions.shape[1]))
    sources = batch.sources
    if sources is not None:
        sources = sources.repeat_interleave(pieces)
    return Batch(
        tokens=batch.tokens.reshape(pieces * len(batch.tokens), -1),
        targets=batch.targets.reshape(pieces * len(batch.targets), -1),
        ids=batch.ids.repeat_interleave(pieces),
        mask=cut(batch.mask),
        documents=documents,
        positions=positions,
        sources=sources,
    )
