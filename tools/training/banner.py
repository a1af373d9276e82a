"""The lines that `megaprec train` prints before the first step and after the last."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from megaprec.comm.layout import Part
from megaprec.data.blend import Blend
from megaprec.errors import UserError
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.muon.rule import Muon
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import dtype_name
from models.kv_cache import CachedStage
from parallel.pipeline.simulation import bubble, simulate
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig
from tools.console.units import counted
from tools.console.wrapped import say
from tools.convert.train_state import TrainState
from tools.journal.records import VALIDATION_PREFIX
from tools.text.generation import Generation, escape_control_characters
from tools.text.load import find_checkpoint, load_model
from tools.text.sampling import Sampling
from tools.training.batches import evaluated_samples
from tools.training.corpus import Corpus
from tools.training.deletions import deletion_lines
from tools.training.fp8_summary import fp8_lines
from tools.training.resume import resume_lines

SAMPLE_TOKENS = 60
MOST_MARKED = 4  # names of marked parameters in the line
MOST_OTHERS = 3  # names of tensors that Muon does not update in the line
NO_PLOT = "none: pip install matplotlib, or set log.plot = false"


def print_start(
    config: RunConfig, corpus: Corpus, device: str, resumed: Path | None, done: int
) -> None:
    """Print model, data, layout, batch sizes, precision and stages.

    resumed: the checkpoint that the run resumes from, None if it begins. done: the number of steps
    that it has taken before.
    """
    _print_settings(config, corpus, device)
    if config.train.eval_every:
        _print_evaluated(config, corpus)
    for note in corpus.notes:
        say(f"note       {note}")
    for line in fp8_lines(config, corpus.model, device):
        say(line)
    if config.parallel.pipeline > 1:
        say(f"stages     {_describe_stages(config, corpus)}")
    if config.train.init_from and not resumed:
        say(f"weights    from {config.train.init_from}")
    if resumed:
        say(f"resumed    from {resumed}, {_describe_remaining(done, config.train.steps)}")
        for line in resume_lines(config, corpus, resumed):
            say(line)
    for line in deletion_lines(config, done):
        say(line)


def _print_settings(config: RunConfig, corpus: Corpus, device: str) -> None:
    train = config.train
    model = corpus.model
    tokens = sum(dataset.num_tokens for dataset in corpus.datasets)
    documents = sum(dataset.num_documents for dataset in corpus.datasets)
    layout, _, experts = in_words(config.parallel).partition(", ")
    modes = ", ".join(_modes(config))
    layers = counted(model.layers, "layer")
    replicas = counted(config.parallel.data, "replica")
    microbatches = counted(config.num_microbatches, "micro-batch", "es")
    say(
        f"model      {model.family}, {model.num_parameters:,} parameters: {layers}, "
        f"hidden {model.hidden}, vocabulary {model.vocab}\n"
        f"data       {tokens:,} tokens in {counted(documents, 'document')}, "
        f"{_describe_samples(config, corpus)}\n"
        f"layout     {layout} on {device}, {experts and f'{experts}, '}{modes}\n"
        f"batch      {train.global_batch} samples = {replicas} x {microbatches} x "
        f"{train.micro_batch}, {config.tokens_per_step:,} tokens a step\n"
        f"precision  {config.precision.compute}"
    )


def _modes(config: RunConfig) -> Iterator[str]:
    """Yield the ways in which the run is spread over ranks, beside the sizes of its axes."""
    parallel = config.parallel
    yield parallel.schedule_file or parallel.schedule
    if config.canonical_shards:
        yield f"canonical in {counted(config.canonical_shards, 'shard')}"
    elif parallel.sequence:
        yield "sequence parallel"
    if parallel.recompute != "none":
        yield f"recompute {', '.join(parallel.recompute_modules) or parallel.recompute}"
    if parallel.context > 1:
        yield f"context by {parallel.context_by}"
    if parallel.zero and parallel.copies > 1:
        yield "ZeRO-1"


def _print_evaluated(config: RunConfig, corpus: Corpus) -> None:
    """Print a line for each set of which an evaluation takes a part only."""
    train = config.train
    for name, samples in corpus.evaluated.items():
        available = len(samples)
        taken = evaluated_samples(train, available)
        if taken < available:
            kind = "held-out" if name == "eval_loss" else name.removeprefix(VALIDATION_PREFIX)
            say(
                f"evaluated  {taken:,} of {available:,} {kind} samples: train.eval_batches = "
                f"{train.eval_batches} of train.global_batch = {train.global_batch}"
            )


def _describe_remaining(done: int, steps: int) -> str:
    """Return the steps that remain of a resumed run, in words."""
    if done >= steps:
        return "no step is left: train.steps is reached"
    if done + 1 < steps:
        return f"steps {done + 1} to {steps} are left"
    return f"step {steps} is left"


def _describe_samples(config: RunConfig, corpus: Corpus) -> str:
    """Return the number of samples of an epoch.

    Of a blend a line per data set with its share and its epochs.
    """
    if not isinstance(corpus.train, Blend):
        return f"{len(corpus.train):,} samples an epoch"
    steps = config.train.steps
    taken_of_each = corpus.train.taken(steps * config.train.global_batch)
    total_weight = sum(source.weight for source in config.data.blend)
    lines = [f"blended from {len(corpus.datasets)}"]
    for source, part, taken in zip(
        config.data.blend, corpus.train.parts, taken_of_each, strict=True
    ):
        share = source.weight / total_weight
        lines.append(
            f"           {share:.4g} of the samples from {source.source}: {taken:,} of "
            f"{len(part):,} samples, {taken / len(part):.2f} epochs in {steps} steps"
        )
    return "\n".join(lines)


def print_memory(optimizer: ParallelAMPOptimizer) -> None:
    """Print what Muon updates, and the memory of weights, gradients and optimizer state.

    The memory is told by formula, and in bytes on rank 0.

    The formula leaves out routers' corrections, a number for each expert.
    """
    buffers = optimizer.all_buffers()
    # Buffers of routers' corrections are left out: they would be a formula for a few numbers.
    kinds = {_BufferKind.of(buffer) for buffer in buffers if not buffer.balances}
    in_order = sorted(kinds, key=_BufferKind.sort_key, reverse=True)
    formulas = ", ".join(_bytes_formula(optimizer, kind) for kind in in_order)
    num_bytes = sum(buffer.num_bytes() for buffer in buffers)
    for line in _muon_lines(optimizer):
        say(line)
    say(
        f"memory     {formulas} for weights, gradients and optimizer; {num_bytes / 1e6:,.1f} MB "
        "on rank 0"
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
        return cls(buffer.in_codes, len(buffer.state), buffer.of_experts, buffer.shards.size)

    def sort_key(self) -> tuple[bool, int, bool, int]:
        """Return the key of a descending order.

        FP8 is first, then few moments, then what is not of experts, then many ranks.
        """
        return (self.in_fp8, -self.moments, not self.of_experts, self.ranks)


def print_marked(optimizer: ParallelAMPOptimizer) -> None:
    """Print the parameters that a custom model has marked to stay in FP32, if there are any."""
    if names := optimizer.marked:
        listed = _list_names(names, MOST_MARKED)
        say(f"marked     {listed}: held and computed in FP32 (set_fp32_attr_to_module)")


def _list_names(names: Sequence[str], max_names: int) -> str:
    """Return the first `max_names` names, and the number of the others."""
    listed = ", ".join(names[:max_names])
    if len(names) > max_names:
        return f"{listed} and {len(names) - max_names} more"
    return listed


def _bytes_formula(optimizer: ParallelAMPOptimizer, kind: _BufferKind) -> str:
    """Return the bytes of a parameter of this kind: on every rank, and of optimizer state."""
    on_every_rank, sharded = optimizer.plan.bytes_per_parameter(kind.moments, kind.in_fp8)
    divisor = f"/{kind.ranks}" if kind.ranks > 1 else ""
    total = on_every_rank + sharded / kind.ranks
    formula = f"{on_every_rank} + {sharded}{divisor} = {total:g} bytes a parameter"
    if isinstance(optimizer.rule, Muon):  # which leaves some tensors to AdamW, with two moments
        formula += " updated by Muon" if kind.moments == 1 else " updated by AdamW"
    if kind.in_fp8:
        formula += " kept in FP8"
    if kind.of_experts:
        formula += " of experts"
    return formula


def _muon_lines(optimizer: ParallelAMPOptimizer) -> Iterator[str]:
    """Yield a line about the tensors of this rank that Muon updates, and those that AdamW does."""
    rule = optimizer.rule
    if not isinstance(rule, Muon):
        return
    matrices = list[Part]()
    others = list[Part]()
    for buffer in optimizer.all_buffers():
        for piece in buffer.pieces:
            if rule.updates(piece.part):
                matrices.append(piece.part)
            else:
                others.append(piece.part)
    others.sort(key=lambda part: -len(part.shape))  # matrices that Muon leaves out come first
    other_names = _list_names([part.name for part in others], MOST_OTHERS) or "nothing"
    size = sum(prod(part.shape) for part in matrices)
    dtype = dtype_name(rule.iteration_dtype(optimizer.plan.masters))
    yield (
        f"muon       matrices with {size:,} parameters on rank 0, {len(matrices)} in number, "
        f"iterated in {dtype}; AdamW updates {other_names}"
    )


def _describe_stages(config: RunConfig, corpus: Corpus) -> str:
    """Return the layers and the share of the FLOPs of each stage, and the predicted bubble."""
    schedule = config.schedule  # a stage is a part of the layers; a rank may hold several
    costs = config.stage_costs(corpus.model, schedule.rank_of_stage)
    total = sum(cost.forward for cost in costs)
    stages = list[str]()
    for cost in costs:
        layers = counted(len(cost.cut.layers), "layer")
        stages.append(f"{layers} ({cost.forward / total:.0%})")
    simulated = simulate(schedule, lambda item: costs[item.stage].of(item))
    return f"{', '.join(stages)}; predicted bubble {bubble(simulated):.1%}"


def print_skipped(config: RunConfig, progress: TrainState) -> None:
    """Print how many steps were skipped, the tokens not learned, and the last learning rate.

    The rate follows applied steps, so skips cut its schedule short.
    """
    if not progress.skipped:
        return
    say(
        f"skipped    {progress.skipped:,} of {counted(progress.step, 'step')}: "
        f"{progress.learned_tokens:,} of {progress.tokens:,} tokens were learned"
    )
    if not progress.applied:
        return  # another line says that nothing was learned
    schedule = config.lr_schedule
    in_samples = config.lr.unit == "samples"
    batch = config.train.global_batch if in_samples else 1
    applied = progress.applied_samples if in_samples else progress.applied
    without_skips = progress.step
    if in_samples:  # not progress.samples, which is a position in the data
        without_skips = applied + progress.skipped_tokens // config.train.seq_length
    # The last rate is that of the step before the one that would follow.
    ended = schedule.at(max(0, applied - batch))
    planned = schedule.at(without_skips - batch)
    if ended == planned:
        return
    steps = config.train.steps + progress.skipped
    say(
        f"lr         ended at {ended:.3g}, not at {planned:.3g}: it follows applied steps, so the "
        f"schedule was cut short; train.steps={steps} lr.length={schedule.total} goes on to its "
        "end"
    )


def print_outcome(config: RunConfig, plots: Sequence[Path]) -> None:
    """Print a generated sample and the paths of checkpoint, metrics and plots."""
    folder = Path(config.train.folder)
    if config.log.sample:
        print(f"\nsample\n{_generate_sample(folder, config.log.sample)}\n")
    say(f"checkpoint {find_checkpoint(folder)}\nmetrics    {folder / 'metrics.jsonl'}")
    if config.log.plot:
        say(f"plots      {', '.join(map(str, plots)) or NO_PLOT}")


def _generate_sample(folder: Path, prompt: str) -> str:
    """Return a text that begins with the prompt, or the reason why it cannot be continued."""
    try:
        model = load_model(folder, CachedStage)
        text = "".join(Generation(model, prompt, SAMPLE_TOKENS, Sampling()))
    except UserError as error:
        return f"none: {error}"
    return f"{prompt}{escape_control_characters(text)}"
