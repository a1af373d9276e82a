import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


def wrap(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32):
    policy = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    return FSDP(model, mixed_precision=policy)
