import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed, fp16_mixed

trainer_args = dict(accelerator="gpu", devices=8, max_steps=100)

# Set up trainer with bf16 precision
trainer_bf16 = run.Config(
    nl.Trainer,
    plugins=bf16_mixed(),
    **trainer_args,
)

# Set up trainer with fp16 precision
trainer_fp16 = run.Config(
    nl.Trainer,
    plugins=fp16_mixed(),
    **trainer_args,
)
