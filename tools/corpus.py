"""The data of a run: what [data] names, tokenized if it has to be, split into samples to train on and to hold out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaprec.data.build import check_vocabulary, prepare
from megaprec.data.files import beside
from megaprec.data.indexed import IndexedDataset
from megaprec.data.samples import Samples, split
from megaprec.data.text import open_source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.errors import UserError
from models.config import ModelConfig
from tools.run import RunConfig

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Corpus:
    """model: the run's, with its vocabulary known. held_out, tokenizer: None if the run has none."""

    dataset: IndexedDataset
    train: Samples
    held_out: Samples | None
    tokenizer: Tokenizer | None
    model: ModelConfig


def open_corpus(config: RunConfig, on_progress: Progress | None = None) -> Corpus:
    """Builds what is not built yet. One process at a time; all others after it find everything there.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for a sample, and a vocabulary
    that does not hold the data's tokens.
    """
    prefix, tokenizer = _tokens(config, on_progress)
    dataset = IndexedDataset(prefix)
    model = config.model.with_vocab(_vocab(config, tokenizer))
    check_vocabulary(dataset, model.vocab)
    train, held_out = split(dataset, config.train.seq_length, config.data.held_out, config.train.seed, config.data.shuffle)
    return Corpus(dataset, train, held_out, tokenizer, model)


def _tokens(config: RunConfig, on_progress: Progress | None) -> tuple[Path, Tokenizer | None]:
    """Prefix of the .bin/.idx pair, and the tokenizer it was made with."""
    data, source = config.data, Path(config.data.source)
    given = Path(data.tokenizer) if data.tokenizer else None
    if beside(source, ".idx").is_file():
        return source, load_tokenizer(given) if given else None
    cache = Path(data.cache or Path(config.train.folder) / "data")
    made = prepare(
        open_source(data.source, text_field=data.text_field, max_chars=data.max_chars or None),
        cache / "text",
        tokenizer=given,
        vocab_size=None if given else data.vocab_size,
        overwrite=not data.cache,  # the run's own folder is ours to renew; a folder of the user's is not
        on_progress=on_progress,
    )
    return made.prefix, load_tokenizer(made.tokenizer)


def _vocab(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    asked = config.model.vocab
    if tokenizer is None and asked == 0:
        raise UserError(f"model.vocab = 0 asks the tokenizer, but data.source {config.data.source} came without one: give model.vocab or data.tokenizer")
    if tokenizer is not None and 0 < asked < tokenizer.vocab_size:
        raise UserError(f"model.vocab = {asked} does not hold the {tokenizer.vocab_size} tokens of {tokenizer.path}: use 0 or at least {tokenizer.vocab_size}")
    return asked or (tokenizer.vocab_size if tokenizer else 0)
