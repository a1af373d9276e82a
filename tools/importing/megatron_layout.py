"""Ranks, pipeline, recompute and ZeRO-1 of Megatron-LM's arguments: [parallel] and the global
batch."""

from collections.abc import Iterator

from megaprec.comm.experts import describe_misfit
from tools.console.units import counted
from tools.importing.draft import NO_RANKS, Draft
from tools.importing.arguments import Arguments

AXES = {
    "parallel.tensor": "tensor_model_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "parallel.context": "context_parallel_size",
}
MODULES = {"core_attn": "attention", "layernorm": "norm", "moe_act": "activation"}


def add_layout(a: Arguments, draft: Draft, ranks: int | None) -> None:
    """Add the layout. ranks: how many there are; None if that is not said."""
    sizes = [
        draft.settled[key].value if key in draft.settled else a.get(name)
        for key, name in AXES.items()
    ]
    if not all(isinstance(size, int) for size in sizes):
        return
    for (key, name), size in zip(AXES.items(), sizes, strict=True):
        if key != "parallel.context" or size != 1:
            draft.put(key, size, a.origin(name))
    if min(sizes) < 1:
        a.refuse("give numbers from 1 on", *AXES.values())
        return
    tensor, pipeline, context = sizes
    _add_ways(a, draft, context)
    data = _add_data(a, draft, ranks, tensor * pipeline * context, context)
    if a.get("sequence_parallel") and tensor > 1:
        draft.put("parallel.sequence", True, a.origin("sequence_parallel"))
    _add_stages(a, draft, pipeline)
    _add_recompute(a, draft)
    draft.put(
        "parallel.zero",
        bool(a.get("use_distributed_optimizer")),
        a.origin("use_distributed_optimizer"),
    )
    if a.get("overlap_grad_reduce") or a.get("overlap_param_gather"):
        draft.put("parallel.overlap", True, a.origin("overlap_grad_reduce", "overlap_param_gather"))
    if a.has("ddp_bucket_size"):
        draft.put("parallel.bucket", a.get("ddp_bucket_size"), a.origin("ddp_bucket_size"))
    _add_experts(a, draft, ranks, data * context, tensor)
    _add_instances(a, draft, data * context)


WAYS = {"p2p": "ring", "all_gather": "gather", "allgather": "gather"}


def _add_ways(a: Arguments, draft: Draft, context: int) -> None:
    """Add the way in which the ranks of parallel.context exchange keys and values, the same in all
    layers."""
    ways = sorted({*a.get("cp_comm_type")})
    if context == 1:
        if a.has("cp_comm_type"):
            draft.notes.append(
                f"{a.origin('cp_comm_type')}: no ranks share a sequence, so there is no exchange"
            )
    elif len(ways) != 1 or ways[0] not in WAYS:
        a.refuse(
            "keys and values go round (p2p) or are gathered (all_gather) here, in all layers alike",
            "cp_comm_type",
        )
    else:
        draft.put("parallel.context_by", WAYS[ways[0]], a.origin("cp_comm_type"))


SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")


def _add_experts(a: Arguments, draft: Draft, ranks: int | None, data: int, tensor: int) -> None:
    """Add the ranks of experts, which Megatron-LM numbers in the same way
    (megatron/core/parallel_state.py)."""
    expert = a.get(SIZES[0])
    in_slices = a.get(SIZES[1])
    if expert == 1 and in_slices in (None, tensor):
        return
    if expert < 1 or (in_slices is not None and in_slices < 1):
        a.refuse("give numbers from 1 on", *SIZES)
    elif not draft.value("model.experts"):
        draft.notes.append(
            f"{a.origin(*SIZES)}: the model has no experts, so no ranks are for them"
        )
    elif (
        not ranks
        and "parallel.data" not in draft.settled
        and describe_misfit(data, tensor, expert, in_slices or tensor)
    ):
        draft.notes.append(
            f"{a.origin(*SIZES)}: left out, because the arguments do not say how many ranks "
            "there are; --ranks N does"
        )
    elif problem := describe_misfit(data, tensor, expert, in_slices or tensor):
        a.refuse(problem, *(name for name in SIZES if a.has(name)))
    else:
        draft.put("parallel.expert", expert, a.origin(SIZES[0]))
        if in_slices not in (None, tensor):
            draft.put("parallel.expert_tensor", in_slices, a.origin(SIZES[1]))


def _add_instances(a: Arguments, draft: Draft, data: int) -> None:
    """Add the size of ZeRO-1's groups. data: the ranks with equal weights."""
    instances = a.get("num_distributed_optimizer_instances")
    if instances != 1:
        if instances < 1 or not data or data % instances:
            a.refuse(f"must divide the replicas, {data}", "num_distributed_optimizer_instances")
        else:
            draft.put(
                "parallel.zero_size",
                data // instances,
                a.origin("num_distributed_optimizer_instances"),
            )


def _add_data(a: Arguments, draft: Draft, ranks: int | None, per_replica: int, context: int) -> int:
    """Add the number of replicas and the global batch. Returns the first."""
    micro = a.get("micro_batch_size")
    batch = a.get("global_batch_size")
    data = draft.value("parallel.data")
    if not isinstance(data, int):
        data = ranks // per_replica if ranks else 1
        if ranks and ranks % per_replica:
            draft.problems.append(
                f"{ranks} ranks are no multiple of {per_replica}, those of one replica "
                "(tensor x pipeline"
                f"{' x context' if context > 1 else ''}): "
                "--ranks gives another number"
            )
            return 0
        draft.put("parallel.data", data, counted(ranks, "rank") if ranks else NO_RANKS)
        if not ranks:
            said = (
                "parallel.data = 1: the arguments do not say how many ranks there are; --ranks N "
                "does"
            )
            draft.notes.append(f"{said}. The global batch is the same for any number")
    if batch is not None:
        draft.put("train.global_batch", batch, a.origin("global_batch_size"))
    elif not draft.needs("train.global_batch"):
        pass
    elif micro is not None and (ranks or "parallel.data" in draft.settled):
        draft.put(
            "train.global_batch", micro * data, "--micro-batch-size x replicas, as in Megatron-LM"
        )
        draft.notes[:] = [note for note in draft.notes if not note.startswith("parallel.data = 1")]
    elif "global_batch_size" not in a.tried:
        draft.missing.append(
            "--global-batch-size is missing, and without it the batch depends on the number "
            "of ranks: give it, or "
            "--ranks N"
        )
    return data


def _add_stages(a: Arguments, draft: Draft, pipeline: int) -> None:
    """Add an interleaved schedule, and the layers of each stage as Megatron-LM cuts them."""
    layers = draft.value("model.layers")
    chunks = a.get("num_virtual_stages_per_pipeline_rank")
    each = a.get("num_layers_per_virtual_pipeline_stage")
    if chunks is not None and each is not None:
        a.refuse(
            "give one of them",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
        )
        return
    if not isinstance(layers, int) or layers < 1:
        return
    if each is not None:
        if each < 1 or layers % (pipeline * each):
            a.refuse(
                f"does not divide {layers} layers on {pipeline} ranks",
                "num_layers_per_virtual_pipeline_stage",
            )
            return
        chunks = layers // pipeline // each
    if chunks is not None and chunks > 1:
        origin = a.origin(
            "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
        )
        draft.put("parallel.schedule", "interleaved", origin)
        draft.put("parallel.chunks", chunks, origin)
    if pipeline > 1 and draft.needs("parallel.cuts"):
        _add_cuts(a, draft, layers, pipeline, max(chunks or 1, 1))


UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _add_cuts(a: Arguments, draft: Draft, layers: int, pipeline: int, chunks: int) -> None:
    if pipeline > 4096 or chunks > 4096:
        a.refuse("more stages than a model has layers", "pipeline_model_parallel_size")
        return
    cuts = list(_cuts(a, layers, pipeline, chunks))
    if sum(cuts) != layers or min(cuts) < 1:
        shown = (
            f"{layers} layers cannot be cut evenly into {pipeline} x {chunks} stages: "
            "parallel.cuts says how"
        )
        a.refuse(
            shown,
            *(name for name in (*UNEVEN, *COUNTED, "pipeline_model_parallel_size") if a.has(name)),
        )
        return
    draft.put("parallel.cuts", cuts, a.origin(*UNEVEN, *COUNTED))


def _cuts(a: Arguments, layers: int, pipeline: int, chunks: int) -> Iterator[int]:
    """Yield the layers of each stage in the order of the model.

    Ranks with a number of layers of their own cut it into chunks; the embedding and the loss count
    as a layer of the first and the last stage, if asked.
    """
    first, last = (a.get(name) for name in UNEVEN)
    ends = sum(end is not None for end in (first, last))
    between = pipeline - ends
    left = layers - (first or 0) - (last or 0)
    embedding, loss = (int(bool(a.get(name))) for name in COUNTED)
    each = (left + embedding + loss) // between if between else 0
    for chunk in range(chunks):
        for rank in range(pipeline):
            if rank == 0:
                own = first
            elif rank == pipeline - 1:
                own = last
            else:
                own = None
            size = (each if own is None else own) // chunks
            size -= embedding if (chunk, rank) == (0, 0) else 0
            yield size - (loss if (chunk, rank) == (chunks - 1, pipeline - 1) else 0)


def _add_recompute(a: Arguments, draft: Draft) -> None:
    kind = "selective" if a.get("recompute_activations") else a.get("recompute_granularity")
    if kind is None:
        return
    draft.put(
        "parallel.recompute", kind, a.origin("recompute_activations", "recompute_granularity")
    )
    if kind == "selective":
        _add_modules(a, draft)
    elif a.get("recompute_method") == "block" and a.get("recompute_num_layers"):
        draft.put(
            "parallel.recompute_layers",
            a.get("recompute_num_layers"),
            a.origin("recompute_num_layers"),
        )
    elif (a.get("recompute_num_layers") or 1) > 1:
        shown = f"{a.said['recompute_num_layers']}: each layer is recomputed alone, not in groups"
        draft.notes.append(f"{shown}; the results are the same, the memory is not")


def _add_modules(a: Arguments, draft: Draft) -> None:
    modules = a.get("recompute_modules") or ("core_attn",)
    modules = [module for given in modules for module in given.split()]
    unknown = [module for module in modules if module not in MODULES]
    if unknown and draft.needs("parallel.recompute_modules"):
        a.refuse(
            f"there is no recompute of {', '.join(unknown)} here: of {', '.join(MODULES)}",
            "recompute_modules",
        )
        return
    draft.put(
        "parallel.recompute_modules",
        [MODULES[m] for m in modules if m in MODULES],
        a.origin("recompute_modules"),
    )
