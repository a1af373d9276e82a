"""Sources of tokens whose entropy is known."""

import math

import torch
from torch import Tensor

from models.attention.packing import UNPACKED, Packing
from models.engine.passes import Share

# probability of each next token by the present one, of tokens that are quite unlike each other
CHAIN = torch.tensor(
    [
        [0.70, 0.10, 0.10, 0.05, 0.03, 0.02],
        [0.05, 0.05, 0.80, 0.04, 0.03, 0.03],
        [0.25, 0.25, 0.25, 0.15, 0.05, 0.05],
        [0.01, 0.02, 0.03, 0.04, 0.40, 0.50],
        [0.60, 0.30, 0.05, 0.03, 0.01, 0.01],
        [0.02, 0.90, 0.02, 0.02, 0.02, 0.02],
    ],
    dtype=torch.float64,
)
VOCAB = len(CHAIN)


def entropy_rate(chain: Tensor) -> float:
    """Nats a token of a Markov chain that has forgotten its beginning."""
    stationary = torch.linalg.matrix_power(chain, 64)[0]
    information = -(chain * chain.log()).sum(1)
    return float(stationary @ information)


def draw_chain(chain: Tensor, samples: int, length: int, seed: int) -> Tensor:
    """Independent samples [samples, length] of a Markov chain."""
    generator = torch.Generator().manual_seed(seed)
    stationary = torch.linalg.matrix_power(chain, 64)[0]
    columns = [torch.multinomial(stationary, samples, True, generator=generator)]
    for _ in range(length - 1):
        following = torch.multinomial(chain[columns[-1]], 1, generator=generator)
        columns.append(following.squeeze(1))
    return torch.stack(columns, 1)


def draw_uniform(samples: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (samples, length), generator=generator)


def conditional_entropy(tokens: Tensor, targets: Tensor, mask: Tensor | None = None) -> float:
    """Nats a target of what a text tells about its next token when only the present one is known."""
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counting = torch.ones_like(tokens, dtype=torch.float64) if mask is None else mask.double()
    counts.index_put_((tokens.flatten(), targets.flatten()), counting.flatten(), accumulate=True)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return float(-torch.xlogy(counts, shares).sum() / counts.sum())


def share_of(
    stream: Tensor,
    packing: Packing = UNPACKED,
    mask: Tensor | None = None,
    part: slice | None = None,
) -> Share:
    """The share of a batch, or of the samples of a dp rank, whose targets are its next tokens.

    stream: int64 [samples, length + 1].
    """
    own = part or slice(0, len(stream))
    return Share(
        stream[own, :-1].contiguous(),
        stream[own, 1:].contiguous(),
        None if mask is None else mask[own],
        first=own.start,
        packing=packing.rows(own),
    )


LOG_VOCAB = math.log(VOCAB)
