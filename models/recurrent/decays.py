"""The decays of a recurrence within chunks of tokens, of heads whose state decays by a number of
each token (`models.recurrent.delta_rule`, `models.recurrent.state_space`). Those of states each of
whose rows has a decay of its own are in `models.recurrent.row_decays`.

w(t, s) = exp(g_(s+1) + ... + g_t) is the decay from token s of a chunk to token t, and w(t) that
from before the chunk to token t. Sums of g are taken over the tokens between s and t, never as
differences of sums from the beginning of the chunk: those lose the digits of a weak decay that
follows a strong one. A decay of 0 (g = -inf) is exact too.

Where a document begins nothing is left of the state: w(t, s) and w(t) are 0 across such a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recurrent.chunks import in_chunks


@dataclass(frozen=True)
class Decays:
    """The decays within chunks; 0 across the beginning of a document.

    between: [b, n, chunks, C, C], w(t, s) of token t (row) from token s (column); 0 above the
        diagonal.
    from_before: [b, n, chunks, C, 1], w(t).
    to_end: [b, n, chunks, C, 1], w(C, s).
    over_chunk: [b, n, chunks, 1, 1], w(C).
    """

    between: Tensor
    from_before: Tensor
    to_end: Tensor
    over_chunk: Tensor

    def weigh(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return w(t, s) (l_t . e_s) of token t (row) and token s (column), [b, n, chunks, C, C].

        later, earlier: l and e, [b, n, chunks, C, d].
        """
        return later @ earlier.mT * self.between

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> "Decays":
        """Return the decays of chunks of tokens, of which those that pad the last one have g = 0.

        log_decay: [b, n, s], g above.
        begins: bool [b, s], True where a document begins; None: nowhere.
        """
        log_decays = in_chunks(log_decay, chunk)  # g [b, n, chunks, C]
        # True where the token of the row comes after that of the column
        square = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device)
        is_later = square.tril(-1)
        # Row t has g_t in the columns of all earlier tokens s: summed down to row t, this is the
        # sum from s + 1 to t.
        in_all_columns = log_decays.unsqueeze(-1).expand(*log_decays.shape, chunk)
        of_later_tokens = in_all_columns.masked_fill(~is_later, 0)  # [b, n, chunks, C, C]
        between = running_sums(of_later_tokens, -2).exp()
        between = between.masked_fill(is_later.T, 0)
        from_before = running_sums(log_decays, -1).exp()  # [b, n, chunks, C]
        if begins is not None:
            # The number of documents that have begun in the chunk; one dimension for all heads.
            begun = in_chunks(begins.unsqueeze(1), chunk).cumsum(-1)  # [b, 1, chunks, C]
            is_other_document = begun.unsqueeze(-1) != begun.unsqueeze(-2)
            between = between.masked_fill(is_other_document, 0)
            from_before = from_before.masked_fill(begun > 0, 0)
        last_row = between[..., -1, :]  # w(C, s) [b, n, chunks, C]
        last = from_before[..., -1:]  # w(C) [b, n, chunks, 1]
        return Decays(
            between=between,
            from_before=from_before.unsqueeze(-1),
            to_end=last_row.unsqueeze(-1),
            over_chunk=last.unsqueeze(-1),
        )


def running_sums(values: Tensor, dim: int) -> Tensor:
    """Return the sums of floating-point values up to each place along a dim."""
    is_on_cpu = values.device.type == "cpu"
    if is_on_cpu or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(dim)
    # CUDA has no deterministic kernel for this, forward or backward, and torch raises. Sums of 2,
    # 4, 8, ... values have one order of their additions; no difference is taken, as g may be -inf.
    length = values.shape[dim]
    distance = 1
    while distance < length:
        earlier = values.narrow(dim, 0, length - distance)
        before_first = torch.zeros_like(values.narrow(dim, 0, distance))
        values = values + torch.cat((before_first, earlier), dim)
        distance *= 2
    return values


def token_decays(log_decay: Tensor, begins: Tensor | None) -> Tensor:
    """Return the decay from the token before to each token [b, n, s].

    log_decay: its logarithm, [b, n, s].
    begins: bool [b, s], True where a document begins, of which the decay is 0; None: nowhere.
    """
    decay = log_decay.exp()
    if begins is None:
        return decay
    return decay.masked_fill(begins.unsqueeze(1), 0)
