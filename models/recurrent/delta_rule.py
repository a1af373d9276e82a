"""The gated delta rule, token by token and in chunks of tokens.

A head has a state S [d, v], a matrix that maps a key to a value. Token t brings a query q_t and a
key k_t [d], a value v_t [v], a decay a_t = exp(g_t) with g_t <= 0, and a strength b_t from 0 to 1.
The state decays; then it is corrected by the part b_t of the error that it makes about the value of
the key; and then it is read:

    D_t = a_t S_(t-1)
    u_t = b_t (v_t - D_t' k_t)
    S_t = D_t + k_t u_t'                                                              (recurrence)
    o_t = S_t' q_t

In Kimi Delta Attention a_t is a vector [d], and each row of the state has a decay of its own.

One token at a time these are products of a matrix with a vector, which no processor does fast. In
chunks of C tokens they become products of matrices. Let S be the state before a chunk, and let
w(t, s) = exp(g_(s+1) + ... + g_t) be the decay from token s of the chunk to token t, and w(t) that
from before the chunk to token t. Unrolled, the recurrence says

    D_t = w(t) S + sum over s < t of w(t, s) k_s u_s'

and put into the equation of u_t this is a system of linear equations for all u of the chunk, in
which the matrix is triangular with ones on its diagonal:

    u_t + sum over s < t of b_t w(t, s) (k_t . k_s) u_s = b_t v_t - b_t w(t) S' k_t

Its solution is U = X - Y S, where X and Y solve it for b_t v_t and for b_t w(t) k_t alone, and need
no state: they are computed for all chunks at once. What remains from chunk to chunk is

    U  = X - Y S
    o_t = w(t) S' q_t + sum over s <= t of w(t, s) (q_t . k_s) u_s
    S' = w(C) S + sum over s of w(C, s) k_s u_s'

`models.recurrent.decays` computes the decays, which are 0 across the beginning of a document. If
rows have decays of their own, w(t, s) is a vector [d]: it stands inside the product of query and
key, w(t, s) (q_t . k_s) is the sum over rows of w(t, s) q_t k_s, and all else is as before
(`models.recurrent.row_decays`). Tokens that pad the last chunk have b = 0 and g = 0, and change no
state.

Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025), whose form for chunks is that
of Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024), with decays; for
decays of rows Kimi Team, "Kimi Linear" (2025).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recurrent.chunks import in_chunks, one_by_one
from models.recurrent.decays import Decays
from models.recurrent.row_decays import RowDecays

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the gated delta rule; all tensors in one dtype, which computes it.

    query, key: [b, n, s, d].
    value: [b, n, s, v].
    log_decay: [b, n, s], g above: 0 or less; or [b, n, s, d], of each row of the state.
    strength: [b, n, s], b above: from 0 to 1.
    begins: bool [b, s], True where a document begins; None: nowhere. If the first token begins one,
        the initial state is not read.
    starts: int32 [documents + 1], where documents begin in the samples laid end to end, and where
        the last one ends, as far as it is known; read by kernels of a GPU alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor
    begins: Tensor | None = None
    starts: Tensor | None = None

    @property
    def decays_by_row(self) -> bool:
        """Return True if each row of a state has a decay of its own."""
        return self.log_decay.dim() == self.key.dim()

    def decays_of_tokens(self) -> Tensor:
        """Return the decay from the token before to each token, [b, n, s, 1 or d]: of all rows of
        a state, or of each."""
        log_decays = self.log_decay if self.decays_by_row else self.log_decay.unsqueeze(-1)
        decays = log_decays.exp()
        if self.begins is None:
            return decays
        # a document knows nothing of the one before it
        is_first = self.begins[:, None, :, None]
        return decays.masked_fill(is_first, 0)

    def decays_in_chunks(self, chunk: int) -> "Decays | RowDecays":
        """Return the decays within chunks of so many tokens."""
        if self.decays_by_row:
            return RowDecays.of(self.log_decay, self.begins, chunk)
        return Decays.of(self.log_decay, self.begins, chunk)

    def initial_state(self) -> Tensor:
        """Return the state before any token: zeros [b, n, d, v]."""
        samples, heads, _, key_dim = self.key.shape
        value_dim = self.value.shape[-1]
        return self.value.new_zeros(samples, heads, key_dim, value_dim)


def recurrent(inputs: DeltaInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, n, s, v] and the last state [b, n, d, v] of the recurrence above,
    computed token by token.

    state: the one before the first token; None: zeros.
    """
    if state is None:
        state = inputs.initial_state()
    outputs = []
    decays = inputs.decays_of_tokens()
    tensors = (inputs.query, inputs.key, inputs.value, inputs.strength, decays)
    # Of each token: query, key and value [b, n, features], strength [b, n], decay [b, n, 1 or d].
    for query, key, value, strength, decay in one_by_one(*tensors):
        query_column = query.unsqueeze(-1)  # [b, n, d, 1]
        key_column = key.unsqueeze(-1)  # [b, n, d, 1]
        decayed = state * decay.unsqueeze(-1)  # D_t [b, n, d, v]
        remembered = (decayed * key_column).sum(-2)  # D_t' k_t [b, n, v]
        error = value - remembered
        correction = strength.unsqueeze(-1) * error  # u_t [b, n, v]
        correction_row = correction.unsqueeze(-2)  # [b, n, 1, v]
        written = key_column * correction_row  # k_t u_t' [b, n, d, v]
        state = decayed + written  # S_t
        output = (state * query_column).sum(-2)  # o_t [b, n, v]
        outputs.append(output)
    return torch.stack(outputs, 2), state


def chunked(
    inputs: DeltaInputs, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return what `recurrent` does, computed chunk by chunk, with the names of the module's
    docstring in comments.

    state: the one before the first token; None: zeros.
    chunk: tokens of a chunk, of which the last one may have fewer; a power of two if rows have
        decays of their own.
    """
    query = in_chunks(inputs.query, chunk)  # [b, n, chunks, C, d]
    key = in_chunks(inputs.key, chunk)  # [b, n, chunks, C, d]
    value = in_chunks(inputs.value, chunk)  # [b, n, chunks, C, v]
    strength = in_chunks(inputs.strength, chunk)  # [b, n, chunks, C]
    strength = strength.unsqueeze(-1)  # [b, n, chunks, C, 1]
    decays = inputs.decays_in_chunks(chunk)

    # What needs no state is computed for all chunks at once.
    from_values, from_state = _corrections(key, value, strength, decays)
    scores = decays.weigh(query, key)  # [b, n, chunks, C, C]
    reading = decays.from_before * query  # [b, n, chunks, C, d]
    writing = (decays.to_end * key).mT  # [b, n, chunks, d, C]

    carried = inputs.initial_state() if state is None else state  # [b, n, d, v]
    outputs = []
    tensors = (from_values, from_state, scores, reading, writing, decays.over_chunk)
    # X and Y of a chunk, what reads and writes its state, and the decay w(C)
    for x, y, score, read, write, decay in one_by_one(*tensors):
        corrections = x - y @ carried  # U [b, n, C, v]
        from_before = read @ carried  # [b, n, C, v]
        from_inside = score @ corrections
        outputs.append(from_before + from_inside)
        carried = decay * carried + write @ corrections  # S' [b, n, d, v]
    # without the tokens that pad the last chunk
    length = inputs.key.shape[2]
    padded = torch.cat(outputs, 2)
    return padded[:, :, :length], carried


def _corrections(
    key: Tensor, value: Tensor, strength: Tensor, decays: Decays | RowDecays
) -> tuple[Tensor, Tensor]:
    """Return X [b, n, chunks, C, v] and Y [b, n, chunks, C, d] of the equations above: with the
    state S before a chunk its corrections are U = X - Y S.

    key, value: [b, n, chunks, C, features].
    strength: [b, n, chunks, C, 1].
    """
    # The left side of the equations, b_t w(t, s) (k_t . k_s), below its diagonal of ones.
    weighted_key = strength * key  # b_t k_t [b, n, chunks, C, d]
    system = decays.weigh(weighted_key, key)  # [b, n, chunks, C, C]
    # Both right sides, which are solved for together.
    from_values = strength * value
    from_state = strength * decays.from_before * key
    known = torch.cat((from_values, from_state), -1)  # [b, n, chunks, C, v + d]
    # Only what is below the diagonal is read: the diagonal stands for ones.
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    widths = (value.shape[-1], key.shape[-1])
    x, y = solved.split(widths, -1)
    return x, y
