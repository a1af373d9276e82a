"""Feed-forwards, experts and routers in Megatron's args, both ways.

Megatron has one feed-forward in a layer, or experts with a router, and perhaps shared ones;
`moe_layer_freq` says which layers have experts. What its args say of a router is not quite what
`models.router_settings` says:

    pre-softmax   without it, probabilities are of the chosen experts alone, and so sum to one;
                  groups are then compared by logits
    sigmoid       scores of a token's experts are divided by their sum wherever it has several
    groups        count as much as their moe_router_topk / moe_router_group_topk best experts
                  together

Experts, routers and attention have biases all together, or none of them has.
"""

from typing import Any

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.megatron.keys import Args, argument_or

ALPHA = 1.702  # of quick_gelu (megatron/core/activations.py)
SQUARED_RELU = "squared_relu"
OFFSET = 1.0  # of swiglu_clamped's other factor


def activation_of(arguments: Args, bias: bool, experts: int) -> dict[str, Any]:
    """Return the fields of the activation. UserError for one that no model of ours has.

    Fused with a bias, its gelu is the tanh approximation, and exact otherwise; without biases
    nothing is fused.
    """
    clamp = arguments.get("activation_func_clamp_value")
    offset = arguments.get("glu_linear_offset") or 0.0
    if arguments.get("quick_geglu") or arguments.get("activation_func") == "quick_gelu":
        return _clamped(arguments, clamp, offset, _is_fused(arguments) and bias)
    for key, value in (("activation_func_clamp_value", clamp), ("glu_linear_offset", offset)):
        if value not in (None, 0.0):
            raise UserError.of("convert.megatron_activation", key=key, value=value)
    if _is_squared_relu(arguments):
        return {"mlp": "relu2"}
    if _gated(arguments):
        return {"mlp": "swiglu"}
    if arguments.get("use_te_activation_func"):
        raise UserError.of("convert.megatron_te_gelu")
    # Fused with a bias it is the tanh approximation; experts are never fused so.
    is_tanh = _is_fused(arguments) and bias and not experts
    return {"mlp": "gelu" if is_tanh else "gelu_exact"}


def _is_fused(arguments: Args) -> bool:
    """Return True if an activation that is not swiglu is computed in one with the bias before
    it."""
    if "bias_activation_fusion" in arguments:
        return bool(arguments["bias_activation_fusion"])
    return bool(argument_or(arguments, "bias_gelu_fusion", True))


def _clamped(arguments: Args, clamp: float | None, offset: float, fused: bool) -> dict[str, Any]:
    """Return the fields of the activation of gpt-oss.

    Fused with biases, it is another: it is clamped before they are added
    (`weighted_bias_quick_geglu_impl` of fused_bias_geglu.py). Grouped experts have added them by
    then.
    """
    if arguments.get("activation_func") == "quick_gelu":
        setting = "activation_func = quick_gelu"
    else:
        setting = "quick_geglu = True"
    is_gated = arguments.get("quick_geglu") or arguments.get("gated_linear_unit")
    if arguments.get("swiglu") or not is_gated:
        raise UserError.of("convert.megatron_clamp_gated", setting=setting)
    if clamp is None or offset != OFFSET:
        raise UserError.of("convert.megatron_clamp_values", setting=setting)
    if arguments.get("use_te_activation_func"):
        raise UserError.of("convert.megatron_te_clamp", setting=setting)
    if fused and not arguments.get("moe_grouped_gemm"):
        # megatron-core's name of the switch, or Megatron-LM's.
        key = "bias_activation_fusion"
        if key not in arguments:
            key = "bias_gelu_fusion"
        raise UserError.of("convert.megatron_clamp_bias", key=key, setting=setting)
    return {"mlp": "swiglu_clamped", "swiglu_alpha": ALPHA, "swiglu_limit": float(clamp)}


def _is_squared_relu(arguments: Args) -> bool:
    """Return True if the activation is the square of relu. UserError if it has a gate."""
    if arguments.get("activation_func") == SQUARED_RELU:
        setting = f"activation_func = {SQUARED_RELU}"
    elif arguments.get("squared_relu"):
        setting = "squared_relu = True"
    else:
        return False
    for key in ("swiglu", "gated_linear_unit"):
        if arguments.get(key):
            raise UserError.of("convert.megatron_squared_gated", setting=setting, key=key)
    return True


def _gated(arguments: Args) -> bool:
    """Return True if the feed-forward is gated, which is by SiLU here."""
    gated = bool(arguments.get("swiglu") or arguments.get("gated_linear_unit"))
    activation = arguments.get("activation_func")
    # --swiglu sets both; megatron-core's configuration has them apart.
    if gated and not arguments.get("swiglu") and activation != "silu":
        raise UserError.of("convert.megatron_gated")
    if not gated and activation == "silu":
        raise UserError.of("convert.megatron_silu")
    return gated


def experts_of(arguments: Args, experts: int, bias: bool) -> dict[str, Any]:
    """Return the fields of experts and their router. UserError for what no model of ours has."""
    experts_per_token = argument_or(arguments, "moe_router_topk", 2)
    sigmoid = arguments.get("moe_router_score_function") == "sigmoid"
    pre_softmax = arguments.get("moe_router_pre_softmax")
    shared = arguments.get("moe_shared_expert_intermediate_size") or 0
    dense = _dense_layers(arguments)
    if experts_per_token == 1 and not sigmoid and not pre_softmax:
        raise UserError.of("convert.megatron_top1")
    # Megatron gives biases to all linear layers, ours has none in a feed-forward beside experts.
    if bias and (dense or shared):
        key = "moe_layer_freq" if dense else "moe_shared_expert_intermediate_size"
        raise UserError.of("convert.megatron_expert_bias", key=key, args=arguments[key])
    norm_topk = experts_per_token > 1 if sigmoid else not pre_softmax
    fields: dict[str, Any] = {
        "experts": experts,
        "experts_per_token": experts_per_token,
        "norm_topk": norm_topk,
        "router": _router(arguments, experts_per_token, sigmoid),
        **_router_losses(arguments),
        "expert_bias": bias,
        "router_bias": bias,
        "shared_experts": shared,
        "shared_gate": bool(shared and arguments.get("moe_shared_expert_gate")),
    }
    if dense:
        fields["dense_layers"] = dense
        fields["dense_ffn"] = arguments.get("ffn_hidden_size") or 4 * arguments["hidden_size"]
    return fields


def _router_losses(arguments: Args) -> dict[str, float]:
    """Return the weights of a router's losses, and the speed of its correction."""
    aux_loss = argument_or(arguments, "moe_aux_loss_coeff", 0.0)
    # The coefficient may be left over from before balancing was switched off.
    if arguments.get("moe_router_load_balancing_type") == "none":
        aux_loss = 0.0
    correction_speed = argument_or(arguments, "moe_router_bias_update_rate", 1e-3)
    return {
        "router_aux_loss": float(aux_loss),
        "router_z_loss": float(arguments.get("moe_z_loss_coeff") or 0.0),
        "router_correction_speed": float(correction_speed),
    }


def _dense_layers(arguments: Args) -> tuple[int, ...]:
    """Return the layers without experts.

    moe_layer_freq is a list with a number for each layer, or n: then every nth has experts, from
    the first on.
    """
    frequency = argument_or(arguments, "moe_layer_freq", 1)
    layers = arguments["num_layers"]
    setting = f"Megatron's moe_layer_freq = {frequency!r}"
    if isinstance(frequency, list | tuple):
        has_experts = [*frequency]
    # Megatron counts from the first layer, which has experts with any frequency.
    elif isinstance(frequency, int) and frequency > 0:
        has_experts = [int(layer % frequency == 0) for layer in range(layers)]
    else:
        raise UserError.of("convert.megatron_dense_form", setting=setting)
    if len(has_experts) != layers or not all(has in (0, 1) for has in has_experts):
        raise UserError.of("convert.megatron_dense_length", setting=setting, layers=layers)
    if not any(has_experts):
        raise UserError.of(
            "convert.megatron_dense_all", setting=setting, num_experts=arguments["num_experts"]
        )
    return tuple(layer for layer, has in enumerate(has_experts) if not has)


def _router(arguments: Args, experts_per_token: int, sigmoid: bool) -> dict[str, Any]:
    """Return the settings of the router. Without a number of groups to choose there are no
    groups."""
    correction = bool(arguments.get("moe_router_enable_expert_bias"))
    groups = _router_groups(arguments, experts_per_token, sigmoid)
    if correction and not sigmoid:
        raise UserError.of("convert.megatron_router_bias")
    return {
        "score": "sigmoid" if sigmoid else "softmax",
        "scale": float(arguments.get("moe_router_topk_scaling_factor") or 1.0),
        "correction": correction,
        **groups,
    }


def _router_groups(arguments: Args, topk: int, sigmoid: bool) -> dict[str, Any]:
    """Return the settings of the groups of experts among which a router chooses first."""
    chosen = arguments.get("moe_router_group_topk") or 0
    if not chosen:
        return {"groups": 1, "groups_per_token": 1}
    groups = arguments.get("moe_router_num_groups") or 0
    if not 0 < chosen <= groups:
        raise UserError.of("convert.megatron_router_groups", chosen=chosen)
    fields: dict[str, Any] = {"groups": groups, "groups_per_token": chosen}
    if chosen == groups:  # all groups are chosen, so how they compare does not matter
        return fields
    # Megatron compares groups by so many of their experts.
    best = topk // chosen
    if not best:
        raise UserError.of("convert.megatron_router_topk", chosen=chosen, topk=topk)
    if best > 1 and not sigmoid and not arguments.get("moe_router_pre_softmax"):
        raise UserError.of("convert.megatron_router_order", chosen=chosen)
    return {**fields, "group_best": best}


def feed_forward_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's args of feed-forwards, experts and routers."""
    clamped = model.mlp == "swiglu_clamped"
    return {
        "ffn_hidden_size": model.dense_ffn if model.dense_layers else model.ffn,
        "swiglu": model.mlp == "swiglu",
        "squared_relu": model.mlp == "relu2",
        "quick_geglu": clamped,
        "activation_func_clamp_value": model.swiglu_limit if clamped else None,
        "glu_linear_offset": OFFSET if clamped else 0.0,
        "bias_gelu_fusion": model.mlp == "gelu",
        **_expert_args(model),
        **_router_args(model),
    }


def _expert_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that say which layers have experts, and how wide they are."""
    frequency: int | list[int] = 1
    if model.dense_layers:
        frequency = [int(layer not in model.dense_layers) for layer in range(model.layers)]
    return {
        "num_experts": model.experts or None,
        "moe_ffn_hidden_size": model.ffn if model.experts else None,
        "moe_layer_freq": frequency,
        "moe_shared_expert_intermediate_size": model.shared_experts or None,
        "moe_shared_expert_gate": model.shared_gate,
    }


def _router_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of the router."""
    router = model.router
    # None is what the args say without groups.
    has_groups = router.groups > 1
    return {
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": router.score == "softmax" and not model.norm_topk,
        "moe_router_score_function": router.score,
        "moe_router_topk_scaling_factor": router.scale if router.scale != 1 else None,
        "moe_router_num_groups": router.groups if has_groups else None,
        "moe_router_group_topk": router.groups_per_token if has_groups else None,
        "moe_router_enable_expert_bias": bool(model.experts) and router.correction,
        "moe_router_bias_update_rate": model.router_correction_speed,
        "moe_aux_loss_coeff": model.router_aux_loss,
        "moe_z_loss_coeff": model.router_z_loss or None,
    }
