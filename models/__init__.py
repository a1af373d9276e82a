"""Transformer models by configuration, and the engine that trains them on any mesh.

The smallest whole use, in one process:

    from megaprec import plan
    from models import Engine, EngineOptions, Share, preset
    from parallel.pipeline import schedule

    config = preset("llama-demo", vocab=512)  # or ModelConfig(layers=..., hidden=..., ...)
    options = EngineOptions(micro_batch=1, seq_length=64)
    engine = Engine.build(config, plan("bf16"), None, schedule("1f1b", 1, 4), options)
    # tokens, targets: int64 [samples, sequence]
    report = engine.step(Share(tokens, targets), lr=3e-4, number=0)

With given weights, which an optimizer takes over when it is made:

    stages = build_stages(config, plan("bf16"), None, schedule("1f1b", 1, 4), options)
    load_logical(stages.by_number.values(), tensors)  # whole tensors by logical name
    engine = Engine(stages, stages.make_optimizer(clip=1.0))
"""

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from models.attention.packing import Packing
    from models.config import ModelConfig
    from models.decoder.cutting import build, cuts
    from models.decoder.logical_tensors import load_logical
    from models.decoder.stages import Stage
    from models.engine.engine import Engine, RankStages, build_stages
    from models.engine.options import EngineOptions
    from models.engine.passes import OutsideVocabulary, Share
    from models.presets import PRESETS, preset
    from models.rope_scaling import RopeScaling

__getattr__, __dir__ = front_door(__name__)

__all__ = [
    "PRESETS",
    "Engine",
    "EngineOptions",
    "ModelConfig",
    "OutsideVocabulary",
    "Packing",
    "RankStages",
    "RopeScaling",
    "Share",
    "Stage",
    "build",
    "build_stages",
    "cuts",
    "load_logical",
    "preset",
]
