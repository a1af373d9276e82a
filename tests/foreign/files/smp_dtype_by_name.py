import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parallelize(model, job_config):
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[job_config.training.mixed_precision_param],
        reduce_dtype=torch.float32,
    )
    return fully_shard(model, mp_policy=policy)
