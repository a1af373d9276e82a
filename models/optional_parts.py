"""The table of what few models and layouts have: each is loaded when a model has it.

A dense decoder with plain attention loads no mixture of experts, no latent attention and no layer
with a recurrent state.
"""

from importlib import import_module
from typing import Any

PARTS = {
    "AttentionLogits": "models.engine.attention_logits",
    "LatentAttention": "models.attention.latent_attention",
    "GatedDeltaNet": "models.recurrent.gated_delta_net",
    "KimiDeltaAttention": "models.recurrent.kimi_delta_attention",
    "MambaMixer": "models.recurrent.mamba_mixer",
    "MixtureOfExperts": "models.feed_forward.moe",
    "require_nvfp4_layers": "models.nvfp4_models",
    "SourceSums": "models.engine.source_sums",
    "attend_over_ranks": "models.attention.context_parallel",
}
"""The modules that define classes and functions, by the name of each."""


def part(name: str) -> Any:
    """Return the class or function of a name in PARTS; import its module if that has not been
    done."""
    return getattr(import_module(PARTS[name]), name)
