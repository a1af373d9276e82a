from functools import partial

import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

# the recipe's own plugin is bf16_mixed()
recipe = partial(llm.llama31_70b.pretrain_recipe)(name="fp8", dir="/checkpoints", num_nodes=8)
recipe.trainer.plugins = bf16_with_fp8_mixed()
recipe.trainer.plugins.fp8_amax_history_len = 32
recipe.trainer.plugins.fp8_param_gather = False
recipe.trainer.max_steps = 1000
recipe.model.config.seq_length = 8192

if __name__ == "__main__":
    run.run(recipe, executor=run.LocalExecutor())
