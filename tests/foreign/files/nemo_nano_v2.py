from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import nanov2_bf16_with_fp8_current_scaling_mixed

recipe = llm.nemotron_nano_9b_v2.pretrain_recipe(num_nodes=4, num_gpus_per_node=8)
recipe.trainer.plugins = [nanov2_bf16_with_fp8_current_scaling_mixed()]
recipe.trainer.strategy.sequence_parallel = True
