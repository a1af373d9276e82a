import torch
from torch.distributed.fsdp import MixedPrecision

policy = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduction_dtype=torch.float32,
)
