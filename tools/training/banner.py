"""The lines that `megaprec train` prints before the first step and after the last."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from megaprec.data.blend import Blend
from megaprec.errors import UserError
from megaprec.optim.muon import Muon
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.post_validation import PostValidationOptimizer
from megaprec.precision.plan import dtype_name
from models.kv_cache import CachedStage
from parallel.pipeline.simulation import bubble, simulate
from tools.config.layouts import in_words
from tools.config.run_file import RunConfig
from tools.console.units import counted
from tools.console.wrapped import say
from tools.convert.train_state import TrainState
from tools.journal.records import NAMED
from tools.text.generation import Generation, harmless
from tools.text.load import find_checkpoint, load_model
from tools.text.sampling import Sampling
from tools.training.batches import evaluated_samples
from tools.training.corpus import Corpus
from tools.training.deletions import deletion_lines
from tools.training.fp8_summary import fp8_lines
from tools.training.resume import resume_lines

SAMPLE_TOKENS = 60
NO_PLOT = "none: pip install matplotlib, or set log.plot = false"


def print_start(
    config: RunConfig, corpus: Corpus, device: str, resumed: Path | None, done: int
) -> None:
    """Print model, data, layout, batch sizes, precision and stages."""
    p = config.parallel
    t = config.train
    model = corpus.model
    replicas = counted(p.data, "replica")
    layout, _, experts = in_words(p).partition(", ")
    tokens, documents = (
        sum(counts)
        for counts in zip(*((d.num_tokens, d.num_documents) for d in corpus.datasets), strict=True)
    )
    modes = [
        p.schedule_file or p.schedule,
        *(["sequence parallel"] if p.sequence and not config.canonical_shards else []),
        *(
            [f"canonical in {counted(config.canonical_shards, 'shard')}"]
            if config.canonical_shards
            else []
        ),
        *(
            [f"recompute {', '.join(p.recompute_modules) or p.recompute}"]
            if p.recompute != "none"
            else []
        ),
        *([f"context by {p.context_by}"] if p.context > 1 else []),
        *(["ZeRO-1"] if p.zero and p.copies > 1 else []),
    ]
    say(
        f"model      {model.family}, {model.num_parameters:,} parameters: "
        f"{counted(model.layers, 'layer')}, hidden {model.hidden}, vocabulary {model.vocab}\n"
        f"data       {tokens:,} tokens in {counted(documents, 'document')}, "
        f"{_samples(config, corpus)}\n"
        f"layout     {layout} on {device}, {experts and f'{experts}, '}{', '.join(modes)}\n"
        f"batch      {t.global_batch} samples = {replicas} x "
        f"{counted(config.num_microbatches, 'micro-batch', 'es')} x {t.micro_batch}, "
        f"{config.tokens_per_step:,} tokens a step\n"
        f"precision  {config.precision.compute}"
    )
    for name, samples in corpus.evaluated.items() if t.eval_every else ():
        there = len(samples)
        taken = evaluated_samples(t, there)
        if taken < there:
            of = "held-out" if name == "eval_loss" else name.removeprefix(NAMED)
            say(
                f"evaluated  {taken:,} of {there:,} {of} samples: train.eval_batches = "
                f"{t.eval_batches} of train.global_batch = {t.global_batch}"
            )
    for note in corpus.notes:
        say(f"note       {note}")
    for line in fp8_lines(config, model, device):
        say(line)
    if p.pipeline > 1:
        say(f"stages     {_stages(config, corpus)}")
    if config.train.init_from and not resumed:
        say(f"weights    from {config.train.init_from}")
    if resumed:
        say(f"resumed    from {resumed}, {_left(done, t.steps)}")
        for line in resume_lines(config, corpus, resumed):
            say(line)
    for line in deletion_lines(config, done):
        say(line)


def _left(done: int, steps: int) -> str:
    """Return the steps that remain of a resumed run, in words."""
    if done >= steps:
        return "no step is left: train.steps is reached"
    if done + 1 < steps:
        return f"steps {done + 1} to {steps} are left"
    return f"step {steps} is left"


def _samples(config: RunConfig, corpus: Corpus) -> str:
    """Return the number of samples; of a blend a line per data set with its share and its
    epochs."""
    if not isinstance(corpus.train, Blend):
        return f"{len(corpus.train):,} samples an epoch"
    samples = config.train.steps * config.train.global_batch
    lines = [f"blended from {len(corpus.datasets)}"]
    for one, part, taken in zip(
        config.data.blend, corpus.train.parts, corpus.train.taken(samples), strict=True
    ):
        share = one.weight / sum(other.weight for other in config.data.blend)
        lines.append(
            f"           {share:.4g} of the samples from {one.source}: {taken:,} of {len(part):,} "
            f"samples, {taken / len(part):.2f} epochs in {config.train.steps} steps"
        )
    return "\n".join(lines)


def print_memory(optimizer: ParallelAMPOptimizer) -> None:
    """Print what Muon updates, and the memory of weights, gradients and optimizer state, by formula
    and on rank 0.

    The formula leaves out routers' corrections, a number for each expert.
    """
    buffers = optimizer.all_buffers()
    trained = (buffer for buffer in buffers if not buffer.balances)
    kinds = sorted(
        {(b.in_codes, -len(b.state), not b.of_experts, b.shards.size) for b in trained},
        reverse=True,
    )
    formula = ", ".join(
        _formula(optimizer, in_fp8, -moments, ranks) + ("" if usual else " of experts")
        for in_fp8, moments, usual, ranks in kinds
    )
    held = sum(buffer.num_bytes() for buffer in buffers)
    for line in _muon(optimizer):
        say(line)
    say(
        f"memory     {formula} for weights, gradients and optimizer; {held / 1e6:,.1f} MB on rank 0"
    )
    if isinstance(optimizer, PostValidationOptimizer):
        say(f"           and {optimizer.num_copied_bytes() / 1e6:,.1f} MB to take a step back")


def print_marked(optimizer: ParallelAMPOptimizer) -> None:
    """Print the parameters that a custom model has marked to stay in FP32, if there are any."""
    if names := optimizer.marked:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        say(f"marked     {shown}: held and computed in FP32 (set_fp32_attr_to_module)")


def _formula(optimizer: ParallelAMPOptimizer, in_fp8: bool, moments: int, ranks: int) -> str:
    """Return the bytes of a parameter whose optimizer state is cut over `ranks`."""
    whole, cut = optimizer.plan.bytes_per_parameter(moments, in_fp8)
    if ranks > 1:
        said = f"{whole} + {cut}/{ranks} = {whole + cut / ranks:g}"
    else:
        said = f"{whole} + {cut} = {whole + cut}"
    if isinstance(optimizer.rule, Muon):
        by = f" updated by {'Muon' if moments == 1 else 'AdamW'}"
    else:
        by = ""
    return f"{said} bytes a parameter{by}{' kept in FP8' if in_fp8 else ''}"


def _muon(optimizer: ParallelAMPOptimizer) -> Iterator[str]:
    """Yield a line about the tensors of this rank that Muon updates, and those that AdamW updates
    in its stead."""
    rule = optimizer.rule
    parts = [piece.part for buffer in optimizer.all_buffers() for piece in buffer.pieces]
    if isinstance(rule, Muon):
        matrices = [part for part in parts if rule.updates(part)]
        rest = sorted(
            (part for part in parts if not rule.updates(part)), key=lambda part: -len(part.shape)
        )
        others = ", ".join(part.name for part in rest[:3]) + (
            f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        )
        size = sum(prod(part.shape) for part in matrices)
        yield (
            f"muon       matrices with {size:,} parameters on rank 0, {len(matrices)} in number, "
            f"iterated in {dtype_name(rule.iteration_dtype(optimizer.plan.masters))}; AdamW "
            f"updates {others or 'nothing'}"
        )


def _stages(config: RunConfig, corpus: Corpus) -> str:
    """Return the layers and the share of the FLOPs of each stage, and the predicted bubble."""
    schedule = config.schedule
    costs = config.stage_costs(corpus.model, schedule.rank_of_stage)
    total = sum(cost.forward for cost in costs)
    said = ", ".join(
        f"{counted(len(c.cut.layers), 'layer')} ({c.forward / total:.0%})" for c in costs
    )
    return (
        f"{said}; predicted bubble {bubble(simulate(schedule, lambda i: costs[i.stage].of(i))):.1%}"
    )


def print_skipped(config: RunConfig, progress: TrainState) -> None:
    """Print how many steps were skipped, the tokens that were not learned, and where the learning
    rate ended.

    The rate follows applied steps, so skips cut its schedule short.
    """
    if not progress.skipped:
        return
    read = progress.tokens
    say(
        f"skipped    {progress.skipped:,} of {counted(progress.step, 'step')}: "
        f"{progress.learned_tokens:,} of {read:,} tokens were learned"
    )
    if not progress.applied:
        return  # another line says that nothing was learned
    schedule = config.lr_schedule
    in_samples = config.lr.unit == "samples"
    batch = config.train.global_batch if in_samples else 1
    applied = progress.applied_samples if in_samples else progress.applied
    reached = progress.step
    if in_samples:  # not progress.samples, which is a place in the data
        reached = applied + progress.skipped_tokens // config.train.seq_length
    ended = schedule.at(max(0, applied - batch))
    planned = schedule.at(reached - batch)
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
        print(f"\nsample\n{_sample(folder, config.log.sample)}\n")
    say(f"checkpoint {find_checkpoint(folder)}\nmetrics    {folder / 'metrics.jsonl'}")
    if config.log.plot:
        say(f"plots      {', '.join(map(str, plots)) or NO_PLOT}")


def _sample(folder: Path, prompt: str) -> str:
    """Return a text that begins with the prompt, or the reason why the prompt cannot be
    continued."""
    try:
        text = "".join(
            Generation(load_model(folder, CachedStage), prompt, SAMPLE_TOKENS, Sampling())
        )
    except UserError as error:
        return f"none: {error}"
    return f"{prompt}{harmless(text)}"
