from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin

plugin = LowLevelZeroPlugin(
    stage=1,
    precision="bf16",
    max_norm=0.5,
    master_weights=False,
    cast_inputs=False,
    overlap_communication=True,
    verbose=True,
)
booster = Booster(plugin=plugin)
