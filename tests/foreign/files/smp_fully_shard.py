import torch
import torch.sagemaker as tsm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

tsm.init()
mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))

fsdp_kwargs = {
    "mesh": mesh,
    "mp_policy": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    ),
}


def apply_fsdp(model):
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True, **fsdp_kwargs)
    return fully_shard(model, **fsdp_kwargs)
