import argparse

import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin

WARMUP_FRACTION = 0.1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-t", "--task", default="mrpc", help="GLUE task to run")
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    colossalai.launch_from_torch(seed=42)
    plugin = GeminiPlugin(
        placement_policy="static",
        shard_param_frac=1.0,
        offload_optim_frac=0.5,
        precision="fp16",
        force_outputs_fp32=True,
        initial_scale=2**8,
        min_scale=2,
        max_norm=1.0,
        enable_flash_attention=True,
    )
    booster = Booster(plugin=plugin)
    train(booster, args.task, args.batch_size, get_accelerator().get_current_device())
