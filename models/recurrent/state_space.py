"""The recurrence of Mamba-2, a selective state space, token by token and in chunks of tokens.

A head has a rate r and a state S [d, v]. Token t brings a query q_t and a key k_t [d], which a
group of heads shares, a value x_t [v] and a time step d_t. In Mamba's letters r, q, k, x and d are
-A, C, B, x and dt. The state decays, the value is written to it under the key, and it is read:

    S_t = a_t S_(t-1) + k_t v_t',  a_t = exp(g_t),  g_t = -r d_t,  v_t = d_t x_t      (recurrence)
    o_t = S_t' q_t

In chunks of C tokens the products of a matrix with a vector become products of matrices. With the
decays w(t, s) from token s to token t of a chunk, w(t) from before the chunk to token t
(`models.recurrent.decays`) and the state S before the chunk

    o_t = w(t) S' q_t + sum over s <= t of w(t, s) (q_t . k_s) v_s
    S'  = w(C) S + sum over s of w(C, s) k_s v_s'

of which both sums need no state: they are computed for all chunks at once.

Tokens that pad the last chunk have v = 0 and g = 0, and change no state.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.recurrent.chunks import in_chunks, one_by_one
from models.recurrent.decays import Decays, token_decays

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class StateSpaceInputs:
    """The inputs of the recurrence; all tensors in one dtype, which computes it.

    query, key: [b, groups, s, d], of groups of n / groups heads in a row.
    value: [b, n, s, v], x above.
    step: [b, n, s], d above: 0 or more.
    rate: [n], r above: 0 or more.
    begins: bool [b, s], True where a document begins; None: nowhere. If the first token begins one,
        the initial state is not read.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    step: Tensor
    rate: Tensor
    begins: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Return the number of heads that share a query and a key."""
        return self.value.shape[1] // self.key.shape[1]

    @property
    def log_decay(self) -> Tensor:
        """Return the logarithms of the decays, [b, n, s]."""
        return -self.rate.unsqueeze(-1) * self.step

    @property
    def scaled_value(self) -> Tensor:
        """Return the values that are written to the state, v above, [b, n, s, v]."""
        return self.value * self.step.unsqueeze(-1)

    def initial_state(self) -> Tensor:
        """Return the state before any token: zeros [b, n, d, v]."""
        samples, heads, _, value_dim = self.value.shape
        key_dim = self.key.shape[-1]
        return self.value.new_zeros(samples, heads, key_dim, value_dim)


def recurrent(inputs: StateSpaceInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, n, s, v] and the last state [b, n, d, v] of the recurrence above,
    computed token by token.

    state: the one before the first token; None: zeros.
    """
    if state is None:
        state = inputs.initial_state()
    decays = token_decays(inputs.log_decay, inputs.begins)  # [b, n, s]
    query_of_head = inputs.query.repeat_interleave(inputs.group_size, 1)  # [b, n, s, d]
    key_of_head = inputs.key.repeat_interleave(inputs.group_size, 1)  # [b, n, s, d]
    outputs = []
    tensors = (query_of_head, key_of_head, inputs.scaled_value, decays)
    # Of each token: query, key and value [b, n, features], the decay [b, n].
    for query, key, value, decay in one_by_one(*tensors):
        query_column = query.unsqueeze(-1)  # [b, n, d, 1]
        key_column = key.unsqueeze(-1)
        value_row = value.unsqueeze(-2)  # [b, n, 1, v]
        added = key_column * value_row  # k_t v_t' [b, n, d, v]
        state = state * decay[:, :, None, None] + added  # S_t
        output = (state * query_column).sum(-2)  # o_t [b, n, v]
        outputs.append(output)
    return torch.stack(outputs, 2), state


def chunked(
    inputs: StateSpaceInputs, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return what `recurrent` does, computed chunk by chunk.

    state: the one before the first token; None: zeros.
    chunk: tokens of a chunk, of which the last one may have fewer.
    """
    query = in_chunks(inputs.query, chunk)  # [b, groups, chunks, C, d]
    key = in_chunks(inputs.key, chunk)  # [b, groups, chunks, C, d]
    value = in_chunks(inputs.scaled_value, chunk)  # [b, n, chunks, C, v]
    decays = Decays.of(inputs.log_decay, inputs.begins, chunk)

    # Heads of a group differ in their decays alone, so a group has one product of its tokens.
    products_of_group = query @ key.mT  # [b, groups, chunks, C, C]
    products = products_of_group.repeat_interleave(inputs.group_size, 1)
    query_of_head = query.repeat_interleave(inputs.group_size, 1)
    key_of_head = key.repeat_interleave(inputs.group_size, 1)

    # What needs no state is computed for all chunks at once.
    scores = products * decays.between  # [b, n, chunks, C, C]
    from_inside = scores @ value  # [b, n, chunks, C, v]
    reading = decays.from_before * query_of_head  # [b, n, chunks, C, d]
    writing = decays.to_end * key_of_head  # [b, n, chunks, C, d]
    from_chunk = writing.mT @ value  # [b, n, chunks, d, v]

    carried = inputs.initial_state() if state is None else state  # [b, n, d, v]
    outputs = []
    tensors = (reading, from_inside, from_chunk, decays.over_chunk)
    # What reads the state before a chunk, what comes of the chunk itself to outputs and to the
    # state, and the decay w(C).
    for read, inner, added, decay in one_by_one(*tensors):
        from_before = read @ carried  # [b, n, C, v]
        outputs.append(from_before + inner)
        carried = decay * carried + added  # S' [b, n, d, v]
    # without the tokens that pad the last chunk
    length = inputs.value.shape[2]
    padded = torch.cat(outputs, 2)
    return padded[:, :, :length], carried
