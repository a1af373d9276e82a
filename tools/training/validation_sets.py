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
from megaprec.data.files import alone, beside
from megaprec.data.indexed import IndexedDataset
from megaprec.data.intact import check_vocabulary, contents_of, read_record
from megaprec.data.samples import Resets, Samples
from megaprec.data.text import Source, open_source
from megaprec.data.tokenizer import Tokenizer
from megaprec.errors import UserError
from megaprec.resources import cores
from tools.config.data_settings import Data
from tools.config.relative_paths import beside_run_file
from tools.config.run_file import RunConfig
from tools.console.progress_bar import building
from tools.console.toml import toml
from tools.training.tokenizer_notes import tokenizer_notes


@dataclass(frozen=True)
class _Named:
    """One set. key: the run-file key that names its source. prefix: of its data set, which may have
    to be built."""

    key: str
    name: str
    source: str
    prefix: Path

    @property
    def ready(self) -> bool:
        return self.prefix == Path(self.source)


def check_validation(config: RunConfig, cache: Path) -> None:
    """Raise UserError for sets that do not exist or cannot be read. Builds nothing.

    cache: folder of the data sets that are built of texts.
    """
    for one in _sets(config.data, cache):
        with _about(config, one):
            IndexedDataset(one.prefix) if one.ready else _text(config.data, one)


def build_validation(
    config: RunConfig, tokenizer: Tokenizer | None, vocab: int, cache: Path
) -> Iterator[str]:
    """Build the data sets that are missing, and check all. One process at a time does so. Yields
    notes for the user.

    Raises UserError.
    """
    if config.data.validation and not config.train.eval_every:
        yield "data.validation is not evaluated, because train.eval_every is 0"
        return
    for one in _sets(config.data, cache):
        with _about(config, one):
            if not one.ready:
                _build(config.data, one, tokenizer, cache)
            dataset = IndexedDataset(one.prefix)
            check_vocabulary(dataset, contents_of(dataset), vocab)
            yield from dataset.notes
            yield from tokenizer_notes(one.prefix, read_record(one.prefix), tokenizer)


def open_validation(config: RunConfig, cache: Path, begin: int | None) -> Mapping[str, Samples]:
    """Open the existing data sets by name; none if the run never evaluates. Raises UserError for
    too short ones.

    begin: id of the token before each document, as in the training data; None: no token is put
        there.
    """
    data = config.data
    train = config.train
    opened = dict[str, Samples]()
    resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
    for one in _sets(data, cache) if train.eval_every else ():
        with _about(config, one):
            dataset = with_begin(IndexedDataset(one.prefix), begin)
            opened[one.name] = Samples(
                dataset, train.seq_length, train.seed, shuffle=False, resets=resets
            )
            opened[one.name].require_counted("evaluated samples")
    return opened


def _sets(data: Data, cache: Path) -> Iterator[_Named]:
    for n, one in enumerate(data.validation):
        path = Path(one.source)
        ready = beside(path, ".idx").is_file()
        yield _Named(
            f"data.validation[{n}].source",
            one.name,
            one.source,
            path if ready else cache / f"eval-{one.name}",
        )


def _text(data: Data, one: _Named) -> Source:
    if one.source.endswith((".bin", ".idx")):
        raise UserError(f'give the common prefix of the .bin and .idx pair, "{one.source[:-4]}"')
    return open_source(one.source, text_field=data.text_field)


def _build(data: Data, one: _Named, tokenizer: Tokenizer | None, cache: Path) -> None:
    if tokenizer is None:
        raise UserError(
            "it is text, and the run has no tokenizer: set data.tokenizer, or build a data set of "
            "it"
        )
    source = _text(data, one)
    if reusable(one.prefix, source, tokenizer):
        return
    with alone(cache / ".lock", partial(_say_busy, cache)), building(source) as report:
        prepare(
            source,
            one.prefix,
            tokenizer=tokenizer.path,
            workers=data.workers or cores(),
            overwrite=not data.cache,
            on_progress=report,
        )


def _say_busy(cache: Path) -> None:
    print(f"waiting for another process, which builds data in {cache}", file=sys.stderr, flush=True)


@contextmanager
def _about(config: RunConfig, one: _Named) -> Iterator[None]:
    """Prefix the problems raised inside the context with the key and the source of a set."""
    try:
        yield
    except UserError as error:
        hint = beside_run_file(config.origin("data.validation"), one.source)
        raise UserError(
            *(f"{one.key} = {toml(one.source)}: {problem}{hint}" for problem in error.problems)
        ) from error
