import os

import neuronx_distributed as nxd

ZERO = os.environ.get("USE_ZERO_1", "1") == "1"


def config():
    return nxd.neuronx_distributed_config(
        8,
        1,
        optimizer_config={"zero_one_enabled": ZERO},
        mixed_precision_config={"use_master_weights_in_ckpt": False},
    )
