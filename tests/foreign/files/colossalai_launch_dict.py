import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger


def train_resnet(port: int, world_size: int):
    CONFIG = dict(
        BATCH=32,
        gradient_accumulation=4,
        fp16=dict(mode=AMP_TYPE.TORCH, init_scale=2.0**11, backoff_factor=0.25),
        clip_grad_norm=0.9,
    )
    colossalai.launch(config=CONFIG, rank=0, world_size=world_size, host="localhost", port=port, backend="nccl")
    logger = get_dist_logger()
    logger.info(f"accumulates {gpc.config.gradient_accumulation} batches", ranks=[0])
