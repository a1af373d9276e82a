import sys

from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed, fp16_mixed

recipe = llm.gemma_2b.pretrain_recipe(num_nodes=1)
recipe.trainer.plugins = fp16_mixed() if "--fp16" in sys.argv else bf16_mixed()
