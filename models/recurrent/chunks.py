"""Tokens in chunks, and tokens or chunks one after another."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor


def in_chunks(tokens: Tensor, chunk: int) -> Tensor:
    """Return tokens [b, n, s, ...] in chunks [b, n, chunks, C, ...]; zeros pad the last."""
    missing = -tokens.shape[2] % chunk
    if missing:
        # `F.pad` takes (before, after) of each dim, the last dim first
        no_padding = (0, 0)
        later_dims = tokens.dim() - 3
        padding = no_padding * later_dims + (0, missing)
        tokens = F.pad(tokens, padding)
    return tokens.unflatten(2, (-1, chunk))


def one_by_one(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield [b, n, ...] of all tensors [b, n, s, ...], for each of s.

    The gradients of all slices are then joined once. Of slices by index autograd would add each to
    zeros of the whole size, in a time that grows with the square of s.
    """
    slices = [tensor.unbind(2) for tensor in tensors]
    return zip(*slices, strict=True)
