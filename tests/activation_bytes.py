"""The bytes that each stage of a cut keeps of a micro-batch, as the estimate of memory counts them."""

from collections.abc import Sequence

from megaprec.precision.plan import PrecisionPlan
from models.config import ModelConfig
from models.decoder.stages import Cut
from models.engine.options import EngineOptions
from models.estimate.memory import ActivationBytes, StageMemory
from models.estimate.storage import Device


def kept_bytes(
    config: ModelConfig,
    plan: PrecisionPlan,
    cuts: Sequence[Cut],
    options: EngineOptions,
    tp: int = 1,
    device: Device = "cpu",
    cp: int = 1,
) -> list[ActivationBytes]:
    """The bytes that each stage keeps on each of `tp` x `cp` ranks."""
    memory = StageMemory(config, plan, options, tp=tp, cp=cp, device=device)
    return [memory.activation_bytes(cut) for cut in cuts]
