import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.collections.llm.recipes.precision.mixed_precision import nemotron_h_bf16_with_fp8_current_scaling_mixed

trainer = run.Config(
    nl.Trainer,
    accelerator="gpu",
    devices=8,
    limit_val_batches=32,
    plugins=[nemotron_h_bf16_with_fp8_current_scaling_mixed()],
    use_distributed_sampler=False,
)
optim = distributed_fused_adam_with_cosine_annealing(max_lr=3e-4, clip_grad=0.8)
