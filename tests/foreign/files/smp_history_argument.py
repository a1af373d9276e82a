import torch
import transformer_engine.pytorch as te
from torch.distributed.fsdp import MixedPrecision
from transformer_engine.common.recipe import DelayedScaling, Format

dtype = torch.bfloat16
policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=torch.float32)


def train(model, batches, args):
    fp8_recipe = DelayedScaling(
        fp8_format=Format.HYBRID,
        amax_history_len=args.fp8_amax_history_len,
        amax_compute_algo="max",
    )
    for batch in batches:
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            loss = model(**batch).loss
        loss.backward()
