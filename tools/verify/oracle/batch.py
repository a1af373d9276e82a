"""A global batch as an oracle trains on it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OracleBatch:
    """A global batch. tokens, targets: int64 [samples, s]. counts: the weight of each target.

    documents, positions: int64 [samples, s], the document of each token within its sample, and its
        place, in the sample or in the document.
    """

    ids: list[int]
    tokens: Tensor
    targets: Tensor
    counts: Tensor
    documents: Tensor
    positions: Tensor
