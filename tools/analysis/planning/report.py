"""The words of a plan: the bytes of a rank, the verdict, the predicted step, and the table of
layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from math import isinf
from textwrap import wrap
from typing import Any

from models.estimate.flops import training_flops
from models.estimate.storage import without_storage
from models.parameter_counts import num_parameters
from parallel.pipeline.kinds import KINDS
from tools.analysis.planning.accuracy import MEASURED, PLAIN
from tools.analysis.planning.assumed import assumed_lines
from tools.analysis.planning.bottleneck import describe_bottleneck
from tools.analysis.planning.device import RESERVED, DeviceTarget, target_of
from tools.analysis.planning.memory import MemoryModel, RankBytes
from tools.analysis.planning.remedies import Remedy
from tools.analysis.planning.search import (
    LayoutSearch,
    Planned,
    least_of_mean_rank,
    plan_run,
    run_seconds,
    steps_within,
)
from tools.analysis.planning.seconds.assumptions import Assumptions
from tools.analysis.planning.speed import Prediction
from tools.config.layouts import AXES, in_words, zero_in_words
from tools.config.rules.expert_ranks import expert_slices
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Parallel
from tools.console.units import duration, first_of, flops, size

MOST_CHANGES = 8  # of train.batch_schedule that are named
# kinds of bytes with a column of their own, and those that share the column "other"
MAIN_KINDS = ("weights", "gradients", "masters", "moments", "activations")
OTHER_KINDS = {
    "ema": "the average of the weights",
    "staging": "tiles on their way between host and device",
    "buffers": "rotary tables and FP8 casts",
    "communication": "gradients that travel",
    "arriving": "gradients of buckets until they are reduced",
    "gathered": "whole weights of layers that compute",
    "sums": "sums of micro-batches",
    "optimizer": "the update",
    "statistics": "masters before a step of log.statistics",
    "communicators": "NCCL's buffers",
    "save": "the copy of a save",
    "process": "Python and torch",
    "gaps": "gaps between tensors",
}


def run_lines(config: RunConfig, target: DeviceTarget) -> Iterator[str]:
    """Yield the lines on the run and its device."""
    model = config.sized_model
    parallel = config.parallel
    train = config.train
    yield (
        f"model      {model.family}, {num_parameters(model):,} parameters, {train.seq_length:,} "
        "tokens a sequence"
    )
    yield f"layout     {', '.join((in_words(parallel), *_modes(parallel)))}"
    microbatches = f"{config.num_microbatches:,} micro-batches x {train.micro_batch:,}"
    yield (
        f"batch      {train.global_batch:,} samples = {parallel.data:,} x {microbatches}, "
        f"{config.tokens_per_step:,} tokens a step"
    )
    if train.batch_schedule:
        changes = [
            f"{batch:,} from sample {samples:,} on" for samples, batch in train.batch_schedule
        ]
        yield (
            f"batches    {first_of(changes, MOST_CHANGES)}; bytes are those of the largest, the "
            "step is one of the last"
        )
    if train.seq_schedule:
        changes = [
            f"{length:,} from sample {samples:,} on" for samples, length in train.seq_schedule
        ]
        yield (
            f"lengths    {first_of(changes, MOST_CHANGES)}; bytes and the step are those of the "
            "longest"
        )
    if not model.factory:
        with without_storage(target.device):
            if attention := config.attention_kernels(model):
                yield f"attention  {'; '.join(attention)}"
            if recurrent := config.recurrent_kernels(model):
                yield f"recurrent  {'; '.join(recurrent)}"
    memory = f"{size(target.memory)} of memory" if target.memory else "memory not known"
    # the name of a CPU is its memory
    if target.device == "cpu":
        yield f"device     {target.name}"
    else:
        yield f"device     {target.name}: {memory}"


def _modes(parallel: Parallel) -> Iterator[str]:
    """Yield what a layout does besides its sizes."""
    if parallel.pipeline > 1:
        yield str(parallel.schedule_file or parallel.schedule)
    if parallel.sequence:
        yield "sequence parallel"
    if parallel.async_tensor:
        yield "asynchronous tensor parallel"
    if zero := zero_in_words(parallel):
        yield zero
    if parallel.context > 1:
        yield f"context by {parallel.context_by}"
    if parallel.recompute != "none":
        yield f"recompute {', '.join(parallel.recompute_modules) or parallel.recompute}"


def memory_lines(planned: Planned, target: DeviceTarget) -> Iterator[str]:
    """Yield the table of bytes by pipeline rank, and the verdict."""
    rows: list[tuple[str, ...]] = [("rank", *MAIN_KINDS, "other", "total")]
    for first, last, rank_bytes in _group_equal(planned.ranks):
        by_kind = rank_bytes.by_kind()
        numbers = str(first) if first == last else f"{first}-{last}"
        sizes = [size(by_kind[kind]) for kind in MAIN_KINDS]
        other = size(_other(by_kind))
        rows.append((numbers, *sizes, other, size(rank_bytes.total)))
    yield "bytes of a rank, by pipeline rank; activations at their peak"
    yield from aligned(rows)
    by_kind = planned.ranks[planned.fullest].by_kind()
    others: list[str] = []
    for kind, description in OTHER_KINDS.items():
        if by_kind[kind]:
            others.append(f"{description} {size(by_kind[kind])}")
    if others:
        yield f"other      {', '.join(others)}"
    # of the rank of the last stage, which in some schedules is not the last rank
    logits = max(rank.logits for rank in planned.ranks)
    if logits:
        yield f"logits     {size(logits)} a micro-batch, within the activations of the last stage"
    host = max(rank.host for rank in planned.ranks)
    if host:
        yield f"host       {size(host)} of host memory a rank: masters, moments, average"
    yield f"verdict    {describe_fit(planned.ranks, target)}"


def _other(by_kind: Mapping[str, int]) -> int:
    """Return the bytes of the kinds that tables show together."""
    return sum(by_kind[kind] for kind in OTHER_KINDS)


def describe_fit(ranks: Sequence[RankBytes], target: DeviceTarget) -> str:
    """Return whether the run fits, with the numbers that say so."""
    total = max(rank.total for rank in ranks)
    needs = f"{target.verdict(total)}: {size(total)} on the fullest rank"
    if not target.memory:
        return f"{needs}; --gpu says what there is"
    return f"{needs}, {size(target.usable)} usable ({1 - RESERVED:.0%} of {size(target.memory)})"


def beyond_line(config: RunConfig, target: DeviceTarget) -> str:
    """Return the verdict on a run that does not fit in its own layout by what its state takes at
    least."""
    least = least_of_mean_rank(config)
    usable = f"{size(target.usable)} usable"
    return f"verdict    does not fit as it is: at least {size(least)} a rank, {usable}"


def summary_line(config: RunConfig) -> str:
    """Return the plan of a run in a line: the bytes of the fullest rank by kind, and the device's
    memory.

    Empty for a custom model, whose memory is not known before it is built.
    """
    if config.model.factory:
        return ""
    target = target_of(config)
    planned = plan_run(config.on_device(target.device), MemoryModel(target.device), None)
    by_kind = planned.ranks[planned.fullest].by_kind()
    shown = {kind: by_kind[kind] for kind in MAIN_KINDS}
    shown["other"] = _other(by_kind)
    parts = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in shown.items())
    available = f" of {size(target.memory)}" if target.memory else ", of memory that is not known"
    line = f"{size(planned.total)}{available} a rank: {parts}"
    if target.verdict(planned.total) == "does not fit":
        line += "; DOES NOT FIT"
    return line


def prediction_lines(
    planned: Planned, predicted: Prediction, assumed: Assumptions
) -> Iterator[str]:
    """Yield the predicted step and what it rests on."""
    config = planned.config
    traffic = predicted.traffic
    speed = rates(config, predicted, assumed)
    total_seconds = run_seconds(planned, predicted, assumed)
    by_axis = {
        "tensor": traffic.tp,
        "context": traffic.cp,
        "pipeline": traffic.pp,
        "data": traffic.dp,
        "experts": traffic.experts,
    }
    sent = [f"{size(nbytes)} over {axis}" for axis, nbytes in by_axis.items() if nbytes]
    yield "prediction, not a measurement"
    yield from _step_lines(predicted)
    limit, advice = describe_bottleneck(config, predicted, assumed)
    yield f"limit      {limit};"
    yield from (f"           {line}" for line in wrap(advice, 69))
    yield f"sends      a rank, a step: {', '.join(sent) or 'nothing'}"
    rank_speed = f"{flops(speed['tflops'] * 1e12)}/s a rank, MFU {speed['mfu']:.1%}"
    yield f"speed      {speed['tokens_per_s']:,.0f} tokens/s, {rank_speed}"
    yield f"error      {_error(assumed)}"
    rank_hours = total_seconds / 3600 * config.world_size
    yield (
        f"run        {config.train.steps:,} steps in {duration(total_seconds)}: {rank_hours:,.1f} "
        "rank-hours"
    )
    tokens_of_hour = speed["tokens_per_s"] * 3600 / config.world_size
    yield f"           a rank-hour is {tokens_of_hour:,.0f} tokens"
    yield from assumed_lines(config, assumed)


def _step_lines(predicted: Prediction) -> Iterator[str]:
    """Yield the lines on the times of a step by kind."""
    in_passes = {
        "products": predicted.compute,
        "attention": predicted.attention,
        "between products": predicted.elementwise,
        "launches and latency": predicted.fixed,
        "traffic": predicted.tp,
    }
    known = [f"{kind} {duration(seconds)}" for kind, seconds in in_passes.items() if seconds]
    yield f"step       {duration(predicted.seconds)}: {', '.join(known[:2])},"
    if known[2:]:
        yield f"           {', '.join(known[2:])},"
    replicas = f"replicas {duration(predicted.dp)}"
    if predicted.exposed < predicted.dp:
        replicas += f", of which {duration(predicted.exposed)} are waited for"
    if predicted.update:
        replicas += f", update {duration(predicted.update)}"
    yield f"           {replicas};"
    share = _bubble(predicted.idle)
    yield f"           bubble {share:.1%} (time that ranks wait over time that they work)"


def _bubble(idle: float) -> float:
    """Return the bubble of which ranks wait a fraction `idle` of the passes."""
    return idle / (1 - idle)


def _error(assumed: Assumptions) -> str:
    """Return how far predictions are from measured speeds."""
    if isinf(assumed.bandwidth):
        return "not known: only products and messages are timed"
    if assumed.device == "cpu":
        return "not known of this machine; docs/planning.md has that of another CPU"
    if assumed.factor != 1.0:
        return MEASURED.describe()
    return PLAIN.describe()


def remedy_lines(planned: Planned, remedy: Remedy | None) -> Iterator[str]:
    """Yield the line on the cheapest change that makes a run fit."""
    if remedy is None:
        yield "           no ZeRO, bf16 gradients, recomputation or state in host memory is enough;"
        yield "           --ranks N looks for another layout"
        return
    changed = remedy.planned
    cost = ""
    if planned.prediction and changed.prediction:
        longer = changed.prediction.seconds / planned.prediction.seconds - 1
        cost = f", a step {abs(longer):.1%} {'longer' if longer > 0 else 'shorter'}"
    yield f"           it fits with {remedy.describe()}"
    yield f"           ({size(changed.total)}{cost})"


def budget_line(
    planned: Planned, predicted: Prediction, assumed: Assumptions, rank_hours: float
) -> str:
    """Return what a budget buys: tokens, steps and days, by the batches of train.batch_schedule."""
    config = planned.config
    seconds = rank_hours * 3600 / config.world_size
    afforded = steps_within(planned, predicted, assumed, seconds)
    tokens = afforded.samples * config.train.seq_length
    took = duration(afforded.seconds)
    return (
        f"budget     {rank_hours:,.0f} rank-hours: {tokens:,} tokens in {afforded.steps:,} steps, "
        f"{took}"
    )


def rates(config: RunConfig, predicted: Prediction, assumed: Assumptions) -> dict[str, float]:
    """Return tokens a second of the run, and model TFLOP/s and MFU of a rank."""
    tokens = config.tokens_per_step / predicted.seconds
    # of the model, without what is recomputed: as MFU is defined
    token_flops = training_flops(config.sized_model, config.train.seq_length)
    tflops = tokens * token_flops / config.world_size / 1e12
    return {"tokens_per_s": tokens, "tflops": tflops, "mfu": tflops / assumed.tflops}


def layout_lines(
    result: LayoutSearch, ranks: int, target: DeviceTarget, assumed: Assumptions
) -> Iterator[str]:
    """Yield the table of the layouts that fit. target, assumed: of one of the `ranks` ranks."""
    has_context = any(planned.config.parallel.context > 1 for planned in result.layouts)
    axes = [axis for axis in AXES if has_context or axis != "context"]
    yield f"layouts of {ranks:,} ranks, {' x '.join(axes)}, that fit; fastest first"
    if target.device == "cpu":
        yield (
            f"each has a share of {target.name}: {size(target.memory)}, "
            f"{flops(assumed.tflops * 1e12)}/s"
        )
    if not result.layouts:
        yield none_found(result, ranks)
        return
    smallest = f" (the smallest needs {size(result.smallest)})" if result.too_large else ""
    yield f"left out as too large: {result.too_large:,}{smallest}; as slower: {result.slower:,}"
    if result.unseen:
        yield f"stopped: {result.unseen:,} were not looked at"
    has_experts = result.layouts[0].config.model.experts > 0
    if has_experts:
        yield "experts: the ranks over which they are spread x the slices of each"
    yield "stages: of each pipeline rank; batch: samples of a micro-batch"
    columns = ["layout", "stages", "batch", "recompute", "ZeRO", "memory", "bubble", "step", "MFU"]
    if has_experts:
        columns.insert(1, "experts")
    rows = [tuple(columns)]
    for planned in result.layouts:
        cells = _layout_cells(planned, axes, assumed)
        rows.append(tuple(cells[column] for column in columns))
    yield from aligned(rows)


def _layout_cells(planned: Planned, axes: Sequence[str], assumed: Assumptions) -> dict[str, str]:
    """Return the cells of a row of the table of layouts, by column."""
    parallel = planned.config.parallel
    predicted = planned.prediction
    assert predicted is not None  # layouts are searched with a peak speed
    mfu = rates(planned.config, predicted, assumed)["mfu"]
    axis_sizes = [str(getattr(parallel, axis)) for axis in axes]
    return {
        "layout": " x ".join(axis_sizes),
        "experts": f"{parallel.expert} x {expert_slices(parallel)}",
        "stages": str(parallel.chunks or KINDS[parallel.schedule].chunks),
        "batch": str(planned.config.train.micro_batch),
        "recompute": parallel.recompute,
        "ZeRO": _zero_stage(parallel),
        "memory": size(planned.total),
        "bubble": f"{_bubble(predicted.idle):.1%}",
        "step": duration(predicted.seconds),
        "MFU": f"{mfu:.1%}",
    }


def _zero_stage(parallel: Parallel) -> str:
    """Return the stage of ZeRO of a layout, and how many layers are kept whole."""
    if parallel.zero and parallel.copies == 1:
        return "1"
    stage = str(parallel.zero_stage or "-")
    keeps_layers = parallel.shards_weights and parallel.zero_keep
    return f"{stage}, {parallel.zero_keep} kept" if keeps_layers else stage


def none_found(result: LayoutSearch, ranks: int) -> str:
    """Return why no layout was found."""
    if result.too_large:
        least = f"the smallest of {result.too_large} needs {size(result.smallest)} a rank"
        return f"no layout of {ranks:,} ranks fits: {least}"
    return (
        f"{ranks:,} ranks have no layout: pipeline is at most model.layers, tensor suits the "
        "model and one machine, and data x train.micro_batch divides train.global_batch"
    )


def as_data(planned: Planned, target: DeviceTarget, assumed: Assumptions | None) -> dict[str, Any]:
    """Return a plan as plain values, for JSON."""
    predicted = planned.prediction
    ranks: list[dict[str, int]] = []
    for rank in planned.ranks:
        ranks.append(
            {**rank.by_kind(), "logits": rank.logits, "host": rank.host, "total": rank.total}
        )
    data: dict[str, Any] = {
        "parallel": planned.config.parallel.model_dump(),
        "ranks": ranks,
        "total": planned.total,
        "verdict": target.verdict(planned.total),
    }
    if predicted and assumed:
        data["prediction"] = asdict(predicted) | rates(planned.config, predicted, assumed)
    return data


def beyond_as_data(config: RunConfig) -> dict[str, Any]:
    """Return what is known of a run that does not fit in its own layout by what its state takes at
    least, for JSON: `total` is that bound, and there are neither ranks nor a prediction."""
    return {
        "parallel": config.parallel.model_dump(),
        "ranks": [],
        "total": least_of_mean_rank(config),
        "verdict": "does not fit",
    }


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with columns of equal width."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _group_equal(ranks: Sequence[RankBytes]) -> Iterator[tuple[int, int, RankBytes]]:
    """Yield groups of neighbouring ranks with the same bytes: first, last, and the bytes."""
    first = 0
    for rank_bytes, equal_ranks in groupby(ranks):
        num_ranks = len(list(equal_ranks))
        yield first, first + num_ranks - 1, rank_bytes
        first += num_ranks
