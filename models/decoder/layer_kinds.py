"""The kinds of layers that few models have: each is loaded when a model has one.

A dense decoder with plain attention loads no mixture of experts, no latent attention and no layer
with a recurrent state.
"""

from importlib import import_module
from typing import Any

KINDS = {
    "LatentAttention": "models.attention.latent_attention",
    "GatedDeltaNet": "models.recurrent.gated_delta_net",
    "MambaMixer": "models.recurrent.mamba_mixer",
    "MixtureOfExperts": "models.feed_forward.moe",
}
"""The modules that define them, by the name of the class."""


def layer_kind(name: str) -> Any:
    """Return the class of a name in KINDS; import its module if that has not been done."""
    return getattr(import_module(KINDS[name]), name)
