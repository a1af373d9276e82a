"""Mixtral as its recipe has it; only sizes are changed."""

import nemo_run as run
from nemo.collections import llm
from nemo.lightning.run import plugins as run_plugins

recipe = llm.mixtral_8x7b.pretrain_recipe(name="mixtral", num_nodes=16, performance_mode=True)
recipe.trainer.max_steps = 2000
recipe.trainer.strategy.expert_model_parallel_size = 4
recipe.data.micro_batch_size = 2
recipe.resume.resume_if_exists = True

with run.Experiment("mixtral-8x7b") as experiment:
    experiment.add(
        recipe,
        executor=run.SlurmExecutor(account="coreai", partition="batch", nodes=16, ntasks_per_node=8),
        plugins=[run_plugins.NsysPlugin(start_step=10, end_step=11)],
        name="mixtral",
    )
    experiment.run(detach=True)
