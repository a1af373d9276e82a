"""Experts in a config.json: how many there are, the widths of feed-forwards, the layers that have
none, and the groups of a router."""

from megaprec.errors import UserError
from models.config import ModelConfig
from tools.convert.hf.keys import Entry, Fields, Json, Keys, require, same

# Of experts in all layers, as wide as intermediate_size says.
LOCAL_EXPERTS = (
    same("num_local_experts", "experts"),
    same("num_experts_per_tok", "experts_per_token"),
    same("router_aux_loss_coef", "router_aux_loss"),
)


def experts_of_qwen(shared: bool) -> Entry:
    """Return the entry of Qwen's experts, which some layers may lack. shared: there is a shared one
    with a gate."""

    def read(keys: Keys) -> Fields:
        routed: Fields = {
            "experts": keys["num_experts"],
            "experts_per_token": keys["num_experts_per_tok"],
            "router_aux_loss": keys["router_aux_loss_coef"],
            "norm_topk": keys["norm_topk_prob"],
        }
        if shared:
            width = keys["shared_expert_intermediate_size"]
            routed |= {"shared_experts": width, "shared_gate": True}
        dense = _dense_layers_of_qwen(keys)
        if len(dense) == keys["num_hidden_layers"]:
            return _feed_forwards(keys, dense)
        if shared and not routed["shared_experts"]:
            raise UserError.of("convert.hf_shared_expert_zero")
        return {**routed, **_feed_forwards(keys, dense)}

    def write(model: ModelConfig) -> Json:
        keys: Fields = {
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
            keys["shared_expert_intermediate_size"] = model.shared_experts
        return keys

    return Entry(read, write)


def _dense_layers_of_qwen(keys: Keys) -> list[int]:
    """Return the numbers of the layers without experts."""
    dense_only = keys["mlp_only_layers"] or ()
    step = keys["decoder_sparse_step"]
    return [
        layer
        for layer in range(keys["num_hidden_layers"])
        if layer in dense_only or (layer + 1) % step or not keys["num_experts"]
    ]


def _feed_forwards(keys: Keys, dense: list[int]) -> Fields:
    """Return the widths of feed-forwards. dense: numbers of the layers without experts; if all,
    there are no experts.

    The width of a feed-forward without experts is read and ignored if every layer has them.
    """
    expert_width = keys["moe_intermediate_size"]
    dense_width = keys["intermediate_size"]
    if len(dense) == keys["num_hidden_layers"]:
        return {"ffn": dense_width, "experts": 0}
    fields = {"ffn": expert_width}
    if dense:
        fields |= {"dense_layers": tuple(dense), "dense_ffn": dense_width}
    return fields


def _read_glm4_moe(keys: Keys) -> Fields:
    first = keys["first_k_dense_replace"]
    layers = keys["num_hidden_layers"]
    # Several shared experts compute what one of their widths together does.
    shared = keys["n_shared_experts"] * keys["moe_intermediate_size"]
    if first >= layers:
        raise UserError.of("convert.hf_glm4_dense_layers", first=first, layers=layers)
    if not shared > 0:
        raise UserError.of("convert.hf_shared_experts", n_shared_experts=keys["n_shared_experts"])
    return {
        "experts": keys["n_routed_experts"],
        "experts_per_token": keys["num_experts_per_tok"],
        "norm_topk": keys["norm_topk_prob"],
        "shared_experts": shared,
        "router_aux_loss": 0.0,
        **_feed_forwards(keys, list(range(first))),
        "router": _corrected_router(keys),
    }


def _corrected_router(keys: Keys) -> Fields:
    scale = float(keys["routed_scaling_factor"])
    return {"score": "sigmoid", "correction": True, "scale": scale, **_groups(keys, best=2)}


def _read_deepseek_v2(keys: Keys) -> Fields:
    """Return the fields of DeepSeek-V2, whose weights of a token's experts transformers never
    normalizes."""
    keys.mark_read("topk_method", "norm_topk_prob", "n_group", "topk_group")
    fields = _deepseek_experts(keys)
    if not fields["experts"]:
        return fields
    require(keys["norm_topk_prob"], "norm_topk_prob", (False, None))
    router: Fields = {"score": "softmax", "scale": float(keys["routed_scaling_factor"])}
    methods = ("greedy", "group_limited_greedy")
    if require(keys["topk_method"], "topk_method", methods) == "group_limited_greedy":
        _require_groups(keys)
        router |= _groups(keys, best=1)
    return {**fields, "router": router}


def _read_deepseek_v3(keys: Keys) -> Fields:
    keys.mark_read("norm_topk_prob", "n_group", "topk_group")
    fields = _deepseek_experts(keys)
    if not fields["experts"]:
        return fields
    # The class of V3 always chooses among groups.
    _require_groups(keys)
    router = _corrected_router(keys)
    return {**fields, "norm_topk": bool(keys["norm_topk_prob"]), "router": router}


def _deepseek_experts(keys: Keys) -> Fields:
    """Return the fields of experts and feed-forwards; of a model none of whose layers has experts,
    experts = 0."""
    shared = keys["n_shared_experts"]
    scale = keys["routed_scaling_factor"]
    routed = {
        "experts": keys["n_routed_experts"],
        "experts_per_token": keys["num_experts_per_tok"],
        "router_aux_loss": keys["aux_loss_alpha"],
        "norm_topk": False,
    }
    dense = min(keys["first_k_dense_replace"], keys["num_hidden_layers"])
    fields = _feed_forwards(keys, list(range(dense)))
    if "experts" in fields:
        return fields
    if not shared or not scale:
        raise UserError.of("convert.hf_deepseek_experts", shared=shared, scale=scale)
    return {**routed, **fields, "shared_experts": shared * keys["moe_intermediate_size"]}


def _require_groups(keys: Keys) -> None:
    groups = keys["n_group"]
    chosen = keys["topk_group"]
    if type(groups) is not int or type(chosen) is not int:
        raise UserError.of("convert.hf_groups_not_numbers", groups=groups, chosen=chosen)


def _groups(keys: Keys, best: int) -> Fields:
    """Return the settings of a router's groups of experts. best: experts of a group by whose sum it
    is compared."""
    groups = keys["n_group"]
    chosen = keys["topk_group"]
    experts = keys["n_routed_experts"]
    if not 1 <= chosen <= groups or experts % groups:
        raise UserError.of(
            "convert.hf_groups_uneven", groups=groups, chosen=chosen, experts=experts
        )
    if chosen * (experts // groups) < keys["num_experts_per_tok"]:
        raise UserError.of(
            "convert.hf_groups_too_few",
            groups=groups,
            chosen=chosen,
            experts=experts,
            num_experts_per_tok=keys["num_experts_per_tok"],
        )
    fields = {"groups": groups, "groups_per_token": chosen}
    # What a group is compared by decides nothing where all are chosen.
    if chosen < groups:
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
        "n_shared_experts": model.shared_experts // model.ffn,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.norm_topk,
        "routed_scaling_factor": model.router.scale,
        "n_group": model.router.groups,
        "topk_group": model.router.groups_per_token,
    }


def _write_deepseek(model: ModelConfig, method: str) -> Json:
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
    limits_groups = model.router.limits
    return _write_deepseek(model, "group_limited_greedy" if limits_groups else "greedy")


EXPERTS_OF_GLM4 = Entry(_read_glm4_moe, _write_after_dense)
EXPERTS_OF_DEEPSEEK_V2 = Entry(_read_deepseek_v2, _write_deepseek_v2)
EXPERTS_OF_DEEPSEEK_V3 = Entry(_read_deepseek_v3, lambda model: _write_deepseek(model, "noaux_tc"))
