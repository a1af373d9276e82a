import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

trainer_args = {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "max_steps": 500, "log_every_n_steps": 10}
fp8_args = {
    "fp8": "e4m3",
    "fp8_margin": 1,
    "fp8_amax_history_len": 64,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_params": False,
}

trainer_bf16_fp8 = run.Config(
    nl.Trainer,
    plugins=bf16_with_fp8_mixed(),
    **trainer_args,
    **fp8_args,
)
