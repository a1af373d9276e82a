"""Rules between the tables of a run file, each a function of the tables that it reads.

A table that could not be read skips only the checks that need it, so one pass reports all problems.
Every problem is a line with the key, its value, the reason and the nearest values that are allowed.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel

from megaprec.data.blend import shares
from megaprec.errors import UserError
from megaprec.optim.lr import LRSchedule
from megaprec.optim.rule_by_name import rule
from megaprec.optim.scaler import make_scaler
from megaprec.optim.update_rules import UpdateRule
from megaprec.precision.patterns import match_patterns, unmatched_problems
from models.config import ModelConfig
from parallel.activation_checkpoint import MODULES
from tools.config.canonical import unequal_settings, unequal_sums, virtual_ranks, virtual_sizes
from tools.config.cut_sequences import cut_sequences
from tools.config.data_settings import Data
from tools.config.expert_ranks import expert_layout, expert_neighbours
from tools.config.native_keys import loss_scaling, plan_of, recipe_of
from tools.config.precision_settings import FP8, Precision
from tools.config.schedules import stage_count
from tools.config.settings import LR, Checkpoint, Log, Optimizer, Parallel, Train
from tools.convert.core.rules import logical_shapes

T = TypeVar("T")


def cross_problems(tables: Mapping[str, BaseModel]) -> list[str]:
    """Return the problems of all rules whose tables could be read."""
    problems: list[str] = []
    for check in CHECKS:
        # a parameter of a check has the name of the table that it reads
        required = inspect.signature(check).parameters
        if required.keys() <= tables.keys():
            problems += check(**{name: tables[name] for name in required})
    return problems


def with_vocabulary_size(model: ModelConfig, data: Data) -> ModelConfig:
    """Return the model with a vocabulary: data.vocab_size where model.vocab leaves the size to the
    tokenizer."""
    return model if model.vocab else model.with_vocab(data.vocab_size)


def check_all(subject: T, *checks: Callable[[T], object]) -> None:
    """Raise one UserError with the problems of all `checks` of `subject`."""
    problems: list[str] = []
    for check in checks:
        try:
            check(subject)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def make_rule(optimizer: Optimizer) -> UpdateRule:
    """Return the update rule of [optimizer]. Raises UserError."""
    name = optimizer.name.lower()
    if name not in ("adamw", "muon"):
        return rule(optimizer.name, dict(optimizer.options))
    settings = {"betas": optimizer.betas, "eps": optimizer.eps}
    repeated = sorted(settings.keys() & optimizer.options.keys())
    if name == "muon" and repeated:
        raise UserError(
            *(
                f"optimizer.options {key}: give optimizer.{key} for muon's AdamW, ns_eps for muon"
                for key in repeated
            )
        )
    return rule(optimizer.name, settings | optimizer.options)


def lr_schedule(lr: LR, train: Train) -> LRSchedule:
    """Return the schedule over lr.length or the whole run, in steps or samples as lr.unit says.
    Raises UserError."""
    # the length of the whole run, if lr.length is 0
    length = lr.length or train.steps * (train.global_batch if lr.unit == "samples" else 1)
    return LRSchedule(lr.schedule, lr.peak, lr.final, lr.warmup, length, lr.decay)


def _schedule(lr: LR, train: Train) -> Iterator[str]:
    try:
        lr_schedule(lr, train)
    except UserError as error:
        unit = " (in samples)" if lr.unit == "samples" else ""
        yield from (problem.within("lr.", unit) for problem in error.problems)


def _rule(optimizer: Optimizer) -> Iterator[str]:
    try:
        make_rule(optimizer)
    except UserError as error:
        yield from error.problems


def _history(fp8: FP8, parallel: Parallel, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for settings that need the same FP8 scales in all micro-batches of a step."""
    if fp8.kind == "none" or fp8.history == "step":
        return
    # the second pass would find other scales than the first
    if parallel.recompute_fraction or parallel.recompute_layers:
        yield (
            'fp8.history "te" updates scales before a layer is recomputed: set parallel.recompute '
            '= "none" or "selective", or fp8.history = "step"'
        )
    if model.latent and "attention" in parallel.recompute_modules:
        yield (
            'fp8.history "te" updates scales before the projections of model.latent are '
            'recomputed: leave "attention" '
            'out of parallel.recompute_modules, or set fp8.history = "step"'
        )
    if fp8.shadow_every:
        yield (
            f"fp8.shadow_every = {fp8.shadow_every} repeats the first micro-batch, which "
            'fp8.history "te" gives other scales: set 0, or fp8.history = "step"'
        )


def _sentinel(train: Train, fp8: FP8) -> Iterator[str]:
    if train.sentinel and fp8.kind != "none" and fp8.history == "te":
        yield (
            f"train.sentinel = {train.sentinel} computes a micro-batch again, which fp8.history "
            '"te" gives other scales: set 0, or fp8.history = "step"'
        )


def _compile(train: Train, model: ModelConfig) -> Iterator[str]:
    if train.compile != "off" and model.factory:
        yield (
            f'train.compile = "{train.compile}" knows the built-in families only, not '
            f'model.factory "{model.factory}": remove one of them'
        )


def _patterns(
    optimizer: Optimizer, precision: Precision, model: ModelConfig, data: Data
) -> Iterator[str]:
    """Yield a problem for each pattern without a parameter; parameters of a custom model are known
    to the ranks only.
    """
    groups = [group.pattern for group in optimizer.groups]
    by_adamw = list[str]()
    if optimizer.name.lower() == "muon":
        patterns = optimizer.options.get("by_adamw", [])
        # `_rule` reports an option that is no list, and items that are no text
        if isinstance(patterns, list):
            by_adamw = [pattern for pattern in patterns if isinstance(pattern, str)]
    if model.factory or not (groups or precision.keep_fp32 or by_adamw):
        return
    # known without building the model
    names = [*logical_shapes(with_vocabulary_size(model, data))]
    for key, patterns in (
        ("optimizer.groups", groups),
        ("precision.keep_fp32", precision.keep_fp32),
        ("optimizer.options by_adamw", by_adamw),
    ):
        yield from unmatched_problems(key, patterns, match_patterns(patterns, names), names)


def _zero(parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless optimizer state can be cut over parallel.zero_size ranks."""
    size = parallel.zero_size
    copies = parallel.copies
    if size and copies % size:
        divisors = ", ".join(str(i) for i in range(1, copies + 1) if copies % i == 0)
        ranks = f"parallel.data {parallel.data}"
        if parallel.context > 1:
            ranks += f" x parallel.context {parallel.context} = {copies}"
        yield f"parallel.zero_size {size} does not divide {ranks}: {divisors} would"
    if size > 1 and not parallel.zero:
        yield (
            f"parallel.zero_size {size} cuts optimizer state, but parallel.zero = false: remove "
            "one of them"
        )


def _elastic(parallel: Parallel, checkpoint: Checkpoint) -> Iterator[str]:
    if parallel.elastic and not checkpoint.resume:
        yield (
            "parallel.elastic = true goes on from a checkpoint when ranks come or go, but "
            "checkpoint.resume = false: remove one of them"
        )


def _tensor(model: ModelConfig, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless heads and feed-forward divide by the ranks; fewer key-value heads than
    ranks are copied.
    """
    if _fits_tensor(model, parallel.tensor):
        return
    widths = " and ".join(f"model.{key} {width}" for key, width in model.ffn_widths.items())
    sizes = f"model.heads {model.heads}, model.kv_heads {model.kv_heads} and {widths}"
    if model.mtp_layers:
        sizes += f" and, with model.mtp_layers, model.hidden {model.hidden}"
    possible = [i for i in range(1, model.heads + 1) if _fits_tensor(model, i)]
    would = ", ".join(map(str, possible))
    yield f"parallel.tensor {parallel.tensor} does not divide {sizes} evenly: {would} would"


def _fits_tensor(model: ModelConfig, tensor: int) -> bool:
    """Return True if `tensor` ranks can share each layer evenly."""
    if model.kv_heads % tensor and tensor % model.kv_heads:
        return False
    widths = [*model.ffn_widths.values(), model.heads]
    if model.mtp_layers:
        widths.append(model.hidden)  # features of the projection of a module
    return not any(width % tensor for width in widths)


def _sequence(train: Train, parallel: Parallel) -> Iterator[str]:
    # cut sequences have rules of their own in `cut_sequences`
    if parallel.sequence and parallel.context == 1 and train.seq_length % parallel.tensor:
        possible = nearest_multiples(train.seq_length, parallel.tensor)
        yield (
            f"train.seq_length {train.seq_length} is not a multiple of parallel.tensor "
            f"{parallel.tensor}, as parallel.sequence needs: {possible} would be"
        )


def _recompute(parallel: Parallel) -> Iterator[str]:
    """Yield a problem if keys of one kind of recompute are given with another, or twice."""
    kind = f'parallel.recompute "{parallel.recompute}"'
    modules = parallel.recompute_modules
    layers = parallel.recompute_layers
    fraction = parallel.recompute_fraction
    if modules and parallel.recompute != "selective":
        yield (
            f"parallel.recompute_modules {[*modules]} is for parallel.recompute "
            f'"selective", but {kind}: remove one of them'
        )
    for key, value in (("layers", layers), ("fraction", fraction)):
        if value and parallel.recompute != "full":
            yield (
                f'parallel.recompute_{key} {value} is for parallel.recompute "full", but '
                f"{kind}: remove one of them"
            )
    if parallel.recompute == "selective" and not modules:
        yield f"{kind} needs a module in parallel.recompute_modules: {', '.join(MODULES)}"
    if layers and fraction:
        yield (
            f"parallel.recompute_layers {layers} and parallel.recompute_fraction "
            f"{fraction:g} are two ways to say the same: remove one of them"
        )


def _recomputed_layers(model: ModelConfig, train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem if more layers are to be recomputed than any stage can have."""
    recomputed = parallel.recompute_layers
    if recomputed <= 1 or parallel.recompute != "full":
        return
    try:
        stages = stage_count(parallel, _microbatches(train, parallel))
    except UserError:
        return  # `_stages` reports it
    # without cuts, a stage can have all layers but one of each other stage
    most_layers = max(parallel.cuts, default=model.layers - stages + 1)
    if stages <= model.layers and recomputed > most_layers:
        layers = f"model.layers = {model.layers}"
        if stages > 1:
            layers += f" in {stages} stages"
        yield (
            f"parallel.recompute_layers = {recomputed} is more than a stage has of {layers}: give "
            f"at most {most_layers}, or parallel.recompute_fraction = 1.0 for all"
        )


def _microbatches(train: Train, parallel: Parallel) -> int:
    """Return the micro-batches of a step; 1 if the batch does not divide, which `_batch`
    reports."""
    # a schedule needs one at least
    return max(1, train.global_batch // (train.micro_batch * parallel.data))


def _predicted_ahead(model: ModelConfig, train: Train) -> Iterator[str]:
    """Yield a problem if a module of multi-token prediction would have no token to predict."""
    if model.mtp_layers >= train.seq_length:
        yield (
            f"model.mtp_layers = {model.mtp_layers}: module number {train.seq_length} has "
            "nothing to predict within "
            f"train.seq_length = {train.seq_length}; give fewer modules or longer samples"
        )


def _stages(model: ModelConfig, train: Train, parallel: Parallel) -> Iterator[str]:
    """Yield a problem unless every stage has a layer and parallel.cuts covers all stages and
    layers."""
    pipeline = f"parallel.pipeline {parallel.pipeline}"
    if parallel.pipeline > model.layers:  # before a schedule is built for all of them
        yield f"{pipeline} is more than model.layers {model.layers}: a stage needs a layer"
        return
    try:
        stages = stage_count(parallel, _microbatches(train, parallel))
    except UserError as error:
        yield from error.problems
        return
    if stages != parallel.pipeline:
        pipeline += f" x {stages // parallel.pipeline} chunks = {stages}"
    cuts = parallel.cuts
    if stages > model.layers:
        yield f"{pipeline} is more than model.layers {model.layers}: a stage needs a layer"
    elif cuts and (len(cuts) != stages or sum(cuts) != model.layers):
        yield (
            f"parallel.cuts {[*cuts]} cuts {sum(cuts)} layers into {len(cuts)}, but {pipeline} "
            f"and model.layers is {model.layers}"
        )


def _batch(train: Train, parallel: Parallel) -> Iterator[str]:
    unit = train.micro_batch * parallel.data
    if train.global_batch % unit:
        yield (
            f"train.global_batch {train.global_batch} is not a multiple of train.micro_batch "
            f"{train.micro_batch} x parallel.data {parallel.data} = {unit}: "
            f"{nearest_multiples(train.global_batch, unit)} would be"
        )


def _positions(model: ModelConfig, train: Train) -> Iterator[str]:
    if train.seq_length > model.max_positions:
        yield (
            f"train.seq_length {train.seq_length} is more than model.max_positions "
            f"{model.max_positions}: lower the first or raise the second"
        )


def _vocabulary(model: ModelConfig, data: Data) -> Iterator[str]:
    # the tokenizer that is trained has data.vocab_size tokens
    if not data.tokenizer and data.has_text() and 0 < model.vocab < data.vocab_size:
        yield (
            f"model.vocab {model.vocab} is smaller than data.vocab_size {data.vocab_size}: "
            f"set model.vocab = 0 or data.vocab_size = {model.vocab}"
        )


def _blend(data: Data) -> Iterator[str]:
    if data.blend and data.source != "python":
        yield (
            f'data.source "{data.source}" and data.blend both name the training data: remove one '
            "of them"
        )
    try:
        shares([part.weight for part in data.blend] or [1])
    except UserError as error:
        yield from (problem.within("data.blend: ") for problem in error.problems)


def _evaluation(train: Train, data: Data) -> Iterator[str]:
    if train.eval_every and not (data.held_out or data.validation or data.lm_eval):
        yield (
            f"train.eval_every {train.eval_every} needs held-out text, but data.held_out is 0: set "
            "it to 0.02, for example, or name sets in data.validation"
        )
    # further sets beside the held-out part
    names = [part.name for part in data.validation]
    for name in dict.fromkeys(names):
        # a name becomes part of keys in metrics.jsonl and of tags of trackers
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
            yield (
                f'data.validation: the name "{name}" needs 1 to 60 letters, digits, dots, "_" or '
                '"-"'
            )
        elif names.count(name) > 1:
            yield (
                f'data.validation: {names.count(name)} sets have the name "{name}": give each its '
                "own"
            )


def _lm_eval(model: ModelConfig, train: Train, data: Data, fp8: FP8) -> Iterator[str]:
    """Yield a problem for settings under which the tasks of data.lm_eval are not evaluated."""
    if not data.lm_eval:
        for key in ("lm_eval_folder", "lm_eval_limit"):
            if getattr(data, key):
                yield f"data.{key} does nothing without data.lm_eval: name tasks there"
        return
    if not train.eval_every:
        yield (
            "data.lm_eval is evaluated every train.eval_every steps, which is 0: give a number "
            "of steps"
        )
    if model.factory:
        yield "data.lm_eval is for built-in model families, not for model.factory: remove it"
    if fp8.kind != "none":
        yield (
            "data.lm_eval evaluates batches of many shapes, which products in FP8 do not allow: "
            "remove it"
        )


def _sample(model: ModelConfig, log: Log) -> Iterator[str]:
    if model.factory and log.sample:
        yield (
            f'log.sample needs a built-in family, not model.factory "{model.factory}": remove one '
            "of them"
        )


def _plan(precision: Precision, fp8: FP8) -> Iterator[str]:
    try:
        recipe_of(fp8)
    except UserError as error:
        yield from error.problems
        return
    try:
        plan_of(precision, fp8)
    except UserError as error:
        yield from (problem.within("precision.") for problem in error.problems)


def _shadow(fp8: FP8) -> Iterator[str]:
    if fp8.shadow_every and fp8.kind == "none":
        yield (
            f'fp8.shadow_every = {fp8.shadow_every}, but fp8.kind = "none": there is no FP8 to '
            "compare; set 0"
        )


def _kind_of_scale(precision: Precision) -> Iterator[str]:
    # a constant scale and a loss_scale go together, or neither is there
    if (precision.scaling == "constant") != (precision.loss_scale > 0):
        yield (
            f'precision.scaling = "{precision.scaling}", precision.loss_scale = '
            f"{precision.loss_scale:g}: a constant scale needs a loss_scale, any other has none"
        )


def _scale(precision: Precision) -> Iterator[str]:
    if precision.min_scale > precision.initial_scale:
        yield (
            f"precision.min_scale {precision.min_scale:g} is more than precision.initial_scale "
            f"{precision.initial_scale:g}: the scale starts at or above its floor"
        )
        return
    # the scaler knows the other limits of its first scale
    try:
        make_scaler(loss_scaling(precision))
    except UserError as error:
        key = "loss_scale" if precision.loss_scale else "initial_scale"
        yield from (
            problem.within(f"precision.{key} = {getattr(precision, key):g}: ")
            for problem in error.problems
        )


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value`, in words."""
    # zero is a multiple, but no size
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _tensor,
    _sequence,
    cut_sequences,
    _stages,
    _batch,
    _positions,
    _vocabulary,
    _blend,
    _evaluation,
    _lm_eval,
    _sample,
    _schedule,
    _plan,
    _shadow,
    _sentinel,
    _compile,
    _kind_of_scale,
    _scale,
    _rule,
    _patterns,
    _zero,
    _elastic,
    _recompute,
    _recomputed_layers,
    _predicted_ahead,
    _history,
    expert_layout,
    expert_neighbours,
    virtual_ranks,
    virtual_sizes,
    unequal_settings,
    unequal_sums,
)
