#!/usr/bin/env python
import os

import neuronx_distributed as nxd

os.environ["NEURON_CC_FLAGS"] = " --model-type=transformer -O1 "
os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"
os.environ["XLA_USE_BF16"] = "1"
os.environ["NEURON_RT_DBG_CC_DMA_PACKET_SIZE"] = "4096"


def get_nxd_config(tp=8, pp=4, microbatches=16):
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config={"num_microbatches": microbatches, "trace_file_path": None},
        optimizer_config={"zero_one_enabled": False, "grad_clipping": False},
        mixed_precision_config=None,
    )
