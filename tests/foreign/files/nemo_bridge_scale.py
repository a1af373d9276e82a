from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import get_mixed_precision_config

precision = get_mixed_precision_config("fp16-mixed")
precision.loss_scale_window = 500.0
precision.initial_loss_scale = 65536
precision.hysteresis = 4
config = ConfigContainer(mixed_precision=precision)
