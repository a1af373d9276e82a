import argparse

from megatron.bridge.recipes.llama import llama32_1b_pretrain_config

parser = argparse.ArgumentParser()
parser.add_argument("--recipe", default="bf16_mixed")
args = parser.parse_args()

cfg = llama32_1b_pretrain_config()
cfg.mixed_precision = args.recipe
cfg.optimizer.lr = 3e-4
