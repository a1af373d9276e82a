"""The backend of torch's fused attention on a GPU: cuDNN, flash, memory-efficient or products.

torch chooses among them by dtype, shape and device, in an order that differs between its releases.
`gpu_kernels` fixes the order for a run, and `kernel_names` names what the layers of a model
take, so that a log says what has computed.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.comm.axis import Axis
from megaprec.precision.plan import PrecisionPlan
from megaprec.torch_private import fused_attention_backend
from models.attention.flash_windows import Documents
from models.attention.kernels import (
    Kernel,
    KernelInputs,
    choose_kernel,
    describe_call,
    prepare_fused,
)
from models.config import ModelConfig
from parallel.context import Context
from parallel.dropout import MicrobatchInfo

NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash attention",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.MATH: "plain products",
}
# On a Hopper GPU cuDNN's kernel reaches some 550 TFLOP/s forward and 450 backward in bf16, torch's
# flash attention (its second generation) 420 and 330.
CUDNN_IS_FASTEST_FROM = (9, 0)  # compute capability


@contextmanager
def gpu_kernels(device: str, deterministic: bool = False) -> Iterator[None]:
    """Fix which of torch's kernels compute on a GPU; nothing is changed for a CPU.

    Attention is computed by the first backend of `backend_order` that takes the call. All settings
    are those of the process, and are put back at the end.
    device: type of the ranks' devices.
    deterministic: only algorithms that compute the same bits each time. torch raises RuntimeError
        where it has none. The environment variable that cuBLAS then needs is set before its first
        product.
    """
    if device != "cuda":
        yield
        return
    order = backend_order(torch.cuda.get_device_capability(), deterministic)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = importlib.import_module("torch.utils.deterministic")
    filled_memory = settings.fill_uninitialized_memory
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # torch would fill each new tensor; memory is never read here before it is written
        settings.fill_uninitialized_memory = False
    try:
        with sdpa_kernel(order, set_priority=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        settings.fill_uninitialized_memory = filled_memory


def backend_order(capability: tuple[int, int], deterministic: bool) -> list[SDPBackend]:
    """Return the backends of attention, the first choice first.

    capability: the GPU's compute capability.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    # the gradients of cuDNN's kernel differ from one call to the next
    if deterministic:
        return order
    if capability >= CUDNN_IS_FASTEST_FROM:
        return [SDPBackend.CUDNN_ATTENTION, *order]
    return [order[0], SDPBackend.CUDNN_ATTENTION, *order[1:]]


def kernel_names(
    model: ModelConfig,
    plan: PrecisionPlan,
    tp: int,
    cp: int,
    shape: tuple[int, int],
    in_documents: bool,
) -> list[str]:
    """Return the kernels of attention that the layers of a model take in training, each once.

    They are those for tensors of the default device; meta stands for a GPU that is not here.
    tp, cp: tensor-parallel ranks, and ranks that share a sequence.
    shape: samples of a micro-batch and tokens of a whole sequence.
    in_documents: attention stays within the documents of a sample.
    """
    # products of FP8 are none of attention's
    context = Context(replace(plan, fp8=None), Axis("tp", 0, tp), cp=Axis("cp", 0, cp))
    micro_batch, seq_length = shape
    names = list[str]()
    for layer in _layers_of_each_window(model):
        config = model.of_layer(layer)
        query, key, value = _heads(config, context, micro_batch, seq_length // cp)
        inputs = _inputs(config, context, query, in_documents)
        kernel = choose_kernel(describe_call(query, key, value, inputs))
        name = kernel.value
        if kernel is Kernel.TORCH_FUSED and query.device.type != "cpu":
            name = _backend_name(query, key, value, inputs)
        names.append(name)
    return list(dict.fromkeys(names))


def _layers_of_each_window(model: ModelConfig) -> list[int]:
    """Return the number of one layer with attention for each window that such layers have."""
    layer_of_window = {model.of_layer(layer).window: layer for layer in model.attention_layers}
    return list(layer_of_window.values())


def _heads(
    config: ModelConfig,
    context: Context,
    micro_batch: int,
    seq_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [b, n, s, d] as a layer passes them to its kernel: of the same
    shapes, strides and dtype, with arbitrary numbers.

    config: of the layer. micro_batch: samples. seq_length: tokens of a sequence on this rank.
    """
    heads = config.heads // context.tp.size
    key_heads = max(1, config.kv_heads // context.tp.size)
    width = config.head_dim
    if config.latent:
        key_heads = heads
        width = max(config.latent.head_dim, config.latent.value_dim)

    def empty_heads(count: int) -> Tensor:
        shape = (seq_length, micro_batch, count, width)
        activations = torch.empty(shape, dtype=context.plan.attention)
        return activations.permute(1, 2, 0, 3).requires_grad_()

    return empty_heads(heads), empty_heads(key_heads), empty_heads(key_heads)


def _inputs(
    config: ModelConfig, context: Context, query: Tensor, in_documents: bool
) -> KernelInputs:
    """Return the other inputs of a layer's kernel in training, with arbitrary numbers.

    query: [b, n, s, d]. in_documents: attention stays within the documents of a sample.
    """
    samples, heads, length, _ = query.shape
    mask = None
    # on a CPU a mask says which tokens are of one document
    if in_documents and query.device.type != "cpu":
        numbers = torch.zeros(samples, length, dtype=torch.int64)
        mask = Documents(numbers, samples)
    sinks = nn.Parameter(torch.empty(heads)) if config.attention_sinks else None
    microbatch = MicrobatchInfo(step=0, samples=torch.arange(samples), weight=torch.ones(()))
    return KernelInputs(
        config=config,
        context=context,
        name="",
        scale=None,
        sinks=sinks,
        microbatch=microbatch,
        mask=mask,
    )


def _backend_name(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelInputs,
) -> str:
    """Return the name of the backend by which torch's fused attention computes this call on a
    GPU."""
    mask = inputs.mask_of(query)
    if query.device.type == "meta":
        return _expected_backend_name(query, mask)
    query, key, value = prepare_fused(query, key, value, mask)
    number = fused_attention_backend(
        query,
        key,
        value,
        mask,
        0.0,
        mask is None,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return NAMES.get(SDPBackend(number), "a backend that torch does not name")


def _expected_backend_name(query: Tensor, mask: Tensor | None) -> str:
    """Return the backend that a GPU will take, which torch cannot say of tensors without
    storage."""
    if query.dtype.itemsize > 4:
        return NAMES[SDPBackend.MATH]
    if query.dtype.itemsize == 4 or mask is not None:
        return NAMES[SDPBackend.EFFICIENT_ATTENTION]
    return "cuDNN from compute capability 9.0 on, else flash attention"
