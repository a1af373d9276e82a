import os
import sys

import neuronx_distributed as nxd

precise = "--precise" in sys.argv
os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "0" if precise else "1"

nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=8,
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)
