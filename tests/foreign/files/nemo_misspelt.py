from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

recipe = llm.llama3_70b.pretrain_recipe(num_nodes=8)
recipe.trainer.plugins = bf16_with_fp8_mixed()
recipe.trainer.plugins.fp8_amax_history_length = 256
