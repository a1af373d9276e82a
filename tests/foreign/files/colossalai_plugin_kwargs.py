import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

SCALE = dict(initial_scale=2**12, min_scale=1, growth_factor=2, backoff_factor=0.5, growth_interval=400, hysteresis=1)
plugin_kwargs = {"tp_size": 2, "pp_size": 2, "num_microbatches": 8, "zero_stage": 0, "max_norm": 0.7}
plugin_kwargs.update(precision="fp16", max_scale=2**20)


def prepare(model, optimizer):
    colossalai.launch_from_torch()
    plugin = HybridParallelPlugin(**plugin_kwargs, **SCALE)
    booster = Booster(mixed_precision="bf16", plugin=plugin)
    return booster.boost(model, optimizer)
