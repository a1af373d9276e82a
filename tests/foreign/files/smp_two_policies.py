import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


def student(model):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(model, mixed_precision=policy)


def teacher(model):
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    return FSDP(model, mixed_precision=policy)
