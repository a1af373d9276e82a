"""GPT-2 with the state of the optimizer and the gradients cut over replicas."""

import argparse

import colossalai
import torch.nn as nn
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        shifted = logits[..., :-1, :].contiguous()
        return self.loss_fn(shifted.view(-1, shifted.size(-1)), labels[..., 1:].contiguous().view(-1))


def main(steps: int = 10):
    args = argparse.ArgumentParser().parse_args()
    colossalai.launch_from_torch()
    plugin = LowLevelZeroPlugin(stage=2, initial_scale=2**5)
    booster = Booster(plugin=plugin)
    with LazyInitContext(default_device=get_current_device()):
        model = build(args)
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, GPTLMLoss())
    for _ in range(steps):
        ids, mask = batch()
        optimizer.zero_grad()
        loss = criterion(model(ids, mask), ids)
        booster.backward(loss, optimizer)
        optimizer.step()
