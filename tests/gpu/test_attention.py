"""Each backend of torch's fused attention computes what float64 does, and a run names the one that
it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.precision.plan import plan
from models.attention.backends import NAMES, gpu_kernels, kernel_names
from models.config import ModelConfig

TOLERANCE = 1e-2  # relative, of results and gradients in bf16
# head width, heads, key and value heads, tokens, samples
SHAPES = [
    (64, 4, 4, 200, 2),
    (64, 4, 1, 2048, 1),
    (128, 4, 2, 200, 1),
    (128, 4, 2, 2048, 2),
]
SMALL_SHAPES = [(64, 4, 1, 200, 2), (128, 2, 2, 64, 1)]
NODES = {
    "cuDNN": "Cudnn",
    "flash attention": "Flash",
    "memory-efficient attention": "Efficient",
    "plain products": "Math",
}


def cases() -> list[Any]:
    on_cpu = [pytest.param("cpu", shape, id=f"cpu {shape}") for shape in SMALL_SHAPES]
    on_gpu = [
        pytest.param("cuda", shape, id=f"cuda {shape}", marks=pytest.mark.gpu) for shape in SHAPES
    ]
    return on_cpu + on_gpu


def heads_of(device: str, tokens: int, samples: int, count: int, width: int) -> Tensor:
    """Heads [b, n, s, d] with the strides that a layer passes: tokens come first in memory."""
    drawn = torch.randn(tokens, samples, count, width).to(device, torch.bfloat16)
    return drawn.permute(1, 2, 0, 3).requires_grad_()


def attend(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """The result of attention and its gradients."""
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(output, (query, key, value), grad)
    return [output.detach(), *grads]


@pytest.mark.parametrize(("device", "shape"), cases())
def test_each_backend_that_takes_a_call_computes_what_float64_does(
    device: str, shape: tuple[int, int, int, int, int]
) -> None:
    width, heads, key_heads, tokens, samples = shape
    query = heads_of(device, tokens, samples, heads, width)
    key = heads_of(device, tokens, samples, key_heads, width)
    value = heads_of(device, tokens, samples, key_heads, width)
    grad = heads_of(device, tokens, samples, heads, width).detach()
    wide_query, wide_key, wide_value = (
        x.detach().double().requires_grad_() for x in (query, key, value)
    )
    with sdpa_kernel(SDPBackend.MATH):
        exact = attend(wide_query, wide_key, wide_value, grad.double())
    taken = []
    for backend, name in NAMES.items():
        try:
            with sdpa_kernel(backend):
                computed = attend(query, key, value, grad)
        except RuntimeError:
            continue
        taken.append(name)
        for ours, expected in zip(computed, exact, strict=True):
            error = (ours.double() - expected).norm() / expected.norm()
            assert error < TOLERANCE, name
    assert len(taken) > 1, "only one backend takes this call"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.gpu
def test_the_backend_that_a_run_names_is_the_one_that_runs(
    precision: str, deterministic: bool
) -> None:
    model = ModelConfig(family="llama", hidden=512, layers=1, heads=4, kv_heads=2, ffn=64, vocab=64)
    with gpu_kernels("cuda", deterministic), torch.device("cuda"):
        (name,) = kernel_names(model, plan(precision), 1, 1, (2, 256), False)
        dtype = plan(precision).attention
        query = heads_of("cuda", 256, 2, 4, 128).to(dtype)
        key = heads_of("cuda", 256, 2, 2, 128).to(dtype)
        grouped = dtype == torch.bfloat16
        if not grouped:
            key = key.repeat_interleave(2, 1)
        output = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=grouped)
    assert NODES[name] in type(output.grad_fn).__name__
    assert not deterministic or name != "cuDNN"


@pytest.mark.gpu
def test_attention_that_must_repeat_does_so_bit_for_bit() -> None:
    query = heads_of("cuda", 2048, 2, 8, 128)
    key = heads_of("cuda", 2048, 2, 2, 128)
    value = heads_of("cuda", 2048, 2, 2, 128)
    grad = heads_of("cuda", 2048, 2, 8, 128).detach()
    with gpu_kernels("cuda", deterministic=True):
        first = attend(query, key, value, grad)
        for _ in range(5):
            again = attend(query, key, value, grad)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
