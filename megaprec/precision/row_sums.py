"""Sums of the rows that go to one row of a matrix, such as the gradients of a token that occurs
several times: always in the order of the rows, whatever the device and the number of threads."""

import torch
from torch import Tensor


def add_rows_(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Add each of `rows` [m, n] to the row of `total` [k, n] whose index is in `indices` [m]."""
    if total.device.type == "cpu" and total.dtype == torch.float32:
        # torch's index_put_ adds FP32 by atomic operations, in the order in which its threads come
        # to them. Of one thread both have the same bits; of two this one took a fifth of the time.
        total.index_add_(0, indices, rows)
    else:
        # On a GPU it is index_add_ whose order varies.
        total.index_put_((indices,), rows, accumulate=True)
