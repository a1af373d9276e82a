import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    param = TORCH_DTYPES["bf16"]
    reduce = TORCH_DTYPES["fp32"]


def parallelize(model):
    policy = MixedPrecisionPolicy(param_dtype=Precision.param, reduce_dtype=Precision.reduce, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
