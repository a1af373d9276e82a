import os

# stochastic rounding off, to compare with a GPU step by step
os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "0"

zero = {"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0}
mixed_precision_config = {
    "use_master_weights": False,
    "use_fp32_grad_acc": False,
    "use_master_weights_in_ckpt": False,
}
nxd_config = {
    "tensor_parallel_size": 2,
    "optimizer_config": zero,
    "mixed_precision_config": mixed_precision_config,
}
