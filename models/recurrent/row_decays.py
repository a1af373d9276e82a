"""The decays of a recurrence within chunks of tokens, of heads of whose state each row has a decay
of its own (Kimi Delta Attention, `models.recurrent.delta_rule`).

w(t, s) = exp(g_(s+1) + ... + g_t) is now a vector [d]. A product of vectors that are weighed by it,

    A(t, s) = sum over rows of w(t, s) l_t e_s,

is no product of matrices with a mask, and the table of all w(t, s) would have C x C x d numbers. It
is one between two halves of a run of tokens, for with the end m of the first half

    w(t, s) = w(t, m) w(m, s),   s in the first half, t in the second:
    A(t, s) = (w(t, m) l_t) . (w(m, s) e_s)

So A is put together from runs of 1, 2, 4, ... tokens: of two neighbouring runs of a length each has
its own square already, and the product above is the one below the first and left of the second.

As in `models.recurrent.decays` every sum of g is taken over the tokens between s and t, so that no
digits of a weak decay are lost, no exponential is above 1, and a decay of 0 (g = -inf) is exact.
Where a document begins the decay is 0: nothing is left of the state.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent.chunks import in_chunks
from models.recurrent.decays import running_sums


@dataclass(frozen=True)
class RowDecays:
    """The decays of each row within chunks; 0 across the beginning of a document.

    log_decay: [b, n, chunks, C, d], g above, -inf where a document begins.
    from_before: [b, n, chunks, C, d], w(t) from before the chunk to token t.
    to_end: [b, n, chunks, C, d], w(C, s).
    over_chunk: [b, n, chunks, d, 1], w(C).
    """

    log_decay: Tensor
    from_before: Tensor
    to_end: Tensor
    over_chunk: Tensor

    @staticmethod
    def of(log_decay: Tensor, begins: Tensor | None, chunk: int) -> "RowDecays":
        """Return the decays of chunks of tokens, of which those that pad the last one have g = 0.

        log_decay: [b, n, s, d], g above.
        begins: bool [b, s], True where a document begins; None: nowhere.
        chunk: a power of two. Raises ValueError for another number.
        """
        if chunk & (chunk - 1):
            raise ValueError(f"chunks of {chunk} tokens cannot be halved down to one")
        if begins is not None:
            begins_of_rows = begins[:, None, :, None]  # [b, 1, s, 1]
            log_decay = log_decay.masked_fill(begins_of_rows, -torch.inf)
        log_decays = in_chunks(log_decay, chunk)
        from_before = running_sums(log_decays, -2).exp()
        over_chunk = from_before[..., -1, :].unsqueeze(-1)
        return RowDecays(
            log_decay=log_decays,
            from_before=from_before,
            to_end=_sums_of_later(log_decays).exp(),
            over_chunk=over_chunk,
        )

    def weigh(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return A(t, s) of token t (row) and token s (column), 0 above the diagonal: [b, n,
        chunks, C, C].

        later, earlier: l and e, [b, n, chunks, C, d].
        """
        # A(t, t), the squares of runs of one token, in which nothing decays
        squares = (later * earlier).sum(-1)[..., None, None]  # [b, n, chunks, C, 1, 1]
        chunk = later.shape[-2]
        half = 1
        while half < chunk:
            # each run of 2 half tokens in halves: [b, n, chunks, C / (2 half), half, d]
            first_decays, second_decays = _halves(self.log_decay, half)
            _, later_half = _halves(later, half)
            earlier_half, _ = _halves(earlier, half)
            to_middle = _sums_of_later(first_decays).exp()  # w(m, s)
            from_middle = running_sums(second_decays, -2).exp()  # w(t, m)
            below_left = (from_middle * later_half) @ (to_middle * earlier_half).mT
            first_squares = squares[..., 0::2, :, :]  # of the first halves
            second_squares = squares[..., 1::2, :, :]
            above = F.pad(first_squares, (0, half))  # with zeros on the right
            below = torch.cat((below_left, second_squares), -1)
            squares = torch.cat((above, below), -2)
            half *= 2
        return squares.squeeze(-3)


def _halves(tokens: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return both halves of runs of 2 half tokens [..., C, d]: [..., C / (2 half), half, d]."""
    runs = tokens.unflatten(-2, (-1, 2, half))
    first, second = runs.unbind(-3)
    return first, second


def _sums_of_later(values: Tensor) -> Tensor:
    """Return for each token of [..., tokens, d] the sum of the values of all later ones."""
    # g of the token itself is not among them: s + 1 to the last
    later = F.pad(values, (0, 0, 0, 1))[..., 1:, :]
    return running_sums(later.flip(-2), -2).flip(-2)
