"""Values that follow from several tables of a run file."""

from megaprec.errors import Problem, UserError
from megaprec.optim.rules.lr import LRSchedule
from megaprec.optim.rules.rule_table import rule, rule_kind
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.precision.patterns import match_patterns
from megaprec.tokens.blend_phases import BlendPhases
from models.config import ModelConfig
from models.logical_shapes import is_never_trained, logical_shapes
from tools.config.tables.batch_schedule import BatchSchedule
from tools.config.tables.data_settings import Data
from tools.config.tables.settings import LR, Optimizer, Train


def with_vocabulary_size(model: ModelConfig, data: Data) -> ModelConfig:
    """Return the model with a vocabulary: data.vocab_size where model.vocab leaves the size to the
    tokenizer."""
    return model if model.vocab else model.with_vocab(data.vocab_size)


def blend_phases(data: Data) -> BlendPhases:
    """Return the weights of the data sets; without a blend there is one set."""
    if not data.blend:
        return BlendPhases.constant([1.0])
    points = tuple(part.points for part in data.blend)
    return BlendPhases(points, linear=data.blend_phases == "linear")


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
        total=lr.length or run_length(lr, train),
        decay=lr.decay,
        tail=lr.wsd_decay,
        initial=lr.initial,
    )


def run_length(lr: LR, train: Train) -> int:
    """Return the length of the run in steps or samples, as lr.unit says."""
    if lr.unit == "samples":
        return BatchSchedule.of(train).after(0, train.steps)
    return train.steps


def trained_names(optimizer: Optimizer, model: ModelConfig) -> list[str]:
    """Return the logical names of the parameters that are trained, of a model without a factory."""
    names = [name for name in logical_shapes(model) if not is_never_trained(name)]
    return [name for name in names if not any(match_patterns(optimizer.frozen, [name]))]
