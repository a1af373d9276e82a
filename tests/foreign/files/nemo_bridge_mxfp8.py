from megatron.bridge.recipes.qwen import qwen3_8b_pretrain_config
from megatron.bridge.training.mixed_precision import bf16_with_mxfp8_mixed

cfg = qwen3_8b_pretrain_config(mock=True)
cfg.mixed_precision = bf16_with_mxfp8_mixed()
cfg.mixed_precision.fp8_param_gather = False
cfg.mixed_precision.reuse_grad_buf_for_mxfp8_param_ag = False
cfg.train.train_iters = 100
