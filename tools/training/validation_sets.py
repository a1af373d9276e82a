"""The named sets of data.validation, which are evaluated beside the held-out part of the training
data.

They are text or data sets like the training data, and have its tokenizer, its samples of
train.seq_length and its rules at document ends; no sample of them is trained on. The files of a
text are built once, into the folder that the run keeps its data in.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megaprec.data.build import prepare, reusable
from megaprec.data.document_tokens import with_begin
from megaprec.data.files import exclusive_lock, with_suffix
from megaprec.data.indexed import IndexedDataset
from megaprec.data.intact import check_vocabulary, contents_of, read_record
from megaprec.data.samples import Resets, Samples
from megaprec.data.text import Source, left_out_words, open_source
from megaprec.data.tokenizer import Tokenizer
from megaprec.errors import UserError
from megaprec.resources import cores
from tools.config.data_settings import Data
from tools.config.relative_paths import beside_run_file
from tools.config.run_file import RunConfig
from tools.console.progress_bar import build_progress
from tools.console.toml import toml
from tools.training.tokenizer_notes import tokenizer_notes


@dataclass(frozen=True)
class _ValidationSet:
    """One set.

    key: the run-file key that names its source. prefix: of its data set, which may have to be
    built.
    """

    key: str
    name: str
    source: str
    prefix: Path

    @property
    def tokenized(self) -> bool:
        """Return True if the source is a tokenized data set, False if it is text."""
        return self.prefix == Path(self.source)


def check_validation(config: RunConfig, cache: Path) -> None:
    """Raise UserError for sets that do not exist or cannot be read. Builds nothing.

    cache: folder of the data sets that are built of texts.
    """
    for validation_set in _sets(config.data, cache):
        with _naming(config, validation_set):
            if validation_set.tokenized:
                IndexedDataset(validation_set.prefix)
            else:
                open_text(validation_set.source, config.data)


def build_validation(
    config: RunConfig, tokenizer: Tokenizer | None, vocab: int, cache: Path
) -> Iterator[str]:
    """Build the data sets that are missing, and check all.

    One process at a time does so. Yields notes for the user.

    Raises UserError.
    """
    if config.data.validation and not config.train.eval_every:
        yield "data.validation is not evaluated, because train.eval_every is 0"
        return
    for validation_set in _sets(config.data, cache):
        prefix = validation_set.prefix
        with _naming(config, validation_set):
            if not validation_set.tokenized:
                _build(config.data, validation_set, tokenizer, cache)
            dataset = IndexedDataset(prefix)
            check_vocabulary(dataset, contents_of(dataset), vocab)
            yield from dataset.notes
            yield from tokenizer_notes(prefix, read_record(prefix), tokenizer)


def open_validation(config: RunConfig, cache: Path, begin: int | None) -> Mapping[str, Samples]:
    """Open the existing data sets by name; none if the run never evaluates.

    Raises UserError for too short ones.

    begin: id of the token before each document, as in the training data; None: no token is put
        there.
    """
    data = config.data
    train = config.train
    opened = dict[str, Samples]()
    if not train.eval_every:
        return opened
    resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
    for validation_set in _sets(data, cache):
        with _naming(config, validation_set):
            dataset = with_begin(IndexedDataset(validation_set.prefix), begin)
            # In the order of the file: an evaluation takes the first samples.
            samples = Samples(dataset, train.seq_length, train.seed, shuffle=False, resets=resets)
            samples.require_counted("evaluated samples")
            opened[validation_set.name] = samples
    return opened


def validation_prefixes(config: RunConfig) -> Iterator[Path]:
    """Yield the prefix of each set that the run evaluates and that was given as tokens."""
    if not config.train.eval_every:
        return
    for validation_set in _sets(config.data, Path()):
        if validation_set.tokenized:
            yield validation_set.prefix


def _sets(data: Data, cache: Path) -> Iterator[_ValidationSet]:
    for i, validation in enumerate(data.validation):
        key = f"data.validation[{i}].source"
        path = Path(validation.source)
        tokenized = with_suffix(path, ".idx").is_file()
        prefix = path if tokenized else cache / f"eval-{validation.name}"
        yield _ValidationSet(key, validation.name, validation.source, prefix)


def open_text(source: str, data: Data, max_chars: int | None = None) -> Source:
    """Open a text of [data].

    Raises UserError, also for a file of a data set in place of its prefix.

    max_chars: characters of the text that are used; None: all.
    """
    if source.endswith((".bin", ".idx")):
        raise UserError.of("training.data_set_prefix", source=source[:-4])
    return open_source(source, text_field=data.text_field, max_chars=max_chars)


def _build(
    data: Data, validation_set: _ValidationSet, tokenizer: Tokenizer | None, cache: Path
) -> None:
    """Build the data set of a text, unless it is there."""
    if tokenizer is None:
        raise UserError.of("training.no_tokenizer")
    source = open_text(validation_set.source, data)
    if reusable(validation_set.prefix, source, tokenizer):
        return
    # The lock is that of the training data: both are built in this folder.
    with (
        exclusive_lock(cache / ".lock", partial(say_busy, cache)),
        build_progress(
            source.name, source.total_chars(), left_out_words(source.left_out)
        ) as report,
    ):
        prepare(
            source,
            validation_set.prefix,
            tokenizer=tokenizer.path,
            workers=data.workers or cores(),
            overwrite=not data.cache,  # other runs may use what is in data.cache
            on_progress=report,
        )


def say_busy(cache: Path) -> None:
    """Say on stderr that this process waits for another one, which builds data in `cache`."""
    print(f"waiting for another process, which builds data in {cache}", file=sys.stderr, flush=True)


@contextmanager
def _naming(config: RunConfig, validation_set: _ValidationSet) -> Iterator[None]:
    """Prefix the problems raised inside the context with the key and the source of a set."""
    try:
        yield
    except UserError as error:
        subject = f"{validation_set.key} = {toml(validation_set.source)}"
        hint = beside_run_file(config.origin("data.validation"), validation_set.source)
        problems = [problem.within(f"{subject}: ", hint) for problem in error.problems]
        raise UserError(*problems) from error
