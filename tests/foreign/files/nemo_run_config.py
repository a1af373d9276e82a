import nemo_run as run
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision


def precision() -> run.Config[MegatronMixedPrecision]:
    return run.Config(
        MegatronMixedPrecision,
        precision="16-mixed",
        params_dtype=torch.half,
        pipeline_dtype=torch.half,
        grad_reduce_in_fp32=False,
        fp16_initial_loss_scale=2**20,
        fp16_loss_scale_window=500,
        fp16_hysteresis=4,
    )


def trainer(nodes: int = 1) -> run.Config[nl.Trainer]:
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=2,
        pipeline_dtype=torch.half,
        ddp=run.Config(DistributedDataParallelConfig, check_for_nan_in_grad=False, overlap_grad_reduce=True),
    )
    return run.Config(
        nl.Trainer,
        accelerator="gpu",
        devices=8,
        num_nodes=nodes,
        max_steps=100,
        plugins=precision(),
        strategy=strategy,
        use_distributed_sampler=False,
    )


def optimizer() -> run.Config[MegatronOptimizerModule]:
    return run.Config(
        MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig, optimizer="adam", lr=1e-4, fp16=True, use_distributed_optimizer=True, clip_grad=0.3
        ),
        lr_scheduler=run.Config(CosineAnnealingScheduler, warmup_steps=50, min_lr=1e-5),
    )
