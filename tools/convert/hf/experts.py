"""Experts in a config.json: how many there are, the widths of feed-forwards, and the groups of a
router."""

from typing import Any

from megaprec.errors import UserError
from tools.convert.hf.keys import Keys


def experts(keys: Keys, number: Any, aux: Any) -> dict[str, Any]:
    """Return the fields of a number of experts. aux: the weight of the loss that balances them."""
    return {
        "experts": number,
        "experts_per_token": keys["num_experts_per_tok"],
        "router_aux_loss": aux,
    }


def feed_forwards(keys: Keys, dense: list[int]) -> dict[str, Any]:
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


def qwen_experts(keys: Keys, shared: bool = False) -> dict[str, Any]:
    """Return the fields of Qwen's experts, which some layers may lack. shared: there is a shared
    one with a gate."""
    layers = keys["num_hidden_layers"]
    dense_only = keys["mlp_only_layers"] or ()
    step = keys["decoder_sparse_step"]
    routed = {
        **experts(keys, keys["num_experts"], keys["router_aux_loss_coef"]),
        "norm_topk": keys["norm_topk_prob"],
    }
    if shared:
        width = keys["shared_expert_intermediate_size"]
        routed |= {"shared_experts": width, "shared_gate": True}
    dense = []
    for layer in range(layers):
        if layer in dense_only or (layer + 1) % step or not routed["experts"]:
            dense.append(layer)
    if len(dense) == layers:
        return feed_forwards(keys, dense)
    if shared and not routed["shared_experts"]:
        raise UserError.of("convert.hf_shared_expert_zero")
    return {**routed, **feed_forwards(keys, dense)}


def by_groups(keys: Keys, best: int = 2) -> dict[str, Any]:
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
    if chosen < groups:
        fields["group_best"] = best
    return fields
