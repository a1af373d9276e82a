"""The keys of a run that its first weights decide: [model], tokenizer, token before documents.

The folder itself is read by `tools.convert.initial`: a run file is understood without opening a
checkpoint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megaprec.errors import Problem
from models.config import ModelConfig
from models.equivalence import (
    CONTEXT_KEYS,
    MUP_KEYS,
    TRAINING_ONLY_KEYS,
    scores_follow_rope_scaling,
)
from tools.console.toml import Setting, toml

ZERO_LEAVES_OPEN = ("vocab", "head_dim", "mtp_layers")  # keys whose 0 claims nothing


@dataclass(frozen=True)
class InitialModel:
    """A model of train.init_from, without its weights.

    tokenizer: its file, None if there is none.
    rows: tokens that its weights have rows for, if the model has more (train.grow_vocabulary), else
        0.
    begin: id of the token before documents in the training of the weights, None if the folder names
        none.
    origin: the file that says what the model is.
    """

    model: ModelConfig
    tokenizer: Path | None
    begin: int | None
    origin: str
    rows: int = 0


def add_initial_model(settings: dict[str, Setting], initial: InitialModel) -> Iterator[Problem]:
    """Add to `settings` the keys that the weights decide; yield a line for each that is given
    another value."""
    origin = initial.origin
    yield from _add_model(settings, initial.model, origin, initial.rows)
    begin = settings.get("data.begin", Setting("auto", origin))
    if initial.begin is not None and begin.value == "auto":
        settings["data.begin"] = Setting(initial.begin, origin)
    if initial.tokenizer:
        settings.setdefault("data.tokenizer", Setting(str(initial.tokenizer), origin))


def _add_model(
    settings: dict[str, Setting], model: ModelConfig, origin: str, rows: int
) -> Iterator[Problem]:
    """Add the keys of `model` that are not given; yield a problem for each that is given another
    value, but for those that may differ: keys of training, of a longer context, and the vocabulary
    if it grows.

    rows: tokens that the weights have rows for if the vocabulary grows, else 0.
    """
    vocab = settings.get("model.vocab", Setting(0, origin))
    may_differ = _keys_that_may_differ(model, vocab.value, rows)
    following = _keys_that_follow(settings, model)
    for name, value in model.model_dump(exclude=following).items():
        key = f"model.{name}"
        chosen = settings.setdefault(key, Setting(value, origin))
        is_open = name in ZERO_LEAVES_OPEN and chosen.value == 0
        if is_open and name == "vocab":
            # the size of the weights, which may be padded beyond the tokens of the tokenizer
            settings[key] = Setting(value, origin)
        # a model of the user's own takes weights by their logical names, whoever has saved them
        is_own = name == "factory" and bool(chosen.value)
        if is_open or is_own or name in may_differ or _is_equal(getattr(model, name), chosen.value):
            continue
        if name == "vocab" and rows:
            yield Problem.of("config.vocabulary_shrinks", vocab=vocab.value, rows=rows, file=origin)
            continue
        # from here on the weights' value, so that other rules speak of one model, not of a mixture
        settings[key] = Setting(value, origin)
        # positions are learned, or this key would be free
        if name == "max_positions":
            yield learned_positions(model, chosen.value, origin)
            continue
        yield Problem.of(
            "config.not_of_weights",
            key=key,
            value=toml(chosen.value),
            origin=chosen.origin,
            value_of_weights=toml(value),
            file=origin,
        )


def _keys_that_may_differ(model: ModelConfig, vocab: object, rows: int) -> set[str]:
    """Return the keys of [model] that may be others than those of the weights.

    vocab: the given size, 0 if none is. rows: tokens that the weights have rows for if the
        vocabulary may grow, else 0.
    """
    may_differ = set(TRAINING_ONLY_KEYS).difference(MUP_KEYS)
    shrinks = isinstance(vocab, int) and 0 < vocab < rows
    # a value that is no number is reported with the types of its table
    if rows and not shrinks:
        may_differ.add("vocab")
    if model.positions != "learned":
        may_differ.update(CONTEXT_KEYS)
    return may_differ


def _keys_that_follow(settings: dict[str, Setting], model: ModelConfig) -> set[str]:
    """Return the keys of [model] that are not taken from the weights, for they follow others."""
    following = set[str]()
    # a dropout of the embedding that equals the model's follows a given dropout
    if model.embedding_dropout == model.dropout:
        following.add("embedding_dropout")
    if "model.rope_scaling" in settings and scores_follow_rope_scaling(model):
        following.add("attention_scalar")
    return following


def learned_positions(saved: ModelConfig, max_positions: object, file: str) -> Problem:
    """Return the problem that learned positions are as many as the weights in `file` have."""
    return Problem.of(
        "config.learned_positions",
        max_positions=max_positions,
        saved=saved.max_positions,
        file=file,
    )


def _is_equal(of_weights: Any, chosen: Any) -> bool:
    """Return True if the given value equals the folder's; keys that a given table leaves out have
    their default."""
    if not isinstance(of_weights, BaseModel) or not isinstance(chosen, Mapping):
        # TOML has lists where the model has tuples
        if isinstance(chosen, list):
            chosen = tuple(chosen)
        return of_weights == chosen
    defaults = {
        name: field.default
        for name, field in type(of_weights).model_fields.items()
        if not field.is_required()
    }
    return {**defaults, **chosen} == of_weights.model_dump()
