from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

plugin = HybridParallelPlugin(
    tp_size=4,
    pp_size=1,
    zero_stage=2,
    precision="bf16",
    overlap_allgather=True,
    use_fp8=True,
    fp8_communication=True,
)
booster = Booster(plugin=plugin)
