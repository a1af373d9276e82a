import argparse

from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

parser = argparse.ArgumentParser()
parser.add_argument("-x", "--mixed_precision", choices=["fp16", "bf16"], default="bf16")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("-g", "--grad_clip", type=float, default=1.0)
args = parser.parse_args()

plugin = HybridParallelPlugin(
    tp_size=args.tp,
    pp_size=1,
    zero_stage=1,
    precision=args.mixed_precision,
    max_norm=1.0,
)
booster = Booster(plugin=plugin)
