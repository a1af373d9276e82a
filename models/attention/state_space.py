"""The recurrence of Mamba-2, a selective state space, token by token and in chunks of tokens.

A head has a state S [d, v]. Token t brings a query q_t and a key k_t [d], which a group of heads
shares, a value v_t [v] and a decay a_t = exp(g_t) with g_t <= 0. In Mamba's letters q, k and v are
C, B and dt x. The state decays, the value is written to it under the key, and it is read:

    S_t = a_t S_(t-1) + k_t v_t'                                                      (recurrence)
    o_t = S_t' q_t

In chunks of C tokens the products of a matrix with a vector become products of matrices. With the
decays w(t, s) from token s to token t of a chunk, w(t) from before the chunk to token t
(`models.attention.decays`) and the state S before the chunk

    o_t = w(t) S' q_t + sum over s <= t of w(t, s) (q_t . k_s) v_s
    S'  = w(C) S + sum over s of w(C, s) k_s v_s'

of which both sums need no state: they are computed for all chunks at once.

Tokens that fill up the last chunk have k = 0 and g = 0, and change no state.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.decays import Decays

CHUNK = 64
"""Tokens of a chunk."""


@dataclass(frozen=True)
class StateSpaceInputs:
    """The inputs of the recurrence; all tensors in one dtype, which computes it.

    query, key: [b, groups, s, d], of groups of n / groups heads in a row.
    value: [b, n, s, v].
    log_decay: [b, n, s], g above: 0 or less.
    begins: bool [b, s], True where a document begins; None: nowhere. If the first token begins one,
        the initial state is not read.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    begins: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Return the number of heads that share a query and a key."""
        return self.value.shape[1] // self.key.shape[1]

    def initial_state(self) -> Tensor:
        """Return the state before any token: zeros [b, n, d, v]."""
        samples, heads, _, value_dim = self.value.shape
        return self.value.new_zeros(samples, heads, self.key.shape[-1], value_dim)


def recurrent(inputs: StateSpaceInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, n, s, v] and the last state [b, n, d, v], token by token.

    state: the one before the first token; None: zeros.
    """
    if state is None:
        state = inputs.initial_state()
    decay = inputs.log_decay.exp()
    if inputs.begins is not None:
        decay = decay.masked_fill(inputs.begins.unsqueeze(1), 0)
    query = inputs.query.repeat_interleave(inputs.group_size, 1)
    key = inputs.key.repeat_interleave(inputs.group_size, 1)
    outputs = []
    for token in range(inputs.value.shape[2]):
        written = key[:, :, token].unsqueeze(-1) * inputs.value[:, :, token].unsqueeze(-2)
        state = state * decay[:, :, token, None, None] + written
        outputs.append((state * query[:, :, token].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 2), state


def chunked(
    inputs: StateSpaceInputs, state: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return what `recurrent` does, chunk by chunk.

    chunk: tokens of a chunk, of which the last one may have fewer.
    """
    length = inputs.value.shape[2]
    whole = _filled(inputs, -length % chunk)
    # [b, groups or n, chunks, C, features]
    query = whole.query.unflatten(2, (-1, chunk))
    key = whole.key.unflatten(2, (-1, chunk))
    value = whole.value.unflatten(2, (-1, chunk))
    decays = Decays.of(whole.log_decay, whole.begins, chunk)
    # Heads of a group differ in their decays alone.
    products = (query @ key.mT).repeat_interleave(inputs.group_size, 1)
    inside = (products * decays.between) @ value
    reading = decays.from_before * query.repeat_interleave(inputs.group_size, 1)
    writing = decays.to_end * key.repeat_interleave(inputs.group_size, 1)
    written = writing.mT @ value
    carried = inputs.initial_state() if state is None else state
    outputs = []
    for number in range(value.shape[2]):
        outputs.append(reading[:, :, number] @ carried + inside[:, :, number])
        carried = decays.whole[:, :, number] * carried + written[:, :, number]
    return torch.cat(outputs, 2)[:, :, :length], carried


def _filled(inputs: StateSpaceInputs, missing: int) -> StateSpaceInputs:
    """Return the inputs with `missing` tokens more, which change no state."""
    if not missing:
        return inputs
    begins = inputs.begins
    if begins is not None:
        begins = F.pad(begins, (0, missing), value=False)
    return StateSpaceInputs(
        query=F.pad(inputs.query, (0, 0, 0, missing)),
        key=F.pad(inputs.key, (0, 0, 0, missing)),
        value=F.pad(inputs.value, (0, 0, 0, missing)),
        log_decay=F.pad(inputs.log_decay, (0, missing)),
        begins=begins,
    )
