"""When two models compute the same: keys for training only, and keys without effect.

Two models whose `with_idle_keys_reset` differ in `TRAINING_ONLY_KEYS` alone compute the same logits
from the same weights.
"""

from typing import Any

from models.config import ModelConfig
from models.model_fields import default_attention_scalar
from models.router_settings import PLAIN

# Keys of muP: initial weights are drawn by them, and their learning rates are right for no others.
MUP_KEYS: tuple[str, ...] = ("mup_base_hidden", "mup_base_head_dim")
# Keys that only training goes by.
TRAINING_ONLY_KEYS: tuple[str, ...] = (
    "dropout",
    "dropout_at",
    "embedding_dropout",
    "attention_dropout",
    "init_std",
    "init",
    "router_aux_loss",
    "router_z_loss",
    "router_correction_speed",
    "z_loss",
    "embedding_grad_scale",
    "head_grad_scale",
    "mtp_loss_weight",
    *MUP_KEYS,
)
# Keys by which a model of rotary positions reads longer sequences; none of its weights has their
# size.
CONTEXT_KEYS: tuple[str, ...] = ("rope_base", "rope_scaling", "max_positions")
_KEYS_OF_EXPERTS = (
    "experts_per_token",
    "norm_topk",
    "router_aux_loss",
    "router_z_loss",
    "router_correction_speed",
)


def with_idle_keys_reset(model: ModelConfig) -> ModelConfig:
    """Return a model that computes and trains the same, whose keys without effect have the value
    that they have in most models. Two such models are equal if they differ in such keys alone."""
    reset: dict[str, Any] = {}
    if not model.experts:
        reset["router"] = PLAIN
        reset |= {key: _default_of(key) for key in _KEYS_OF_EXPERTS}
    elif not model.router.limits:
        # experts of all groups may be chosen, so that no group is compared with another
        groups = {"groups": 1, "groups_per_token": 1, "group_best": PLAIN.group_best}
        reset["router"] = model.router.model_copy(update=groups)
    if not model.qk_norm:
        reset["qk_norm_over"] = "head"
    if model.positions != "rope":
        reset["rope_base"] = _default_of("rope_base")
    if model.global_head_dim == model.head_dim:
        reset["global_head_dim"] = 0
    if model.global_kv_heads == model.kv_heads:
        reset["global_kv_heads"] = 0
    # An empty list says the same.
    if model.window_layers == tuple(range(model.layers)):
        reset["window_layers"] = ()
    if not (model.dropout or model.embedding_dropout):
        reset["dropout_at"] = "branches"
    if not model.mtp_layers:
        reset["mtp_loss_weight"] = _default_of("mtp_loss_weight")
    return model.model_copy(update=reset)


def scores_follow_rope_scaling(model: ModelConfig) -> bool:
    """Return True if latent attention divides its scores by what follows from rope_scaling, so that
    another scaling is another attention_scalar too."""
    return bool(model.latent) and model.attention_scalar == default_attention_scalar(dict(model))


def _default_of(key: str) -> Any:
    """Return the default of a key, of one that depends on the family Llama's."""
    return ModelConfig.model_fields[key].get_default(
        call_default_factory=True, validated_data={"family": "llama"}
    )
