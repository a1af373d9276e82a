import torch
from megatron.bridge.training.config import ConfigContainer, OptimizerConfig, TrainingConfig
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

fp8_config = MixedPrecisionConfig(
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    autocast_enabled=False,
    grad_reduce_in_fp32=False,
    fp8="hybrid",
    fp8_param=True,
)

config = ConfigContainer(
    mixed_precision=fp8_config,
    optimizer=OptimizerConfig(optimizer="adam", lr=3e-4, clip_grad=1.0, use_distributed_optimizer=True),
    train=TrainingConfig(train_iters=1000, global_batch_size=512, micro_batch_size=1),
)
