"""The lines that `megaprec train` prints before the first step and after the last."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megaprec.checkpoint.atomic import damaged_beside, step_of, whole_checkpoints
from megaprec.checkpoint.keeping import Keep, best_made_here, describe_evaluations, made_here
from megaprec.comm.layout import Part
from megaprec.durable import file_error
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import dtype_name
from megaprec.tokens.blend import Blend
from models.config import ModelConfig
from models.mup import scaled_widths
from models.parameter_counts import num_parameters
from parallel.loopback import listening_in_words
from parallel.pipeline.simulation import bubble, simulate
from tools.config.layouts import in_words, zero_in_words
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Checkpoint
from tools.console.units import counted, date_now, first_of
from tools.console.wrapped import say
from tools.journal.journal import add_event
from tools.journal.records import SAMPLE, VALIDATION_PREFIX, read_events
from tools.parts import optional_parts
from tools.saved.save_record import odd_saves
from tools.saved.train_state import TrainState, find_checkpoint
from tools.training.batches import describe_requested, evaluated_samples
from tools.training.branch import is_branch
from tools.training.corpus import Corpus
from tools.training.initial import initial_changes, initial_notes
from tools.training.learning_rates import LearningRates
from tools.training.resume import resume_lines

# the most names in a line: of marked parameters, tensors that Muon leaves out, and checkpoints
MAX_MARKED = 4
MAX_LEFT_OUT = 3
MAX_CHECKPOINTS = 4
MAX_CHANGES = 8  # lines about train.batch_schedule
NO_PLOT = "none: pip install matplotlib, or set log.plot = false"


def print_start(
    config: RunConfig,
    corpus: Corpus,
    device: str,
    resumed: Path | None,
    steps_done: int,
    refused_kernels: Mapping[str, str],
) -> None:
    """Print model, data, layout, batch sizes, precision and stages.

    resumed: the checkpoint that the run resumes or branches from, None if it begins. steps_done:
    the number of steps that it has taken before. refused_kernels: why the run's engine does without
    a package of kernels, by its name.
    """
    _print_settings(config, corpus, device)
    if config.train.evaluates:
        _print_evaluated(config, corpus)
    if not config.model.factory:
        for line in optional_parts.kernel_lines(config, corpus.model, device, refused_kernels):
            say(line)
    for note in corpus.notes:
        say(f"note       {note}")
    if config.plan.fp8:
        for line in optional_parts.fp8_lines(config, corpus.model, device):
            say(line)
    if config.parallel.pipeline > 1:
        say(f"stages     {_describe_stages(config, corpus)}")
    if resumed:
        _print_resumed(config, corpus, resumed, steps_done)
    elif config.train.init_from:
        _print_initial(config, corpus)
    for line in deletion_lines(config, steps_done):
        say(line)


def _print_initial(config: RunConfig, corpus: Corpus) -> None:
    """Print where the first weights are from, and what the run changes of their model."""
    say(f"weights    from {config.train.init_from}")
    for line in initial_changes(config, corpus):
        say(f"changed    {line}")
    for note in initial_notes(config):
        say(f"note       {note}")


def _print_resumed(config: RunConfig, corpus: Corpus, resumed: Path, steps_done: int) -> None:
    """Print from which checkpoint the run goes on, and what has changed since."""
    word = "branched" if is_branch(config, resumed) else "resumed"
    say(f"{word:11}from {resumed}, {_describe_remaining(steps_done, config.train.steps)}")
    for line in resume_lines(config, corpus, resumed):
        say(line)


def _print_settings(config: RunConfig, corpus: Corpus, device: str) -> None:
    """Print the lines about model, data, layout, batch, lengths of sequences and precision."""
    model = corpus.model
    tokens = sum(dataset.num_tokens for dataset in corpus.datasets)
    documents = sum(dataset.num_documents for dataset in corpus.datasets)
    # The device is named after the axes that all models have, before those of experts.
    layout, _, expert_axes = in_words(config.parallel).partition(", ")
    if expert_axes:
        expert_axes += ", "
    modes = ", ".join(_modes(config))
    layers = counted(model.layers, "layer")
    say(
        f"model      {model.family}, {num_parameters(model):,} parameters: {layers}, "
        f"hidden {model.hidden}, vocabulary {model.vocab}\n"
        f"{_describe_mup(model)}"
        f"data       {tokens:,} tokens in {counted(documents, 'document')}, "
        f"{_describe_samples(config, corpus)}\n"
        f"layout     {layout} on {device}, {expert_axes}{modes}\n"
        f"{_describe_listening(config)}"
        f"{_describe_batch(config)}\n"
        f"{_describe_lengths(config)}"
        f"precision  {config.precision.compute}"
    )


def _describe_listening(config: RunConfig) -> str:
    """Return the line about who can connect to the ranks; "" if there is only one."""
    return f"listens    {listening_in_words()}\n" if config.world_size > 1 else ""


def _describe_batch(config: RunConfig) -> str:
    """Return the line about the batch of a step; of train.batch_schedule one for each change, or
    the first and the last if there are many."""
    changes = config.batches.changes
    lines = [_batch_line(config, begin, batch) for begin, batch in changes]
    if len(lines) > MAX_CHANGES:
        left_out = len(lines) - MAX_CHANGES
        lines = [*lines[: MAX_CHANGES - 1], f"and {left_out:,} more changes, then", lines[-1]]
    column = "\n           ".join(lines)
    return f"batch      {column}"


def _describe_lengths(config: RunConfig) -> str:
    """Return the line about the lengths of sequences; "" if all steps have one."""
    if not config.train.seq_schedule:
        return ""
    changes = [f"{length:,} from sample {begin:,} on" for begin, length in config.lengths.changes]
    return f"lengths    {first_of(changes, MAX_CHANGES)}; a step keeps its tokens\n"


def _batch_line(config: RunConfig, begin: int, batch: int) -> str:
    """Return the samples of a step, as replicas x micro-batches x samples of each, and its tokens.

    begin: number of samples of the run after which steps have this batch.
    """
    replicas = counted(config.parallel.data, "replica")
    microbatches = counted(config.microbatches_of(batch), "micro-batch", "es")
    tokens = batch * config.train.seq_length
    line = (
        f"{batch} samples = {replicas} x {microbatches} x {config.train.micro_batch}, "
        f"{tokens:,} tokens a step"
    )
    return f"{line}, after {begin:,} samples" if begin else line


def _describe_mup(model: ModelConfig) -> str:
    """Return the line about the width relative to muP's base model, and that model's widths; ""
    without muP."""
    if not model.mup_base_hidden:
        return ""
    growth = model.mup.growth
    widths = [f"hidden {model.mup_base_hidden}"]
    for key, width in scaled_widths(model).items():
        widths.append(f"{key} {width / growth:g}")
    return f"muP        {growth:g} times as wide as the base model: {', '.join(widths)}\n"


def _modes(config: RunConfig) -> Iterator[str]:
    """Yield the ways in which the run is spread over ranks, beside the sizes of its axes."""
    parallel = config.parallel
    yield parallel.schedule_file or parallel.schedule
    if config.canonical_shards:
        yield f"canonical in {counted(config.canonical_shards, 'shard')}"
    elif parallel.sequence:
        yield "sequence parallel"
        if parallel.async_tensor:
            yield "asynchronous tensor parallel"
    if parallel.recompute != "none":
        yield f"recompute {', '.join(parallel.recompute_modules) or parallel.recompute}"
    if parallel.context > 1:
        yield f"context by {parallel.context_by}"
    if zero := zero_in_words(parallel):
        yield zero


def _print_evaluated(config: RunConfig, corpus: Corpus) -> None:
    """Print a line for each set of which an evaluation takes a part only."""
    train = config.train
    for name, samples in corpus.evaluated.items():
        available = len(samples)
        taken = evaluated_samples(train, available)
        if taken < available:
            set_name = "held-out" if name == "eval_loss" else name.removeprefix(VALIDATION_PREFIX)
            say(
                f"evaluated  {taken:,} of {available:,} {set_name} samples: "
                f"{describe_requested(train)}"
            )


def _describe_remaining(steps_done: int, steps: int) -> str:
    """Return the steps that remain of a resumed run, in words."""
    if steps_done >= steps:
        return "no step is left: train.steps is reached"
    if steps_done + 1 < steps:
        return f"steps {steps_done + 1} to {steps} are left"
    return f"step {steps} is left"


def _describe_samples(config: RunConfig, corpus: Corpus) -> str:
    """Return the number of samples of an epoch; of a blend a line per data set with its share and
    its epochs.
    """
    if not isinstance(corpus.train, Blend):
        if corpus.train.windows == "random":
            return f"{corpus.train.num_different:,} windows to draw samples from"
        return f"{len(corpus.train):,} samples an epoch"
    return "\n".join(optional_parts.blend_lines(config, corpus))


def print_memory(optimizer: ParallelAMPOptimizer) -> None:
    """Print what Muon updates, and the memory of weights, gradients and optimizer state, by formula
    and in bytes on rank 0.
    """
    buffers = optimizer.all_buffers()
    # The corrections of routers have buffers too: a few numbers, which need no formula.
    kinds = {_BufferKind.of(buffer) for buffer in buffers if not buffer.holds_loads}
    in_order = sorted(kinds, key=_BufferKind.sort_key, reverse=True)
    formulas = ", ".join(_bytes_formula(optimizer, kind) for kind in in_order)
    num_bytes = sum(buffer.num_bytes() for buffer in buffers)
    host_bytes = sum(buffer.host_bytes() for buffer in buffers)
    in_host_memory = f", {host_bytes / 1e6:,.1f} MB of it in host memory" if host_bytes else ""
    for line in _muon_lines(optimizer):
        say(line)
    if line_of_kept_layers := _kept_layers(optimizer):
        say(line_of_kept_layers)
    say(
        f"memory     {formulas} for weights, gradients and optimizer; {num_bytes / 1e6:,.1f} MB "
        f"on rank 0{in_host_memory}"
    )


def _kept_layers(optimizer: ParallelAMPOptimizer) -> str:
    """Return the line of the layers that ZeRO-3 keeps whole; "" if none were to be."""
    weights = optimizer.layer_weights
    if weights is None or not weights.keeps:
        return ""
    if not weights.num_kept:
        return "kept       no layer of rank 0: parallel.zero_keep has room for none"
    return (
        f"kept       the last {weights.num_kept} of {weights.num_layers} layers of rank 0 whole "
        f"during a step: {weights.kept_bytes / 1e6:,.1f} MB"
    )


class _BufferKind(NamedTuple):
    """The properties of a buffer that the bytes of its parameters depend on.

    moments: tensors of optimizer state. ranks: over which the state is cut.
    """

    in_fp8: bool
    moments: int
    of_experts: bool
    ranks: int

    @classmethod
    def of(cls, buffer: Buffer) -> "_BufferKind":
        return cls(
            buffer.has_fp8_weights, len(buffer.state), buffer.holds_experts, buffer.shards.size
        )

    def sort_key(self) -> tuple[bool, int, bool, int]:
        """Return the key of a descending order: FP8 is first, then few moments, then what is not of
        experts, then many ranks.
        """
        return (self.in_fp8, -self.moments, not self.of_experts, self.ranks)


def print_marked(optimizer: ParallelAMPOptimizer) -> None:
    """Print the parameters that a custom model has marked to stay in FP32, if there are any."""
    if names := optimizer.marked:
        listed = first_of(names, MAX_MARKED)
        say(f"marked     {listed}: held and computed in FP32 (set_fp32_attr_to_module)")


def _bytes_formula(optimizer: ParallelAMPOptimizer, buffer_kind: _BufferKind) -> str:
    """Return in words the bytes that a rank holds for a parameter of this kind: those that every
    rank has whole, plus those that ZeRO divides by its ranks."""
    on_every_rank, sharded = optimizer.plan.bytes_per_parameter(
        buffer_kind.moments,
        buffer_kind.in_fp8,
        shards_gradients=optimizer.shards_gradients and buffer_kind.ranks > 1,
        shards_weights=optimizer.shards_weights and buffer_kind.ranks > 1,
        ema=optimizer.ema > 0,
    )
    divisor = f"/{buffer_kind.ranks}" if buffer_kind.ranks > 1 else ""
    total = on_every_rank + sharded / buffer_kind.ranks
    # under ZeRO-3 nothing is on every rank
    terms = [str(on_every_rank)] if on_every_rank else []
    terms.append(f"{sharded}{divisor}")
    formula = f"{' + '.join(terms)} = {total:g} bytes a parameter"
    if isinstance(optimizer.rule, Muon):  # which leaves some tensors to AdamW, with two moments
        formula += " updated by Muon" if buffer_kind.moments == 1 else " updated by AdamW"
    if buffer_kind.in_fp8:
        formula += " kept in FP8"
    if buffer_kind.of_experts:
        formula += " of experts"
    return formula


def _muon_lines(optimizer: ParallelAMPOptimizer) -> Iterator[str]:
    """Yield a line about the tensors of this rank that Muon updates, and those that AdamW does."""
    update_rule = optimizer.rule
    if not isinstance(update_rule, Muon):
        return
    matrices = list[Part]()
    left_out = list[Part]()
    for buffer in optimizer.all_buffers():
        for piece in buffer.pieces:
            if update_rule.orthogonalizes(piece.part):
                matrices.append(piece.part)
            else:
                left_out.append(piece.part)
    left_out.sort(key=lambda part: -len(part.shape))  # matrices first, for they are unexpected
    names_left_out = first_of([part.name for part in left_out], MAX_LEFT_OUT) or "nothing"
    size = sum(prod(part.shape) for part in matrices)
    dtype = dtype_name(update_rule.iteration_dtype(optimizer.plan.masters))
    counts = f"{len(matrices)} in number"
    if update_rule.per_head:
        num_by_head = sum(update_rule.matrices_of(part).count > 1 for part in matrices)
        counts += f" ({num_by_head} of them head by head)"
    yield (
        f"muon       matrices with {size:,} parameters on rank 0, {counts}, "
        f"iterated in {dtype}; AdamW updates {names_left_out}"
    )


def _describe_stages(config: RunConfig, corpus: Corpus) -> str:
    """Return the layers and the share of the FLOPs of each stage, and the predicted bubble."""
    schedule = config.schedule  # a stage is a part of the layers; a rank may hold several
    costs = config.stage_costs(corpus.model, schedule.rank_of_stage)
    total_cost = sum(cost.forward for cost in costs)
    stages = list[str]()
    for cost in costs:
        layers = counted(len(cost.cut.layers), "layer")
        stages.append(f"{layers} ({cost.forward / total_cost:.0%})")
    simulated = simulate(schedule, lambda item: costs[item.stage].flops(item))
    return f"{', '.join(stages)}; predicted bubble {bubble(simulated):.1%}"


def deletion_lines(config: RunConfig, steps_done: int) -> Iterator[str]:
    """Yield a line if saves of the run will delete checkpoints, and one for each that is damaged
    and for a damaged record of saves.

    steps_done: the number of steps that the run has taken before.
    """
    checkpoints = whole_checkpoints(config.checkpoint_folder)
    if checkpoints:
        for line in damaged_beside(checkpoints[-1]):
            yield f"note       {line}"
    if note := odd_saves(config.checkpoint_folder):
        yield f"note       {note}"
    if steps_done < config.train.steps:
        yield from _keeping_lines(config, steps_done, checkpoints)


def _keeping_lines(
    config: RunConfig, steps_done: int, checkpoints: Sequence[Path]
) -> Iterator[str]:
    """Yield the line about deletions, none if the saves to come delete nothing, and the best
    checkpoint, if the run keeps it.

    checkpoints: those in the run's folder, whoever has made them.
    """
    saved_steps = [step_of(path) for path in made_here(config.checkpoint_folder)]
    following = _saves_after(steps_done, config)
    keep = config.checkpoint.kept
    expiring = keep.expired(saved_steps, len(following))
    best = best_made_here(config.checkpoint_folder, keep.best) if keep.best else None
    if best is not None:
        expiring = [step for step in expiring if step != step_of(best.path)]
        name = best.path.name
        lowest = describe_evaluations(keep.best)
        yield f"best       {name} has the lowest {lowest} so far, {best.loss:.4f}"
    if not expiring and not _later_ones_expire(following, keep):
        return

    line = f"keeps      {_describe_rule(config.checkpoint)} that it saves; older ones are deleted"
    if expiring:
        names_expiring = [f"step_{step:08d}" for step in expiring]
        line += f", {first_of(names_expiring, MAX_CHECKPOINTS)} too"
    copied = [path.name for path in checkpoints if step_of(path) not in saved_steps]
    if copied:
        verb, pronoun = ("stays", "it") if len(copied) == 1 else ("stay", "them")
        names_copied = first_of(copied, MAX_CHECKPOINTS)
        line += f"; {names_copied} {verb}, for no save into this folder made {pronoun}"
    yield line


def _saves_after(steps_done: int, config: RunConfig) -> Sequence[int]:
    """Return the steps after which the run will save, beginning after `steps_done`. They may be
    many, and are not stored.
    """
    steps = config.train.steps
    every = config.checkpoint.every
    if not every:
        return (steps,)
    first = steps_done - steps_done % every + every
    # The last save may come before the next multiple of `every`. Counted as one at that multiple it
    # is as well the newest, and so makes the same checkpoints expire.
    return range(first, steps + every, every)


def _later_ones_expire(following: Sequence[int], keep: Keep) -> bool:
    """Return True if checkpoints of saves that follow will be deleted by saves after them.

    following: the steps of these saves.
    """
    if keep.newest is None:
        return False
    older = following[: max(0, len(following) - keep.newest)]
    # Two neighbours tell it of all: multiples of checkpoint.keep_every stay, and if both neighbours
    # are such multiples, all of `older` are.
    return bool(keep.expired(older[:2], keep.newest))


def _describe_rule(settings: Checkpoint) -> str:
    """Return in words which checkpoints the settings keep."""
    if settings.keep == 1:
        newest = "the newest checkpoint"
    else:
        newest = f"the newest {counted(int(settings.keep), 'checkpoint')}"
    rules = [newest]
    if settings.keep_every:
        rules.append(f"those of each multiple of {settings.keep_every} steps")
    if settings.keep_best:
        rules.append(f"the one with the lowest {describe_evaluations(settings.best)}")
    return " and ".join(rules)


def print_skipped(config: RunConfig, progress: TrainState) -> None:
    """Print how many steps were skipped, the tokens that were not learned, and the last learning
    rate if skips have cut its schedule short.
    """
    if not progress.skipped:
        return
    say(
        f"skipped    {progress.skipped:,} of {counted(progress.step, 'step')}: "
        f"{progress.learned_tokens:,} of {progress.tokens:,} tokens were learned"
    )
    if not progress.applied:
        return  # another line says that nothing was learned
    rates = LearningRates.of(config.lr, config.train)
    # From tokens, for progress.samples is a position in the data.
    skipped_samples = progress.skipped_tokens // config.train.seq_length
    without_skips = replace(
        progress,
        applied=progress.step,
        applied_samples=progress.applied_samples + skipped_samples,
    )
    ended = rates.of_last(progress)
    planned = rates.of_last(without_skips)
    if ended == planned:
        return
    steps = config.train.steps + rates.steps_of_skipped(progress, skipped_samples)
    say(
        f"lr         ended at {ended:.3g}, not at {planned:.3g}: it follows applied steps, so the "
        f"schedule was cut short; train.steps={steps} lr.length={rates.schedule.total} goes on to "
        "its end"
    )


def print_outcome(config: RunConfig, plots: Sequence[Path], step: int) -> None:
    """Print a generated sample, which is kept in events.jsonl, and the paths of checkpoint, metrics
    and plots. step: the newest one."""
    folder = Path(config.train.folder)
    if config.log.sample:
        text = optional_parts.sample_text(config.checkpoint_folder, config.log.sample)
        print(f"\nsample\n{text}\n")
        _keep_sample(folder, step, text)
    newest = find_checkpoint(config.checkpoint_folder)
    say(f"checkpoint {newest}\nmetrics    {folder / 'metrics.jsonl'}")
    if config.log.plot:
        say(f"plots      {', '.join(map(str, plots)) or NO_PLOT}")
    _print_measured(config, step)


def _print_measured(config: RunConfig, step: int) -> None:
    """Print the measured step beside the predicted one and keep both in events.jsonl, if there is a
    prediction. step: the newest one."""
    folder = Path(config.train.folder)
    with suppress(UserError):  # the start of the run has printed why nothing can be predicted
        if measured := optional_parts.measured_prediction(config, step):
            line, event = measured
            say(f"measured   {line}")
            _keep_event(folder, event)


def _keep_sample(folder: Path, step: int, text: str) -> None:
    """Write a sample to events.jsonl, unless the same text of this step is there."""
    known = [(event["step"], event["text"]) for event in read_events(folder, SAMPLE)]
    if (step, text) not in known:
        _keep_event(folder, {"event": SAMPLE, "step": step, "date": date_now(), "text": text})


def _keep_event(folder: Path, event: dict[str, Any]) -> None:
    """Write an event to events.jsonl, with a warning if that fails."""
    try:
        add_event(folder, event)
    except (OSError, UserError) as error:
        reason = file_error(error) if isinstance(error, OSError) else error
        kind = event["event"]
        print(f"warning    the {kind} is not kept: {reason}", file=sys.stderr, flush=True)
