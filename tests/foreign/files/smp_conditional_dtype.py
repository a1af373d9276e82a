import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


def shard(model, args):
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    torch.cuda.set_device(args.local_rank)
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return FSDP(model, mixed_precision=policy, device_id=torch.cuda.current_device())
