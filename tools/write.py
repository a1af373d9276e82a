"""What `megaprec train` says before the first step and after the last."""

from pathlib import Path

from models.stages import cuts
from parallel.schedule import schedule
from parallel.simulate import bubble
from tools.corpus import Corpus
from tools.generate import find_checkpoint, generate, harmless, load_model
from tools.run import RunConfig

SAMPLE_TOKENS = 60


def print_start(config: RunConfig, corpus: Corpus, device: str, resumed: Path | None, done: int) -> None:
    """Model, data, layout, batch arithmetic and stages, in a few lines."""
    p, t, model = config.parallel, config.train, corpus.model
    replicas = _count(p.data, "replica")
    modes = [p.schedule, *(["sequence parallel"] if p.sequence else []), *(["ZeRO-1"] if p.zero and p.data > 1 else [])]
    print(
        f"model      {model.family}, {model.num_parameters:,} parameters: {_count(model.layers, 'layer')}, "
        f"hidden {model.hidden}, vocabulary {model.vocab}\n"
        f"data       {corpus.dataset.num_tokens:,} tokens in {_count(corpus.dataset.num_documents, 'document')}, "
        f"{len(corpus.train):,} samples an epoch\n"
        f"layout     tensor {p.tensor} x pipeline {p.pipeline} x data {p.data} = {_count(config.world_size, 'rank')} "
        f"on {device}, {', '.join(modes)}\n"
        f"batch      {t.global_batch} samples = {replicas} x {_count(config.num_microbatches, 'micro-batch', 'es')} x "
        f"{t.micro_batch}, {config.tokens_per_step:,} tokens a step\n"
        f"precision  {config.precision.compute}"
    )
    if p.pipeline > 1:
        print(f"stages     {_stages(config, corpus)}")
    if config.train.init_from and not resumed:
        print(f"weights    from {config.train.init_from}")
    if resumed:
        left = (
            f"steps {done + 1} to {t.steps} are left" if done < t.steps else "no step is left: train.steps is reached"
        )
        print(f"resumed    from {resumed}, {left}")


def _stages(config: RunConfig, corpus: Corpus) -> str:
    """Layers of each stage, its share of the cost, and the share of time that ranks will wait."""
    model, p = corpus.model, config.parallel
    cut = cuts(model, p.pipeline, config.train.seq_length)
    costs = [len(c.layers) * model.layer_flops(config.train.seq_length) + c.last * model.head_flops() for c in cut]
    said = ", ".join(
        f"{_count(len(c.layers), 'layer')} ({cost / sum(costs):.0%})" for c, cost in zip(cut, costs, strict=True)
    )
    return f"{said}; bubble of equal stages {bubble(schedule(p.schedule, p.pipeline, config.num_microbatches)):.1%}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def print_outcome(config: RunConfig, plot: Path | None) -> None:
    """A generated sample, and where everything is."""
    folder = Path(config.train.folder)
    if config.log.sample:
        model, tokenizer = load_model(find_checkpoint(folder))
        text = "".join(generate(model, tokenizer, config.log.sample, SAMPLE_TOKENS))
        print(f"\nsample\n{config.log.sample}{harmless(text)}\n")
    print(f"checkpoint {find_checkpoint(folder)}\nmetrics    {folder / 'metrics.jsonl'}")
    if config.log.plot:
        print(f"plots      {plot or 'none: pip install matplotlib, or set log.plot = false'}")
