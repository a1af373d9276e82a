"""The door to what few models and layouts have: a function or class is loaded when a model has it,
and its module with it.

A dense decoder with plain attention loads no mixture of experts, no latent attention and no layer
with a recurrent state.
"""

from typing import TYPE_CHECKING

from megaprec.front_door import front_door

if TYPE_CHECKING:
    from models.attention.context_parallel import attend_over_ranks
    from models.attention.latent_attention import LatentAttention
    from models.engine.attention_logits import AttentionLogits
    from models.engine.source_sums import SourceSums
    from models.feed_forward.moe import MixtureOfExperts
    from models.nvfp4_models import require_nvfp4_layers
    from models.recurrent.gated_delta_net import GatedDeltaNet
    from models.recurrent.kimi_delta_attention import KimiDeltaAttention
    from models.recurrent.mamba_mixer import MambaMixer

__getattr__, __dir__ = front_door(__name__)
