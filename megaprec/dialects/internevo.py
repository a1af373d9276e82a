"""Dialect of InternEvo: `model = dict(...)` with its dtype, and the scaler and clipping beside it.

The whole model is in `dtype`: weights, gradients and their reduction; masters and moments are FP32.
FP16 and BF16 both have a dynamic loss scale. "torch.tf32" is FP32 whose products may use TF32.

    [precision.internevo]                           model = dict(...)
    dtype = "torch.bfloat16"                        default: torch.float16
    num_layers = 8                                  keys of the model are those of [model] in
                                                    InternEvo's words
    [precision.internevo.grad_scaler]               max_scale, hysteresis, growth_factor,
                                                    backoff_factor
    [precision.internevo.grad_scaler.fp16]          initial_scale, min_scale, growth_interval
    [precision.internevo.hybrid_zero_optimizer]     clip_grad_norm, overlap_sync_grad,
                                                    overlap_sync_param, reduce_bucket_size
    [precision.internevo.parallel]                  zero1, tensor, pipeline: sizes; zero1 of 1 is
                                                    off, -1 all ranks

A dict with a size describes a whole model, see `internevo_model`; without a size the run file
describes the model. In float32 and tf32, flash attention gets query, key and value in BF16; without
flash attention, scores and probabilities are rounded to the dtype
(`internlm/model/modules/multi_head_attention.py`). So are the tables of positions
(`modules/embedding.py`). megaprec differs from InternEvo in three oversights: it also clips TF32
and FP32 gradients, it counts a NaN as an overflow, and its clip_grad_norm = 0 turns off clipping
only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field

from megaprec.dialects.internevo_model import (
    Model,
    express_model,
    has_flash,
    model_notes,
    model_settings,
)
from megaprec.dialects.reading import (
    UNKNOWN,
    Decision,
    Keys,
    Reading,
    Resolved,
    all_of,
    no_such_key,
)
from megaprec.dialects.scaling import CEILING, LossScale, cap, refuse_outside
from megaprec.precision.patterns import NORMS
from megaprec.precision.plan import TORCH_DTYPES, LossScaling, PrecisionPlan

SYSTEM = "InternEvo"
PREFIX = "precision.internevo"


class InternEvoGradScaler(Keys):
    """Keys of `grad_scaler = dict(...)`."""

    fp16: Any = None
    growth_factor: float = Field(default=2, gt=1)
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    max_scale: LossScale = 2.0**24
    hysteresis: int = Field(default=2, gt=0)


class Fp16(Keys):
    """Keys of `grad_scaler.fp16`, which apply to BF16 too."""

    initial_scale: LossScale = 2.0**16
    min_scale: LossScale = 1
    growth_interval: int = Field(default=1000, gt=0)


class HybridZeroOptimizer(Keys):
    """Keys of `hybrid_zero_optimizer = dict(...)`; the size is in elements."""

    clip_grad_norm: float = Field(default=1.0, ge=0)
    overlap_sync_grad: bool | None = None
    overlap_sync_param: bool | None = None
    reduce_bucket_size: int | None = Field(default=None, gt=0)


class InternEvoParallel(Keys):
    """Keys of `parallel = dict(...)`, each a size or dict(size=...).

    zero1: number of data-parallel ranks over which the optimizer state is sharded.
    sequence_parallel: of older files, which a mode of `tensor` says since.
    """

    zero1: Any = -1
    tensor: Any = None
    pipeline: Any = None
    weight: Any = None
    sequence_parallel: bool = False


SCALE_KEYS = (
    "grad_scaler.growth_factor",
    "grad_scaler.backoff_factor",
    "grad_scaler.max_scale",
    "grad_scaler.hysteresis",
    "grad_scaler.fp16.initial_scale",
    "grad_scaler.fp16.min_scale",
    "grad_scaler.fp16.growth_interval",
)


def resolve(config: Mapping[str, Any] | None, sources: Mapping[str, str] | None = None) -> Resolved:
    """Return the plan and settings of `config`, a model dict with the other tables inside. Raises
    UserError.

    sources: full dotted key -> where it was set: a file or the command line.
    """
    reading = Reading(SYSTEM, PREFIX, sources)
    model = reading.read(Model, config)
    scaling = _scaling(reading, model)
    settings = _settings(reading, model)
    for key, run_file_key in DEFAULTED.items():
        # InternEvo's default decided it only because the actual value is unknown
        if f"{PREFIX}.{key}" in reading.unknown_keys:
            settings.pop(run_file_key, None)
    reading.raise_problems()
    # "tf32", which is no dtype of torch's, is FP32 whose products may use TF32
    dtype = reading.decided_by(TORCH_DTYPES.get(model.dtype, torch.float32), "dtype")
    residual = dtype
    if model.residual_in_fp32:
        residual = reading.decided_by(torch.float32, "residual_in_fp32")
    attention: torch.dtype = dtype.value
    scores: torch.dtype = dtype.value
    if model.use_flash_attn:
        # flash attention knows no FP32
        attention = torch.bfloat16 if dtype.value == torch.float32 else dtype.value
        scores = torch.float32
    output = torch.float32 if model.output_to_fp32 else dtype.value
    decisions = {
        **all_of(("compute", "parameters", "gradients", "reduce", "buffers"), dtype),
        "attention": reading.decided_by(attention, "use_flash_attn", "dtype"),
        "scores": reading.decided_by(scores, "use_flash_attn", "dtype"),
        **all_of(("masters", "moments", "sensitive"), reading.always(torch.float32)),
        "output": reading.decided_by(output, "output_to_fp32"),
        **all_of(("residual", "pipeline"), residual),
        "tf32": reading.decided_by(model.dtype == "tf32", "dtype"),
        "keep_fp32": reading.decided_by(NORMS if model.use_fp32_norm else (), "use_fp32_norm"),
        "scaling": scaling,
    }
    return reading.resolved(decisions, settings, tuple(_notes(reading, model)))


# keys with a default from which a run-file key follows -> that run-file key
DEFAULTED = {
    "hybrid_zero_optimizer.clip_grad_norm": "optimizer.clip",
    "parallel.zero1": "parallel.zero",
}


def _read_scaler(reading: Reading, model: Model) -> tuple[InternEvoGradScaler, Fp16]:
    """Return the tables `grad_scaler` and `grad_scaler.fp16`."""
    scaler = reading.read(InternEvoGradScaler, model.grad_scaler, "grad_scaler")
    fp16 = reading.read(Fp16, scaler.fp16, "grad_scaler.fp16")
    return scaler, fp16


def _scaling(reading: Reading, model: Model) -> Decision:
    """Return the loss scale, of FP16 and of BF16."""
    scaler, fp16 = _read_scaler(reading, model)
    for key in sorted(reading.unknown_keys):
        if key.startswith(f"{PREFIX}.grad_scaler"):
            name = key.removeprefix(f"{PREFIX}.")
            reading.refuse(name, UNKNOWN, f"numbers depend on it: set {key} = ...")
    initial_key = "grad_scaler.fp16.initial_scale"
    refuse_outside(reading, initial_key, fp16.initial_scale, fp16.min_scale, scaler.max_scale)
    if model.dtype in ("float32", "tf32"):
        return reading.decided_by(LossScaling(), "dtype")
    scaling = LossScaling(
        "dynamic",
        initial=fp16.initial_scale,
        minimum=fp16.min_scale,
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=fp16.growth_interval,
        hysteresis=scaler.hysteresis,
        maximum=cap(scaler.max_scale),
    )
    return reading.decided_by(scaling, *SCALE_KEYS)


def _settings(reading: Reading, model: Model) -> dict[str, Decision]:
    """Return the other decisions of the configuration, by run-file key."""
    settings = model_settings(reading, model)
    if model.checkpoint:  # the fraction of layers that are recomputed
        settings["parallel.recompute"] = reading.decided_by("full", "checkpoint")
        settings["parallel.recompute_fraction"] = reading.decided_by(model.checkpoint, "checkpoint")
    if model.num_chunks > 1:
        settings["parallel.schedule"] = reading.decided_by("interleaved", "num_chunks")
        settings["parallel.chunks"] = reading.decided_by(model.num_chunks, "num_chunks")
    if model.hybrid_zero_optimizer is not None:
        settings |= _optimizer(reading, model.hybrid_zero_optimizer)
    if model.parallel is not None:
        settings |= _parallel(reading, reading.read(InternEvoParallel, model.parallel, "parallel"))
    return settings


def _optimizer(reading: Reading, table: Any) -> dict[str, Decision]:
    """Return clipping and communication, by run-file key.

    Gradient reduction and parameter gathering can only be overlapped both or neither here.
    """
    prefix = "hybrid_zero_optimizer"
    optimizer = reading.read(HybridZeroOptimizer, table, prefix)
    settings = {
        "optimizer.clip": reading.decided_by(optimizer.clip_grad_norm, f"{prefix}.clip_grad_norm")
    }
    overlaps = (optimizer.overlap_sync_grad, optimizer.overlap_sync_param)
    if overlaps != (None, None):
        keys = (f"{prefix}.overlap_sync_grad", f"{prefix}.overlap_sync_param")
        settings["parallel.overlap"] = reading.decided_by(any(overlaps), *keys)
    if optimizer.reduce_bucket_size is not None:
        settings["parallel.bucket"] = reading.decided_by(
            optimizer.reduce_bucket_size, f"{prefix}.reduce_bucket_size"
        )
    return settings


def _parallel(reading: Reading, sizes: InternEvoParallel) -> dict[str, Decision]:
    """Return sizes of the layout, ZeRO and sequence parallelism, by run-file key."""
    settings: dict[str, Decision] = {}
    _refuse_unknown_keys(reading, sizes)
    for name in ("tensor", "pipeline"):
        value = getattr(sizes, name)
        size = None if value is None else _read_size(reading, name, value)
        if size is not None:
            key = f"parallel.{name}"
            settings[key] = reading.decided_by(size, key, f"{key}.size")
    settings |= _sequence(reading, sizes)
    if sizes.weight is not None:
        weight_ranks = _read_size(reading, "weight", sizes.weight) or 1
        if weight_ranks > 1:
            why = "weight parallelism is not supported: use 1"
            reading.refuse("parallel.weight", sizes.weight, why)
    zero = _read_size(reading, "zero1", sizes.zero1)
    # 1 is off; 0 and less are all data-parallel ranks; more are that many of them
    if zero is not None:
        keys = ("parallel.zero1", "parallel.zero1.size")
        settings["parallel.zero"] = reading.decided_by(zero != 1, *keys)
        if zero > 1:
            settings["parallel.zero_size"] = reading.decided_by(zero, *keys)
    return settings


def _sequence(reading: Reading, sizes: InternEvoParallel) -> dict[str, Decision]:
    """Return sequence parallelism by its run-file key if a mode of tensor parallelism or an older
    key turns it on, else nothing. A mode that is unknown or refused is recorded in `reading`."""
    mode = "mtp"  # the plain one
    if isinstance(sizes.tensor, Mapping):
        mode = sizes.tensor.get("mode", mode)
    if mode is UNKNOWN:
        reading.unknown_keys.add(f"{PREFIX}.parallel.tensor.mode")
        return {}
    if mode not in SEQUENCE:
        reading.refuse(
            "parallel.tensor.mode", mode, f"not supported: use one of {', '.join(SEQUENCE)}"
        )
        return {}
    if SEQUENCE[mode]:
        keys = ("parallel.tensor", "parallel.tensor.mode")
        return {"parallel.sequence": reading.decided_by(True, *keys)}
    if sizes.sequence_parallel:
        return {"parallel.sequence": reading.decided_by(True, "parallel.sequence_parallel")}
    return {}


def _refuse_unknown_keys(reading: Reading, sizes: InternEvoParallel) -> None:
    """Record a problem for each key of the tables in `parallel` that InternEvo does not have."""
    for name, other_keys in PARALLEL_KEYS.items():
        table = getattr(sizes, name)
        if not isinstance(table, Mapping):
            continue
        keys = ("size", *other_keys)
        for key in table:
            if key not in keys:
                why = no_such_key(str(key), keys)
                reading.refuse(f"parallel.{name}.{key}", table[key], why)


# mode of tensor parallelism -> sequence parallelism
SEQUENCE = {
    "mtp": False,
    "msp": True,
    "fsp": True,
}


def _read_size(reading: Reading, name: str, value: Any) -> int | None:
    """Return a number of ranks, which may be in a table; None if it is unknown or no number."""
    size = value
    if isinstance(value, Mapping):
        size = value.get("size", -1 if name == "zero1" else 1)  # InternEvo's defaults
    if size is UNKNOWN:
        reading.unknown_keys.add(f"{PREFIX}.parallel.{name}.size")
        return None
    is_integer = isinstance(size, int) and not isinstance(size, bool)
    if is_integer and (size > 0 or name == "zero1"):
        return size
    reading.refuse(f"parallel.{name}", value, "must be a number of ranks, or dict(size=...)")
    return None


def _notes(reading: Reading, model: Model) -> list[str]:
    """Return notes on the whole configuration."""
    notes: list[str] = []
    # a default that decides all numbers should be seen
    if f"{PREFIX}.dtype" not in reading.set_keys:
        notes.append("dtype is not given: InternEvo takes torch.float16")
    unknown_names = sorted(key.removeprefix(f"{PREFIX}.") for key in reading.unknown_keys)
    if unknown_names:
        names = ", ".join(unknown_names)
        notes.append(
            f"{names}: the value is not known, so the run file must set what depends on it"
        )
    notes += _notes_of_layout(reading, model)
    if model.dtype in ("float32", "tf32"):
        notes += _notes_of_idle_scaler(reading, model)
    return [*notes, *model_notes(reading, model)]


def _notes_of_layout(reading: Reading, model: Model) -> Iterator[str]:
    """Yield notes on keys that are about where numbers lie and travel, not about which they are."""
    keys: list[str] = []
    if f"{PREFIX}.embed_split_hidden" in reading.set_keys:
        keys.append("embed_split_hidden")
    if f"{PREFIX}.parallel_output" in reading.set_keys and not model.parallel_output:
        keys.append("parallel_output")
    if keys:
        yield (
            f"{', '.join(keys)}: the same numbers either way; here the vocabulary of embedding and "
            "logits is sharded over tensor ranks"
        )
    if f"{PREFIX}.dropout_selective_checkpoint" in reading.set_keys:
        yield (
            "dropout_selective_checkpoint: the same numbers either way; here parallel.recompute "
            "decides what is recomputed"
        )
    if communication := [*_communication_keys(model.parallel)]:
        yield f"{', '.join(communication)}: how ranks communicate, with the same numbers either way"


def _notes_of_idle_scaler(reading: Reading, model: Model) -> tuple[str, ...]:
    """Return notes on keys of a loss scaler in a dtype that has none."""
    why = "in float32 and tf32, which have no loss scale"
    scaler, fp16 = _read_scaler(reading, model)
    own_keys = ("growth_factor", "backoff_factor", "max_scale", "hysteresis")
    notes = reading.idle_note(scaler, own_keys, why, "grad_scaler")
    return notes + reading.idle_note(fp16, Fp16.model_fields, why, "grad_scaler.fp16")


def _communication_keys(parallel: object) -> Iterator[str]:
    """Yield the keys in `parallel` that concern only the timing and memory of communication, not
    its content."""
    if not isinstance(parallel, Mapping):
        return
    for name, keys in COMMUNICATION.items():
        table = parallel.get(name)
        if isinstance(table, Mapping):  # a plain number is the size
            for key in keys:
                if key in table:
                    yield f"parallel.{name}.{key}"


# table in `parallel` -> its keys about communication
COMMUNICATION = {
    "zero1": ("fsdp",),
    "pipeline": ("interleaved_overlap",),
    "weight": ("overlap", "memory_pool"),
}
# table in `parallel` -> the keys that it has besides its size
PARALLEL_KEYS = {
    "tensor": ("mode",),
    **COMMUNICATION,
}

# InternEvo's key -> run-file key of the same value
_MODEL_KEYS = {
    "num_chunks": "parallel.chunks",
    "checkpoint": "parallel.recompute_fraction",
}
_OPTIMIZER_KEYS = {
    "clip_grad_norm": "optimizer.clip",
    "overlap_sync_grad": "parallel.overlap",
    "overlap_sync_param": "parallel.overlap",
    "reduce_bucket_size": "parallel.bucket",
}


def express(plan: PrecisionPlan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one configuration, the nearest to a plan and to the run-file keys in `settings`."""
    scaling = plan.scaling
    names = {torch.float16: "torch.float16", torch.bfloat16: "torch.bfloat16"}
    wide_name = "torch.tf32" if plan.tf32 else "torch.float32"
    config: dict[str, Any] = {"dtype": names.get(plan.compute, wide_name)}
    if plan.residual == torch.float32 and plan.compute != torch.float32:
        config["residual_in_fp32"] = True
    if plan.keep_fp32:
        config["use_fp32_norm"] = True
    if not has_flash(plan):  # the default is true
        config["use_flash_attn"] = False
    if scaling.kind == "dynamic":
        config["grad_scaler"] = {
            "fp16": {
                "initial_scale": scaling.initial,
                "min_scale": scaling.minimum,
                "growth_interval": scaling.growth_interval,
            },
            "growth_factor": scaling.growth_factor,
            "backoff_factor": scaling.backoff_factor,
            "max_scale": scaling.maximum or CEILING,
            "hysteresis": scaling.hysteresis,
        }
    return [config | express_model(plan, settings) | _express_settings(settings)]


def _express_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return InternEvo's keys of optimizer and parallelism."""
    config: dict[str, Any] = {}
    for key, name in _MODEL_KEYS.items():
        if settings.get(name):  # InternEvo's default is the same as 0 or no value
            config[key] = settings[name]
    optimizer = {key: settings[name] for key, name in _OPTIMIZER_KEYS.items() if name in settings}
    if optimizer:
        config["hybrid_zero_optimizer"] = optimizer
    parallel: dict[str, Any] = {}
    for name in ("tensor", "pipeline"):
        if f"parallel.{name}" in settings:
            parallel[name] = {"size": settings[f"parallel.{name}"]}
    if settings.get("parallel.sequence"):
        # of the modes in SEQUENCE that turn it on, either will do
        parallel["tensor"] = {"size": settings.get("parallel.tensor", 1), "mode": "msp"}
    if "parallel.zero" in settings:
        all_or_none = -1 if settings["parallel.zero"] else 1
        parallel["zero1"] = {"size": settings.get("parallel.zero_size", all_or_none)}
    if parallel:
        config["parallel"] = parallel
    return config
