import torch
from nemo import lightning as nl

strategy = nl.MegatronStrategy(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
trainer = nl.Trainer(
    devices=2,
    max_steps=50,
    accelerator="gpu",
    strategy=strategy,
    plugins=nl.MegatronMixedPrecision("16-mixed", torch.half, torch.half, None, False, True, fp16_loss_scale=512.0),
)
