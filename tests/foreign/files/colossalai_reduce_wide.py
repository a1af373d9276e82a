import torch
from colossalai.booster.plugin import LowLevelZeroPlugin


def get_plugin():
    return LowLevelZeroPlugin(1, "bf16", max_norm=1.0, communication_dtype=torch.float32, reduce_bucket_size_in_m=24)
