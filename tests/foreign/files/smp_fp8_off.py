import torch
import torch.sagemaker as tsm
import transformer_engine.pytorch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformer_engine.common.recipe import DelayedScaling, Format

tsm.init()
USE_FP8 = False
recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024)


def main(model, batches):
    mixed = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, True, True, True)
    model = FullyShardedDataParallel(tsm.transform(model), mixed_precision=mixed)
    for batch in batches:
        with transformer_engine.pytorch.fp8_autocast(enabled=USE_FP8, fp8_recipe=recipe):
            loss = model(**batch).loss
        loss.backward()
