"""Rules between the tables of a run file, each a function of the tables that it reads.

A table that could not be read skips only the checks that need it, so one pass reports all problems.
Every problem is a line with the key, its value, the reason and the nearest values that are allowed.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TypeVar

from pydantic import BaseModel

from megaprec.comm.layout import Growth, Part
from megaprec.errors import Problem, UserError
from megaprec.optim.decision.scaler import make_scaler
from megaprec.optim.rules.lr import SCHEDULES, LRSchedule
from megaprec.optim.rules.rule_table import rule, rule_kind
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.optim.rules.width import require_width_factors
from megaprec.precision.patterns import match_patterns, unmatched_problems
from megaprec.tokens.blend import shares
from models.attention.context_limits import context_problems
from models.config import ModelConfig
from models.logical_shapes import logical_shapes
from models.nvfp4_models import nvfp4_problems
from parallel.activation_checkpoint import MODULES
from parallel.fused_products import async_tensor_problems
from parallel.pipeline.kinds import KINDS
from tools.config.rules.canonical import (
    unequal_models,
    unequal_scales,
    unequal_stages,
    unequal_steps,
    unequal_sums,
    unequal_tasks,
    virtual_ranks,
    virtual_sizes,
)
from tools.config.rules.expert_ranks import expert_layout, expert_numerics, expert_scales
from tools.config.tables.batch_schedule import BatchSchedule
from tools.config.tables.data_settings import Data
from tools.config.tables.native_keys import (
    loss_scaling,
    plan_of,
    plan_or_none,
    recipe_of,
    recipe_or_none,
)
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.schedules import stage_count
from tools.config.tables.settings import LR, Checkpoint, Log, Optimizer, Parallel, Train
from tools.console.toml import toml

T = TypeVar("T")
# each batch of a schedule has a pipeline schedule of its own, which is proven when a run begins
MOST_CHANGES = 1000
# problems of options that begin with the option, as a rule by itself knows it
BY_OPTION_ALONE = frozenset(
    {"optimizer.betas", "optimizer.eps", "optimizer.momentum", "optimizer.nesterov"}
)
OF_TORCHS_CLASS = "optimizer.torch_rule"  # how codes of problems with such a rule begin
GROWS = Growth(1.0, 2.0)
"""Of any embedding under muP."""


def cross_problems(tables: Mapping[str, BaseModel], changed: str = "") -> list[str]:
    """Return the problems of all rules whose tables could be read.

    changed: a table, if all rules hold that do not read it.
    """
    problems: list[str] = []
    for check in CHECKS:
        required = _tables_of(check)
        may_fail = not changed or changed in required
        if may_fail and required <= tables.keys():
            problems += check(**{name: tables[name] for name in required})
    return problems


@cache
def _tables_of(check: Callable[..., object]) -> frozenset[str]:
    """Return the names of the tables that a rule reads: those of its parameters."""
    return frozenset(inspect.signature(check).parameters)


def with_vocabulary_size(model: ModelConfig, data: Data) -> ModelConfig:
    """Return the model with a vocabulary: data.vocab_size where model.vocab leaves the size to the
    tokenizer."""
    return model if model.vocab else model.with_vocab(data.vocab_size)


def check_all(subject: T, *checks: Callable[[T], object]) -> None:
    """Raise one UserError with the problems of all `checks` of `subject`."""
    problems: list[Problem] = []
    for check in checks:
        problems += _problems_of(check, subject)
    if problems:
        # several checks may fail by the same cause, such as a server that does not answer
        raise UserError(*dict.fromkeys(problems))


def _problems_of(function: Callable[..., object], *arguments: object) -> tuple[Problem, ...]:
    """Return the problems of the UserError that a call raises, none if it raises none."""
    try:
        function(*arguments)
    except UserError as error:
        return error.problems
    return ()


def make_rule(optimizer: Optimizer) -> UpdateRule:
    """Return the update rule of [optimizer]. Raises UserError."""
    settings = {key: getattr(optimizer, key) for key in rule_kind(optimizer.name).own_keys}
    repeated = sorted(settings.keys() & optimizer.options.keys())
    if repeated:
        raise UserError(*(Problem.of("config.own_key_of_rule", key=key) for key in repeated))
    return rule(optimizer.name, settings | optimizer.options)


def lr_schedule(lr: LR, train: Train) -> LRSchedule:
    """Return the schedule over lr.length or the whole run, in steps or samples as lr.unit says.
    Raises UserError."""
    return LRSchedule(
        kind=lr.schedule,
        peak=lr.peak,
        final=lr.final,
        warmup=lr.warmup,
        total=lr.length or _run_length(lr, train),
        decay=lr.decay,
        tail=lr.wsd_decay,
        initial=lr.initial,
    )


def _run_length(lr: LR, train: Train) -> int:
    """Return the length of the run in steps or samples, as lr.unit says."""
    if lr.unit == "samples":
        return BatchSchedule.of(train).after(0, train.steps)
    return train.steps


def _schedule(lr: LR, train: Train) -> Iterator[str]:
    if changes_problems(train):
        return  # `_batch_schedule` reports them
    unit = " (in samples)" if lr.unit == "samples" else ""
    for problem in _problems_of(lr_schedule, lr, train):
        remedy = ""
        if problem.code in ("optimizer.schedule_warmup", "optimizer.schedule_decay"):
            remedy = _fitting_phases(lr, train)
        yield problem.within("lr.", f"{unit}{remedy}")


def _fitting_phases(lr: LR, train: Train) -> str:
    """Return phases that the length of the schedule has room for, as arguments beside those that
    give the length."""
    length = f"lr.length={lr.length}" if lr.length else f"train.steps={train.steps}"
    total = lr.length or _run_length(lr, train)
    tenth = total // 10
    phases = f"lr.warmup={min(lr.warmup, tenth)}"
    if "decay" in SCHEDULES[lr.schedule].keys:
        phases += f" lr.decay={max(1, min(lr.decay, tenth))}"
    return f"; with {length} give {phases}, for example"


def _rule(optimizer: Optimizer) -> Iterator[str]:
    for problem in _problems_of(make_rule, optimizer):
        if problem.code in BY_OPTION_ALONE:
            yield problem.within("optimizer.options.")
        elif problem.code.startswith(OF_TORCHS_CLASS):
            yield problem.within(_name_and_options(optimizer))
        else:
            yield problem


def _name_and_options(optimizer: Optimizer) -> str:
    """Return the keys that a class of torch is made by, to stand before what is wrong with it."""
    keys = [f"optimizer.name = {toml(optimizer.name)}"]
    if optimizer.options:
        keys.append(f"optimizer.options = {toml(optimizer.options)}")
    return f"{', '.join(keys)}: "


def _recomputed_scales(parallel: Parallel, fp8: FP8) -> Iterator[str]:
    recomputes_layers = parallel.recompute_fraction or parallel.recompute_layers
    if recomputes_layers and _scales_advance(fp8):
        yield Problem.of("config.history_recomputed")


def _recomputed_latents(model: ModelConfig, parallel: Parallel, fp8: FP8) -> Iterator[str]:
    recomputes_attention = "attention" in parallel.recompute_modules
    if model.latent and recomputes_attention and _scales_advance(fp8):
        yield Problem.of("config.history_latent")


def _sentinel(train: Train, fp8: FP8) -> Iterator[str]:
    if train.sentinel and _scales_advance(fp8):
        yield Problem.of("config.history_sentinel", sentinel=train.sentinel)


def _scales_advance(fp8: FP8) -> bool:
    """Return True if a pass that is computed again would find other FP8 scales
    (`FP8Recipe.repeatable`)."""
    recipe = recipe_or_none(fp8)
    return recipe is not None and not recipe.repeatable


def _compile(train: Train, model: ModelConfig) -> Iterator[str]:
    if train.compile not in ("auto", "off") and model.factory:
        yield Problem.of("config.compile_factory", compile=train.compile, factory=model.factory)


def _mup_rule(optimizer: Optimizer, model: ModelConfig) -> Iterator[str]:
    """Yield a problem if the update rule has no factors under muP, or none for an embedding."""
    if not model.mup_base_hidden or _problems_of(make_rule, optimizer):
        return
    update_rule = make_rule(optimizer)
    for name in ("embedding.weight", "positions.weight"):
        table = Part(name, (model.max_positions, model.hidden), growth=GROWS)
        for problem in _problems_of(require_width_factors, update_rule, table):
            yield problem
            return


def _optimizer_patterns(optimizer: Optimizer, model: ModelConfig) -> Iterator[str]:
    groups = [group.pattern for group in optimizer.groups]
    yield from _unmatched("optimizer.groups", groups, model)
    yield from _unmatched("optimizer.frozen", optimizer.frozen, model)
    if not model.factory and optimizer.frozen and not trained_names(optimizer, model):
        yield Problem.of("config.nothing_trained")
    # `_rule` reports an unknown name, an option that is no list, and items that are no text
    if _problems_of(rule_kind, optimizer.name):
        return
    for option in rule_kind(optimizer.name).patterns:
        patterns = optimizer.options.get(option, [])
        if isinstance(patterns, list):
            texts = [pattern for pattern in patterns if isinstance(pattern, str)]
            yield from _unmatched(f"optimizer.options {option}", texts, model)


def trained_names(optimizer: Optimizer, model: ModelConfig) -> list[str]:
    """Return the logical names of the parameters that are trained, of a model without a factory."""
    names = [*logical_shapes(model)]
    return [name for name in names if not any(match_patterns(optimizer.frozen, [name]))]


def _fp32_patterns(precision: Precision, model: ModelConfig) -> Iterator[str]:
    yield from _unmatched("precision.keep_fp32", precision.keep_fp32, model)


def _unmatched(key: str, patterns: Sequence[str], model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each pattern without a parameter; parameters of a custom model are known
    to the ranks only.
    """
    if model.factory or not patterns:
        return
    # known without building the model, and the same for any vocabulary
    names = [*logical_shapes(model)]
    yield from unmatched_problems(key, patterns, match_patterns(patterns, names), names)


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
    """Yield a problem for each setting that needs whole gradients, which ZeRO-2 frees."""
    if parallel.zero != 2:
        return
    if train.numerics == "canonical":
        yield Problem.of("config.zero_2_canonical")
    if train.sentinel:
        yield Problem.of("config.zero_2_sentinel", sentinel=train.sentinel)
    if fp8.shadow_every:
        yield Problem.of("config.zero_2_shadow", shadow_every=fp8.shadow_every)
    if parallel.schedule_file or KINDS[parallel.schedule].splits_backward:
        key = "schedule_file" if parallel.schedule_file else "schedule"
        yield Problem.of("config.zero_2_schedule", key=key, schedule=getattr(parallel, key))


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
            model, plan, parallel.context, train.seq_length, slices, canonical
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
        stages = stage_count(parallel, _microbatches(train.global_batch, train, parallel))
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


def _microbatches(batch: int, train: Train, parallel: Parallel) -> int:
    """Return the micro-batches of a step with this batch; 1 if it does not divide, which `_batch`
    reports."""
    # a schedule needs one at least
    return max(1, batch // (train.micro_batch * parallel.data))


def _predicted_ahead(model: ModelConfig, train: Train) -> Iterator[str]:
    """Yield a problem if a module of multi-token prediction would have no token to predict."""
    if model.mtp_layers >= train.seq_length:
        yield Problem.of(
            "config.mtp_too_far", mtp_layers=model.mtp_layers, seq_length=train.seq_length
        )


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
        stages = stage_count(parallel, _microbatches(train.global_batch, train, parallel))
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


def changes_problems(train: Train) -> list[str]:
    """Return the problems of train.batch_schedule by itself."""
    changes = train.batch_schedule
    if not changes:
        return []
    if len(changes) > MOST_CHANGES:
        return [Problem.of("config.batch_schedule_long", count=len(changes), most=MOST_CHANGES)]
    problems = list[str]()
    first, _ = changes[0]
    if first:
        problems.append(Problem.of("config.batch_schedule_begin", samples=first))
    thresholds = [threshold for threshold, _ in changes]
    for earlier, later in pairwise(thresholds):
        if later <= earlier:
            problems.append(Problem.of("config.batch_schedule_order", earlier=earlier, later=later))
    return problems


def _batch_schedule(train: Train) -> Iterator[str]:
    yield from changes_problems(train)
    if not train.batch_schedule:
        return
    _, last = train.batch_schedule[-1]
    if last != train.global_batch:
        yield Problem.of("config.batch_schedule_last", last=last, global_batch=train.global_batch)


def _batch_schedule_of_file(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if batches differ and the pipeline schedule is one of a file."""
    sizes = {batch for _, batch in train.batch_schedule}
    if parallel.schedule_file and len(sizes) > 1:
        yield Problem.of("config.batch_schedule_file", schedule_file=parallel.schedule_file)


def _pipeline_of_batches(train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem for the first batch of train.batch_schedule whose micro-batches the pipeline
    schedule cannot have."""
    # `_stages` reports those of train.global_batch and of a file
    if parallel.schedule_file:
        return
    for samples, batch in train.batch_schedule:
        problems = _problems_of(stage_count, parallel, _microbatches(batch, train, parallel))
        if problems and batch != train.global_batch:
            for problem in problems:
                yield problem.within(f"train.batch_schedule [{samples}, {batch}]: ")
            return


def _rates_of_batches(lr: LR, train: Train) -> Iterator[str]:
    """Yield a problem if the learning rate is a function of steps, whose batches differ."""
    depends_on_unit = lr.warmup > 0 or SCHEDULES[lr.schedule].ends
    if train.batch_schedule and lr.unit == "steps" and depends_on_unit:
        yield Problem.of("config.batch_schedule_rates")


def _batch(train: Train, parallel: Parallel) -> Iterator[str]:
    # samples of one micro-batch of every replica
    unit = train.micro_batch * parallel.data
    undivided = [change for change in train.batch_schedule if change[1] % unit]
    if undivided:
        samples, batch = undivided[0]
        others = ""
        if len(undivided) > 1:
            others = f", and {len(undivided) - 1} more"
        yield Problem.of(
            "config.batch_schedule_undivided",
            samples=samples,
            batch=batch,
            others=others,
            micro_batch=train.micro_batch,
            data=parallel.data,
            product=unit,
            possible=nearest_multiples(batch, unit),
        )
    elif train.global_batch % unit:
        yield Problem.of(
            "config.global_batch",
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            data=parallel.data,
            product=unit,
            possible=nearest_multiples(train.global_batch, unit),
        )


def _positions(model: ModelConfig, train: Train) -> Iterator[str]:
    if train.seq_length > model.max_positions:
        yield Problem.of(
            "config.too_long", seq_length=train.seq_length, max_positions=model.max_positions
        )


def _vocabulary(model: ModelConfig, data: Data) -> Iterator[str]:
    # the tokenizer that is trained has data.vocab_size tokens, but for one of characters
    if not data.tokenizer and data.has_text() and 0 < model.vocab < data.vocab_size:
        yield Problem.of("config.small_vocab", vocab=model.vocab, vocab_size=data.vocab_size)


def _first_state(train: Train) -> Iterator[str]:
    if train.branch_from and train.init_from:
        yield Problem.of("config.init_and_branch")


def _blend(data: Data) -> Iterator[str]:
    if data.blend and data.source != "python":
        yield Problem.of("config.source_and_blend", source=data.source)
    # without a blend there is nothing to refuse
    weights = [dataset.weight for dataset in data.blend] or [1]
    for problem in _problems_of(shares, weights):
        yield problem.within("data.blend: ")


def _windows(data: Data) -> Iterator[str]:
    if data.windows == "random" and not data.shuffle:
        yield Problem.of("config.windows_in_order")


def _evaluation(train: Train, data: Data) -> Iterator[str]:
    if train.evaluates and not (data.held_out or data.validation or data.lm_eval):
        key = "eval_every" if train.eval_every else "eval_first"
        value = toml(getattr(train, key))
        yield Problem.of("config.eval_without_text", key=key, value=value)


def _best_checkpoint(train: Train, data: Data, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a problem if there is no evaluation by which the best checkpoint is chosen."""
    name = checkpoint.keep_best
    if not name:
        return
    evaluations = [f"eval_loss/{dataset.name}" for dataset in data.validation]
    if data.held_out:
        evaluations.insert(0, "eval_loss")
    if name not in evaluations:
        known = ", ".join(evaluations) or "nothing: set data.held_out or data.validation"
        yield Problem.of("config.keep_best_unknown", name=name, known=known)
        return
    # the last step has both
    if not train.eval_every:
        yield Problem.of("config.keep_best_never_evaluated", name=name)


def _validation_names(data: Data) -> Iterator[str]:
    names = [dataset.name for dataset in data.validation]
    for name in dict.fromkeys(names):
        # a name becomes part of keys in metrics.jsonl and of tags of trackers
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
            yield Problem.of("config.validation_name", name=name)
        elif names.count(name) > 1:
            yield Problem.of("config.validation_name_twice", count=names.count(name), name=name)


def _lm_eval_keys(data: Data) -> Iterator[str]:
    for key in ("lm_eval_folder", "lm_eval_limit"):
        if getattr(data, key) and not data.lm_eval:
            yield Problem.of("config.lm_eval_key", key=key)


def _lm_eval_steps(train: Train, data: Data) -> Iterator[str]:
    if data.lm_eval and not train.evaluates:
        yield Problem.of("config.lm_eval_never")


def _lm_eval_family(model: ModelConfig, data: Data) -> Iterator[str]:
    if data.lm_eval and model.factory:
        yield Problem.of("config.lm_eval_factory")


def _lm_eval_products(data: Data, fp8: FP8) -> Iterator[str]:
    if data.lm_eval and fp8.kind != "none":
        yield Problem.of("config.lm_eval_fp8")


def _sample(model: ModelConfig, log: Log) -> Iterator[str]:
    if model.factory and log.sample:
        yield Problem.of("config.sample_factory", factory=model.factory)


def _recipe(fp8: FP8) -> Iterator[str]:
    yield from _problems_of(recipe_of, fp8)


def _nvfp4(model: ModelConfig, parallel: Parallel, fp8: FP8) -> Iterator[str]:
    if not fp8.four_bits:
        return
    yield from nvfp4_problems(model)
    if parallel.context > 1:
        yield Problem.of("parallel.nvfp4_context", size=parallel.context)
    if parallel.tensor > model.kv_heads:
        copies = parallel.tensor // model.kv_heads
        heads = f"model.kv_heads = {model.kv_heads}"
        yield Problem.of("parallel.nvfp4_copies", name=heads, copies=copies)


def _plan(precision: Precision, fp8: FP8) -> Iterator[str]:
    # `_recipe` reports the problems of [fp8]; those of the plan name fields without their table
    if _problems_of(recipe_of, fp8):
        return
    for problem in _problems_of(plan_of, precision, fp8):
        yield problem.within("precision.")


def _shadow(fp8: FP8) -> Iterator[str]:
    if fp8.shadow_every and fp8.kind == "none":
        yield Problem.of("config.shadow_without_fp8", shadow_every=fp8.shadow_every)
    if fp8.shadow_every and _scales_advance(fp8):
        yield Problem.of("config.history_shadow", shadow_every=fp8.shadow_every)


def _kind_of_scale(precision: Precision) -> Iterator[str]:
    # a constant scale and a loss_scale go together, or neither is there
    if (precision.scaling == "constant") != (precision.loss_scale > 0):
        yield Problem.of(
            "config.loss_scale_kind", scaling=precision.scaling, loss_scale=precision.loss_scale
        )


def _scale(precision: Precision) -> Iterator[str]:
    if precision.min_scale > precision.initial_scale:
        yield Problem.of(
            "config.low_first_scale",
            min_scale=precision.min_scale,
            initial_scale=precision.initial_scale,
        )
        return
    # the scaler knows the other limits of its first scale
    key = "loss_scale" if precision.loss_scale else "initial_scale"
    for problem in _problems_of(make_scaler, loss_scaling(precision)):
        yield problem.within(f"precision.{key} = {getattr(precision, key):g}: ")


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value`, in words."""
    # zero is a multiple, but no size
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _tensor,
    _sequence,
    _async_tensor,
    _cut_sequences,
    _sentinel_of_cut_sequences,
    _lm_eval_of_cut_sequences,
    _pipeline,
    _stages,
    _batch,
    _batch_schedule,
    _batch_schedule_of_file,
    _pipeline_of_batches,
    _rates_of_batches,
    _positions,
    _vocabulary,
    _first_state,
    _blend,
    _windows,
    _evaluation,
    _validation_names,
    _best_checkpoint,
    _lm_eval_keys,
    _lm_eval_steps,
    _lm_eval_family,
    _lm_eval_products,
    _sample,
    _schedule,
    _recipe,
    _nvfp4,
    _plan,
    _shadow,
    _compile,
    _kind_of_scale,
    _scale,
    _rule,
    _mup_rule,
    _optimizer_patterns,
    _fp32_patterns,
    _zero,
    _sharded_gradients,
    _elastic,
    _recompute,
    _recomputed_layers,
    _predicted_ahead,
    _recomputed_scales,
    _recomputed_latents,
    _sentinel,
    expert_layout,
    expert_numerics,
    expert_scales,
    virtual_ranks,
    virtual_sizes,
    unequal_steps,
    unequal_models,
    unequal_tasks,
    unequal_stages,
    unequal_scales,
    unequal_sums,
)
