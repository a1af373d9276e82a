import argparse

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default="torch_ddp", choices=["torch_ddp", "torch_ddp_fp16", "gemini", "zero"])
    return parser.parse_args()


def main():
    args = parse()
    booster_kwargs = {}
    if args.plugin == "torch_ddp_fp16":
        booster_kwargs["mixed_precision"] = "fp16"
    if args.plugin.startswith("torch_ddp"):
        plugin = TorchDDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(placement_policy="static", strict_ddp_mode=True, initial_scale=2**5)
    elif args.plugin == "zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5)
    return Booster(plugin=plugin, **booster_kwargs)
