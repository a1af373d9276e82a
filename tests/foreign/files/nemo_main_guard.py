import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_current_scaling_mixed

if __name__ == "__main__":
    recipe = llm.llama32_1b.pretrain_recipe(name="current", num_nodes=1, num_gpus_per_node=2)
    recipe.trainer.plugins = bf16_with_fp8_current_scaling_mixed()
    recipe.trainer.plugins.num_layers_at_end_in_bf16 = 2
    recipe.data.seq_length = 4096
    run.run(recipe)
