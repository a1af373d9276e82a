from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)

SEQUENCE = 4096

config = ConfigContainer(
    model=GPTModelProvider(
        num_layers=24,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=SEQUENCE,
        tensor_model_parallel_size=2,
        normalization="RMSNorm",
    ),
    train=TrainingConfig(train_iters=500, global_batch_size=256, micro_batch_size=2),
    optimizer=OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-5,
        adam_beta2=0.95,
        weight_decay=0.1,
        clip_grad=0.6,
        use_distributed_optimizer=True,
    ),
    scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=50),
    ddp=DistributedDataParallelConfig(
        check_for_nan_in_grad=True,
        grad_reduce_in_fp32=False,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
    ),
    logger=LoggerConfig(log_interval=10, tensorboard_dir="/results/tb"),
    tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32000),
    checkpoint=CheckpointConfig(save="/results/ckpt", save_interval=100),
    mixed_precision="fp16-with-fp8-subchannel-scaling-mixed",
)
