import colossalai
import torch
import torchvision
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from torch.optim.lr_scheduler import MultiStepLR

NUM_EPOCHS = 80
LEARNING_RATE = 1e-3


def main():
    colossalai.launch_from_torch()
    plugin = TorchDDPPlugin(bucket_cap_mb=50)
    booster = Booster(mixed_precision="fp16", plugin=plugin)
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = HybridAdam(model.parameters(), lr=LEARNING_RATE)
    scheduler = MultiStepLR(optimizer, milestones=[20, 40, 60], gamma=1 / 3)
    booster.boost(model, optimizer, criterion=torch.nn.CrossEntropyLoss(), lr_scheduler=scheduler)
