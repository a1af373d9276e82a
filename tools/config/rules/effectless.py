"""Keys of a run file that change nothing beside its other keys: one note for each reason, before
the first step.

`EFFECT_RULES` says when such a key has an effect, and which keys decide it. Only what the user
wrote is told, and only if it differs from the default, which claims nothing. Keys that are refused
in such runs are in the modules beside this one, those without effect on the data in
`tools.training.run_warnings`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from megaprec.optim.rules.lr import SCHEDULES
from megaprec.optim.rules.rule_table import rule_kind
from megaprec.tokens.places import STANDARD_LIBRARY
from models.config import ModelConfig
from models.initial_weights import InitialStd
from models.logical_shapes import logical_shapes
from models.model_fields import BESIDE
from tools.config.rules.derived import with_vocabulary_size
from tools.config.tables.data_settings import Data, names_of
from tools.config.tables.native_keys import plan_or_none
from tools.config.tables.precision_settings import FP8, Precision
from tools.config.tables.schedules import stage_count
from tools.config.tables.settings import (
    LR,
    Checkpoint,
    Log,
    Optimizer,
    OptimizerGroup,
    Parallel,
    Train,
)
from tools.console.toml import toml
from tools.console.units import first_of


@dataclass(frozen=True)
class Tables:
    """The tables that decide whether a key has an effect."""

    # their names are those of the tables in a run file, by which `of` finds them
    model: ModelConfig
    data: Data
    parallel: Parallel
    precision: Precision
    fp8: FP8
    optimizer: Optimizer
    lr: LR
    train: Train
    checkpoint: Checkpoint
    log: Log

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> "Tables":
        """Return the tables that are among `tables`, all tables of a run by name."""
        return cls(**{field.name: tables[field.name] for field in fields(cls)})

    def get(self, key: str) -> Any:
        """Return the value of the dotted `key`."""
        table, name = key.split(".")
        return getattr(getattr(self, table), name)

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        parallel = self.parallel
        train = self.train
        return stage_count(parallel, train.global_batch // (train.micro_batch * parallel.data))


@dataclass(frozen=True)
class EffectRule:
    """Keys that have an effect only in some runs.

    keys, deciders: dotted, separated by spaces.
    only_with: the value of the one decider with which the keys have an effect; None: any but 0 and
        false.
    holds: says whether the keys have an effect, where that is more than a value of one decider.
    """

    keys: str
    deciders: str
    only_with: str | None = None
    holds: Callable[[Tables], bool] | None = None

    def has_effect(self, tables: Tables) -> bool:
        """Return True if the keys have an effect in a run."""
        if self.holds is not None:
            return self.holds(tables)
        value = tables.get(self.deciders)
        return bool(value) if self.only_with is None else value == self.only_with


_FP8_KEYS = " ".join(
    f"fp8.{name}" for name in FP8.model_fields if name not in ("kind", "shadow_every")
)
_SCALING_KEYS = (
    "precision.initial_scale precision.min_scale precision.max_scale precision.growth_factor "
    "precision.backoff_factor precision.growth_interval precision.hysteresis "
    "precision.hysteresis_refill"
)
# in steps
PERIODS = (
    "train.sentinel",
    "fp8.shadow_every",
    "log.timeline",
    "log.digests",
    "log.statistics",
)
# a pattern of layers without attention refuses some of them, layers of delta_net alone do not
_ATTENTION_KEYS = " ".join(
    [
        "model.kv_heads model.head_dim model.latent model.attention_scalar model.rotary_fraction",
        "model.rope_base model.rope_scaling model.qk_norm_over",
        *(f"model.{key}" for key, beside in BESIDE.items() if beside.of_attention),
    ]
)
_EXPERT_KEYS = (
    "model.experts_per_token model.norm_topk model.router model.router_aux_loss model.router_z_loss"
)


def _reached(key: str) -> EffectRule:
    """Return the rule of a number of steps: one that the run does not reach is as none."""

    def is_reached(tables: Tables) -> bool:
        return tables.get(key) <= tables.train.steps

    return EffectRule(key, "train.steps", holds=is_reached)


def _attention_rules(
    decider: str, has_attention: Callable[[ModelConfig], bool]
) -> Iterator[EffectRule]:
    """Yield the rules of keys that attention alone reads.

    decider: the key that says which layers have attention. has_attention: says whether any has.
    """
    yield EffectRule(_ATTENTION_KEYS, decider, holds=lambda tables: has_attention(tables.model))
    yield EffectRule(
        "model.positions",
        decider,
        # a table of positions is added to the embeddings
        holds=lambda tables: has_attention(tables.model) or tables.model.positions == "learned",
    )


def _lacks_letters(model: ModelConfig, letters: str) -> bool:
    """Return True if the model has a pattern of layers, and none of these kinds."""
    return bool(model.hybrid_pattern) and not set(letters) & set(model.hybrid_pattern)


def _window_rope_everywhere(model: ModelConfig) -> bool:
    return model.window_rope_base > 0 and len(model.window_layers) in (0, model.layers)


def _sets_head_only(init: InitialStd) -> bool:
    return init == InitialStd(head=init.head)


def _recomputes(tables: Tables) -> bool:
    """Return True if a stage can have so many layers that the fraction, which is rounded down,
    takes one."""
    parallel = tables.parallel
    if parallel.recompute != "full" or parallel.recompute_layers > 0:
        return True
    most_layers = tables.model.layers - tables.stages + 1  # every other stage has one
    # rounded down, a small fraction of few layers is no layer
    return int(most_layers * parallel.recompute_fraction) > 0


EFFECT_RULES: tuple[EffectRule, ...] = (
    *_attention_rules("model.hybrid_pattern", lambda model: not _lacks_letters(model, "*")),
    *_attention_rules("model.delta_layers", lambda model: bool(model.attention_layers)),
    EffectRule(
        "model.mlp model.ffn",
        "model.hybrid_pattern",
        holds=lambda tables: not _lacks_letters(tables.model, "-E"),
    ),
    EffectRule(
        "model.mlp_bias",
        "model.hybrid_pattern",
        holds=lambda tables: not _lacks_letters(tables.model, "-"),
    ),
    EffectRule("model.qk_norm_over", "model.qk_norm"),
    EffectRule("optimizer.qk_clip_alpha", "optimizer.qk_clip"),
    EffectRule("model.rope_base", "model.positions", only_with="rope"),
    EffectRule(
        "model.rope_base model.rope_scaling",
        "model.window_rope_base model.window_layers",
        holds=lambda tables: not _window_rope_everywhere(tables.model),
    ),
    EffectRule(f"{_EXPERT_KEYS} model.router_correction_speed", "model.experts"),
    EffectRule(
        "model.router_correction_speed",
        "model.router",
        holds=lambda tables: tables.model.router.correction,
    ),
    EffectRule(
        "model.dropout_at",
        "model.dropout",
        holds=lambda tables: tables.model.dropout > 0 or tables.model.embedding_dropout > 0,
    ),
    EffectRule(
        "model.embedding_dropout",
        "model.dropout_at",
        holds=lambda tables: tables.model.dropout_at != "stream",
    ),
    EffectRule(
        "model.init_std model.init",
        "train.init_from train.grow_vocabulary",
        holds=lambda tables: not tables.train.init_from or tables.train.grow_vocabulary == "random",
    ),
    EffectRule(
        "train.grow_vocabulary",
        "train.init_from",
        holds=lambda tables: tables.train.init_from != "",
    ),
    EffectRule(
        "model.init",
        "model.tied",
        holds=lambda tables: not (tables.model.tied and _sets_head_only(tables.model.init)),
    ),
    EffectRule(
        "model.window",
        "model.max_positions",
        holds=lambda tables: tables.model.window < tables.model.max_positions,
    ),
    EffectRule("model.mtp_loss_weight", "model.mtp_layers"),
    EffectRule(
        "parallel.context_by",
        "parallel.context",
        holds=lambda tables: tables.parallel.context > 1,
    ),
    EffectRule("parallel.sequence", "train.numerics", only_with="fast"),
    EffectRule(
        "parallel.sequence", "parallel.tensor", holds=lambda tables: tables.parallel.tensor > 1
    ),
    EffectRule("parallel.schedule parallel.chunks", "parallel.schedule_file", only_with=""),
    EffectRule("parallel.recompute", "parallel.recompute_fraction model.layers", holds=_recomputes),
    EffectRule(
        "precision.reduce",
        "parallel.data parallel.context",
        holds=lambda tables: tables.parallel.copies > 1,
    ),
    EffectRule(
        "parallel.overlap",
        "parallel.data parallel.context",
        holds=lambda tables: tables.parallel.copies > 1 or not tables.parallel.overlap,
    ),
    EffectRule(
        "parallel.zero",
        "parallel.data parallel.zero_size",
        holds=lambda tables: tables.parallel.zero not in (2, 3) or tables.parallel.shards_gradients,
    ),
    EffectRule(
        "parallel.zero_keep",
        "parallel.data parallel.zero_size",
        holds=lambda tables: tables.parallel.shards_weights,
    ),
    EffectRule(
        "log.profile",
        "train.steps",
        holds=lambda tables: min(tables.log.profile, default=0) <= tables.train.steps,
    ),
    EffectRule("log.profile_ranks", "log.profile"),
    EffectRule("precision.pipeline", "parallel.pipeline", holds=lambda tables: tables.stages > 1),
    EffectRule("precision.buffers", "model.positions", only_with="rope"),
    EffectRule(_SCALING_KEYS, "precision.scaling", only_with="dynamic"),
    EffectRule(
        "precision.hysteresis_refill",
        "precision.hysteresis",
        holds=lambda tables: tables.precision.hysteresis > 1,
    ),
    EffectRule("precision.patience", "precision.on_nonfinite", only_with="skip"),
    EffectRule(
        _FP8_KEYS,
        "fp8.kind",
        holds=lambda tables: tables.fp8.kind != "none",
    ),
    EffectRule(
        "fp8.history_length fp8.amax_algo fp8.reduce_amax",
        "fp8.kind",
        holds=lambda tables: tables.fp8.keeps_history,
    ),
    EffectRule("fp8.history_length", "fp8.amax_algo", only_with="max"),
    EffectRule(
        "fp8.format",
        "fp8.kind",
        holds=lambda tables: not tables.fp8.four_bits,
    ),
    EffectRule(
        "fp8.power_2_scales",
        "fp8.kind",
        holds=lambda tables: not tables.fp8.power_2,
    ),
    EffectRule("fp8.calibrate", "fp8.calibrating", holds=lambda tables: not tables.fp8.calibrating),
    EffectRule("fp8.shadow_loss_gap fp8.shadow_cosine", "fp8.shadow_every"),
    EffectRule(
        "optimizer.betas optimizer.eps",
        "optimizer.name",
        holds=lambda tables: "betas" in rule_kind(tables.optimizer.name).own_keys,
    ),
    EffectRule(
        "optimizer.weight_decay",
        "optimizer.name",
        holds=lambda tables: rule_kind(tables.optimizer.name).decays,
    ),
    EffectRule(
        "lr.final lr.length",
        "lr.schedule",
        holds=lambda tables: SCHEDULES[tables.lr.schedule].ends,
    ),
    EffectRule("lr.initial", "lr.warmup"),
    EffectRule(
        "lr.decay lr.wsd_decay",
        "lr.schedule",
        holds=lambda tables: "decay" in SCHEDULES[tables.lr.schedule].keys,
    ),
    EffectRule("train.spike_patience", "train.on_spike", only_with="skip"),
    EffectRule("train.canonical_shards", "train.numerics", only_with="canonical"),
    EffectRule("data.blend_phases", "data.blend", holds=lambda tables: tables.data.blend_changes),
    EffectRule(
        "data.held_out_from",
        "data.held_out data.validation",
        holds=lambda tables: bool(tables.data.held_out or tables.data.validation),
    ),
    EffectRule(
        "train.eval_batches train.eval_samples",
        "train.eval_every train.eval_first",
        holds=lambda tables: tables.train.evaluates,
    ),
    EffectRule(
        "train.eval_batches",
        "train.eval_samples",
        holds=lambda tables: not tables.train.eval_samples,
    ),
    EffectRule(
        "data.encoding data.exclude data.skip_bad",
        "data.source",
        holds=lambda tables: _reads_files(tables.data),
    ),
    EffectRule(
        "checkpoint.keep_every checkpoint.keep_best",
        "checkpoint.keep",
        holds=lambda tables: tables.checkpoint.keep != "all",
    ),
    EffectRule("checkpoint.export_ema", "checkpoint.export", only_with="hf"),
    *map(_reached, PERIODS),
)


def _reads_files(data: Data) -> bool:
    """Return True if any text is not Python's standard library."""
    evaluated = [", ".join(names_of(part.source)) for part in data.validation]
    return any(source != STANDARD_LIBRARY for source in (*data.sources, *evaluated))


def effectless(tables: Tables, written: Collection[str]) -> Iterator[str]:
    """Yield a line for each reason by which keys have no effect. written: the dotted keys that the
    user gave.

    A model of model.factory may read any key of [model].
    """
    reported = set[str]()
    for rule in EFFECT_RULES:
        changed_keys = list[str]()
        for key in rule.keys.split():
            # who knows what a custom model reads
            is_unknown = tables.model.factory and key.startswith("model.")
            if key not in written or key in reported or is_unknown:
                continue
            if _differs_from_default(tables, key):
                changed_keys.append(key)
        if not changed_keys or rule.has_effect(tables):
            continue
        # one reason is enough: a key is named once
        reported.update(changed_keys)
        yield _effectless_line(tables, changed_keys, rule.deciders.split())
    if "optimizer.groups" in written:
        yield from _effectless_groups(tables)
    if "parallel.async_tensor" in written and tables.parallel.async_tensor:
        yield from _separate_transfers(tables)


def _effectless_line(tables: Tables, idle_keys: list[str], deciders: list[str]) -> str:
    """Return the line about keys that have no effect because of the values of the `deciders`."""
    values = ", ".join(f"{key} = {toml(tables.get(key))}" for key in idle_keys)
    reason = " and ".join(f"{key} = {toml(tables.get(key))}" for key in deciders)
    changes = " or ".join(deciders)
    if len(idle_keys) > 1:
        return f"{values} have no effect with {reason}: leave them out, or change {changes}"
    return f"{values} has no effect with {reason}: leave it out, or change {changes}"


def _effectless_groups(tables: Tables) -> Iterator[str]:
    """Yield a line for each group, and each factor of one, that changes nothing; names of custom
    models are unknown."""
    optimizer = tables.optimizer
    has_decay = rule_kind(optimizer.name).decays
    decays = optimizer.weight_decay and has_decay
    # why weight decay has no effect, where it has none
    reason = f"name = {toml(optimizer.name)}"
    if has_decay:
        reason = "weight_decay = 0, of which it is a factor"
    shapes: Mapping[str, Sequence[int]] = {}
    if not tables.model.factory:
        shapes = logical_shapes(with_vocabulary_size(tables.model, tables.data))
    taken = set[str]()  # names that earlier patterns match
    for group in optimizer.groups:
        line = f'optimizer.groups: pattern "{group.pattern}"'
        matches = {name for name in shapes if fnmatchcase(name, group.pattern)}
        if matches and matches <= taken:
            yield (
                f"{line} has no effect: earlier patterns match all its parameters, and the first "
                "counts; move it up"
            )
        elif group.weight_decay and not decays:
            yield (
                f"{line}: weight_decay = {group.weight_decay} has no effect with "
                f"optimizer.{reason}: leave it out"
            )
        elif vectors_only := _reaches_no_matrix(group, matches - taken, shapes):
            yield f"{line}: {vectors_only}"
        # the first pattern that matches a name decides
        taken |= matches


def _reaches_no_matrix(
    group: OptimizerGroup, names: Set[str], shapes: Mapping[str, Sequence[int]]
) -> str:
    """Return the words about a factor of weight decay that reaches only parameters which do not
    decay; "" if it reaches others, or if the group has none."""
    if group.weight_decay is None or group.all_dims or not names:
        return ""
    if any(len(shapes[name]) >= 2 for name in names):
        return ""
    return (
        f"weight_decay = {group.weight_decay} has no effect on parameters with fewer than two "
        "dimensions, which do not decay: leave it out, or set all_dims = true"
    )


def _separate_transfers(tables: Tables) -> Iterator[str]:
    """Yield a line for the transfers that are not fused with products, if there are any."""
    model = tables.model
    separate = list[str]()
    if model.factory:
        separate.append("layers of model.factory but ColumnParallelLinear and RowParallelLinear")
    if model.experts:
        separate.append("experts, whose tokens are gathered for the router")
    if model.latent:
        separate.append("latents, which are gathered for several products")
    if wide := _wide_products(tables):
        separate.append(f"products in FP32 by precision.keep_fp32 ({first_of(wide, 1)})")
    if separate:
        yield (
            f"parallel.async_tensor = true has no effect on {'; '.join(separate)}: there a layer "
            "waits for its transfers"
        )


def _wide_products(tables: Tables) -> list[str]:
    """Return the weights of products whose factors have a wider dtype than activations."""
    plan = plan_or_none(tables.precision, tables.fp8)
    if plan is None or tables.model.factory:
        return []
    wide = list[str]()
    for name, shape in logical_shapes(tables.model).items():
        is_product = len(shape) == 2 and not fnmatchcase(name, "*embedding.weight")
        if is_product and plan.compute_dtype(name) != plan.compute:
            wide.append(name)
    return wide


def _differs_from_default(tables: Tables, key: str) -> bool:
    """Return True if the key has another value than if it were left out."""
    table, name = key.split(".")
    values: BaseModel = getattr(tables, table)
    field = type(values).model_fields[name]
    # some defaults follow from other keys of the table
    default = field.get_default(call_default_factory=True, validated_data=dict(values))
    return tables.get(key) != default
