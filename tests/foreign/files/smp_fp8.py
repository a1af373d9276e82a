import torch
import torch.sagemaker as smp
import transformer_engine.pytorch as te
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformer_engine.common import recipe

smp.init()

fp8_recipe = recipe.DelayedScaling(
    margin=0,
    fp8_format=recipe.Format.HYBRID,
    amax_history_len=32,
    amax_compute_algo="max",
)


def wrapped(model):
    policy = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
    return FullyShardedDataParallel(model, mixed_precision=policy, use_orig_params=True)


def train_step(model, optimizer, ids, labels):
    optimizer.zero_grad()
    with te.fp8_autocast(True, fp8_recipe=fp8_recipe, fp8_group=smp.state.world_process_group):
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss.detach()
