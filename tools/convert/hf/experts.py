"""Experts in a config.json: how many there are, the widths of feed-forwards, and the groups of a
router."""

from typing import Any

from megaprec.errors import UserError
from tools.convert.hf.keys import Keys


def experts(c: Keys, number: Any, aux: Any) -> dict[str, Any]:
    """Return the fields of a number of experts. aux: the weight of the loss that balances them."""
    return {
        "experts": number,
        "experts_per_token": c["num_experts_per_tok"],
        "router_aux_loss": aux,
    }


def feed_forwards(c: Keys, dense: list[int]) -> dict[str, Any]:
    """Return the widths of feed-forwards. dense: numbers of the layers without experts; if all,
    there are no experts.

    The width of a feed-forward without experts is read and ignored if every layer has them.
    """
    width = c["moe_intermediate_size"]
    alone = c["intermediate_size"]
    if len(dense) == c["num_hidden_layers"]:
        return {"ffn": alone, "experts": 0}
    return {"ffn": width, **({"dense_layers": tuple(dense), "dense_ffn": alone} if dense else {})}


def qwen_experts(c: Keys, shared: bool = False) -> dict[str, Any]:
    """Return the fields of Qwen's experts, which some layers may lack. shared: there is a shared
    one with a gate."""
    layers = c["num_hidden_layers"]
    alone = c["mlp_only_layers"] or ()
    step = c["decoder_sparse_step"]
    routed = {
        **experts(c, c["num_experts"], c["router_aux_loss_coef"]),
        "norm_topk": c["norm_topk_prob"],
    }
    if shared:
        width = c["shared_expert_intermediate_size"]
        routed |= {"shared_experts": width, "shared_gate": True}
    dense = [n for n in range(layers) if n in alone or (n + 1) % step or not routed["experts"]]
    if len(dense) == layers:
        return feed_forwards(c, dense)
    if shared and not routed["shared_experts"]:
        raise UserError(
            "config.json has shared_expert_intermediate_size = 0: there must be a shared expert"
        )
    return {**routed, **feed_forwards(c, dense)}


def by_groups(c: Keys, best: int = 2) -> dict[str, Any]:
    """Return the settings of a router's groups of experts. best: experts of a group by whose sum it
    is compared."""
    groups = c["n_group"]
    chosen = c["topk_group"]
    experts = c["n_routed_experts"]
    if not 1 <= chosen <= groups or experts % groups:
        raise UserError(
            f"config.json has n_group = {groups} and topk_group = {chosen} of "
            f"n_routed_experts = {experts}: groups "
            "must be of one size, and no more can be chosen than there are"
        )
    if chosen * (experts // groups) < c["num_experts_per_tok"]:
        raise UserError(
            f"config.json has n_group = {groups} and topk_group = {chosen} of "
            f"n_routed_experts = {experts}, which "
            f"leaves fewer experts than num_experts_per_tok = {c['num_experts_per_tok']}"
        )
    return {
        "groups": groups,
        "groups_per_token": chosen,
        **({"group_best": best} if chosen < groups else {}),
    }
