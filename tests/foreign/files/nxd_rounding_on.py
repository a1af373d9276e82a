"""BF16 weights from FP32 masters, rounded up or down by chance."""

import os

import neuronx_distributed as nxd

os.environ["XLA_DOWNCAST_BF16"] = "1"
os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"

USE_FP32 = dict(use_master_weights=True, use_fp32_grad_acc=True, use_master_weights_in_ckpt=False)
OPTIMIZER = dict(zero_one_enabled=True, grad_clipping=True, max_grad_norm=1.0)


def main():
    config = nxd.training_config(
        tensor_parallel_size=32,
        optimizer_config=OPTIMIZER,
        mixed_precision_config=USE_FP32,
    )
    run(config)


if __name__ == "__main__":
    main()
