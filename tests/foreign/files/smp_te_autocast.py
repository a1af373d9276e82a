import torch
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from transformer_engine.common.recipe import Float8CurrentScaling, Format

tsm.init()
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
current = Float8CurrentScaling(fp8_format=Format.E4M3)


class Trainer:
    def __init__(self, model, learning_rate):
        self.model = fully_shard(model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, fused=True)

    def step(self, batch):
        with te.autocast(recipe=current, amax_reduction_group=tsm.state.world_process_group):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
