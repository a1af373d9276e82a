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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from megaprec.precision.patterns import match_patterns
from megaprec.precision.plan import dtype_name
from megaprec.tokens.indexed import IndexedWriter
from models.config import ModelConfig
from models.delta_net import DeltaNet
from models.latent import Latent
from models.logical_shapes import logical_shapes
from models.mamba import Mamba
from models.spread_layers import spread
from parallel.pipeline.kinds import KINDS
from parallel.sequence_cut import length_multiple
from tools.config.layouts import ALONE
from tools.config.rules.derived import trained_names
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import Data
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.table import Table
from tools.verify.parity.record import Plan, Record

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
# factors of [model] whose defaults are made of sizes
FOLLOWING_SIZES = ("attention_scalar", "embedding_scale")
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
MOST_PIECES = 4  # of a sample, with train.seq_schedule
MOST_CHANGES = 3  # of train.batch_schedule and train.seq_schedule, which few steps go through
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
    run_config: RunConfig, layout_limits: LayoutLimits, full: bool, steps: int, folder: Path
) -> RunConfig:
    """Return the run as it is compared, small unless `full`, in its own layout. folder: folder for
    its files.

    Small steps go through the first batches of train.batch_schedule and lengths of
    train.seq_schedule, and end with the last. With `full` all of them have the last batch and
    length.
    """
    if full:
        run_config = _of_last_size(run_config)
    # virtual ranks divide sizes as ranks do
    tensor = max(layout_limits.tensor, run_config.canonical_shards)
    layout_limits = replace(layout_limits, tensor=tensor)
    ready = run_config if full else shrunk(run_config, layout_limits, steps)
    # evaluations and checks change no number of a step
    train = {
        "steps": max(steps, run_config.train.steps) if full else steps,
        "folder": str(folder),
        "branch_from": "",  # the state to begin with is given
        "eval_every": 0,
        "eval_first": False,
        "sentinel": 0,
        "threads": 1,
        "device": "cpu",
    }
    # the infinity that is planted is to be skipped: neither traced, nor the end of the run
    precision: dict[str, object] = {"trace_overflows": False, "masters_in_checkpoint": True}
    if run_config.precision.on_nonfinite == "raise":
        precision["on_nonfinite"] = "skip"
    return ready.model_copy(
        update={
            "train": ready.train.model_copy(update=train),
            "precision": ready.precision.model_copy(update=precision),
            "checkpoint": ready.checkpoint.model_copy(update={"folder": "", "export": "none"}),
            "log": ready.log.model_copy(update={"sample": "", "timeline": 0, "digests": 0}),
        }
    )


def _of_last_size(run_config: RunConfig) -> RunConfig:
    """Return the run whose steps all have the last batch and length of its schedules."""
    if run_config.train.batch_schedule:
        run_config = run_config.with_constant_batch(run_config.train.global_batch)
    train = run_config.train.model_copy(update={"seq_schedule": ()})
    return run_config.model_copy(update={"train": train})


def with_random_tokens(run_config: RunConfig, steps: int, folder: Path) -> RunConfig:
    """Return the run on random tokens, which are written to `folder`.

    Documents end within samples, and a quarter of the vocabulary never occurs.
    """
    vocab_size = run_config.model.vocab
    train = run_config.train
    largest_batch = max(run_config.batches.sizes)
    count = (steps + 1) * largest_batch * train.seq_length + 1
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(0, max(1, vocab_size * 3 // 4), (count,), generator=generator)
    prefix = folder / "tokens"
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in tokens.split(_document_lengths(run_config, count)):
            writer.add_document(document.tolist())
    settings = {
        key: getattr(run_config.data, key) for key in ("shuffle", "windows", "pack", *RESETS)
    }
    data = Data(source=str(prefix), vocab_size=vocab_size, held_out=0.0, **settings)
    return run_config.model_copy(update={"data": data})


def _document_lengths(run_config: RunConfig, count: int) -> list[int]:
    """Return the lengths of documents of `count` tokens together."""
    seq_length = run_config.train.seq_length
    longest = seq_length * 2 // 3 + 1
    cycle = [longest]
    if run_config.data.pack != "none":
        # some share a sample, and some are cut
        cycle = [longest, seq_length // 4 + 1, seq_length + longest, 1]
    lengths = list[int]()
    tokens_left = count
    while tokens_left:
        length = min(tokens_left, cycle[len(lengths) % len(cycle)])
        lengths.append(length)
        tokens_left -= length
    return lengths


def in_float64(run_config: RunConfig) -> RunConfig:
    """Return the run with every dtype float64 and its loss scaling unchanged."""
    others = {key: value for key, value in run_config.precision if key not in DTYPE_KEYS}
    precision = Precision(**{**others, "compute": "fp64"})
    return run_config.model_copy(update={"precision": precision, "fp8": FP8()})


def alone(run_config: RunConfig) -> RunConfig:
    """Return the run on one process."""
    return run_config.model_copy(update={"parallel": ALONE})


def epsilon(run_config: RunConfig) -> float:
    """Return one unit in the last place of the coarsest dtype of products and sums of gradients."""
    plan = run_config.plan
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


def state_epsilons(run_config: RunConfig) -> dict[str, float]:
    """Return one unit in the last place of the optimizer's weights, and of its moments."""
    plan = run_config.plan
    return {
        "weights": EPSILON[dtype_name(plan.masters)],
        "moments": EPSILON[dtype_name(plan.moments)],
    }


def tokens_per_expert(run_config: RunConfig) -> float:
    """Return the average tokens of an expert in the smallest step; infinite without experts."""
    model_config = run_config.model
    if model_config.experts:
        tokens = min(run_config.batches.sizes) * run_config.train.seq_length
        return tokens * model_config.experts_per_token / model_config.experts
    return inf


def with_clipping(run_config: RunConfig, probe: Record) -> RunConfig:
    """Return the run with a clip norm that is exceeded, if it clips at all. probe: one step of
    it."""
    norm = probe.steps[0]["grad_norm"]
    if not 0 < norm <= run_config.optimizer.clip:
        return run_config
    # two digits, so that the run file can be read
    clip = float(f"{norm / 2:.2g}")
    optimizer = run_config.optimizer.model_copy(update={"clip": clip})
    return run_config.model_copy(update={"optimizer": optimizer})


def make_plan(run_config: RunConfig, probe: Record, steps: int, full: bool) -> Plan:
    """Return the plan: `steps` applied steps, and after the first of them one with an infinity in
    the largest tensor.

    No infinity is planted if non-finite steps are applied.
    """
    if run_config.precision.on_nonfinite == "ignore":
        return Plan(steps, small=not full)
    weights = probe.tensors["before/weight"]
    into = max(probe.names, key=lambda name: (weights[name].dim(), weights[name].numel()))
    return Plan(steps + 1, small=not full, planted=1, into=into)


def with_rates_of(run_config: RunConfig, original: RunConfig) -> RunConfig:
    """Return the small run with the rates of the original, whose phases are so short that the few
    steps go through all of them."""
    lr = original.lr
    warmup = min(lr.warmup, 1)
    decay = min(lr.decay, 3)
    unit = "steps"
    if run_config.train.batch_schedule:
        # steps have no fixed number of samples: the first one, and the last three
        steps = run_config.train.steps
        batches = run_config.batches
        warmup *= batches.at(0)
        end = batches.after(0, steps)
        decay = end - batches.after(0, max(0, steps - decay))
        unit = "samples"
    phases = {
        "schedule": lr.schedule,
        "warmup": warmup,
        "decay": decay,
        "final": lr.final,
        "initial": lr.initial,
        "unit": unit,
    }
    rates = run_config.lr.model_copy(update=phases)
    return run_config.model_copy(update={"lr": rates})


def _frozen_of(run_config: RunConfig, model: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of optimizer.frozen that concern the small model, which has fewer layers;
    none if they would leave nothing to be trained."""
    patterns = run_config.optimizer.frozen
    names = [*logical_shapes(model)]
    used = match_patterns(patterns, names)
    frozen = tuple(pattern for pattern, is_used in zip(patterns, used, strict=True) if is_used)
    optimizer = run_config.optimizer.model_copy(update={"frozen": frozen})
    return frozen if trained_names(optimizer, model) else ()


def shrunk(run_config: RunConfig, layout_limits: LayoutLimits, steps: int) -> RunConfig:
    """Return the small run of so many steps, on one process. The vocabulary must be known."""
    train = {**_train(run_config, layout_limits, steps), "init_from": ""}
    rates = {
        "schedule": "constant",
        "warmup": 0,
        "decay": 0,
        "length": 0,
        "final": 0.0,
        "initial": 0.0,
    }
    model = _model(run_config, layout_limits)
    tables: dict[str, Table | ModelConfig] = {
        "model": model,
        "train": run_config.train.model_copy(update=train),
        "lr": run_config.lr.model_copy(update=rates),
    }
    frozen = _frozen_of(run_config, model)
    tables["optimizer"] = run_config.optimizer.model_copy(update={"frozen": frozen})
    # a scale that grows within the few steps, so that growth is compared too
    if run_config.precision.scaling == "dynamic":
        precision = run_config.precision
        initial = max(precision.min_scale, min(precision.initial_scale, MAX_SCALE))
        interval = min(precision.growth_interval, 2)
        tables["precision"] = precision.model_copy(
            update={"initial_scale": initial, "growth_interval": interval}
        )
    return run_config.model_copy(update=tables)


def changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the differences between two runs, by dotted key."""
    old = dict(_dotted_keys(before))
    new = dict(_dotted_keys(after))
    return {
        dotted_key: (old[dotted_key], value)
        for dotted_key, value in new.items()
        if old[dotted_key] != value
    }


def _dotted_keys(run_config: RunConfig) -> Iterator[tuple[str, Any]]:
    for table, values in run_config:
        for name, value in values:
            yield f"{table}.{name}", value


def alike_size(value: int, least: int, largest_divisor: int) -> int:
    """Return the smallest number from `least` on that 2 to `largest_divisor` divide exactly where
    they divide `value`; at most `value`.
    """
    for number in range(max(1, least), value):
        if _divide_alike(number, value, largest_divisor):
            return number
    return value


def _divide_alike(number: int, original: int, largest_divisor: int) -> bool:
    """Return True if each number from 2 to `largest_divisor` divides both numbers or neither."""
    return all(
        (number % divisor == 0) == (original % divisor == 0)
        for divisor in range(2, largest_divisor + 1)
    )


def _model(run_config: RunConfig, layout_limits: LayoutLimits) -> ModelConfig:
    """Return the small model: each size is the smallest that the ranks divide, or do not divide, as
    they do the original."""
    model_config = run_config.model
    kv_heads, num_heads = _alike_heads(
        model_config.kv_heads, model_config.heads, layout_limits.tensor
    )
    latent = _latent(model_config.latent)
    head_dim = latent.head_dim or _head_dim(model_config)
    # the same ratio of the heads' features to those of the model
    small_features = num_heads * head_dim
    features = model_config.heads * model_config.head_dim
    hidden_size = max(8, small_features * model_config.hidden // features)
    hidden_size = min(hidden_size, model_config.hidden)
    if model_config.hidden % model_config.heads == 0:
        # classes of transformers require it, whatever the features of a head are
        hidden_size = max(1, hidden_size // num_heads) * num_heads
    sequence_length = _length(run_config, layout_limits)
    vocab_size = alike_size(
        model_config.vocab or run_config.data.vocab_size, VOCAB, layout_limits.tensor
    )
    # every chunk of every rank has a layer
    num_layers = min(model_config.layers, max(4, layout_limits.pipeline * _chunks(run_config)))
    max_expert_ranks = max(layout_limits.expert, run_config.parallel.expert)
    sizes: dict[str, Any] = {
        "layers": num_layers,
        "heads": num_heads,
        "kv_heads": kv_heads,
        "latent": latent,
        "head_dim": head_dim,
        **_global_heads(model_config, (num_heads, kv_heads, head_dim), layout_limits.tensor),
        "hidden": hidden_size,
        "vocab": vocab_size,
        **_feed_forwards(
            model_config,
            num_layers,
            min(hidden_size, model_config.ffn),
            layout_limits.tensor,
            max_expert_ranks,
        ),
        "max_positions": min(model_config.max_positions, 2 * sequence_length),
        "window": _window(model_config.window, run_config.train.seq_length, sequence_length),
        "window_layers": window_layers(model_config, num_layers),
        "nope_layers": _nope_layers(model_config, num_layers),
        "delta_net": _delta_net(model_config.delta_net, layout_limits.tensor),
        "delta_layers": _delta_layers(model_config, num_layers),
        "mamba": _mamba(model_config.mamba, layout_limits.tensor),
        "hybrid_pattern": _hybrid_pattern(model_config.hybrid_pattern, num_layers),
    }
    if model_config.mup_base_hidden:
        # A base that is twice as wide has all widths; the scale of scores stays as it is.
        sizes |= {"mup_base_hidden": 2 * sizes["hidden"], "mup_base_head_dim": 0}
    fields = model_config.model_dump()
    # under muP the scale of scores stays as it is
    keys_to_follow = () if model_config.mup_base_hidden else FOLLOWING_SIZES
    for key in keys_to_follow:
        others = {other: value for other, value in fields.items() if other != key}
        # The model has the default of its sizes: the small model gets that of its own.
        if ModelConfig(**others) == model_config:
            fields = others
    return ModelConfig(**{**fields, **sizes})


def _alike_heads(key_heads: int, heads: int, tensor: int) -> tuple[int, int]:
    """Return small numbers of heads of keys and of queries, with as many queries for each key as
    before.

    tensor: the largest number of ranks over which either divides as before.
    """
    # kept, for it is structure
    queries_per_key = heads // key_heads
    few = alike_size(key_heads, min(2, key_heads), tensor)
    # ends with the model's own number at the latest
    while not _divide_alike(queries_per_key * few, heads, tensor):
        few = alike_size(key_heads, few + 1, tensor)
    return few, queries_per_key * few


def _delta_net(sizes: DeltaNet, tensor: int) -> DeltaNet:
    """Return a gated delta net of few narrow heads, whose keys and values differ in width where
    they did."""
    if not sizes:
        return sizes
    key_heads, value_heads = _alike_heads(sizes.key_heads, sizes.value_heads, tensor)
    small = {
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": min(sizes.key_dim, 6),
        "value_dim": min(sizes.value_dim, 8),
    }
    # Kimi Delta Attention has one width, which its other programs know.
    if sizes.gate_rank:
        small |= {"value_dim": min(sizes.value_dim, 6), "gate_rank": min(sizes.gate_rank, 6)}
    return sizes.model_copy(update=small)


def _delta_layers(model_config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a gated delta net, spread as in the model. If that has layers with and
    without one, so does the small model."""
    chosen = _spread(model_config.delta_layers, model_config.layers, num_layers)
    if len(model_config.delta_layers) in (0, model_config.layers):
        return chosen
    return chosen[: num_layers - 1] or (0,)


def _spread(layers: Collection[int], model_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return which of `num_layers` layers stand for some of a model's `model_layers` layers, at the
    same share of the depth."""
    chosen = list[int]()
    for layer_number in range(num_layers):
        layer_of_model = layer_number * model_layers // num_layers
        if layer_of_model in layers:
            chosen.append(layer_number)
    return tuple(chosen)


def _mamba(sizes: Mamba, tensor: int) -> Mamba:
    """Return a Mamba-2 mixer of few narrow heads, as many in a group as before."""
    if not sizes:
        return sizes
    groups, heads = _alike_heads(sizes.groups, sizes.heads, tensor)
    small = {
        "groups": groups,
        "heads": heads,
        "head_dim": min(sizes.head_dim, 6),
        "state_dim": min(sizes.state_dim, 8),
    }
    return sizes.model_copy(update=small)


def _hybrid_pattern(pattern: str, num_layers: int) -> str:
    """Return the letters of so many layers, spread as in the model, with every letter of it."""
    return "".join(spread(pattern, num_layers))


def _latent(sizes: Latent) -> Latent:
    """Return latents and features of a head that are small, and of widths that differ where they
    did."""
    small = {"kv_rank": 12, "query_rank": 14, "rope_dim": 4, "nope_dim": 6, "value_dim": 8}
    update = {key: min(getattr(sizes, key), size) for key, size in small.items()}
    return sizes.model_copy(update=update)


def _feed_forwards(
    model_config: ModelConfig, num_layers: int, width: int, tensor: int, expert: int
) -> dict[str, Any]:
    """Return the sizes of feed-forwards and experts, with groups of as many experts as can be
    chosen from them.

    tensor, expert: the largest number of ranks that feed-forwards are cut over, and that experts
        are spread over.
    """
    if model_config.experts:
        width = min(width, MAX_EXPERT_WIDTH)
    widths = {
        key: alike_size(size, min(width, size), tensor)
        for key, size in model_config.ffn_widths.items()
    }
    dense_layers = [
        layer_number for layer_number in model_config.dense_layers if layer_number < num_layers
    ]
    if len(dense_layers) == num_layers:
        dense_layers.pop()  # one layer with experts is left
    chosen = model_config.experts_per_token
    # twice as many as a token chooses, or there would be little to choose from
    least_experts = model_config.router.at_least(max(4, 2 * chosen), chosen)
    experts = model_config.experts
    for number in range(least_experts, model_config.experts, model_config.router.groups):
        if _divide_alike(number, model_config.experts, expert):
            experts = number
            break
    return {
        "dense_ffn": widths["ffn"],
        **widths,
        "dense_layers": tuple(dense_layers),
        "experts": experts,
    }


def _global_heads(
    model_config: ModelConfig, small: tuple[int, int, int], tensor: int
) -> dict[str, int]:
    """Return the heads of layers without the window: of another width than those of others where
    the model's are so, and as few keys and values as ranks can share out as before.

    small: the heads of other layers, their key and value heads, and their width.
    tensor: the largest number of ranks over which heads divide as before.
    """
    num_heads, kv_heads, head_dim = small
    sizes: dict[str, int] = {}
    if width := model_config.global_head_dim:
        sizes["global_head_dim"] = head_dim if width == model_config.head_dim else 2 * head_dim
    if count := model_config.global_kv_heads:
        few = alike_size(count, 1, tensor)
        sizes["global_kv_heads"] = few if num_heads % few == 0 else kv_heads
    return sizes


def _head_dim(model_config: ModelConfig) -> int:
    """Return the smallest even width of a head, from HEAD_DIM on, that rotary positions work
    with; at most the model's."""
    for head_dim in range(HEAD_DIM, model_config.head_dim, 2):
        rotated = int(head_dim * model_config.rotary_fraction)
        # features are rotated in pairs; more than one pair, so that their frequencies differ
        if model_config.positions != "rope" or (rotated > 2 and rotated % 2 == 0):
            return head_dim
    return model_config.head_dim


def _chunks(run_config: RunConfig) -> int:
    return run_config.parallel.chunks or KINDS[run_config.parallel.schedule].chunks


def _window(window: int, before: int, after: int) -> int:
    """Return the window as the same share of the sequence."""
    return min(window, max(2, window * after // before)) if window else 0


def _nope_layers(model_config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers without rotary positions, spread as in the model; one layer at least has
    them."""
    chosen = _spread(model_config.nope_layers, model_config.layers, num_layers)
    return chosen[: num_layers - 1]


def window_layers(model_config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers with the window, spread as in the model; some have it and some do not."""
    if not model_config.window_layers or len(model_config.window_layers) == model_config.layers:
        return ()
    chosen = _spread(model_config.window_layers, model_config.layers, num_layers)
    return chosen[: num_layers - 1] or (num_layers - 1,)


def _length(run_config: RunConfig, layout_limits: LayoutLimits) -> int:
    """Return a small length, which is cut over the ranks, and into pieces, as the original."""
    multiple = length_multiple(layout_limits.context, layout_limits.tensor)
    multiple *= max(map(_few_pieces, _pieces(run_config)))
    return alike_size(run_config.train.seq_length, max(LENGTH, multiple), multiple)


def _pieces(run_config: RunConfig) -> list[int]:
    """Return the number of pieces of a sample by the changes of train.seq_schedule."""
    train = run_config.train
    lengths = [length for _, length in train.seq_schedule] or [train.seq_length]
    return [train.seq_length // length for length in lengths]


def _few_pieces(pieces: int) -> int:
    """Return the largest number up to MOST_PIECES that divides `pieces`; a number that none
    divides, as it is."""
    return next((few for few in range(MOST_PIECES, 1, -1) if pieces % few == 0), pieces)


def _train(run_config: RunConfig, layout_limits: LayoutLimits, steps: int) -> Mapping[str, Any]:
    """Return [train] with few micro-batches of few samples; a schedule file keeps its number of
    micro-batches. Batches and lengths that change do so with each of the first steps."""
    train = run_config.train
    micro_batch = min(train.micro_batch, 2)
    most = min(steps, MOST_CHANGES)
    small_batches: dict[int, int] = {}
    least = MICROBATCHES
    for batch in run_config.batches.sizes:
        microbatches = batch // train.micro_batch
        if not run_config.parallel.schedule_file:
            microbatches = alike_size(microbatches, least, layout_limits.data)
        small_batches[batch] = micro_batch * microbatches
        # batches that differ stay different
        least = microbatches + 1
    original_batches = [batch for _, batch in run_config.batches.changes]
    batches = [small_batches[batch] for batch in _first_and_last(original_batches, most)]
    length = _length(run_config, layout_limits)
    pieces = [_few_pieces(count) for count in _first_and_last(_pieces(run_config), most)]
    # the samples that are consumed before each change
    begins = [0]
    for step in range(most - 1):
        begins.append(begins[-1] + batches[min(step, len(batches) - 1)])
    small: dict[str, Any] = {
        "micro_batch": micro_batch,
        "global_batch": batches[-1],
        "seq_length": length,
    }
    if train.batch_schedule:
        small["batch_schedule"] = tuple(zip(begins, batches, strict=False))
    if train.seq_schedule:
        lengths = [length // count for count in pieces]
        small["seq_schedule"] = tuple(zip(begins, lengths, strict=False))
    return small


def _first_and_last(values: Sequence[int], most: int) -> list[int]:
    """Return at most so many of values: the first ones, and the last."""
    if len(values) <= most:
        return [*values]
    return [*values[: most - 1], values[-1]]
