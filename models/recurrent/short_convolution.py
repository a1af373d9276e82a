"""A causal convolution of each feature over a few tokens, with a weight for each of them.

    y_t = sum over i of weight[kernel - 1 - i] x_(t - i),  i from 0 to kernel - 1

The last weight is that of the token itself. Tokens before the sequence, and tokens of an earlier
document, count as zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    before: Tensor | None = None,
    begins: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the convolution of x [s, b, features], in its dtype.

    weight: [features, kernel].
    before: the kernel - 1 tokens before x, [kernel - 1, b, features]; None: zeros.
    begins: bool [b, s], True where a document begins; None: nowhere.
    bias: [features], which is added; None: zeros.
    """
    length = len(x)
    reach = weight.shape[1] - 1
    if before is None:
        extended = F.pad(x, (0, 0, 0, 0, reach, 0))  # zeros before the first token
    else:
        extended = torch.cat((before, x))
    summed = x * weight[:, reach]
    for distance in range(1, reach + 1):
        first = reach - distance
        earlier = extended[first : first + length]  # x_(t - distance)
        if begins is not None:
            is_other_document = _is_beyond(begins, distance)
            earlier = earlier.masked_fill(is_other_document, 0)
        summed = summed + earlier * weight[:, reach - distance]
    return summed if bias is None else summed + bias


def _is_beyond(begins: Tensor, distance: int) -> Tensor:
    """Return bool [s, b, 1]: True for a token if the one `distance` tokens before it is of another
    document, because one has begun since.

    begins: bool [b, s], True where a document begins.
    """
    num_begun = begins.cumsum(1)  # documents that have begun up to each token
    num_begun_before = F.pad(num_begun, (distance, 0))[:, : num_begun.shape[1]]
    has_begun_since = num_begun > num_begun_before
    return has_begun_since.t().unsqueeze(-1)
