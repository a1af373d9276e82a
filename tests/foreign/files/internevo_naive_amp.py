import torch
from internlm.core.context import ParallelMode
from internlm.core.context import global_context as gpc
from internlm.core.naive_amp import NaiveAMPModel


def initialize_model(build, config):
    model = build(**config)
    return NaiveAMPModel(
        model=model,
        output_to_fp32=False,
        dtype=torch.bfloat16,
        parallel_mode=ParallelMode.DATA,
        sync_buffer=False,
    )


if __name__ == "__main__":
    print(gpc.get_world_size(ParallelMode.GLOBAL))
