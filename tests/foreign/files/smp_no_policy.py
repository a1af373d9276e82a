import torch
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

tsm.init()


def wrap(model, args):
    if args.bf16:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    else:
        policy = None
    return FSDP(model, mixed_precision=policy, limit_all_gathers=True)
