from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

cfg = llama3_8b_pretrain_config()
cfg.mixed_precision = "bf16_with_nvfp4_mixed"
