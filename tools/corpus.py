"""The data of a run: what [data] names, tokenized if it has to be, split into samples to train on and to hold out.

A run has one text or data set (data.source) or a blend of several (data.blend). All share one tokenizer: a given one,
the one that was left beside the data sets, or one that is learned from all texts of the run.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from megaprec.checkpoint.folder import latest
from megaprec.data.blend import Blend
from megaprec.data.build import check_vocabulary, prepare, reusable
from megaprec.data.files import alone, beside
from megaprec.data.indexed import IndexedDataset
from megaprec.data.samples import Resets, Samples, count_samples, split
from megaprec.data.text import Source, open_source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer
from megaprec.data.training import train_sentencepiece
from megaprec.data.workers import cores
from megaprec.errors import UserError
from models.config import ModelConfig
from tools.checks import check_all
from tools.progress import building
from tools.run import RunConfig
from tools.toml import toml


@dataclass(frozen=True)
class Corpus:
    """model: the run's, with its vocabulary known. held_out, tokenizer: None if the run has none."""

    datasets: tuple[IndexedDataset, ...]
    train: Samples | Blend
    held_out: Samples | Blend | None
    tokenizer: Tokenizer | None
    model: ModelConfig


@dataclass(frozen=True)
class _Part:
    """One text or data set of a run. key, name: the run file's key that names it, and what it says."""

    key: str
    name: str
    prefix: Path  # of its data set, which may have to be made

    @property
    def ready(self) -> bool:
        """Whether it is the prefix of a data set, not a text."""
        return self.prefix == Path(self.name)


def check_sources(config: RunConfig) -> None:
    """Raises UserError for what [data] names and is not there, cannot be read or does not suit. Builds nothing."""
    check_all(config, _find_data, _find_tokenizer)


def open_corpus(config: RunConfig) -> Corpus:
    """Builds what is not built yet, and opens it. One process at a time.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for a sample, and a data set
    with tokens that the vocabulary does not hold, for which a given one is read once from end to end.
    """
    parts, given = _parts(config), _given(config)
    texts = [part for part in parts if not part.ready]
    model_file = _build(config, texts, given) if texts else given
    corpus = open_made(config, [part.prefix for part in parts], model_file)
    for part, dataset in zip(parts, corpus.datasets, strict=True):
        if part.ready:
            with _about(config, part, "model.vocab", "data.tokenizer"):
                check_vocabulary(dataset, corpus.model.vocab)
    return corpus


def open_made(config: RunConfig, prefixes: Sequence[Path], model_file: Path | None) -> Corpus:
    """The corpus of data sets and a tokenizer file that are there. Any number of processes may open it."""
    tokenizer = load_tokenizer(model_file) if model_file else None
    model = config.model.with_vocab(_vocab(config, tokenizer))
    train, data, parts = config.train, config.data, _parts(config)
    resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
    datasets, halves = list[IndexedDataset](), list[tuple[Samples, Samples | None]]()
    for part, prefix in zip(parts, prefixes, strict=True):
        with _about(config, part):
            datasets.append(IndexedDataset(prefix))
        with _about(config, part, "data.held_out", "train.seq_length"):
            halves.append(split(datasets[-1], train.seq_length, data.held_out, train.seed, data.shuffle, resets))
    trained, held_out = zip(*halves, strict=True)
    if data.blend:
        weights, names = [one.weight for one in data.blend], [part.name for part in parts]
        totals = [count_samples(dataset, train.seq_length) for dataset in datasets]
        trained = [Blend(trained, weights, names, totals)]
        held_out = [Blend(held_out, weights, names, totals) if data.held_out else None]
    return Corpus(tuple(datasets), trained[0], held_out[0], tokenizer, model)


def open_kept(config: RunConfig) -> Corpus:
    """The corpus that a run was trained on, from the files that it left. Builds nothing.

    Raises UserError if they are gone.
    """
    parts, given = _parts(config), _given(config)
    left = _learned(config)
    if given is None and not all(part.ready for part in parts) and left.is_file():
        given = left
    for part in parts:
        if not beside(part.prefix, ".idx").is_file():
            raise UserError(f"the run's data is gone: there is no {beside(part.prefix, '.idx')}")
    return open_made(config, [part.prefix for part in parts], given)


@contextmanager
def _about(config: RunConfig, part: _Part | None, *keys: str) -> Iterator[None]:
    """Puts before the problems that are raised inside what they are about: a part of the data, and keys."""
    try:
        yield
    except UserError as error:
        said = [f"{part.key} = {toml(part.name)}"] if part else []
        said += [f"{key} = {config.value(key)}" for key in keys]
        raise UserError(*(f"{', '.join(said)}: {problem}" for problem in error.problems)) from error


def _parts(config: RunConfig) -> list[_Part]:
    named = [(f"data.blend[{n}].source", one.source) for n, one in enumerate(config.data.blend)]
    parts = []
    for n, (key, name) in enumerate(named or [("data.source", config.data.source)]):
        ready = beside(Path(name), ".idx").is_file()
        made = _cache(config) / (f"text{n}" if named else "text")
        parts.append(_Part(key, name, Path(name) if ready else made))
    return parts


def _find_data(config: RunConfig) -> None:
    check_all(config, *(lambda config, part=part: _find(config, part) for part in _parts(config)))


def _find(config: RunConfig, part: _Part) -> None:
    if not part.ready:
        _source(config, part)
        return
    with _about(config, part):
        IndexedDataset(part.prefix)


def _find_tokenizer(config: RunConfig) -> None:
    parts = _parts(config)
    if given := _given(config):
        named = next((part for part in parts if beside(part.prefix, ".model") == given), None)
        with _about(config, named, *([] if named else ["data.tokenizer"])):
            _vocab(config, load_tokenizer(given))
    elif ready := [part for part in parts if part.ready]:
        _vocab(config, None)
        key = ready[0].key
        if config.log.sample:
            raise UserError(
                f"log.sample needs a tokenizer, but {key} came without one: give data.tokenizer or no log.sample"
            )
        if len(ready) < len(parts):
            raise UserError(f"{key} came without a tokenizer, which the blend's texts need too: give data.tokenizer")


def _given(config: RunConfig) -> Path | None:
    """The tokenizer file to use: data.tokenizer, else the one that `megaprec data build` left beside its data sets.

    Raises UserError if those of a blend are not the same.
    """
    if config.data.tokenizer:
        return Path(config.data.tokenizer)
    left = [beside(part.prefix, ".model") for part in _parts(config) if part.ready]
    there = [file for file in left if file.is_file()]
    if any(file.read_bytes() != there[0].read_bytes() for file in there[1:]):
        raise UserError(
            f"data.blend: {', '.join(map(str, there))} are not all the same tokenizer, so their ids mean different "
            "things: build the data sets with one --tokenizer"
        )
    return there[0] if there else None


def _source(config: RunConfig, part: _Part) -> Source:
    data = config.data
    with _about(config, part):
        if part.name.endswith((".bin", ".idx")):
            raise UserError(f'of a .bin and .idx pair give the common prefix, "{part.name[:-4]}"')
        return open_source(part.name, text_field=data.text_field, max_chars=data.max_chars or None)


def _cache(config: RunConfig) -> Path:
    """The folder of the data sets that are made of texts."""
    return Path(config.data.cache) if config.data.cache else Path(config.train.folder) / "data"


def _learned(config: RunConfig) -> Path:
    """The tokenizer that is learned from the texts."""
    return beside(_cache(config) / ("blend" if config.data.blend else "text"), ".model")


def _build(config: RunConfig, texts: Sequence[_Part], given: Path | None) -> Path:
    """Makes data sets of texts, one process at a time; returns the tokenizer file they were made with.

    A data set in the run's own folder may be replaced while nothing was trained on it; any other may not.
    """
    sources = {part: _source(config, part) for part in texts}
    tokenizer, vocab_size = given or _learned(config), None if given else config.data.vocab_size

    def there() -> bool:
        return all(reusable(part.prefix, sources[part], tokenizer, vocab_size) for part in texts)

    if there():
        return tokenizer
    with alone(_cache(config) / ".lock", partial(_say_busy, _cache(config))):
        return tokenizer if there() else _build_alone(config, sources, given)


def _say_busy(cache: Path) -> None:
    print(f"waiting for another process, which builds data in {cache}", file=sys.stderr, flush=True)


def _build_alone(config: RunConfig, sources: dict[_Part, Source], given: Path | None) -> Path:
    data, cache, texts = config.data, _cache(config), list(sources)
    tokenizer, vocab_size = given or _learned(config), None if given else data.vocab_size
    used = bool(data.cache) or latest(config.checkpoint_folder) is not None
    for part in texts:
        made = reusable(part.prefix, sources[part], tokenizer, vocab_size)
        if made is None and used and beside(part.prefix, ".idx").exists():
            raise UserError(
                f"[data] names another text or tokenizer than {part.prefix}.idx was made of: give another "
                f"{'data.cache' if data.cache else 'train.folder'}, or remove {cache} to have it made anew"
            )
    if given is None:
        pieces = chain.from_iterable(sources.values())
        with _about(config, texts[0], "data.vocab_size"):
            train_sentencepiece((text for _, text in pieces), tokenizer.with_suffix(""), data.vocab_size, not used)
    for part, source in sources.items():
        with _about(config, part), building(source) as report:
            prepare(
                source,
                part.prefix,
                tokenizer=tokenizer,
                workers=data.workers or cores(),
                overwrite=not used,
                on_progress=report,
            )
    return tokenizer


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
