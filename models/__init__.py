"""Transformer models by configuration, and the engine that trains them on any mesh.

The smallest whole use, in one process:

    from megaprec import plan
    from models import Engine, ModelConfig, Share, preset
    from parallel.pipeline import schedule

    config = preset("llama-demo", vocab=512)  # or ModelConfig(layers=..., hidden=..., ...)
    engine = Engine(
        config, plan("bf16"), None, schedule("1f1b", 1, 4), micro_batch=1, seq_length=64
    )
    # tokens, targets: int64 [samples, sequence]
    report = engine.step(Share(tokens, targets), lr=3e-4, number=1)
"""

from models.config import ModelConfig
from models.cutting import build, cuts
from models.engine import Engine, OutsideVocabulary, Share
from models.packing import Packing
from models.presets import PRESETS, preset
from models.rope import RopeScaling
from models.stages import Stage

__all__ = [
    "PRESETS",
    "Engine",
    "ModelConfig",
    "OutsideVocabulary",
    "Packing",
    "RopeScaling",
    "Share",
    "Stage",
    "build",
    "cuts",
    "preset",
]
