import os

import neuronx_distributed as nxd


def get_mixed_precision_config(use_gpu_compatible_precision):
    return {
        "use_master_weights": bool(use_gpu_compatible_precision),
        "use_fp32_grad_acc": bool(use_gpu_compatible_precision),
        "use_master_weights_in_ckpt": False,
    }


def setup(args):
    os.environ["NEURON_CC_FLAGS"] = "--model-type transformer"
    mixed_precision_config = get_mixed_precision_config(args.use_gpu_compatible_precision > 0)
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        mixed_precision_config=mixed_precision_config,
    )
