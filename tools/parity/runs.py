"""The runs that are compared: the user's run, made small, for a few steps on one process, in
float64 and in its own precision.

The faults of a layout depend on structure, not on size: whether heads, vocabulary and batch divide
by the ranks, how many heads share a key, whether there are experts, windows, dropout, several
chunks a rank. So each size becomes the smallest one that the numbers of ranks divide, or do not
divide, as they did the original.

The learning rate is constant, for weights hardly move in the first steps of a warmup. Text is
replaced by random tokens of the small vocabulary, some of which never occur. Some targets are left
out of the loss, so that the replicas' shares differ in tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch

from megaprec.data.indexed import IndexedWriter
from megaprec.precision.plan import dtype_name
from models.config import ModelConfig
from models.latent import Latent
from parallel.pipeline.builders import default_chunks
from parallel.sequence_cut import unit
from tools.config.data_settings import Data
from tools.config.layouts import ALONE
from tools.config.precision_settings import FP8, Precision
from tools.config.run_file import RunConfig
from tools.config.table import Table
from tools.parity.record import Plan, Record

# keys of [precision] that are dtypes, or only make sense with some
DTYPE_KEYS = (
    "compute",
    "parameters",
    "gradients",
    "reduce",
    "masters",
    "moments",
    "rounding",
    "pipeline",
    "buffers",
    "residual",
    "attention",
    "scores",
    "output",
    "tf32",
)
# what documents change, of [data]
RESETS = (
    "reset_attention_mask",
    "reset_position_ids",
    "eod_mask_loss",
)
# one unit in the last place of 1
EPSILON = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "tf32": 2.0**-10,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    "fp8": 2.0**-3,
}
# The small sizes, from which the next one is taken that the ranks divide as the original.
LENGTH = 16
HEAD_DIM = 8
VOCAB = 61
MICROBATCHES = 4
MAX_EXPERT_WIDTH = 32
MAX_SCALE = 4096.0  # highest initial loss scale: the first of a few steps must not overflow


@dataclass(frozen=True)
class LayoutLimits:
    """The largest sizes of the axes among the layouts. expert: the ranks over which experts are
    spread."""

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    expert: int = 1


def made_ready(
    config: RunConfig, most: LayoutLimits, full: bool, steps: int, folder: Path
) -> RunConfig:
    """Return the run as it is compared, small unless `full`, in its own layout. folder: folder for
    its files."""
    ready = config if full else shrunk(config, most)
    # evaluations and checks change no number of a step
    train = {
        "steps": max(steps, config.train.steps) if full else steps,
        "folder": str(folder),
        "eval_every": 0,
        "sentinel": 0,
        "threads": 1,
        "device": "cpu",
    }
    precision: dict[str, object] = {"trace_overflows": False, "masters_in_checkpoint": True}
    if config.precision.on_nonfinite == "raise":
        precision["on_nonfinite"] = "skip"
    return ready.model_copy(
        update={
            "train": ready.train.model_copy(update=train),
            "precision": ready.precision.model_copy(update=precision),
            "optimizer": ready.optimizer.model_copy(update={"validation": "before"}),
            "log": ready.log.model_copy(update={"sample": "", "timeline": 0, "digests": 0}),
        }
    )


def with_random_tokens(config: RunConfig, steps: int, folder: Path) -> RunConfig:
    """Return the run on random tokens, which are written to `folder`.

    Documents end within samples, and a quarter of the vocabulary never occurs.
    """
    vocab = config.model.vocab
    train = config.train
    count = (steps + 1) * train.global_batch * train.seq_length + 1
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(0, max(1, vocab * 3 // 4), (count,), generator=generator)
    prefix = folder / "tokens"
    with IndexedWriter(prefix, vocab) as writer:
        for document in tokens.split(train.seq_length * 2 // 3 + 1):
            writer.add_document(document.tolist())
    settings = {key: getattr(config.data, key) for key in ("shuffle", *RESETS)}
    data = Data(source=str(prefix), vocab_size=vocab, held_out=0.0, **settings)
    return config.model_copy(update={"data": data})


def in_float64(config: RunConfig) -> RunConfig:
    """Return the run with every dtype float64 and its loss scaling unchanged."""
    others = {key: value for key, value in config.precision if key not in DTYPE_KEYS}
    precision = Precision(**{**others, "compute": "fp64"})
    return config.model_copy(update={"precision": precision, "fp8": FP8()})


def alone(config: RunConfig) -> RunConfig:
    """Return the run on one process."""
    return config.model_copy(update={"parallel": ALONE})


def epsilon(config: RunConfig) -> float:
    """Return one unit in the last place of the coarsest dtype of products and sums of gradients."""
    plan = config.plan
    dtypes = (
        plan.compute,
        plan.attention,
        plan.scores,
        plan.gradients,
        plan.reduce,
        plan.pipeline,
    )
    names = [dtype_name(dtype) for dtype in dtypes]
    if plan.fp8:
        names.append("fp8")
    if plan.tf32:
        names.append("tf32")
    return max(EPSILON[name] for name in names)


def kept(config: RunConfig) -> dict[str, float]:
    """Return one unit in the last place of the optimizer's weights, and of its moments."""
    plan = config.plan
    return {
        "weights": EPSILON[dtype_name(plan.masters)],
        "moments": EPSILON[dtype_name(plan.moments)],
    }


def tokens_per_expert(config: RunConfig) -> float:
    """Return the average tokens of an expert in one step; infinite without experts."""
    model = config.model
    if model.experts:
        return config.tokens_per_step * model.experts_per_token / model.experts
    return inf


def clipped(config: RunConfig, probe: Record) -> RunConfig:
    """Return the run with a clip norm that is exceeded, if it clips at all. probe: one step of
    it."""
    norm = probe.steps[0]["grad_norm"]
    if not 0 < norm <= config.optimizer.clip:
        return config
    clip = float(f"{norm / 2:.2g}")
    optimizer = config.optimizer.model_copy(update={"clip": clip})
    return config.model_copy(update={"optimizer": optimizer})


def planned(config: RunConfig, probe: Record, steps: int, full: bool) -> Plan:
    """Return the plan: `steps` applied steps, and after the first of them one with an infinity in
    the largest tensor.

    No infinity is planted if non-finite steps are applied.
    """
    if config.precision.on_nonfinite == "ignore":
        return Plan(steps, small=not full)
    weights = probe.tensors["before/weight"]
    into = max(probe.names, key=lambda name: (weights[name].dim(), weights[name].numel()))
    return Plan(steps + 1, not full, planted=1, into=into)


def shrunk(config: RunConfig, most: LayoutLimits) -> RunConfig:
    """Return the small run, on one process. The vocabulary must be known."""
    train = {**_train(config, most), "init_from": ""}
    rates = {"schedule": "constant", "warmup": 0, "decay": 0, "length": 0, "final": 0.0}
    tables: dict[str, Table | ModelConfig] = {
        "model": _model(config, most),
        "train": config.train.model_copy(update=train),
        "lr": config.lr.model_copy(update=rates),
    }
    if config.precision.scaling == "dynamic":
        initial = max(config.precision.min_scale, min(config.precision.initial_scale, MAX_SCALE))
        interval = min(config.precision.growth_interval, 2)
        tables["precision"] = config.precision.model_copy(
            update={"initial_scale": initial, "growth_interval": interval}
        )
    return config.model_copy(update=tables)


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the differences between two runs, by dotted key."""
    old = dict(_dotted_keys(before))
    new = dict(_dotted_keys(after))
    return {key: (old[key], value) for key, value in new.items() if old[key] != value}


def _dotted_keys(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for table, values in config:
        for name, value in values:
            yield f"{table}.{name}", value


def like(value: int, least: int, most: int) -> int:
    """Return the smallest number from `least` on that 2 to `most` divide exactly where they divide
    `value`; at most `value`.
    """
    for number in range(max(1, least), value):
        if _divide_alike(number, value, most):
            return number
    return value


def _divide_alike(number: int, original: int, most: int) -> bool:
    """Return True if each number from 2 to `most` divides both numbers or neither."""
    return all(
        (number % divisor == 0) == (original % divisor == 0) for divisor in range(2, most + 1)
    )


def _model(config: RunConfig, most: LayoutLimits) -> ModelConfig:
    model = config.model
    group = model.heads // model.kv_heads  # heads that share a key: kept, for it is structure
    kv_heads = like(model.kv_heads, min(2, model.kv_heads), most.tensor)
    while not _divide_alike(group * kv_heads, model.heads, most.tensor):
        kv_heads = like(model.kv_heads, kv_heads + 1, most.tensor)
    heads = group * kv_heads
    latent = _latent(model.latent)
    head_dim = latent.head_dim or _head_dim(model)
    # the same ratio of the heads' features to those of the model
    hidden = max(8, heads * head_dim * model.hidden // (model.heads * model.head_dim))
    length = _length(config, most)
    vocab = like(model.vocab or config.data.vocab_size, VOCAB, most.tensor)
    # every chunk of every rank has a layer
    layers = min(model.layers, max(4, most.pipeline * _chunks(config)))
    max_expert_ranks = max(most.expert, config.parallel.expert)
    sizes: dict[str, Any] = {
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "latent": latent,
        "head_dim": head_dim,
        "hidden": min(hidden, model.hidden),
        "vocab": vocab,
        **_feed_forwards(model, layers, min(hidden, model.ffn), most.tensor, max_expert_ranks),
        "max_positions": min(model.max_positions, 2 * length),
        "window": _window(model.window, config.train.seq_length, length),
        "window_layers": window_layers(model, layers),
    }
    return ModelConfig(**{**model.model_dump(), **sizes})


def _latent(sizes: Latent) -> Latent:
    """Return latents and features of a head that are small, and of widths that differ where they
    did."""
    small = {"kv_rank": 12, "query_rank": 14, "rope_dim": 4, "nope_dim": 6, "value_dim": 8}
    update = {key: min(getattr(sizes, key), size) for key, size in small.items()}
    return sizes.model_copy(update=update)


def _feed_forwards(
    model: ModelConfig, layers: int, width: int, tensor: int, expert: int
) -> dict[str, Any]:
    """Return the sizes of feed-forwards and experts, with groups of as many experts as can be
    chosen from them.

    tensor, expert: the largest number of ranks that feed-forwards are cut over, and that experts
        are spread over.
    """
    if model.experts:
        width = min(width, MAX_EXPERT_WIDTH)
    widths = {key: like(size, min(width, size), tensor) for key, size in model.ffn_widths.items()}
    dense = [layer for layer in model.dense_layers if layer < layers]
    if len(dense) == layers:
        dense.pop()  # one layer with experts is left
    enough = model.router.at_least(max(4, 2 * model.experts_per_token), model.experts_per_token)
    experts = model.experts
    for number in range(enough, model.experts, model.router.groups):
        if _divide_alike(number, model.experts, expert):
            experts = number
            break
    return {
        "dense_ffn": widths["ffn"],
        **widths,
        "dense_layers": tuple(dense),
        "experts": experts,
    }


def _head_dim(model: ModelConfig) -> int:
    """Return the smallest even width of a head, from HEAD_DIM on, that rotary positions work
    with; at most the model's."""
    for head_dim in range(HEAD_DIM, model.head_dim, 2):
        rotated = int(head_dim * model.rotary_fraction)
        # features are rotated in pairs; more than one pair, so that their frequencies differ
        if model.positions != "rope" or (rotated > 2 and rotated % 2 == 0):
            return head_dim
    return model.head_dim


def _chunks(config: RunConfig) -> int:
    return config.parallel.chunks or default_chunks(config.parallel.schedule)


def _window(window: int, before: int, after: int) -> int:
    """Return the window as the same share of the sequence."""
    return min(window, max(2, window * after // before)) if window else 0


def window_layers(model: ModelConfig, layers: int) -> tuple[int, ...]:
    """Return the layers with the window, spread as in the model; some have it and some do not."""
    if not model.window_layers or len(model.window_layers) == model.layers:
        return ()
    chosen = tuple(
        layer for layer in range(layers) if layer * model.layers // layers in model.window_layers
    )
    return chosen[: layers - 1] or (layers - 1,)


def _length(config: RunConfig, most: LayoutLimits) -> int:
    return like(config.train.seq_length, LENGTH, unit(most.context, most.tensor))


def _train(config: RunConfig, most: LayoutLimits) -> Mapping[str, int]:
    """Return [train] with few micro-batches of few samples; a schedule file keeps its number of
    micro-batches."""
    train = config.train
    micro_batch = min(train.micro_batch, 2)
    microbatches = train.global_batch // train.micro_batch
    if not config.parallel.schedule_file:
        microbatches = like(microbatches, MICROBATCHES, most.data)
    return {
        "micro_batch": micro_batch,
        "global_batch": micro_batch * microbatches,
        "seq_length": _length(config, most),
    }
