import torch
from internlm.core.naive_amp import NaiveAMPModel, set_fp32_attr_to_module
from torch import nn


class Scorer(nn.Module):
    def __init__(self, hidden=512, labels=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.head = nn.Linear(hidden, labels, bias=False)
        set_fp32_attr_to_module(self.head)

    def forward(self, hidden):
        return self.head(self.trunk(hidden))


model = NaiveAMPModel(Scorer(), True, dtype=torch.float16)
