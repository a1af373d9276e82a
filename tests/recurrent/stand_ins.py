"""Stand-ins for packages with kernels that no machine without a GPU can have.

Each has the signature of the package's function, asserts what its source demands of layouts, dtypes
and arguments, and computes token by token what its documentation says, so that autograd has the
gradients.
"""

import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent import kernel_choice
from models.recurrent.kernel_choice import (
    CONVOLUTION,
    DELTA_RULE,
    ROW_DECAY_RULE,
    STATE_SPACE,
    Package,
)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of sums and states."""
    return torch.promote_types(x.dtype, torch.float32)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q, k [b, s, n, d], v [b, s, n, v], g and beta [b, s, n]; state [sequences, n, d, v]."""
    # as releases before 0.6
    _, length, heads, _ = q.shape
    if length < heads:
        warnings.warn(
            "Input tensor shape suggests potential format mismatch: "
            f"seq_len ({length}) < num_heads ({heads}).",
            stacklevel=2,
        )
    assert g.shape == beta.shape
    return _delta_rule(
        q, k, v, g.unsqueeze(-1), beta, scale, initial_state, output_final_state, cu_seqlens
    )


def chunk_kda(  # noqa: PLR0913 - as in the package
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_gated_delta_rule`, with g [b, s, n, d]."""
    assert g.shape == q.shape
    return _delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """g: [b, s, n, 1 or d]."""
    samples, length, heads, key_dim = q.shape
    assert q.dtype == k.dtype == v.dtype and g.dtype == beta.dtype == wide(q)
    assert k.shape == q.shape and v.shape[:3] == q.shape[:3]
    assert g.shape[:3] == beta.shape == (samples, length, heads) and key_dim <= 256
    sequences = [(sample, 0, length) for sample in range(samples)]
    if cu_seqlens is not None:
        assert samples == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == length and bounds == sorted({*bounds})
        sequences = [(0, first, last) for first, last in pairwise(bounds)]
    if initial_state is None:
        initial_state = q.new_zeros(len(sequences), heads, key_dim, v.shape[-1], dtype=wide(q))
    assert initial_state.shape == (len(sequences), heads, key_dim, v.shape[-1])
    query = q.to(g.dtype) * (key_dim**-0.5 if scale is None else scale)
    outputs, last_states = [], []
    for number, (sample, first, last) in enumerate(sequences):
        state = initial_state[number]
        for t in range(first, last):
            key = k[sample, t].to(g.dtype)
            state = state * g[sample, t].exp().unsqueeze(-1)
            error = v[sample, t].to(g.dtype) - torch.einsum("ndv,nd->nv", state, key)
            corrected = beta[sample, t].unsqueeze(-1) * error
            state = state + torch.einsum("nd,nv->ndv", key, corrected)
            outputs.append(torch.einsum("ndv,nd->nv", state, query[sample, t]))
        last_states.append(state)
    output = torch.stack(outputs).view(samples, length, heads, -1).to(q.dtype)
    return output, torch.stack(last_states) if output_final_state else None


def mamba_chunk_scan_combined(  # noqa: PLR0913 - as in the package
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """x [b, s, n, v], dt [b, s, n], A [n], B and C [b, s, groups, d]; state [b, n, v, d]."""
    samples, length, heads, value_dim = x.shape
    groups, key_dim = B.shape[2:]
    assert x.dtype == B.dtype == C.dtype and dt.dtype == A.dtype == wide(x)
    assert dt.shape == (samples, length, heads) and A.shape == (heads,) and C.shape == B.shape
    assert B.shape[:2] == x.shape[:2] and heads % groups == 0 and chunk_size % 16 == 0
    assert D is z is dt_bias is cu_seqlens is None and not dt_softplus
    state = x.new_zeros(samples, heads, value_dim, key_dim, dtype=dt.dtype)
    if initial_states is not None:
        assert initial_states.shape == state.shape
        state = initial_states
    numbers = torch.zeros(samples, length, dtype=torch.int32)
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == numbers.shape
        numbers = seq_idx
    # Before the first token is the document with number 0.
    goes_on = numbers == F.pad(numbers, (1, 0))[:, :-1]
    key = B.to(dt.dtype).repeat_interleave(heads // groups, 2)
    query = C.to(dt.dtype).repeat_interleave(heads // groups, 2)
    steps = dt.clamp(*dt_limit)
    outputs = []
    for t in range(length):
        decay = (steps[:, t] * A).exp() * goes_on[:, t, None]
        value = steps[:, t, :, None] * x[:, t].to(dt.dtype)
        written = torch.einsum("bnv,bnd->bnvd", value, key[:, t])
        state = state * decay[..., None, None] + written
        outputs.append(torch.einsum("bnvd,bnd->bnv", state, query[:, t]))
    output = torch.stack(outputs, 1).to(x.dtype)
    return (output, state) if return_final_states else output


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """x [b, features, s], weight [features, width], initial_states [b, features, width - 1]."""
    samples, features, length = x.shape
    width = weight.shape[1]
    assert weight.shape == (features, width) and 2 <= width <= 4
    # Documents and tokens before need features next to each other in memory.
    assert x.stride(1) == 1 and x.stride(2) > 1
    assert features % 8 == x.stride(2) % 8 == x.stride(0) % 8 == 0
    if bias is not None:
        assert bias.dtype == weight.dtype and bias.shape == (features,) and bias.stride(0) == 1
    before = x.new_zeros(samples, features, width - 1)
    if initial_states is not None:
        assert seq_idx is None and initial_states.dtype == x.dtype
        assert initial_states.shape == before.shape and initial_states.stride(1) == 1
        before = initial_states
    numbers = torch.zeros(samples, length, dtype=torch.int32)
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == numbers.shape
        assert seq_idx.is_contiguous()
        numbers = seq_idx
    # Tokens before count as those of the first document.
    all_numbers = torch.cat((numbers[:, :1].expand(-1, width - 1), numbers), 1)
    whole = torch.cat((before, x), 2)
    outputs = []
    for t in range(length):
        seen = whole[:, :, t : t + width]
        same = all_numbers[:, t : t + width] == numbers[:, t : t + 1]
        outputs.append((seen * weight * same.unsqueeze(1)).sum(-1))
    output = torch.stack(outputs, 2)
    if bias is not None:
        output = output + bias.unsqueeze(-1)
    assert activation in (None, "silu", "swish")
    return F.silu(output) if activation else output


FUNCTIONS: dict[Package, Callable[..., Any]] = {
    DELTA_RULE: chunk_gated_delta_rule,
    ROW_DECAY_RULE: chunk_kda,
    STATE_SPACE: mamba_chunk_scan_combined,
    CONVOLUTION: causal_conv1d_fn,
}


def install(
    patch: pytest.MonkeyPatch,
    package: Package,
    release: str = "9.8.7",
    function: Callable[..., Any] | None = None,
) -> None:
    """Put a package in its place among modules while `patch` lasts. function: None: it lacks it."""
    path = package.module.split(".")
    for depth in range(len(path)):
        name = ".".join(path[: depth + 1])
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = release
        patch.setitem(sys.modules, name, module)
    if function is not None:
        setattr(sys.modules[package.module], package.function, function)
    kernel_choice.find.cache_clear()
