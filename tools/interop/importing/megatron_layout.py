"""Ranks, pipeline, recompute and ZeRO of Megatron-LM's arguments: [parallel] and the global
batch."""

from typing import Any

from megaprec.comm.experts import describe_misfit
from tools.console.units import counted
from tools.convert.megatron.hybrid_layers import PATTERNS, stage_patterns
from tools.interop.arguments.megatron import option
from tools.interop.importing.arguments import Arguments
from tools.interop.importing.draft import NO_RANKS
from tools.interop.importing.megatron_batches import add_global_batch

AXES = {
    "parallel.tensor": "tensor_model_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "parallel.context": "context_parallel_size",
}
EXPERT_AXES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
CONTEXT_BY = {("p2p",): "ring", ("all_gather",): "gather", ("allgather",): "gather"}
MODULES = {"core_attn": "attention", "layernorm": "norm", "moe_act": "activation"}
CHUNKS = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
MOST_STAGES = 4096
MEGATRON_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
STRATEGY = "data_parallel_sharding_strategy"
# the value of parallel.zero by what Megatron-FSDP shards
STAGES = {"no_shard": False, "optim": True, "optim_grads": 2, "optim_grads_params": 3}
TORCH_FSDP = "use_torch_fsdp2"
RESHARDS = "torch_fsdp2_reshard_after_forward"
# what counts as a layer when stages are cut: of Megatron-LM, and of DeepSpeed
ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
METHOD = "pp_partition_method"
BY_LAYERS = "type:transformer"
BY_ENDS = "type:transformer|embedding"


def add_layout(arguments: Arguments, ranks: int | None) -> None:
    """Add the layout. ranks: how many there are; None if that is not said."""
    draft = arguments.draft
    sizes = list[int]()
    for key, name in AXES.items():
        size = draft.settled[key].value if key in draft.settled else arguments.get(name)
        if not isinstance(size, int):
            return
        sizes.append(size)
        if key != "parallel.context" or size != 1:
            arguments.put(key, size, name)
    if min(sizes) < 1:
        arguments.refuse("give numbers from 1 on", *AXES.values())
        return
    tensor, pipeline, context = sizes
    _add_context(arguments, context)
    data = _add_data(arguments, ranks, tensor * pipeline * context)
    if tensor > 1 and arguments.get("sequence_parallel"):
        arguments.copy("parallel.sequence", "sequence_parallel")
    fused = "tp_comm_overlap"
    if fused in arguments.unused:
        # it changes bits here, so it stays off
        arguments.unused[fused] += " (parallel.async_tensor = true does it here)"
    _add_stages(arguments, pipeline)
    _add_recompute(arguments)
    _add_zero(arguments)
    overlaps = ("overlap_grad_reduce", "overlap_param_gather")
    if any(map(arguments.get, overlaps)):
        arguments.put("parallel.overlap", True, *overlaps)
    if arguments.has("ddp_bucket_size"):
        arguments.copy("parallel.bucket", "ddp_bucket_size")
    _add_experts(arguments, ranks, data * context, tensor)


def _add_zero(arguments: Arguments) -> None:
    """Add the stage of ZeRO: of the distributed optimizer, of Megatron-FSDP or of torch's FSDP."""
    by_distributed = "use_distributed_optimizer"
    by_megatron = [name for name in MEGATRON_FSDP if arguments.get(name)]
    if arguments.get(TORCH_FSDP):
        stage = 3 if arguments.get(RESHARDS) else 2
        arguments.put("parallel.zero", stage, TORCH_FSDP, RESHARDS)
    elif by_megatron:
        stage = STAGES[arguments.get(STRATEGY)]
        arguments.put("parallel.zero", stage, *by_megatron, STRATEGY, by_distributed)
        if not arguments.has(STRATEGY):
            arguments.draft.notes.append(
                f"{arguments.origin(*by_megatron)} without {option(STRATEGY)}: all is sharded, as "
                "in Megatron-LM of 2026; versions before sharded nothing"
            )
    else:
        arguments.copy("parallel.zero", by_distributed)
    if not by_megatron and arguments.has(STRATEGY):
        arguments.unused[STRATEGY] = arguments.said[STRATEGY]
    if not arguments.get(TORCH_FSDP) and arguments.has(RESHARDS):
        arguments.unused[RESHARDS] = arguments.said[RESHARDS]


def _add_context(arguments: Arguments, context: int) -> None:
    """Add the way in which the ranks of parallel.context exchange keys and values, the same in all
    layers."""
    draft = arguments.draft
    name = "cp_comm_type"
    ways = tuple({*arguments.get(name)})
    origin = arguments.origin(name)
    if context == 1:
        if arguments.has(name):
            draft.notes.append(f"{origin}: no ranks share a sequence, so there is no exchange")
    elif ways in CONTEXT_BY:
        draft.put("parallel.context_by", CONTEXT_BY[ways], origin)
    else:
        arguments.refuse(
            "keys and values go round (p2p) or are gathered (all_gather) here, in all layers alike",
            name,
        )


def _add_experts(arguments: Arguments, ranks: int | None, data: int, tensor: int) -> None:
    """Add the ranks of experts, which Megatron-LM numbers in the same way
    (megatron/core/parallel_state.py)."""
    draft = arguments.draft
    expert, in_slices = map(arguments.get, EXPERT_AXES)
    in_slices = in_slices or tensor
    origin = arguments.origin(*EXPERT_AXES)
    if expert == 1 and in_slices == tensor:
        return
    if not draft.value("model.experts"):
        draft.notes.append(f"{origin}: the model has no experts, so no ranks are for them")
        return
    misfit = describe_misfit(data, tensor, expert, in_slices)
    if misfit and not ranks and "parallel.data" not in draft.settled:
        arguments.refuse(
            "the ranks of experts depend on how many ranks there are, which is not known: give "
            "--ranks N",
            *filter(arguments.has, EXPERT_AXES),
        )
    elif misfit:
        misfit = misfit.within(after="; --ranks N says how many ranks there are")
        arguments.refuse(misfit, *filter(arguments.has, EXPERT_AXES))
    else:
        arguments.put("parallel.expert", expert, EXPERT_AXES[0])
        if in_slices != tensor:
            arguments.put("parallel.expert_tensor", in_slices, EXPERT_AXES[1])


def _add_data(arguments: Arguments, ranks: int | None, per_replica: int) -> int:
    """Add the number of replicas and the global batch. Returns the first."""
    draft = arguments.draft
    data = draft.value("parallel.data")
    if not isinstance(data, int):
        if ranks and ranks % per_replica:
            draft.problems.append(
                f"{ranks} ranks are no multiple of {per_replica}, those of one replica (tensor x "
                "pipeline x context): --ranks gives another number"
            )
            return 0
        data = ranks // per_replica if ranks else 1
        draft.put("parallel.data", data, counted(ranks, "rank") if ranks else NO_RANKS)
    is_known = bool(ranks) or "parallel.data" in draft.settled
    add_global_batch(arguments, data if is_known else None)
    if not is_known:
        draft.notes.append(
            "parallel.data = 1: the arguments do not say how many ranks there are; --ranks N "
            "does. The global batch is the same for any number"
        )
    return data


def _add_stages(arguments: Arguments, pipeline: int) -> None:
    """Add an interleaved schedule, and the layers of each stage, which Megatron-LM cuts evenly
    unless a hybrid model's pattern says where stages end."""
    draft = arguments.draft
    layers = draft.value("model.layers")
    patterns = stage_patterns({name: arguments.get(name) for name in PATTERNS})
    if patterns:
        _add_stages_of_pattern(arguments, [len(pattern) for pattern in patterns], pipeline)
        return
    chunks = _chunks(arguments, layers, pipeline)
    if chunks is None:
        return
    stages = pipeline * chunks
    if chunks > 1:
        arguments.put("parallel.schedule", "interleaved", *CHUNKS)
        arguments.put("parallel.chunks", chunks, *CHUNKS)
    if pipeline == 1 or not draft.needs("parallel.cuts"):
        return
    begin, end = _layers_beside(arguments)
    usual, rest = divmod(layers + begin + end, stages)
    cuts = [usual] * min(stages, MOST_STAGES)
    cuts[0] -= begin
    cuts[-1] -= end
    if rest or stages > MOST_STAGES or min(cuts) < 1:
        why = f"{layers} layers cannot be cut evenly into {pipeline} x {chunks} stages"
        arguments.refuse(f"{why}: parallel.cuts says how", AXES["parallel.pipeline"])
        return
    origin = arguments.origin(AXES["parallel.pipeline"], *filter(arguments.has, ENDS), METHOD)
    draft.put("parallel.cuts", cuts, f"{origin}, cut evenly")


def _layers_beside(arguments: Arguments) -> tuple[int, int]:
    """Return how many layers embedding and head count as when stages are cut."""
    method = (arguments.get(METHOD) or BY_LAYERS).lower()
    if method == BY_ENDS:
        return 1, 1
    if method != BY_LAYERS:
        arguments.refuse(f"{BY_LAYERS} and {BY_ENDS} are known: give parallel.cuts", METHOD)
    counts_embedding, counts_head = map(arguments.get, ENDS)
    return (1 if counts_embedding else 0, 1 if counts_head else 0)


def _add_stages_of_pattern(arguments: Arguments, cuts: list[int], pipeline: int) -> None:
    """Add the layers of each stage, virtual ones too, as a hybrid model's pattern says them."""
    said = [*filter(arguments.has, PATTERNS)]
    if not all(cuts):
        arguments.refuse(f"has stages of {cuts} layers: a stage needs a layer", *said)
        return
    if len(cuts) % pipeline:
        why = f"has {len(cuts)} stages of {cuts} layers, but there are {pipeline} ranks of them"
        arguments.refuse(why, *said)
        return
    chunks = len(cuts) // pipeline
    stages, layers_of_stage = map(arguments.get, CHUNKS)
    if layers_of_stage is not None or stages not in (None, chunks):
        why = f"the pattern ends {chunks} stages of each rank by |: leave it out"
        arguments.refuse(why, *filter(arguments.has, CHUNKS))
        return
    if chunks > 1:
        arguments.put("parallel.schedule", "interleaved", *PATTERNS)
        arguments.put("parallel.chunks", chunks, *PATTERNS)
    if len(cuts) > 1:
        arguments.put("parallel.cuts", cuts, *PATTERNS)


def _chunks(arguments: Arguments, layers: Any, pipeline: int) -> int | None:
    """Return the stages of each pipeline rank; None if the layers are not known, or after a
    problem."""
    chunks, layers_of_chunk = map(arguments.get, CHUNKS)
    if chunks is not None and layers_of_chunk is not None:
        arguments.refuse("give one of them", *CHUNKS)
        return None
    if not isinstance(layers, int) or layers < 1:
        return None
    if layers_of_chunk is None:
        return max(chunks or 1, 1)
    if layers_of_chunk < 1 or layers % (pipeline * layers_of_chunk):
        arguments.refuse(f"does not divide {layers} layers on {pipeline} ranks", CHUNKS[1])
        return None
    return layers // pipeline // layers_of_chunk


def _add_recompute(arguments: Arguments) -> None:
    """Add what is recomputed: whole layers, all or a number of them, or some of their modules."""
    draft = arguments.draft
    is_selective = arguments.get("recompute_activations")
    kind = "selective" if is_selective else arguments.get("recompute_granularity")
    if arguments.get("checkpoint_activations"):
        kind = "full"
    if kind is None:
        return
    origin = arguments.origin(
        "recompute_activations", "recompute_granularity", "checkpoint_activations"
    )
    draft.put("parallel.recompute", kind, origin)
    name = "recompute_num_layers"
    layers = arguments.get(name) or 1
    if kind == "selective":
        _add_modules(arguments)
    elif arguments.get("recompute_method") == "block" and arguments.has(name):
        arguments.copy("parallel.recompute_layers", name)
    elif layers > 1:
        draft.notes.append(
            f"{arguments.said[name]}: each layer is recomputed alone, not in groups; the results "
            "are the same, the memory is not"
        )


def _add_modules(arguments: Arguments) -> None:
    """Add the modules that are recomputed, and note those that are kept here. The results are the
    same."""
    draft = arguments.draft
    name = "recompute_modules"
    given = arguments.get(name) or ("core_attn",)
    modules = " ".join(given).split()
    unknown = [module for module in modules if module not in MODULES]
    if not unknown:
        ours = [MODULES[module] for module in modules]
        arguments.put("parallel.recompute_modules", ours, name)
    elif draft.needs("parallel.recompute_modules"):
        ours = [MODULES[module] for module in modules if module in MODULES]
        if ours:
            arguments.put("parallel.recompute_modules", ours, name)
        else:
            del draft.keys["parallel.recompute"]
        draft.notes.append(
            f"{arguments.origin(name)}: {', '.join(unknown)} are kept here, not recomputed; the "
            "results are the same, the memory is not (parallel.recompute=full needs least)"
        )
