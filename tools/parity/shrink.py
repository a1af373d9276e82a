"""Making a run small without changing its structure.

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
from typing import Any

from models.config import ModelConfig
from models.latent import Latent
from parallel.pipeline.builders import default_chunks
from parallel.sequence_cut import unit
from tools.config.run_file import RunConfig
from tools.config.table import Table

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
