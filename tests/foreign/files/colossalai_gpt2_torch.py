from colossalai.amp import AMP_TYPE
from colossalai.nn.optimizer import FusedAdam
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import gpt2_small
import torch

BATCH_SIZE = 4
NUM_EPOCHS = 60
SEQ_LEN = 1024
LR = 0.00015

optimizer = dict(
    type=FusedAdam,
    lr=LR,
    weight_decay=1e-2,
)

fp16 = dict(
    mode=AMP_TYPE.TORCH,
)

loss = dict(
    type=GPTLMLoss,
)

model = dict(
    type=gpt2_small,
    checkpoint=True,
    dtype=torch.half,
)

parallel = dict(
    pipeline=1,
    tensor=dict(size=1, mode=None),
)

gradient_accumulation = 2
clip_grad_norm = 1.0
