from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin

PRECISION, STAGE = "fp16", 1
WARMUP, LR, MAX_NORM = 100, 3e-4, 1.5
scale = 2**10
scale *= 4


def make():
    return Booster(plugin=LowLevelZeroPlugin(stage=STAGE, precision=PRECISION, initial_scale=scale, max_norm=MAX_NORM))
