"""The parameters of each of Megatron's ranks, in the order in which its modules register them.

A distributed checkpoint holds tensors by name, whatever the ranks were, but the distributed
optimizer's flat state lies in this order. Its args say what it follows from: how layers are spread
over stages, virtual ones too; whether norms belong to the linear layers after them; and whether a
rank has its experts one by one, grouped or packed.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from models.config import ModelConfig
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, matches
from tools.convert.megatron.hybrid_layers import stage_patterns
from tools.convert.megatron.layout import EMBEDDING, HEAD, expert_of
from tools.convert.megatron.ranks import LAYER

# Args that change the order, or what a rank has, in ways that are not known here.
UNKNOWN_ORDER = (
    "pipeline_model_parallel_layout",
    "overlap_param_gather_with_optimizer_step",
    "fp8_param_gather",
)


@dataclass(frozen=True)
class Registered:
    """A parameter as a module registers it.

    matches: the one tensor that it is a part of, or those of all experts one after another.
    packed: it has all experts, each with features in before features out.
    """

    matches: tuple[Match, ...]
    packed: bool


@dataclass(frozen=True)
class RankCounts:
    """The numbers of ranks that Megatron spread the model over.

    virtual: stages that each rank has.
    expert_tp: tensor-parallel ranks of an expert.
    """

    tp: int
    pp: int
    virtual: int
    ep: int
    expert_tp: int


def sizes_of(arguments: Mapping[str, Any]) -> RankCounts:
    """Return the sizes that Megatron's args state."""
    tp = arguments.get("tensor_model_parallel_size") or 1
    pp = arguments.get("pipeline_model_parallel_size") or 1
    ep = arguments.get("expert_model_parallel_size") or 1
    # Without pipeline stages there are no virtual ones, whatever the args say.
    virtual = arguments.get("virtual_pipeline_model_parallel_size") if pp > 1 else None
    # By default an expert is cut as all else is.
    expert_tp = arguments.get("expert_tensor_parallel_size") or tp
    return RankCounts(tp, pp, virtual or 1, ep, expert_tp)


def unknown_order_setting(arguments: Mapping[str, Any]) -> str:
    """Return a setting under which the order is not known; empty if there is none."""
    for key in UNKNOWN_ORDER:
        if arguments.get(key):
            return f"{key} = {arguments[key]!r}"
    return ""


def stages_of(
    expected: Sequence[Match], arguments: Mapping[str, Any], model: ModelConfig
) -> list[list[Match]]:
    """Return the tensors of each virtual stage, with all experts: the first stage of every rank,
    then the second of every rank, and so on.

    The last stage's copy of a tied embedding is a match of its own, HEAD; one for modules of
    multi-token prediction is there twice. Empty if the args describe no such stages.
    """
    layer_counts = _layers_per_stage(arguments, model.layers)
    if sum(layer_counts) != model.layers or min(layer_counts) < 0:
        return []
    # The number of the layer after each stage's last.
    ends = list(accumulate(layer_counts))
    last = len(layer_counts) - 1
    stages: list[list[Match]] = [[] for _ in layer_counts]
    for match in _in_order_of_model(expected, arguments, model):
        if layer := LAYER.match(match.foreign):
            stage = bisect_right(ends, int(layer[2]))
        else:
            # Last norm, head and modules of multi-token prediction are on the last stage.
            stage = 0 if match.foreign.startswith("embedding.") else last
        stages[stage].append(match)
    embedding = next(match for match in expected if match.foreign == EMBEDDING)
    # Both end stages have a tied weight, which a sum of gradients keeps equal.
    if model.tied and last:
        stages[-1].append(replace(embedding, foreign=HEAD))
    # Modules on the last stage compute with an embedding of their own.
    if model.mtp_layers and last:
        stages[-1].insert(0, embedding)
    return stages


def shared_weights(model: ModelConfig, stages: int) -> tuple[str, ...]:
    """Return the names under which the first and the last of several stages have one weight.

    A tied head beside modules of multi-token prediction is no such weight: Megatron allocates it
    and computes without.
    """
    if stages == 1:
        return ()
    if model.mtp_layers:
        return (EMBEDDING,)
    if model.tied:
        return (EMBEDDING, HEAD)
    return ()


def _layers_per_stage(arguments: Mapping[str, Any], layers: int) -> list[int]:
    """Return the number of layers of each virtual stage."""
    if patterns := stage_patterns(arguments):
        return [len(pattern) for pattern in patterns]
    sizes = sizes_of(arguments)
    stated: dict[int, int] = {}
    for rank, end in ((0, "first"), (sizes.pp - 1, "last")):
        count = arguments.get(f"decoder_{end}_pipeline_num_layers")
        if count is not None:
            stated[rank] = count
    # An embedding or a loss may count as a layer.
    embedding_layers = 1 if arguments.get("account_for_embedding_in_pipeline_split") else 0
    loss_layers = 1 if arguments.get("account_for_loss_in_pipeline_split") else 0
    # What is left for ranks of which nothing is stated, in equal numbers.
    unstated = layers + embedding_layers + loss_layers - sum(stated.values())
    evenly = unstated // max(1, sizes.pp - len(stated))
    counts = []
    for rank in range(sizes.pp):
        layers_of_rank = stated.get(rank, evenly)
        counts.append(layers_of_rank // sizes.virtual)
    # The first virtual stages of all ranks, then the second ones.
    counts *= sizes.virtual
    counts[0] -= embedding_layers
    counts[-1] -= loss_layers
    return counts


def _in_order_of_model(
    expected: Sequence[Match], arguments: Mapping[str, Any], model: ModelConfig
) -> list[Match]:
    """Return tensors in the order in which modules register them.

    The names of a distributed checkpoint do not tell whether norms belong to the linear layers
    after them, which decides the order; the args do.
    """
    fused_norms = arguments.get("transformer_impl") != "local"
    # Where rotary partners are decides no place in the order.
    rules = megatron(fused_norms, interleaved=False, model=model)
    positions = {}
    for number, match in enumerate(matches(rules, model)):
        positions[match.logical] = number
    in_order = sorted(expected, key=lambda match: positions[match.logical])
    return in_registered_order(in_order, bool(arguments.get("moe_grouped_gemm")))


def in_registered_order(expected: Sequence[Match], grouped: bool) -> list[Match]:
    """Return the rows of the name table in the order of parameters: one expert after another,
    unless they are grouped."""
    # The name table has them grouped already.
    if grouped:
        return list(expected)
    # Where the experts of each layer begin, by the name of the layer's feed-forward.
    first_numbers: dict[str, int] = {}
    for number, match in enumerate(expected):
        first_numbers.setdefault(_before_experts(match.foreign), number)

    def position(numbered: tuple[int, Match]) -> tuple[int, int]:
        number, match = numbered
        expert = expert_of(match.foreign)
        # What is no expert's stays where the table has it.
        if expert is None:
            return number, 0
        return first_numbers[_before_experts(match.foreign)], expert

    in_order = sorted(enumerate(expected), key=position)
    return [match for _, match in in_order]


def _before_experts(tensor_name: str) -> str:
    return tensor_name.partition(".experts.")[0]


def parameters_of(local: Sequence[Match], arguments: Mapping[str, Any]) -> list[Registered]:
    """Return a rank's parameters, in the order of what it has of the model."""
    is_local = arguments.get("transformer_impl") == "local"
    is_legacy = bool(arguments.get("moe_use_legacy_grouped_gemm"))
    # Grouped experts are packed in one tensor by GroupedMLP of megatron/core/transformer/moe; those
    # of Transformer Engine are not.
    packed = bool(arguments.get("moe_grouped_gemm")) and (is_local or is_legacy)

    def parameter(match: Match) -> tuple[str, bool]:
        """Return the name that all tensors of a parameter share, and if it packs experts."""
        expert = expert_of(match.foreign) if packed else None
        if expert is None:
            return match.foreign, False
        return match.foreign.replace(f"local_experts.{expert}.", ""), True

    parameters = []
    for (_, is_packed), group in groupby(local, parameter):
        parameters.append(Registered(tuple(group), is_packed))
    return parameters
