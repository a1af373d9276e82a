from colossalai.booster import Booster
from colossalai.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelPlugin

plugin = MoeHybridParallelPlugin(
    1,
    1,
    8,
    precision="bf16",
    zero_stage=1,
    max_norm=1.0,
    enable_flash_attention=True,
    enable_fused_normalization=True,
)
booster = Booster(plugin=plugin)
