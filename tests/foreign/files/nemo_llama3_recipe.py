import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm


def configure_recipe(nodes: int = 1, gpus_per_node: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(
        dir="/checkpoints/llama3",
        name="llama3_pretraining",
        num_nodes=nodes,
        num_gpus_per_node=gpus_per_node,
    )
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.trainer.strategy.context_parallel_size = 1
    recipe.trainer.val_check_interval = 100
    recipe.trainer.max_steps = 5000
    recipe.trainer.plugins.grad_reduce_in_fp32 = False
    recipe.data.global_batch_size = 128
    recipe.optim.config.lr = 2e-4
    recipe.optim.config.clip_grad = 0.5
    recipe.log.ckpt.save_top_k = 3
    return recipe


def local_executor(devices: int = 8) -> run.LocalExecutor:
    env_vars = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "NCCL_NVLS_ENABLE": "0"}
    return run.LocalExecutor(ntasks_per_node=devices, launcher="torchrun", env_vars=env_vars)


if __name__ == "__main__":
    run.run(configure_recipe(), executor=local_executor())
