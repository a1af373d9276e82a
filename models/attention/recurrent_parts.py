"""Parts of all layers with a recurrent state in place of attention: heads of features, and where
documents begin."""

import torch.nn.functional as F
from torch import Tensor

from models.attention.flash_windows import Documents


def heads_of(features: Tensor, width: int) -> Tensor:
    """Return features [s, b, n * width] as heads [b, n, s, width]."""
    return features.unflatten(-1, (-1, width)).permute(1, 2, 0, 3)


def begins_of(documents: Tensor | Documents | None) -> Tensor | None:
    """Return bool [b, s], True where a document begins after the first; None without documents.

    documents: int64 [b, s], the number of each token's document, or the documents.
    """
    if documents is None:
        return None
    numbers = documents.numbers if isinstance(documents, Documents) else documents
    changes = numbers[:, 1:] != numbers[:, :-1]
    return F.pad(changes, (1, 0), value=False)
