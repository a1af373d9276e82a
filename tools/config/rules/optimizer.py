"""Rules on the update rule, its groups, and the schedule of the learning rate."""

from collections.abc import Callable, Iterator

from megaprec.comm.layout import Growth, Part
from megaprec.errors import Problem
from megaprec.optim.rules.lr import SCHEDULES
from megaprec.optim.rules.rule_table import rule_kind
from megaprec.optim.rules.width import require_width_factors
from models.config import ModelConfig
from tools.config.rules.batches import changes_problems
from tools.config.rules.checking import problems_of, unmatched
from tools.config.rules.derived import lr_schedule, make_rule, run_length, trained_names
from tools.config.tables.settings import LR, Log, Optimizer, Parallel, Train
from tools.console.toml import toml

# problems of options that begin with the option, as a rule by itself knows it
BY_OPTION_ALONE = frozenset(
    {"optimizer.betas", "optimizer.eps", "optimizer.momentum", "optimizer.nesterov"}
)
OF_TORCHS_CLASS = "optimizer.torch_rule"  # how codes of problems with such a rule begin
GROWS = Growth(1.0, 2.0)
"""Of any embedding under muP."""


def _schedule(lr: LR, train: Train) -> Iterator[str]:
    """Yield why there is no schedule of the learning rate with these keys, each with phases that
    would fit if warm-up or decay are too long."""
    if changes_problems(train):
        return  # `_batch_schedule` reports them
    unit = " (in samples)" if lr.unit == "samples" else ""
    for problem in problems_of(lr_schedule, lr, train):
        remedy = ""
        if problem.code in ("optimizer.schedule_warmup", "optimizer.schedule_decay"):
            remedy = _fitting_phases(lr, train)
        yield problem.within("lr.", f"{unit}{remedy}")


def _fitting_phases(lr: LR, train: Train) -> str:
    """Return phases that the length of the schedule has room for, as arguments beside those that
    give the length."""
    length = f"lr.length={lr.length}" if lr.length else f"train.steps={train.steps}"
    total = lr.length or run_length(lr, train)
    tenth = total // 10
    phases = f"lr.warmup={min(lr.warmup, tenth)}"
    if "decay" in SCHEDULES[lr.schedule].keys:
        phases += f" lr.decay={max(1, min(lr.decay, tenth))}"
    return f"; with {length} give {phases}, for example"


def _rule(optimizer: Optimizer) -> Iterator[str]:
    """Yield why there is no update rule with these keys, each with the key that it is about."""
    for problem in problems_of(make_rule, optimizer):
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


def _mup_rule(optimizer: Optimizer, model: ModelConfig) -> Iterator[str]:
    """Yield a problem if the update rule has no factors under muP, or none for an embedding."""
    if not model.mup_base_hidden or problems_of(make_rule, optimizer):
        return
    update_rule = make_rule(optimizer)
    for name in ("embedding.weight", "positions.weight"):
        table = Part(name, (model.max_positions, model.hidden), growth=GROWS)
        for problem in problems_of(require_width_factors, update_rule, table):
            yield problem
            return


def _optimizer_patterns(optimizer: Optimizer, model: ModelConfig) -> Iterator[str]:
    """Yield a problem for each pattern of names in [optimizer] that matches no parameter, and one
    if optimizer.frozen matches all."""
    groups = [group.pattern for group in optimizer.groups]
    yield from unmatched("optimizer.groups", groups, model)
    yield from unmatched("optimizer.frozen", optimizer.frozen, model)
    if not model.factory and optimizer.frozen and not trained_names(optimizer, model):
        yield Problem.of("config.nothing_trained")
    # `_rule` reports an unknown name, an option that is no list, and items that are no text
    if problems_of(rule_kind, optimizer.name):
        return
    for option in rule_kind(optimizer.name).patterns:
        patterns = optimizer.options.get(option, [])
        if isinstance(patterns, list):
            texts = [pattern for pattern in patterns if isinstance(pattern, str)]
            yield from unmatched(f"optimizer.options {option}", texts, model)


def _logits_key(optimizer: Optimizer, log: Log) -> str:
    """Return the key that asks for the logits of attention, with its value; "" if none does."""
    if optimizer.qk_clip:
        return f"optimizer.qk_clip = {optimizer.qk_clip:g}"
    return "log.attention_logits = true" if log.attention_logits else ""


def _logits_of_model(optimizer: Optimizer, log: Log, model: ModelConfig) -> Iterator[str]:
    """Yield why the logits of a model cannot be looked at, or not be clipped."""
    key = _logits_key(optimizer, log)
    if not key:
        return
    if not model.attention_layers:
        yield Problem.of("config.logits_without_attention", key=key)
    if model.factory:
        yield Problem.of("config.logits_factory", key=key, factory=model.factory)
    if optimizer.qk_clip and model.qk_norm:
        yield Problem.of("config.qk_clip_qk_norm", key=key)
    if optimizer.qk_clip and model.global_key_as_value:
        yield Problem.of("config.qk_clip_key_as_value", key=key)


def _logits_of_parts(optimizer: Optimizer, log: Log, parallel: Parallel) -> Iterator[str]:
    key = _logits_key(optimizer, log)
    if key and parallel.context > 1:
        yield Problem.of("config.logits_context", key=key, context=parallel.context)


def _canonical_logits(optimizer: Optimizer, log: Log, train: Train) -> Iterator[str]:
    key = _logits_key(optimizer, log)
    if key and train.numerics == "canonical":
        yield Problem.of("config.logits_canonical", key=key)


CHECKS: tuple[Callable[..., Iterator[str]], ...] = (
    _schedule,
    _rule,
    _mup_rule,
    _logits_of_model,
    _logits_of_parts,
    _canonical_logits,
    _optimizer_patterns,
)
