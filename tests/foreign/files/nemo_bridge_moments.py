import torch
from megatron.bridge.recipes.deepseek import deepseek_v3_pretrain_config
from megatron.bridge.training.mixed_precision import get_mixed_precision_config


def config():
    cfg = deepseek_v3_pretrain_config()
    cfg.model.pipeline_model_parallel_size = 16
    cfg.mixed_precision = get_mixed_precision_config("bf16-mixed")
    cfg.mixed_precision.grad_reduce_in_fp32 = False
    # optimizer precision
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.main_params_dtype = torch.float32
    cfg.optimizer.main_grads_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.overlap_grad_reduce = True
    return cfg
