"""Differences between the model of a run and that of the weights with which it begins or goes on.

No weight of a model with rotary positions has the size of the keys of a longer context
(`models.equivalence.CONTEXT_KEYS`), so training can go on with others. But the model then computes
something else, so such a change is refused unless --allow accepts it.
"""

import json
from collections.abc import Iterator, Sequence

from megaprec.errors import Problem
from models.config import ModelConfig
from models.equivalence import (
    CONTEXT_KEYS,
    MUP_KEYS,
    TRAINING_ONLY_KEYS,
    scores_follow_rope_scaling,
)
from tools.config.initial_model import learned_positions
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.training.data_identity import ALLOW, DataDifference


def context_differences(
    saved: ModelConfig, model: ModelConfig, config: RunConfig
) -> Iterator[DataDifference]:
    """Yield the differences in keys of a longer context, of two models without learned
    positions."""
    if not _may_read_longer(saved, model):
        return
    effects = {
        "rope_base": "all positions have other angles",
        "rope_scaling": "all positions have other angles",
        "max_positions": f"the weights have seen none beyond {saved.max_positions:,}",
    }
    for key, effect in effects.items():
        old_value = getattr(saved, key)
        value = getattr(model, key)
        if key == "max_positions" and not _adds_positions(saved, model, config):
            continue
        if value != old_value:
            change = f"{toml(old_value)} -> {toml(value)}"
            yield DataDifference(f"model.{key}", f"model.{key}: {change}: {effect}")


def _may_read_longer(saved: ModelConfig, model: ModelConfig) -> bool:
    """Return True if both models have positions of one kind that is not learned."""
    return saved.positions == model.positions != "learned"


def _adds_positions(saved: ModelConfig, model: ModelConfig, config: RunConfig) -> bool:
    """Return True if a key says that there are more positions, not train.seq_length, whose change
    is told itself."""
    follows = config.origin("model.max_positions") == "train.seq_length"
    return model.max_positions > saved.max_positions and not follows


def other_keys(saved: ModelConfig, model: ModelConfig, file: str) -> Iterator[Problem]:
    """Yield a problem for each key of [model] that differs and that nothing can accept.

    saved: the model of a checkpoint, in which keys that are newer have their default. file: the one
    that describes it.
    """
    saved_values = json.loads(saved.model_dump_json())
    values = json.loads(model.model_dump_json())
    free_keys = set(TRAINING_ONLY_KEYS).difference(MUP_KEYS)
    if _may_read_longer(saved, model):
        free_keys.update(CONTEXT_KEYS)
        if scores_follow_rope_scaling(saved) and scores_follow_rope_scaling(model):
            free_keys.add("attention_scalar")
    if model.vocab == 0:
        free_keys.add("vocab")  # not known yet
    for key, value in values.items():
        saved_value = saved_values.get(key)
        if key in free_keys or saved_value == value:
            continue
        if key == "max_positions" and saved.positions == model.positions:
            yield learned_positions(saved, value, file)
            continue
        yield Problem.of(
            "training.other_model",
            key=key,
            value=json.dumps(value),
            saved=json.dumps(saved_value),
        )


def allow_flags(refused: Sequence[DataDifference]) -> str:
    """Return the options that accept these differences, in the order of ALLOW."""
    options = {difference.option for difference in refused}
    return " ".join(f"--allow {option}" for option in ALLOW if option in options)
