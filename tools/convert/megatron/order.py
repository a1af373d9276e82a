"""The parameters of each of Megatron's ranks, in the order in which its modules register them.

A distributed checkpoint holds tensors by name, whatever the ranks were, but the distributed
optimizer's flat state lies in this order. Its args say what it follows from: how layers are spread
over stages, virtual ones too; whether norms belong to the linear layers after them; and whether a
rank has its experts one by one, grouped or packed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from models.config import ModelConfig
from tools.convert.core.names import megatron
from tools.convert.core.rules import Match, matches
from tools.convert.megatron.experts import expert_of
from tools.convert.megatron.layout import EMBEDDING, HEAD
from tools.convert.megatron.ranks import LAYER

# Args that change the order, or what a rank has, in ways that are not known here.
ODD = (
    "pipeline_model_parallel_layout",
    "overlap_param_gather_with_optimizer_step",
    "fp8_param_gather",
)


@dataclass(frozen=True)
class Registered:
    """A parameter: a tensor's part, or those of all experts one after another, each with features
    in before out."""

    of: tuple[Match, ...]
    packed: bool


@dataclass(frozen=True)
class Sizes:
    """Over how many ranks Megatron spread the model, and an expert. virtual: stages that each rank
    has."""

    tp: int
    pp: int
    virtual: int
    ep: int
    expert_tp: int


def sizes_of(args: Mapping[str, Any]) -> Sizes:
    """Return the sizes that Megatron's args state."""
    tp, pp, ep = (
        args.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline", "expert")
    )
    virtual = args.get("virtual_pipeline_model_parallel_size") if pp > 1 else None
    return Sizes(tp, pp, virtual or 1, ep, args.get("expert_tensor_parallel_size") or tp)


def odd(args: Mapping[str, Any]) -> str:
    """A setting under which the order is not known; empty if there is none."""
    return next((f"{key} = {args[key]!r}" for key in ODD if args.get(key)), "")


def stages_of(
    found: Sequence[Match], args: Mapping[str, Any], model: ModelConfig
) -> list[list[Match]]:
    """Return the tensors of each virtual stage, with all experts: the first of all ranks, then the
    second of all.

    The last stage's copy of a tied embedding is a match of its own, HEAD; one for modules of
    multi-token prediction is there twice. Empty if the args describe no such stages.
    """
    counts = _layers(args, model.layers)
    if sum(counts) != model.layers or min(counts) < 0:
        return []
    ends = list(accumulate(counts))
    last = len(counts) - 1
    stages: list[list[Match]] = [[] for _ in counts]
    for match in _in_order(found, args, model):
        layer = LAYER.match(match.foreign)
        outside = 0 if match.foreign.startswith("embedding.") else last
        stages[
            next(n for n, end in enumerate(ends) if int(layer[2]) < end) if layer else outside
        ].append(match)
    embedding = next(m for m in found if m.foreign == EMBEDDING)
    if model.tied and last:
        stages[-1].append(replace(embedding, foreign=HEAD))
    if model.mtp_layers and last:
        stages[-1].insert(0, embedding)
    return stages


def shared(model: ModelConfig, stages: int) -> tuple[str, ...]:
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


def _layers(args: Mapping[str, Any], layers: int) -> list[int]:
    """Return the number of layers of each virtual stage."""
    sizes, (first, last) = (
        sizes_of(args),
        (args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")),
    )
    given = {stage: n for stage, n in ((0, first), (sizes.pp - 1, last)) if n is not None}
    # An embedding or a loss may count as a layer.
    ends = [bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss")]
    each = (layers + sum(ends) - sum(given.values())) // max(1, sizes.pp - len(given))
    counts = [given.get(stage, each) // sizes.virtual for stage in range(sizes.pp)] * sizes.virtual
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _in_order(found: Sequence[Match], args: Mapping[str, Any], model: ModelConfig) -> list[Match]:
    """The names of a distributed checkpoint do not tell whose layers they were; the args do."""
    fused = args.get("transformer_impl") != "local"
    rows = {
        match.logical: n for n, match in enumerate(matches(megatron(fused, False, model), model))
    }
    return as_registered(
        sorted(found, key=lambda match: rows[match.logical]), bool(args.get("moe_grouped_gemm"))
    )


def as_registered(found: Sequence[Match], grouped: bool) -> list[Match]:
    """The rows of the name table in the order of parameters: one expert after another, unless they
    are grouped."""
    last = len(found)
    first = {m.foreign.partition(".experts.")[0]: n for n, m in reversed([*enumerate(found)])}

    def place(item: tuple[int, Match]) -> tuple[int, int, int]:
        number, match = item
        expert = expert_of(match.foreign)
        if expert is None or grouped:
            return number, 0, 0
        return first[match.foreign.partition(".experts.")[0]], expert, last

    return [match for _, match in sorted(enumerate(found), key=place)]


def parameters_of(own: Sequence[Match], args: Mapping[str, Any]) -> list[Registered]:
    """A rank's parameters, in the order of what it has of the model."""
    native = args.get("transformer_impl") == "local" or args.get("moe_use_legacy_grouped_gemm")
    packed = bool(args.get("moe_grouped_gemm") and native)

    def parameter(match: Match) -> tuple[str, bool]:
        expert = expert_of(match.foreign) if packed else None
        kept = "" if expert is None else f"local_experts.{expert}."
        return match.foreign.replace(kept, ""), bool(kept)

    return [Registered(tuple(of), of_experts) for (_, of_experts), of in groupby(own, parameter)]
