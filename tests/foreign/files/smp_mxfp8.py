import torch
import transformer_engine.pytorch as te
from torch.distributed.fsdp import MixedPrecision
from transformer_engine.common import recipe as te_recipe

bf16 = torch.bfloat16
mixed_precision = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16)


def forward(model, batch, enabled=True):
    with te.fp8_autocast(enabled=True, fp8_recipe=te_recipe.MXFP8BlockScaling()):
        return model(batch)
