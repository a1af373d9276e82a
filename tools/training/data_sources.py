"""The texts and data sets that [data] names, and their tokenizer file. Nothing is built here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megaprec.checkpoint.saving import require_own_names
from megaprec.durable import read_whole
from megaprec.errors import Problem, UserError
from megaprec.text.characters import CharacterTokenizer
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.tokens.copies import file_here, is_there
from megaprec.tokens.files import with_suffix
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.places import is_remote, is_url, path_of
from tools.config.rules.checking import check_all
from tools.config.rules.data import small_vocabulary
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import Data, names_of
from tools.console.toml import toml
from tools.parts import optional_parts

if TYPE_CHECKING:
    from megaprec.text.sources import TextSource

MOST_COUNTED = 1 << 25  # characters of texts that are read before a run


@dataclass(frozen=True)
class DataSource:
    """One text or data set of a run.

    key: the run-file key that names it. names: the value of that key, one or several. prefix: of
    its data set, which may have to be built. validation_name: of a set of data.validation, "" for
    training data.
    """

    key: str
    names: tuple[str, ...]
    prefix: Path
    validation_name: str = ""

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    @property
    def is_tokenized(self) -> bool:
        """Return True if the source is a tokenized data set, False if it is text."""
        return self.prefix == path_of(self.name)

    @property
    def index_file(self) -> Path:
        return with_suffix(self.prefix, ".idx")

    def open_text(self, data: Data, tokenizer_file: Path | None) -> "TextSource":
        """Open the source, which is text.

        tokenizer_file: the existing one, None if it is to be trained.

        Raises UserError, also for a file of a data set in place of its prefix.
        """
        return optional_parts.open_text(self, data, tokenizer_file)


def data_folder(config: RunConfig) -> Path:
    """Return the folder of the data sets that are built of texts."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(config.train.folder) / "data"


def training_sources(config: RunConfig) -> list[DataSource]:
    """Return the source of data.source, or those of a blend."""
    folder = data_folder(config)
    if not config.data.blend:
        names = names_of(config.data.source)
        return [DataSource("data.source", names, _prefix(names, folder / "text"))]
    sources = list[DataSource]()
    for i, source in enumerate(config.data.blend):
        names = names_of(source.source)
        prefix = _prefix(names, folder / f"text{i}")
        key = f"data.blend[{i}].source"
        sources.append(DataSource(key, names, prefix))
    return sources


def validation_sources(config: RunConfig) -> list[DataSource]:
    """Return the sets of data.validation, which are evaluated beside the held-out training data."""
    sources = list[DataSource]()
    for i, source in enumerate(config.data.validation):
        names = names_of(source.source)
        prefix = _prefix(names, data_folder(config) / f"eval-{source.name}")
        key = f"data.validation[{i}].source"
        sources.append(DataSource(key, names, prefix, validation_name=source.name))
    return sources


def _prefix(names: tuple[str, ...], built: Path) -> Path:
    """Return the prefix of a source's data set: its name, or `built` if the source is text."""
    path = path_of(names[0])
    is_data_set = len(names) == 1 and is_there(path, ".idx")
    return path if is_data_set else built


@contextmanager
def naming_settings(config: RunConfig, source: DataSource | None, *keys: str) -> Iterator[None]:
    """Put keys and values of the run file before each problem of a UserError that is raised inside
    the context.

    source: its key and name come first; None for a problem of data.tokenizer. keys: further keys.
    """
    try:
        yield
    except UserError as error:
        settings = [f"{key} = {config.value(key)}" for key in keys]
        if source:
            settings.insert(0, f"{source.key} = {toml(source.name)}")
            key, _, _ = source.key.partition("[")  # without the number of a data set
            name = source.name
        else:
            key = "data.tokenizer"
            name = config.data.tokenizer
        hint = optional_parts.working_directory_hint(config.origin(key), name)
        prefix = f"{', '.join(settings)}: "
        problems = [problem.within(prefix, hint) for problem in error.problems]
        raise UserError(*problems) from error


def check_sources(config: RunConfig) -> None:
    """Raise UserError for sources of [data] that do not exist, cannot be read or do not fit
    together. Builds nothing.
    """
    check_all(config, _check_training, _check_tokenizer, _check_validation)


def _check_training(config: RunConfig) -> None:
    checks = [partial(_check_source, source=source) for source in training_sources(config)]
    check_all(config, *checks)


def _check_validation(config: RunConfig) -> None:
    for source in validation_sources(config):
        _check_source(config, source)


def _check_source(config: RunConfig, source: DataSource) -> None:
    with naming_settings(config, source):
        if source.is_tokenized:
            IndexedDataset(source.prefix)
        else:
            source.open_text(config.data, existing_tokenizer(config))


def _check_tokenizer(config: RunConfig) -> None:
    """Raise UserError for a tokenizer that cannot be used, and for one that is missing."""
    sources = training_sources(config)
    if file := existing_tokenizer(config):
        # The problem is named with the data set that the file lies beside, or with its own key.
        beside = [source for source in sources if file_here(source.prefix, ".model") == file]
        subject = beside[0] if beside else None
        keys = [] if subject else ["data.tokenizer"]
        with naming_settings(config, subject, *keys):
            vocabulary_size(config, load_tokenizer(file))
            require_own_names([file])  # it is copied into checkpoints
        return

    tokenized = [source for source in sources if source.is_tokenized]
    if not tokenized:
        _require_room_for_tokenizer(config)
        return
    key = tokenized[0].key
    if config.data.of_characters:
        raise UserError.of("training.characters_of_tokens", key=key)
    vocabulary_size(config, None)
    if config.log.sample:
        raise UserError.of("training.sample_without_tokenizer", key=key)
    if len(tokenized) < len(sources):
        raise UserError.of("training.blend_without_tokenizer", key=key)


def _require_room_for_tokenizer(config: RunConfig) -> None:
    """Raise UserError if the tokenizer that is trained on the texts has more tokens than the model.

    A run file of texts on this machine is refused for it already, but not one of texts at URLs.
    """
    if config.data.of_characters:
        return  # they are counted when the text is read
    vocab = config.model.vocab
    vocab_size = config.data.vocab_size
    if 0 < vocab < vocab_size:
        raise UserError(small_vocabulary(vocab, vocab_size, config.train.branch_from))


def existing_tokenizer(config: RunConfig) -> Path | None:
    """Return the tokenizer file: data.tokenizer, or the one that `megaprec data build` has left
    beside the data sets.

    Raises UserError if the data sets of a blend have different tokenizers.
    """
    if config.data.tokenizer_file:
        return config.data.tokenizer_file
    tokenized = [source for source in training_sources(config) if source.is_tokenized]
    files = [file_here(source.prefix, ".model") for source in tokenized]
    existing = [file for file in files if not is_remote(file) and file.is_file()]
    if not existing:
        return None
    first, *others = existing
    # Compared by content: the same tokenizer may be copied beside each data set.
    if any(read_whole(file) != read_whole(first) for file in others):
        raise UserError.of("training.blend_tokenizers", tokenizers=", ".join(map(str, existing)))
    if config.data.of_characters and not isinstance(load_tokenizer(first), CharacterTokenizer):
        raise UserError.of("training.not_of_characters", path=first)
    return first


def trained_tokenizer(config: RunConfig) -> Path:
    """Return the path of the tokenizer that is trained on the texts."""
    name = "blend" if config.data.blend else "text"
    return with_suffix(data_folder(config) / name, ".model")


def count_characters(config: RunConfig) -> int:
    """Return the number of different characters in the texts of the run, of which the beginning is
    read. Raises UserError."""
    characters = set[str]()
    left = MOST_COUNTED  # characters of text still to read
    for source in training_sources(config):
        for _, text in source.open_text(config.data, None):
            characters.update(text)
            left -= len(text)
            if left <= 0:
                return len(characters)
    return len(characters)


def vocabulary_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Return the vocabulary size of the model, model.vocab or the tokenizer's. Raises UserError."""
    size = config.model.vocab
    if tokenizer is None:
        if size == 0:
            raise UserError.of("training.vocabulary_unknown")
        return size
    if 0 < size < tokenizer.vocab_size:
        raise UserError(_too_small_vocabulary(config, tokenizer))
    return size or tokenizer.vocab_size


def _too_small_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> Problem:
    """Return the problem that model.vocab, given or that of first weights, is below the tokenizer's
    number of tokens."""
    size = config.model.vocab
    tokens = tokenizer.vocab_size
    path = tokenizer.path
    if config.train.branch_from:
        branch = toml(config.train.branch_from)
        return Problem.of(
            "training.tokenizer_of_branch", size=size, tokens=tokens, tokenizer=path, branch=branch
        )
    if not config.train.init_from or config.train.grow_vocabulary != "none":
        return Problem.of(
            "training.vocabulary_below_tokenizer", size=size, tokens=tokens, tokenizer=path
        )
    return Problem.of(
        "training.vocabulary_of_weights",
        size=size,
        tokens=tokens,
        tokenizer=path,
        weights=toml(config.train.init_from),
    )


def sized_by_tokenizer(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the run with the vocabulary of its tokenizer, and a note on it, if model.vocab leaves
    the size to a tokenizer that is on this machine."""
    if config.model.vocab or any(is_url(name) for name in config.data.sources):
        return config, []
    tokenizer_file = existing_tokenizer(config) or trained_tokenizer(config)
    if config.data.of_characters and not tokenizer_file.exists():
        size = count_characters(config)
        note = f"model.vocab is left to the tokenizer: the text has {size:,} characters"
        return config.model_copy(update={"model": config.model.with_vocab(size)}), [note]
    if not tokenizer_file.exists():
        return config, []
    size = load_tokenizer(tokenizer_file).vocab_size
    note = f"model.vocab is left to the tokenizer: {tokenizer_file} has {size:,} tokens"
    return config.model_copy(update={"model": config.model.with_vocab(size)}), [note]
