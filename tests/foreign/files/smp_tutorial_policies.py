"""The policies of the FSDP tutorial, of which one is chosen below."""

import functools

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.t5.modeling_t5 import T5Block

fpSixteen = MixedPrecision(
    param_dtype=torch.float16,
    # gradient communication precision
    reduce_dtype=torch.float16,
    buffer_dtype=torch.float16,
)

bfSixteen = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    buffer_dtype=torch.bfloat16,
)

fp32_policy = MixedPrecision(
    param_dtype=torch.float32,
    reduce_dtype=torch.float32,
    buffer_dtype=torch.float32,
)


def fsdp_main(model, rank):
    wrapping = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    return FSDP(model, auto_wrap_policy=wrapping, mixed_precision=bfSixteen, device_id=rank)
