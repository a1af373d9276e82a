from nemo.collections import llm

recipe = llm.qwen3_8b.pretrain_recipe(
    dir="/checkpoints/qwen3",
    name="qwen3_8b_fp16",
    tensor_parallelism=4,
    precision="16-mixed",
    num_nodes=1,
    global_batch_size=128,
)
