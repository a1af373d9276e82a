"""The data of a run: what [data] names, tokenized if it has to be, split into samples to train on and to hold out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megaprec.checkpoint.folder import latest
from megaprec.data.build import check_vocabulary, prepare, reusable
from megaprec.data.files import beside
from megaprec.data.indexed import IndexedDataset
from megaprec.data.samples import Resets, Samples, split
from megaprec.data.text import Source, open_source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.data.workers import cores
from megaprec.errors import UserError
from models.config import ModelConfig
from tools.checks import check_all
from tools.progress import building
from tools.run import RunConfig


@dataclass(frozen=True)
class Corpus:
    """model: the run's, with its vocabulary known. held_out, tokenizer: None if the run has none."""

    dataset: IndexedDataset
    train: Samples
    held_out: Samples | None
    tokenizer: Tokenizer | None
    model: ModelConfig


def check_sources(config: RunConfig) -> None:
    """Raises UserError for what [data] names and is not there, cannot be read or does not suit. Builds nothing."""
    check_all(config, _find_data, _find_tokenizer)


def open_corpus(config: RunConfig) -> Corpus:
    """Builds what is not built yet, and opens it. One process at a time.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for a sample, and a data set
    with tokens that the vocabulary does not hold, for which a given one is read once from end to end.
    """
    ready, given = _ready(config), _given(config)
    prefix, model_file = (Path(config.data.source), given) if ready else _build(config, given)
    corpus = open_made(config, prefix, model_file)
    if ready:
        with _about(config, "data.source", "model.vocab", "data.tokenizer"):
            check_vocabulary(corpus.dataset, corpus.model.vocab)
    return corpus


def open_made(config: RunConfig, prefix: Path, model_file: Path | None) -> Corpus:
    """The corpus of a data set and a tokenizer file that are there. Any number of processes may open it."""
    tokenizer = load_tokenizer(model_file) if model_file else None
    model = config.model.with_vocab(_vocab(config, tokenizer))
    with _about(config, "data.source"):
        dataset = IndexedDataset(prefix)
    train, data = config.train, config.data
    with _about(config, "data.source", "data.held_out", "train.seq_length"):
        resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
        samples, held_out = split(dataset, train.seq_length, data.held_out, train.seed, data.shuffle, resets)
    return Corpus(dataset, samples, held_out, tokenizer, model)


def open_kept(config: RunConfig) -> Corpus:
    """The corpus that a run was trained on, from the files that it left. Builds nothing.

    Raises UserError if they are gone.
    """
    prefix, given = Path(config.data.source), _given(config)
    if not _ready(config):
        prefix = _cache(config) / "text"
        left = beside(prefix, ".model")
        given = given or (left if left.is_file() else None)
    if not beside(prefix, ".idx").is_file():
        raise UserError(f"the run's data is gone: there is no {beside(prefix, '.idx')}")
    return open_made(config, prefix, given)


@contextmanager
def _about(config: RunConfig, *keys: str) -> Iterator[None]:
    """Puts before the problems that are raised inside the keys that they are about."""
    try:
        yield
    except UserError as error:
        said = ", ".join(f"{key} = {config.value(key)}" for key in keys)
        raise UserError(*(f"{said}: {problem}" for problem in error.problems)) from error


def _find_data(config: RunConfig) -> None:
    if not _ready(config):
        _source(config)
        return
    with _about(config, "data.source"):
        IndexedDataset(Path(config.data.source))


def _find_tokenizer(config: RunConfig) -> None:
    if given := _given(config):
        with _about(config, "data.tokenizer" if config.data.tokenizer else "data.source"):
            _vocab(config, load_tokenizer(given))
    elif _ready(config):
        _vocab(config, None)
        if config.log.sample:
            raise UserError(
                "log.sample needs a tokenizer, but data.source came without one: give data.tokenizer or no log.sample"
            )


def _ready(config: RunConfig) -> bool:
    """Whether data.source is the prefix of a data set, not a text."""
    return beside(Path(config.data.source), ".idx").is_file()


def _given(config: RunConfig) -> Path | None:
    """The tokenizer file to use: data.tokenizer, else the one that `megaprec data build` left beside its data set."""
    if config.data.tokenizer:
        return Path(config.data.tokenizer)
    left = beside(Path(config.data.source), ".model")
    return left if _ready(config) and left.is_file() else None


def _source(config: RunConfig) -> Source:
    data = config.data
    with _about(config, "data.source"):
        if data.source.endswith((".bin", ".idx")):
            raise UserError(f'of a .bin and .idx pair give the common prefix, "{data.source[:-4]}"')
        return open_source(data.source, text_field=data.text_field, max_chars=data.max_chars or None)


def _cache(config: RunConfig) -> Path:
    """The folder of the data set that is made of a text."""
    return Path(config.data.cache) if config.data.cache else Path(config.train.folder) / "data"


def _build(config: RunConfig, given: Path | None) -> tuple[Path, Path]:
    """Prefix of the data set made of a text, and the tokenizer file it was made with.

    A data set in the run's own folder may be replaced while nothing was trained on it; any other may not.
    """
    source, data = _source(config), config.data
    cache = _cache(config)
    prefix, vocab_size = cache / "text", None if given else data.vocab_size
    made = reusable(prefix, source, given or beside(prefix, ".model"), vocab_size)
    if made is None:
        used = bool(data.cache) or latest(config.checkpoint_folder) is not None
        if used and beside(prefix, ".idx").exists():
            raise UserError(
                f"[data] names another text or tokenizer than {prefix}.idx was made of: give another "
                f"{'data.cache' if data.cache else 'train.folder'}, or remove {cache} to have it made anew"
            )
        with _about(config, "data.source", *([] if given else ["data.vocab_size"])), building(source) as report:
            made = prepare(
                source,
                prefix,
                tokenizer=given,
                vocab_size=vocab_size,
                workers=data.workers or cores(),
                overwrite=not used,
                on_progress=report,
            )
    return made.prefix, made.tokenizer


def _vocab(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    asked = config.model.vocab
    if tokenizer is None and asked == 0:
        raise UserError(
            "model.vocab = 0 asks the tokenizer, but data.source came without one: give model.vocab or data.tokenizer"
        )
    if tokenizer is not None and 0 < asked < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab = {asked} does not hold the {tokenizer.vocab_size} tokens of {tokenizer.path}: "
            f"use 0 or at least {tokenizer.vocab_size}"
        )
    return asked or (tokenizer.vocab_size if tokenizer else 0)
