import nemo_run as run
import torch
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision


def bf16_mixed_with_wide_pipeline():
    return run.Config(
        MegatronMixedPrecision,
        precision="bf16-mixed",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.float32,
        autocast_enabled=False,
    )


cfg = bf16_mixed_with_wide_pipeline()
cfg.fp8 = "hybrid"
cfg.fp8_recipe = "blockwise"
cfg.first_last_layers_bf16 = True
cfg.num_layers_at_start_in_bf16 = 1
cfg.num_layers_at_end_in_bf16 = 3
