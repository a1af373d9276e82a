"""Experts in a config.json, and in which layers: their number, widths, and a router's groups."""

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import ConfigKeys, Entry, Fields, Json, require, same
from tools.convert.hf.windows import require_count


def numbers_of_experts(config: ConfigKeys, key: str) -> Fields:
    """Return how many experts a layer has, and a token. Raises UserError for a number that cannot
    be.

    key: of the number of experts.
    """
    experts = config.above_zero(key)
    per_token = config.above_zero("num_experts_per_tok")
    # In some families it has no default.
    if per_token is None:
        raise UserError.of("convert.hf_missing", key="num_experts_per_tok")
    if experts is not None and per_token > experts:
        raise UserError.of(
            "convert.hf_experts_per_token",
            key=config.as_stated("num_experts_per_tok"),
            per_token=per_token,
            experts_key=config.as_stated(key),
            experts=experts,
        )
    return {"experts": experts, "experts_per_token": per_token}


# Of experts in all layers, as wide as intermediate_size says.
LOCAL_EXPERTS = (
    Entry(
        lambda config: numbers_of_experts(config, "num_local_experts"),
        lambda model: {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
        },
    ),
    same("router_aux_loss_coef", "router_aux_loss"),
)


_KEYS_OF_GLM4 = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
_KEYS_OF_QWENS_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    "norm_topk_prob",
)


def experts_of_qwen(shared: bool) -> Entry:
    """Return the entry of Qwen's experts, which some layers may lack. shared: there is a shared one
    with a gate."""

    def read(config: ConfigKeys) -> Fields:
        """Return the fields of experts, and which layers have them."""
        config.mark_read(*_KEYS_OF_QWENS_EXPERTS)
        if shared:
            config.mark_read("shared_expert_intermediate_size")
        dense = _dense_layers_of_qwen(config)
        fields = _feed_forwards(config, dense)
        # A file may name experts that no layer has.
        if len(dense) == config["num_hidden_layers"]:
            return fields
        routed: Fields = {
            **numbers_of_experts(config, "num_experts"),
            "router_aux_loss": config["router_aux_loss_coef"],
            "norm_topk": config["norm_topk_prob"],
        }
        if shared:
            width = _require_shared(config["shared_expert_intermediate_size"])
            routed |= {"shared_experts": width, "shared_gate": True}
        return {**routed, **fields}

    def write(model: ModelConfig) -> Json:
        """Return the keys of experts."""
        config: Fields = {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.router_aux_loss,
            "norm_topk_prob": model.norm_topk,
            "moe_intermediate_size": model.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(model.dense_layers),
            "intermediate_size": model.dense_ffn,
        }
        if shared:
            config["shared_expert_intermediate_size"] = model.shared_experts
        return config

    return Entry(read, write)


def _read_qwen3_5(config: ConfigKeys) -> Fields:
    """Return the experts of Qwen3.5, which all layers have, with a shared one beside them.

    Its class always normalizes the weights of a token's experts.
    """
    # of feed-forwards without experts, which no layer has
    config.mark_read("intermediate_size")
    return {
        **numbers_of_experts(config, "num_experts"),
        "router_aux_loss": config["router_aux_loss_coef"],
        "norm_topk": True,
        "ffn": config["moe_intermediate_size"],
        "shared_experts": _require_shared(config["shared_expert_intermediate_size"]),
        "shared_gate": True,
    }


def _write_qwen3_5(model: ModelConfig) -> Json:
    """Return the keys of experts, which all layers have."""
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
        "moe_intermediate_size": model.ffn,
        "shared_expert_intermediate_size": model.shared_experts,
    }


def _require_shared(width: int) -> int:
    """Return the width of the shared expert. Raises UserError if there is none."""
    if not width:
        raise UserError.of("convert.hf_shared_expert_zero", key="shared_expert_intermediate_size")
    return width


def _dense_layers_of_qwen(config: ConfigKeys) -> list[int]:
    """Return the numbers of the layers without experts."""
    without_experts = config["mlp_only_layers"] or ()
    sparse_step = config["decoder_sparse_step"]
    dense = []
    for layer in range(config["num_hidden_layers"]):
        is_off_step = (layer + 1) % sparse_step > 0
        if layer in without_experts or is_off_step or not config["num_experts"]:
            dense.append(layer)
    return dense


def _feed_forwards(config: ConfigKeys, dense: list[int]) -> Fields:
    """Return the widths of feed-forwards. dense: numbers of the layers without experts; if all,
    there are no experts.

    The width of a feed-forward without experts is read and ignored if every layer has them.
    """
    expert_width = config["moe_intermediate_size"]
    dense_width = config["intermediate_size"]
    if len(dense) == config["num_hidden_layers"]:
        return {"ffn": dense_width, "experts": 0}
    fields = {"ffn": expert_width}
    if dense:
        fields |= {"dense_layers": tuple(dense), "dense_ffn": dense_width}
    return fields


def _read_glm4_moe(config: ConfigKeys) -> Fields:
    """Return the fields of GLM-4.5's experts, behind some dense layers."""
    first = config["first_k_dense_replace"]
    layers = config["num_hidden_layers"]
    if first >= layers:
        raise UserError.of("convert.hf_glm4_dense_layers", first=first, layers=layers)
    # Several shared experts compute what one of their widths together does.
    shared = config.above_zero("n_shared_experts") * config.above_zero("moe_intermediate_size")
    return {
        **numbers_of_experts(config, "n_routed_experts"),
        "norm_topk": config["norm_topk_prob"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        **_feed_forwards(config, list(range(first))),
        "router": corrected_router(config),
    }


def _read_solar(config: ConfigKeys) -> Fields:
    """Return the experts of Solar Open: those of GLM-4.5, in all layers."""
    # of feed-forwards without experts, which no layer has
    config.mark_read("intermediate_size")
    width = config.above_zero("moe_intermediate_size")
    return {
        **numbers_of_experts(config, "n_routed_experts"),
        "ffn": width,
        "norm_topk": config["norm_topk_prob"],
        "shared_experts": config.above_zero("n_shared_experts") * width,
        "router_aux_loss": 0.0,
        "router": corrected_router(config),
    }


def _write_solar(model: ModelConfig) -> Json:
    written = dict(_write_after_dense(model))
    for key in ("intermediate_size", "first_k_dense_replace"):
        del written[key]
    return written


_MLP_TYPES = {"dense": True, "sparse": False}


def _read_glm4_lite(config: ConfigKeys) -> Fields:
    """Return the experts of GLM-4.7-Flash: those of GLM-4.5, in the layers that mlp_layer_types
    names, otherwise in all but the first."""
    return _read_by_layer(config, leading_dense=1)


def read_after_leading_dense(config: ConfigKeys) -> Fields:
    """Return the experts of Kimi Linear: those of GLM-4.5, in the layers that mlp_layer_types
    names, otherwise in all but the first first_k_dense_replace."""
    return _read_by_layer(config, leading_dense=config["first_k_dense_replace"])


def _read_by_layer(config: ConfigKeys, leading_dense: int) -> Fields:
    """Return the experts of the layers that mlp_layer_types names, otherwise of all but the first
    `leading_dense`."""
    layers = config["num_hidden_layers"]
    types = config["mlp_layer_types"]
    if types is None:
        dense = [*range(min(leading_dense, layers))]
    else:
        require_count(types, layers, "mlp_layer_types")
        for layer_type in types:
            require(layer_type, "mlp_layer_types", tuple(_MLP_TYPES))
        dense = [layer for layer, layer_type in enumerate(types) if _MLP_TYPES[layer_type]]
    # Their classes do not read it beside the types, but older readers of their files do: it must be
    # the number of layers before the first one with experts.
    if config.has("first_k_dense_replace"):
        layers_with_experts = [layer for layer in range(layers) if layer not in dense]
        leading = min(layers_with_experts, default=layers)
        require(config.stated["first_k_dense_replace"], "first_k_dense_replace", (leading,))
    config.mark_read("first_k_dense_replace", "aux_loss_alpha")
    fields = _feed_forwards(config, dense)
    config.mark_read(*_KEYS_OF_GLM4)
    if "experts" in fields:
        return fields
    shared = config.above_zero("n_shared_experts") * config.above_zero("moe_intermediate_size")
    return {
        **numbers_of_experts(config, "n_routed_experts"),
        "norm_topk": config["norm_topk_prob"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        **fields,
        "router": corrected_router(config),
    }


def write_glm4_lite(model: ModelConfig) -> Json:
    """Return the keys of experts, and of the layers that have them."""
    is_dense = [not model.experts or n in model.dense_layers for n in range(model.layers)]
    types = {"mlp_layer_types": ["dense" if dense else "sparse" for dense in is_dense]}
    if not model.experts:
        return types
    written = dict(_write_after_dense(model))
    del written["first_k_dense_replace"]
    return {**written, **types}


def _write_dots1(model: ModelConfig) -> Json:
    # Sizes of experts may stay away: no layer has them.
    if not model.experts:
        return {"first_k_dense_replace": model.layers}
    return _write_after_dense(model)


def corrected_router(config: ConfigKeys) -> Fields:
    """Return the router of DeepSeek-V3, GLM-4.5 and Nemotron-H, whose classes compare groups by the
    sum of their two best experts."""
    scale = float(config["routed_scaling_factor"])
    return {"score": "sigmoid", "correction": True, "scale": scale, **_groups(config, best=2)}


def _read_deepseek_v2(config: ConfigKeys) -> Fields:
    """Return the fields of DeepSeek-V2, whose weights of a token's experts transformers never
    normalizes."""
    # Without experts these decide nothing, whatever they say.
    config.mark_read("topk_method", "norm_topk_prob", "n_group", "topk_group")
    fields = _deepseek_experts(config)
    if not fields["experts"]:
        return fields
    require(config["norm_topk_prob"], "norm_topk_prob", (False, None))
    router: Fields = {"score": "softmax", "scale": float(config["routed_scaling_factor"])}
    method = config["topk_method"]
    require(method, "topk_method", ("greedy", "group_limited_greedy"))
    if method == "group_limited_greedy":
        _require_groups(config)
        # Its class compares groups by their best expert.
        router |= _groups(config, best=1)
    return {**fields, "router": router}


def _read_deepseek_v3(config: ConfigKeys) -> Fields:
    """Return the fields of DeepSeek V3's experts, which are chosen among groups."""
    # Without experts these decide nothing, whatever they say.
    config.mark_read("norm_topk_prob", "n_group", "topk_group")
    fields = _deepseek_experts(config)
    if not fields["experts"]:
        return fields
    # The class of V3 always chooses among groups.
    _require_groups(config)
    router = corrected_router(config)
    return {**fields, "norm_topk": bool(config["norm_topk_prob"]), "router": router}


def _deepseek_experts(config: ConfigKeys) -> Fields:
    """Return the fields of experts and feed-forwards; of a model none of whose layers has experts,
    experts = 0."""
    shared = config["n_shared_experts"]
    scale = config["routed_scaling_factor"]
    config.mark_read("n_routed_experts", "num_experts_per_tok", "aux_loss_alpha")
    dense = min(config["first_k_dense_replace"], config["num_hidden_layers"])
    fields = _feed_forwards(config, list(range(dense)))
    # `_feed_forwards` states their number only where it is 0.
    if "experts" in fields:
        return fields
    if not shared or not scale:
        raise UserError.of("convert.hf_deepseek_experts", shared=shared, scale=scale)
    return {
        **numbers_of_experts(config, "n_routed_experts"),
        "router_aux_loss": config["aux_loss_alpha"],
        "norm_topk": False,
        "shared_experts": shared * config.above_zero("moe_intermediate_size"),
        **fields,
    }


def _require_groups(config: ConfigKeys) -> None:
    groups = config["n_group"]
    chosen_groups = config["topk_group"]
    if type(groups) is not int or type(chosen_groups) is not int:
        raise UserError.of("convert.hf_groups_not_numbers", groups=groups, chosen=chosen_groups)


def _groups(config: ConfigKeys, best: int) -> Fields:
    """Return the settings of a router's groups of experts. best: experts of a group by whose sum it
    is compared."""
    groups = config["n_group"]
    chosen_groups = config["topk_group"]
    experts = config["n_routed_experts"]
    # transformers reshapes scores to [tokens, groups, experts of one].
    if not 1 <= chosen_groups <= groups or experts % groups:
        raise UserError.of(
            "convert.hf_groups_uneven",
            groups_key=config.as_stated("n_group"),
            groups=groups,
            chosen=chosen_groups,
            experts_key=config.as_stated("n_routed_experts"),
            experts=experts,
        )
    if chosen_groups * (experts // groups) < config["num_experts_per_tok"]:
        raise UserError.of(
            "convert.hf_groups_too_few",
            groups_key=config.as_stated("n_group"),
            groups=groups,
            chosen=chosen_groups,
            experts_key=config.as_stated("n_routed_experts"),
            experts=experts,
            per_token_key=config.as_stated("num_experts_per_tok"),
            num_experts_per_tok=config["num_experts_per_tok"],
        )
    fields = {"groups": groups, "groups_per_token": chosen_groups}
    # What a group is compared by decides nothing where all are chosen.
    if chosen_groups < groups:
        fields["group_best"] = best
    return fields


def _write_after_dense(model: ModelConfig) -> Json:
    """Return the keys of experts, of those that are shared, and of the first layers, which have
    none."""
    return {
        "intermediate_size": model.dense_ffn,
        "moe_intermediate_size": model.ffn,
        "first_k_dense_replace": len(model.dense_layers),
        "n_routed_experts": model.experts,
        # counted in experts of the width of the others
        "n_shared_experts": model.shared_experts // model.ffn,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.norm_topk,
        "routed_scaling_factor": model.router.scale,
        "n_group": model.router.groups,
        "topk_group": model.router.groups_per_token,
    }


def _write_deepseek(model: ModelConfig, method: str) -> Json:
    """Return DeepSeek's keys of experts. method: its name for how they are chosen."""
    # Sizes of experts may stay away: no layer has them.
    if not model.experts:
        return {"first_k_dense_replace": model.layers}
    return {
        **_write_after_dense(model),
        "scoring_func": model.router.score,
        "topk_method": method,
        "aux_loss_alpha": model.router_aux_loss,
        "seq_aux": True,
    }


def _write_deepseek_v2(model: ModelConfig) -> Json:
    # Where all groups may be chosen, greedy is the same.
    method = "group_limited_greedy" if model.router.limits else "greedy"
    return _write_deepseek(model, method)


# of all layers, as wide as intermediate_size says
EXPERTS_OF_OLMOE = Entry(
    lambda config: {
        **numbers_of_experts(config, "num_experts"),
        "router_aux_loss": config["router_aux_loss_coef"],
        "norm_topk": config["norm_topk_prob"],
    },
    lambda model: {
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
        "norm_topk_prob": model.norm_topk,
    },
)
EXPERTS_OF_SOLAR = Entry(_read_solar, _write_solar)
EXPERTS_OF_GLM4_LITE = Entry(_read_glm4_lite, write_glm4_lite)
EXPERTS_OF_DOTS1 = Entry(_read_deepseek_v3, _write_dots1)
EXPERTS_OF_QWEN3_5 = Entry(_read_qwen3_5, _write_qwen3_5)
EXPERTS_OF_GLM4 = Entry(_read_glm4_moe, _write_after_dense)
EXPERTS_OF_DEEPSEEK_V2 = Entry(_read_deepseek_v2, _write_deepseek_v2)
EXPERTS_OF_DEEPSEEK_V3 = Entry(_read_deepseek_v3, lambda model: _write_deepseek(model, "noaux_tc"))
