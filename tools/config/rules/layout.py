"""Rules on the layout of a run: ranks, pipeline, sharding, recomputation."""

from collections.abc import Callable, Iterator

from megaprec.errors import Problem, UserError
from models.attention.context_limits import context_problems
from models.config import ModelConfig
from parallel.activation_checkpoint import MODULES
from parallel.fused_products import async_tensor_problems
from parallel.pipeline.kinds import KINDS
from tools.config.rules.batches import microbatches_of
from tools.config.rules.canonical import virtual_sizes
from tools.config.rules.checking import nearest_multiples
from tools.config.rules.precision import scales_advance
from tools.config.tables.data_settings import Data
from tools.config.tables.native_keys import (
    plan_or_none,
)
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.schedules import stage_count
from tools.config.tables.settings import Checkpoint, Log, Parallel, Train
from tools.console.toml import toml

MOST_PROFILED = 10  # steps: a trace of more is too large to be looked at


def _recomputed_scales(parallel: Parallel, fp8: FP8) -> Iterator[str]:
    recomputes_layers = parallel.recompute_fraction or parallel.recompute_layers
    if recomputes_layers and scales_advance(fp8):
        yield Problem.of("config.history_recomputed")


def _recomputed_latents(model: ModelConfig, parallel: Parallel, fp8: FP8) -> Iterator[str]:
    recomputes_attention = "attention" in parallel.recompute_modules
    if model.latent and recomputes_attention and scales_advance(fp8):
        yield Problem.of("config.history_latent")


def _sentinel(train: Train, fp8: FP8) -> Iterator[str]:
    if train.sentinel and scales_advance(fp8):
        yield Problem.of("config.history_sentinel", sentinel=train.sentinel)


def _compile(train: Train, model: ModelConfig) -> Iterator[str]:
    if train.compile not in ("auto", "off") and model.factory:
        yield Problem.of("config.compile_factory", compile=train.compile, factory=model.factory)


def _zero(parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless optimizer state can be cut over parallel.zero_size ranks."""
    size = parallel.zero_size
    copies = parallel.copies
    if size and copies % size:
        divisors = [ranks for ranks in range(1, copies + 1) if copies % ranks == 0]
        ranks = f"parallel.data {parallel.data}"
        if parallel.context > 1:
            ranks += f" x parallel.context {parallel.context} = {copies}"
        yield Problem.of(
            "config.zero_size", size=size, ranks=ranks, divisors=", ".join(map(str, divisors))
        )
    if size > 1 and not parallel.zero:
        yield Problem.of("config.zero_size_without_zero", size=size)


def _sharded_gradients(parallel: Parallel, train: Train, fp8: FP8) -> Iterator[str]:
    """Yield a problem for each setting that needs whole gradients, which ZeRO-2 and 3 free."""
    zero = parallel.zero
    if zero not in (2, 3):
        return
    if train.numerics == "canonical":
        yield Problem.of("config.zero_canonical", zero=zero)
    if train.sentinel:
        yield Problem.of("config.zero_sentinel", zero=zero, sentinel=train.sentinel)
    if fp8.shadow_every:
        yield Problem.of("config.zero_shadow", zero=zero, shadow_every=fp8.shadow_every)
    if parallel.schedule_file or KINDS[parallel.schedule].splits_backward:
        key = "schedule_file" if parallel.schedule_file else "schedule"
        schedule = getattr(parallel, key)
        yield Problem.of("config.zero_schedule", zero=zero, key=key, schedule=schedule)


def _kept_layers(parallel: Parallel) -> Iterator[str]:
    if parallel.zero_keep and parallel.zero != 3:
        yield Problem.of(
            "config.zero_keep", keep=toml(parallel.zero_keep), zero=toml(parallel.zero)
        )


def _profile(parallel: Parallel, log: Log) -> Iterator[str]:
    """Yield a problem unless log.profile is a first and a last step, and its ranks exist."""
    steps = log.profile
    is_span = False
    if len(steps) == 2:
        first, last = steps
        is_span = 0 <= last - first < MOST_PROFILED
    if steps and not is_span:
        yield Problem.of("config.profile_steps", steps=list(steps), most=MOST_PROFILED)
    absent = [rank for rank in log.profile_ranks if rank >= parallel.ranks]
    if steps and absent:
        yield Problem.of("config.profile_ranks", rank=absent[0], ranks=parallel.ranks)


def _elastic(parallel: Parallel, checkpoint: Checkpoint) -> Iterator[str]:
    if parallel.elastic and not checkpoint.resume:
        yield Problem.of("config.elastic_without_resume")


def _tensor(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless heads and feed-forward divide by the ranks; fewer key-value heads than
    ranks are copied.
    """
    if model.fits_tensor(parallel.tensor):
        return
    widths = " and ".join(f"model.{key} {width}" for key, width in model.ffn_widths.items())
    sizes = f"model.heads {model.heads}, model.kv_heads {model.kv_heads} and {widths}"
    if model.global_kv_heads:
        sizes += f" and model.global_kv_heads {model.global_kv_heads}"
    if model.delta_net:
        heads = f"{model.delta_net.key_heads} and {model.delta_net.value_heads} heads"
        sizes += f" and model.delta_net's {heads}"
    if model.mamba:
        sizes += f" and model.mamba.groups {model.mamba.groups}"
    if model.mtp_layers:
        sizes += f" and, with model.mtp_layers, model.hidden {model.hidden}"
    possible = [ranks for ranks in range(1, model.heads + 1) if model.fits_tensor(ranks)]
    yield Problem.of(
        "config.tensor_sizes",
        tensor=parallel.tensor,
        sizes=sizes,
        possible=", ".join(map(str, possible)),
    )


def _sequence(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if tensor-parallel ranks that share sequences cannot do so evenly."""
    # cut sequences have rules of their own in `_cut_sequences`
    if parallel.sequence and parallel.context == 1 and train.seq_length % parallel.tensor:
        possible = nearest_multiples(train.seq_length, parallel.tensor)
        yield Problem.of(
            "config.sequence_length",
            seq_length=train.seq_length,
            tensor=parallel.tensor,
            possible=possible,
        )


def _async_tensor(
    train: Train, parallel: Parallel, precision: Precision, fp8: FP8
) -> Iterator[str]:
    """Yield a problem for each setting with which no product can be fused with its transfers, by
    the rules of the engine."""
    plan = plan_or_none(precision, fp8)
    if not parallel.async_tensor or plan is None:
        return
    canonical = train.numerics == "canonical"
    yield from async_tensor_problems(plan, parallel.tensor, parallel.sequence, canonical)


def _cut_sequences(
    model: ModelConfig, train: Train, parallel: Parallel, precision: Precision, fp8: FP8
) -> Iterator[str]:
    """Yield a problem for each setting under which parallel.context ranks cannot share a sequence,
    by the rules of the engine."""
    if parallel.context == 1:
        return
    # sequence parallelism cuts the tokens of a rank again
    slices = parallel.tensor if parallel.sequence else 1
    canonical = train.numerics == "canonical"
    plan = plan_or_none(precision, fp8)
    if plan is not None:
        yield from context_problems(
            model,
            plan,
            parallel.context,
            train.seq_length,
            slices,
            canonical,
            parallel.tensor,
        )


def _sentinel_of_cut_sequences(train: Train, parallel: Parallel) -> Iterator[str]:
    if train.sentinel and parallel.context > 1:
        yield Problem.of(
            "config.context_sentinel", context=parallel.context, sentinel=train.sentinel
        )


def _lm_eval_of_cut_sequences(parallel: Parallel, data: Data) -> Iterator[str]:
    if data.lm_eval and parallel.context > 1:
        yield Problem.of("config.context_lm_eval", context=parallel.context)


def _recompute(parallel: Parallel) -> Iterator[str]:
    """Yield a problem if keys of one kind of recompute are given with another, or twice."""
    kind = f'parallel.recompute "{parallel.recompute}"'
    modules = parallel.recompute_modules
    layers = parallel.recompute_layers
    fraction = parallel.recompute_fraction
    if modules and parallel.recompute != "selective":
        yield Problem.of("config.recompute_modules", modules=[*modules], kind=kind)
    for key, value in (("layers", layers), ("fraction", fraction)):
        if value and parallel.recompute != "full":
            yield Problem.of("config.recompute_full_only", key=key, value=value, kind=kind)
    if parallel.recompute == "selective" and not modules:
        yield Problem.of("config.recompute_selective_empty", kind=kind, modules=", ".join(MODULES))
    if layers and fraction:
        yield Problem.of("config.recompute_twice", layers=layers, fraction=fraction)


def _recomputed_layers(model: ModelConfig, train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if more layers are to be recomputed than any stage can have."""
    recomputed = parallel.recompute_layers
    if recomputed <= 1 or parallel.recompute != "full":
        return
    try:
        stages = stage_count(parallel, microbatches_of(train.global_batch, train, parallel))
    except UserError:
        return  # `_stages` reports it
    # without cuts, a stage can have all layers but one of each other stage
    most_layers = max(parallel.cuts, default=model.layers - stages + 1)
    if stages <= model.layers and recomputed > most_layers:
        layers = f"model.layers = {model.layers}"
        if stages > 1:
            layers += f" in {stages} stages"
        yield Problem.of(
            "config.recompute_layers",
            recompute_layers=recomputed,
            layers=layers,
            most_layers=most_layers,
        )


def _predicted_ahead(model: ModelConfig, train: Train) -> Iterator[str]:
    """Yield a problem if a module of multi-token prediction would have no token to predict."""
    if model.mtp_layers >= train.seq_length:
        yield Problem.of(
            "config.mtp_too_far", mtp_layers=model.mtp_layers, seq_length=train.seq_length
        )


def _shorter_sequences(
    model: ModelConfig, train: Train, parallel: Parallel, precision: Precision, fp8: FP8
) -> Iterator[str]:
    """Yield the problems of the first length that the layout or the model cannot have."""
    for samples, length in train.seq_schedule:
        if length == train.seq_length:
            continue
        of_length = train.model_copy(update={"seq_length": length, "seq_schedule": ()})
        problems = [
            *_sequence(of_length, parallel),
            *_cut_sequences(model, of_length, parallel, precision, fp8),
            *_predicted_ahead(model, of_length),
            *virtual_sizes(of_length, model),
        ]
        for problem in problems:
            prefix = f"train.seq_schedule [{samples}, {length}]: "
            # every rule yields problems, which are texts
            yield problem.within(prefix) if isinstance(problem, Problem) else prefix + problem
        if problems:
            return


def _pipeline(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    if parallel.pipeline > model.layers:
        pipeline = f"parallel.pipeline {parallel.pipeline}"
        yield Problem.of("config.too_many_stages", pipeline=pipeline, layers=model.layers)


def _stages(model: ModelConfig, train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless every stage has a layer and parallel.cuts covers all stages and
    layers."""
    # `_pipeline` reports them; a schedule for all of them would take long to build
    if parallel.pipeline > model.layers:
        return
    pipeline = f"parallel.pipeline {parallel.pipeline}"
    try:
        stages = stage_count(parallel, microbatches_of(train.global_batch, train, parallel))
    except UserError as error:
        yield from error.problems
        return
    if stages != parallel.pipeline:
        pipeline += f" x {stages // parallel.pipeline} chunks = {stages}"
    cuts = parallel.cuts
    if stages > model.layers:
        yield Problem.of("config.too_many_stages", pipeline=pipeline, layers=model.layers)
    elif cuts and (len(cuts) != stages or sum(cuts) != model.layers):
        yield Problem.of(
            "config.cuts",
            cuts=[*cuts],
            cut_layers=sum(cuts),
            pieces=len(cuts),
            pipeline=pipeline,
            layers=model.layers,
        )


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _tensor,
    _sequence,
    _async_tensor,
    _cut_sequences,
    _sentinel_of_cut_sequences,
    _lm_eval_of_cut_sequences,
    _pipeline,
    _stages,
    _compile,
    _zero,
    _sharded_gradients,
    _kept_layers,
    _profile,
    _elastic,
    _recompute,
    _recomputed_layers,
    _predicted_ahead,
    _shorter_sequences,
    _recomputed_scales,
    _recomputed_latents,
    _sentinel,
)
