import torch
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

half = MixedPrecision(param_dtype=torch.half, reduce_dtype=torch.half)
scaler = ShardedGradScaler("cuda", 2.0**14, 0.25, 4.0, 100)
