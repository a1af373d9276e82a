"""The beginning of a run with the weights of train.init_from: what it changes of their model.

With --allow it may have keys of a longer context, and with train.grow_vocabulary more tokens.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from megaprec.errors import Problem, UserError
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.tokens.places import path_of
from tools.config.run_file import RunConfig
from tools.journal.records import INITIAL
from tools.parts import optional_parts
from tools.saved.train_state import TrainState, open_newest_checkpoint
from tools.training.corpus import Corpus
from tools.training.data_identity import DataDifference
from tools.training.data_sources import existing_tokenizer, vocabulary_size
from tools.training.learning_rates import LearningRates
from tools.training.other_model import allow_flags, context_differences

UNCHECKED = (
    "train.grow_vocabulary: the tokenizer of the weights is not known, so it was not checked that "
    "their tokens have the same ids in the run's tokenizer"
)

if TYPE_CHECKING:
    from tools.convert.growth import VocabularyGrowth


def begins_with_weights(config: RunConfig) -> bool:
    """Return True if the run begins with the weights of train.init_from. One that resumes has
    weights of its own."""
    if not config.train.init_from:
        return False
    return open_newest_checkpoint(config.checkpoint_folder) is None


def check_first_weights(config: RunConfig, allowed: Collection[str]) -> None:
    """Raise UserError if the run begins with weights of train.init_from and changes their model in
    what --allow has not accepted.

    allowed: differences that are accepted, of `data_identity.ALLOW`.
    """
    refused = list[DataDifference]()
    for difference in differences_from_first_weights(config):
        if difference.option not in allowed:
            refused.append(difference)
    if refused:
        lines = [difference.line for difference in refused]
        folder = config.train.init_from
        flags = allow_flags(refused)
        raise UserError(*lines, Problem.of("training.changes_on_init", folder=folder, flags=flags))


def differences_from_first_weights(config: RunConfig) -> list[DataDifference]:
    """Return the differences of the run's model from that of train.init_from that --allow accepts;
    none if the run does not begin with these weights. Raises UserError."""
    if not begins_with_weights(config):
        return []
    saved = optional_parts.initial_model(path_of(config.train.init_from), config.model).model
    return [*context_differences(saved, config.model, config)]


def check_growth(config: RunConfig, allowed: Collection[str]) -> None:
    """Raise UserError if the run begins with weights whose vocabulary cannot grow, or has nothing
    to grow by.

    allowed: see `check_first_weights`.
    """
    if config.train.grow_vocabulary == "none" or not begins_with_weights(config):
        return
    tokenizer_file = existing_tokenizer(config)
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file else None
    old = _tokenizer_of_weights(config)
    if old and tokenizer:
        moved = [*optional_parts.moved_tokens(old, tokenizer)]
        if moved and "tokenizer" not in allowed:
            raise UserError(*moved)
    growth = _growth(config, vocabulary_size(config, tokenizer), old, tokenizer)
    if not growth.new.any():
        raise UserError.of(
            "training.no_growth",
            kind=config.train.grow_vocabulary,
            weights=config.train.init_from,
            vocab=growth.rows,
        )


def growth_of(config: RunConfig, corpus: Corpus) -> "VocabularyGrowth | None":
    """Return how the embedding and the head of train.init_from get rows for new tokens; None if
    train.grow_vocabulary asks for none."""
    if config.train.grow_vocabulary == "none":
        return None
    old = _tokenizer_of_weights(config)
    return _growth(config, corpus.model.vocab, old, corpus.tokenizer)


def _growth(
    config: RunConfig, vocab: int, old: Tokenizer | None, tokenizer: Tokenizer | None
) -> "VocabularyGrowth":
    """Return how embedding and head grow to `vocab` rows, one for each token.

    old: the tokenizer of the weights, None if it is not known. tokenizer: the run's.
    """
    kind = config.train.grow_vocabulary
    assert kind != "none"
    rows = optional_parts.initial_model(path_of(config.train.init_from), config.model).model.vocab
    return optional_parts.VocabularyGrowth.between(kind, rows, vocab, old, tokenizer)


def _tokenizer_of_weights(config: RunConfig) -> Tokenizer | None:
    """Return the tokenizer of the folder of train.init_from, None if it has none."""
    file = optional_parts.initial_model(path_of(config.train.init_from), config.model).tokenizer
    return load_tokenizer(file) if file else None


def initial_changes(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each change of the model of the first weights."""
    for difference in differences_from_first_weights(config):
        yield difference.line
    growth = growth_of(config, corpus)
    if growth is not None:
        yield f"model.vocab: {growth.rows} -> {corpus.model.vocab}: {growth.describe()}"


def initial_notes(config: RunConfig) -> list[str]:
    """Return what could not be checked about the first weights."""
    grows = config.train.grow_vocabulary != "none"
    return [UNCHECKED] if grows and _tokenizer_of_weights(config) is None else []


def initial_event(config: RunConfig, corpus: Corpus) -> dict[str, Any] | None:
    """Return the record for events.jsonl of a run that begins with weights whose model it changes;
    None if it does not."""
    if not config.train.init_from:
        return None
    changed = [*initial_changes(config, corpus)]
    if not changed:
        return None
    return {
        "event": INITIAL,
        "step": 0,
        "weights": config.train.init_from,
        "ranks": config.world_size,
        "changed": changed,
        "notes": initial_notes(config),
        "lr_before": None,
        "lr_next": LearningRates.of(config.lr, config.train).at(TrainState()),
    }
