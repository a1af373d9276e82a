"""The bytes that the operators of a real layer move, by walking it on tensors without storage."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.torch_private import storage_address
from models.decoder.stages import Cut, Stage
from models.estimate.memory import lay_out
from models.estimate.on_cpu import tensors_of
from models.estimate.storage import without_storage
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from tools.config.run_file import RunConfig

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
ATTENTION = "_flash_attention"  # how the names of its operators begin


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that operators read and write, those of products and attention apart.

    A view moves nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name.startswith(ATTENTION):
            return result
        read = [*tensors_of((*args, *keywords.values()))]
        addresses = {storage_address(tensor) for tensor in read}
        written = [*tensors_of((result,))]
        is_view = all(storage_address(tensor) in addresses for tensor in written)
        changes = func._schema.is_mutable
        if not is_view or changes:
            self.total += sum(_touched(tensor) for tensor in (*read, *written))
        return result


def _touched(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, of which those that are expanded are one."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.dtype.itemsize


def walked_bytes(config: RunConfig) -> int:
    """Return the bytes that the last layer of a model moves between products in the forward pass of
    one micro-batch, operator by operator."""
    model = config.sized_model
    tokens = config.train.seq_length
    last = model.layers - 1
    cut = Cut(1, range(last, last + 1), first=False, last=False)
    plan = replace(config.plan, masters=config.plan.parameters)
    with without_storage("cuda"):
        stage = Stage(model.with_zero_weights, Context(plan, blank=True), cut)
        lay_out(stage)
        x = torch.zeros(tokens, 1, model.hidden, dtype=plan.residual, requires_grad=True)
        microbatch = MicrobatchInfo(0, torch.arange(1), torch.ones(()))
        # allocates rotary tables
        stage(x, microbatch)
        with MovedBytes() as forward:
            stage(x, microbatch)
    return forward.total
