from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16TorchMixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin

precision = FP16TorchMixedPrecision(init_scale=2.0**10, growth_interval=250)
booster = Booster(device="cuda", mixed_precision=precision, plugin=TorchDDPPlugin())
