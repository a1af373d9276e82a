"""Calls of kernels of other packages for layers with a recurrent state. They compute what
plain torch does:

    delta_rule    `models.recurrent.delta_rule.chunked`, by flash-linear-attention
    state_space   `models.recurrent.state_space.chunked`, by mamba-ssm
    convolution   SiLU of `models.recurrent.short_convolution`, by causal-conv1d

The kernels of recurrences take queries, keys and values in the dtype of products and keep the
states between chunks in it; they sum in FP32, and take decays, strengths, time steps and the state
before the first token in FP32. The kernel of the convolution takes FP32.

Arguments, layouts and dtypes are those of flash-linear-attention 0.5.2 (of its `chunk_kda` 0.6.0),
mamba-ssm 2.3.2 and causal-conv1d 1.6.1, whose sources were read.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.state_space import StateSpaceInputs

# Tokens of a chunk of mamba-ssm, as in Nemotron-H.
MAMBA_CHUNK = 128


def delta_rule(
    kernel: Callable[..., Any], inputs: DeltaInputs, state: Tensor | None, products: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return what `models.recurrent.delta_rule.chunked` does, outputs [b, n, s, v] and the last
    state, by a kernel of flash-linear-attention.

    state: the one before the first token; None: zeros. products: the dtype of products.
    The last state is None if there are documents: no text continues then.
    """
    # [b, n, s, ...] -> [b, s, n, ...]
    query = inputs.query.transpose(1, 2).to(products)
    key = inputs.key.transpose(1, 2).to(products)
    value = inputs.value.transpose(1, 2).to(products)
    log_decay = inputs.log_decay.transpose(1, 2)
    strength = inputs.strength.transpose(1, 2)
    starts = document_starts(inputs)
    samples, length = query.shape[:2]
    tensors = [query, key, value, log_decay, strength]
    # The kernel takes documents as sequences that lie end to end: [1, b * s, n, ...].
    if starts is not None:
        tensors = [x.flatten(0, 1).unsqueeze(0) for x in tensors]
    outputs, last = kernel(
        *tensors,
        scale=1.0,  # queries have their scale
        initial_state=state,
        output_final_state=starts is None,
        cu_seqlens=starts,
    )
    outputs = outputs.view(samples, length, *outputs.shape[2:])
    return outputs.transpose(1, 2).to(inputs.value.dtype), last


def document_starts(inputs: DeltaInputs) -> Tensor | None:
    """Return where documents begin in the samples laid end to end, and where the last one ends:
    int32 [documents + 1]; None if attention is not restricted to documents. The host waits for the
    GPU unless the inputs have them."""
    if inputs.begins is None or inputs.starts is not None:
        return inputs.starts
    begins = inputs.begins.clone()
    begins[:, 0] = True
    (starts,) = begins.flatten().nonzero(as_tuple=True)
    return F.pad(starts, (0, 1), value=begins.numel()).int()


def state_space(
    kernel: Callable[..., Any],
    inputs: StateSpaceInputs,
    state: Tensor | None,
    products: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what `models.recurrent.state_space.chunked` does, outputs [b, n, s, v] and the last
    state, by a kernel of mamba-ssm, whose states are transposed.

    state: the one before the first token; None: zeros. products: the dtype of products.
    """
    # [b, n, s, ...] -> [b, s, n, ...]
    outputs, last = kernel(
        inputs.value.transpose(1, 2).to(products),
        inputs.step.transpose(1, 2),
        -inputs.rate,
        inputs.key.transpose(1, 2).to(products),
        inputs.query.transpose(1, 2).to(products),
        MAMBA_CHUNK,
        initial_states=None if state is None else state.mT,
        seq_idx=document_numbers(inputs.begins),
        return_final_states=True,
    )
    return outputs.transpose(1, 2).to(inputs.value.dtype), last.mT


def convolution(
    kernel: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    begins: Tensor | None,
) -> Tensor:
    """Return SiLU of what `models.recurrent.short_convolution` does, [s, b, features], by a kernel
    of causal-conv1d.

    x, weight, bias, before: as there.
    begins: bool [b, s], True where a document begins; None: nowhere. Beside it `before` is None:
        there are no tokens before those of documents.
    """
    convolved = kernel(
        _features_inside(x),
        weight,
        bias,
        seq_idx=document_numbers(begins),
        initial_states=None if before is None else _features_inside(before),
        activation="silu",
    )
    return convolved.permute(2, 0, 1)


def _features_inside(x: Tensor) -> Tensor:
    """Return x [s, b, features] as [b, features, s], of which features are next to each other in
    memory: documents and tokens before need that. There is no copy if x is contiguous."""
    # The package also reads the strides of dims of one element, which are any if not made anew.
    return x.flatten().view(x.shape).permute(1, 2, 0)


def document_numbers(begins: Tensor | None) -> Tensor | None:
    """Return the number of each token's document in its sample, int32 [b, s]; None without
    documents. The state before the first token is that of number 0.

    begins: bool [b, s], True where a document begins.
    """
    if begins is None:
        return None
    return begins.cumsum(1, dtype=torch.int32)
