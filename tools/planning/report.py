"""The words of a plan: the bytes of a rank, the verdict, the predicted step, and the table of
layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from models.estimate.flops import training_flops
from tools.config.expert_ranks import slices
from tools.config.layouts import AXES, in_words
from tools.config.run_file import RunConfig
from tools.console.units import duration, flops, size
from tools.planning.device import RESERVED, Target, target_of
from tools.planning.memory import MemoryModel, RankBytes
from tools.planning.search import Found, Planned, plan_run
from tools.planning.speed import Assumptions, Prediction

STATE = ("weights", "gradients", "masters", "moments", "activations")
OTHERS = {
    "buffers": "rotary tables and FP8 casts",
    "communication": "gradients that travel",
    "sums": "sums of micro-batches",
    "optimizer": "the update",
    "save": "the copy of a save",
    "process": "Python and torch",
}


def head(config: RunConfig, target: Target) -> Iterator[str]:
    """Yield the lines on the run and its device."""
    model = config.sized_model
    p = config.parallel
    t = config.train
    modes = [p.schedule_file or p.schedule] if p.pipeline > 1 else []
    modes += ["sequence parallel"] * p.sequence + ["ZeRO-1"] * (p.zero and p.copies > 1)
    modes += [f"context by {p.context_by}"] * (p.context > 1)
    modes += (
        [f"recompute {', '.join(p.recompute_modules) or p.recompute}"]
        if p.recompute != "none"
        else []
    )
    yield (
        f"model      {model.family}, {model.num_parameters:,} parameters, {t.seq_length:,} tokens "
        "a sequence"
    )
    yield f"layout     {', '.join((in_words(p), *modes))}"
    passes = f"{p.data:,} x {config.num_microbatches:,} micro-batches x {t.micro_batch:,}"
    yield (
        f"batch      {t.global_batch:,} samples = {passes}, {config.tokens_per_step:,} tokens a "
        "step"
    )
    memory = f"{size(target.memory)} of memory" if target.memory else "memory not known"
    yield f"device     {target.name}" + ("" if target.device == "cpu" else f": {memory}")


def memory_lines(planned: Planned, target: Target) -> Iterator[str]:
    """Yield the table of bytes by pipeline rank, and the verdict."""
    rows: list[tuple[str, ...]] = [("rank", *STATE, "other", "total")]
    for first, last, one in _alike(planned.ranks):
        kinds = one.by_kind()
        other = sum(kinds[kind] for kind in OTHERS)
        number = str(first) if first == last else f"{first}-{last}"
        rows.append((number, *(size(kinds[kind]) for kind in STATE), size(other), size(one.total)))
    yield "bytes of a rank, by pipeline rank; activations at their peak"
    yield from aligned(rows)
    fullest = planned.ranks[planned.fullest]
    kinds = fullest.by_kind()
    if other := ", ".join(
        f"{what} {size(kinds[kind])}" for kind, what in OTHERS.items() if kinds[kind]
    ):
        yield f"other      {other}"
    if logits := planned.ranks[-1].logits or max(one.logits for one in planned.ranks):
        yield f"logits     {size(logits)} a micro-batch, within the activations of the last stage"
    yield f"verdict    {fit(planned.ranks, target)}"


def fit(ranks: Sequence[RankBytes], target: Target) -> str:
    """Return whether the run fits, with the numbers that say so."""
    total = max(one.total for one in ranks)
    needs = f"{target.verdict(total)}: {size(total)} on the fullest rank"
    if not target.memory:
        return f"{needs}; --gpu says what there is"
    return f"{needs}, {size(target.usable)} usable ({1 - RESERVED:.0%} of {size(target.memory)})"


def one_line(config: RunConfig) -> str:
    """Return the plan of a run in a line: the bytes of the fullest rank by kind, and the device's
    memory.

    Empty for a custom model, whose memory is not known before it is built.
    """
    if config.model.factory:
        return ""
    target = target_of(config)
    planned = plan_run(config, MemoryModel(target.device), None)
    kinds = planned.ranks[planned.fullest].by_kind()
    parts = {kind: kinds[kind] for kind in STATE} | {"other": sum(kinds[kind] for kind in OTHERS)}
    there = f" of {size(target.memory)}" if target.memory else ", of memory that is not known"
    said = ", ".join(f"{kind} {size(count)}" for kind, count in parts.items())
    refused = "; DOES NOT FIT" if target.verdict(planned.total) == "does not fit" else ""
    return f"{size(planned.total)}{there} a rank: {said}{refused}"


def prediction_lines(
    config: RunConfig, predicted: Prediction, assumed: Assumptions
) -> Iterator[str]:
    """Yield the predicted step and what it rests on."""
    p = predicted
    sent = predicted.traffic
    speed = rates(config, p, assumed)
    hours = config.train.steps * p.seconds / 3600
    within = "tensor and context" if sent.cp else "tensor"
    axes = (("tensor", sent.tp), ("context", sent.cp), ("pipeline", sent.pp), ("data", sent.dp))
    axes += (("experts", sent.experts),)
    traffic = ", ".join(f"{size(count)} over {axis}" for axis, count in axes if count) or "nothing"
    yield "prediction, not a measurement"
    yield (
        f"step       {duration(p.seconds)}: products {duration(p.compute)}, {within} traffic "
        f"{duration(p.tp)},"
    )
    yield f"           replicas {duration(p.dp)}; ranks wait {p.idle:.1%} of the passes"
    yield f"sends      a rank, a step: {traffic}"
    each = f"{flops(speed['tflops'] * 1e12)}/s a rank, MFU {speed['mfu']:.1%}"
    yield f"speed      {speed['tokens_per_s']:,.0f} tokens/s, {each}"
    spent = f"{hours * config.world_size:,.1f} rank-hours"
    yield f"run        {config.train.steps:,} steps in {duration(hours * 3600)}: {spent}"
    yield (
        f"assumed    products at {assumed.efficiency:.0%} of {flops(assumed.tflops * 1e12)}/s a "
        "rank,"
    )
    yield (
        f"           links of {assumed.fast:g} GB/s within {assumed.machine} ranks and "
        f"{assumed.slow:g} GB/s beyond;"
    )
    yield "           other: --efficiency, --tflops, --fast-link, --machine, --slow-link"


def rates(config: RunConfig, predicted: Prediction, assumed: Assumptions) -> dict[str, float]:
    """Return tokens a second of the run, and model TFLOP/s and MFU of a rank."""
    tokens = config.tokens_per_step / predicted.seconds
    each = (
        tokens
        * training_flops(config.sized_model, config.train.seq_length)
        / config.world_size
        / 1e12
    )
    return {"tokens_per_s": tokens, "tflops": each, "mfu": each / assumed.tflops}


def layout_lines(found: Found, ranks: int, target: Target, assumed: Assumptions) -> Iterator[str]:
    """Yield the table of the layouts that fit."""
    small = f" (the smallest needs {size(found.smallest)})" if found.too_large else ""
    cut = any(planned.config.parallel.context > 1 for planned in found.layouts)
    axes = [axis for axis in AXES if cut or axis != "context"]
    yield f"layouts of {ranks:,} ranks, {' x '.join(axes)}, that fit; fastest first"
    if target.device == "cpu":
        yield (
            f"each has a share of {target.name}: {size(target.memory)}, "
            f"{flops(assumed.tflops * 1e12)}/s"
        )
    if not found.layouts:
        yield none_found(found, ranks)
        return
    yield f"{found.too_large} others do not fit{small}, {found.slower} are slower"
    spread = ("experts",) if found.layouts[0].config.model.experts else ()
    if spread:
        yield "experts: the ranks over which they are spread x the slices of each"
    rows = [("layout", *spread, "recompute", "sequence", "memory", "waits", "sends", "step", "MFU")]
    for planned in found.layouts:
        predicted = planned.prediction
        p = planned.config.parallel
        assert predicted is not None
        sent = predicted.traffic
        rows.append(
            (
                " x ".join(str(getattr(p, axis)) for axis in axes),
                *(f"{p.expert} x {slices(p)}" for _ in spread),
                p.recompute,
                "yes" if p.sequence else "no",
                size(planned.total),
                f"{predicted.idle:.1%}",
                size(sent.tp + sent.cp + sent.pp + sent.dp + sent.experts),
                duration(predicted.seconds),
                f"{rates(planned.config, predicted, assumed)['mfu']:.1%}",
            )
        )
    yield from aligned(rows)


def none_found(found: Found, ranks: int) -> str:
    """Return why no layout was found."""
    if found.too_large:
        least = f"the smallest of {found.too_large} needs {size(found.smallest)} a rank"
        return f"no layout of {ranks:,} ranks fits: {least}"
    return (
        f"{ranks:,} ranks have no layout: pipeline is at most model.layers, tensor suits the "
        "model and one machine, "
        "and data x train.micro_batch divides train.global_batch"
    )


def as_data(planned: Planned, target: Target, assumed: Assumptions | None) -> dict[str, Any]:
    """Return a plan as plain values, for JSON."""
    p = planned.config.parallel
    predicted = planned.prediction
    said: dict[str, Any] = {
        "parallel": p.model_dump(),
        "ranks": [
            {**one.by_kind(), "logits": one.logits, "total": one.total} for one in planned.ranks
        ],
        "total": planned.total,
        "verdict": target.verdict(planned.total),
    }
    if predicted and assumed:
        said["prediction"] = asdict(predicted) | rates(planned.config, predicted, assumed)
    return said


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _alike(ranks: Sequence[RankBytes]) -> Iterator[tuple[int, int, RankBytes]]:
    """Yield runs of neighbouring ranks with the same bytes: first, last, and the bytes."""
    for one, run in groupby(enumerate(ranks), lambda pair: pair[1]):
        numbers = [number for number, _ in run]
        yield numbers[0], numbers[-1], one
