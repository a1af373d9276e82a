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
class Sizes:
    """The numbers of ranks that Megatron spread the model over.

    virtual: stages that each rank has.
    expert_tp: tensor-parallel ranks of an expert.
    """

    tp: int
    pp: int
    virtual: int
    ep: int
    expert_tp: int


def sizes_of(arguments: Mapping[str, Any]) -> Sizes:
    """Return the sizes that Megatron's args state."""
    tp = arguments.get("tensor_model_parallel_size") or 1
    pp = arguments.get("pipeline_model_parallel_size") or 1
    ep = arguments.get("expert_model_parallel_size") or 1
    virtual = arguments.get("virtual_pipeline_model_parallel_size") if pp > 1 else None
    return Sizes(tp, pp, virtual or 1, ep, arguments.get("expert_tensor_parallel_size") or tp)


def unknown_order_setting(arguments: Mapping[str, Any]) -> str:
    """Return a setting under which the order is not known; empty if there is none."""
    return next((f"{key} = {arguments[key]!r}" for key in UNKNOWN_ORDER if arguments.get(key)), "")


def stages_of(
    expected: Sequence[Match], arguments: Mapping[str, Any], model: ModelConfig
) -> list[list[Match]]:
    """Return the tensors of each virtual stage, with all experts: the first of all ranks, then the
    second of all.

    The last stage's copy of a tied embedding is a match of its own, HEAD; one for modules of
    multi-token prediction is there twice. Empty if the args describe no such stages.
    """
    counts = _layers_per_stage(arguments, model.layers)
    if sum(counts) != model.layers or min(counts) < 0:
        return []
    ends = list(accumulate(counts))
    last = len(counts) - 1
    stages: list[list[Match]] = [[] for _ in counts]
    for match in _in_order_of_model(expected, arguments, model):
        if layer := LAYER.match(match.foreign):
            stage = bisect_right(ends, int(layer[2]))
        else:
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
    sizes = sizes_of(arguments)
    stated: dict[int, int] = {}
    for stage, end in ((0, "first"), (sizes.pp - 1, "last")):
        count = arguments.get(f"decoder_{end}_pipeline_num_layers")
        if count is not None:
            stated[stage] = count
    # An embedding or a loss may count as a layer.
    embedding = bool(arguments.get("account_for_embedding_in_pipeline_split"))
    loss = bool(arguments.get("account_for_loss_in_pipeline_split"))
    # What is left for stages of which nothing is stated, in equal numbers.
    unstated = layers + embedding + loss - sum(stated.values())
    evenly = unstated // max(1, sizes.pp - len(stated))
    counts = [stated.get(stage, evenly) // sizes.virtual for stage in range(sizes.pp)]
    # The first virtual stages of all ranks, then the second ones.
    counts *= sizes.virtual
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _in_order_of_model(
    expected: Sequence[Match], arguments: Mapping[str, Any], model: ModelConfig
) -> list[Match]:
    """Return tensors in the order in which modules register them.

    The names of a distributed checkpoint do not tell whether norms belong to the linear layers
    after them, which decides the order; the args do.
    """
    fused = arguments.get("transformer_impl") != "local"
    positions = {}
    for number, match in enumerate(matches(megatron(fused, False, model), model)):
        positions[match.logical] = number
    in_order = sorted(expected, key=lambda match: positions[match.logical])
    return in_registered_order(in_order, bool(arguments.get("moe_grouped_gemm")))


def in_registered_order(expected: Sequence[Match], grouped: bool) -> list[Match]:
    """Return the rows of the name table in the order of parameters: one expert after another,
    unless they are grouped."""
    # The name table has them grouped already.
    if grouped:
        return list(expected)
    # Where the experts of each layer begin, by what is before their names.
    begins: dict[str, int] = {}
    for number, match in enumerate(expected):
        begins.setdefault(match.foreign.partition(".experts.")[0], number)

    def position(item: tuple[int, Match]) -> tuple[int, int]:
        number, match = item
        expert = expert_of(match.foreign)
        # What is no expert's stays where the table has it.
        if expert is None:
            return number, 0
        return begins[match.foreign.partition(".experts.")[0]], expert

    return [match for _, match in sorted(enumerate(expected), key=position)]


def parameters_of(local: Sequence[Match], arguments: Mapping[str, Any]) -> list[Registered]:
    """Return a rank's parameters, in the order of what it has of the model."""
    packs = arguments.get("transformer_impl") == "local" or arguments.get(
        "moe_use_legacy_grouped_gemm"
    )
    packed = bool(arguments.get("moe_grouped_gemm") and packs)

    def parameter(match: Match) -> tuple[str, bool]:
        """Return the name that all tensors of a parameter share, and if it packs experts."""
        expert = expert_of(match.foreign) if packed else None
        if expert is None:
            return match.foreign, False
        return match.foreign.replace(f"local_experts.{expert}.", ""), True

    return [
        Registered(tuple(group), is_packed) for (_, is_packed), group in groupby(local, parameter)
    ]
