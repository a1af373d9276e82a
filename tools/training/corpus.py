"""The data of a run: text or token files of [data], tokenized if necessary, split into training and
held-out samples.

A run has one text or data set (data.source) or a blend of several (data.blend). All share one
tokenizer: the given one, the one that lies beside the data sets, or one that is trained on all
texts of the run.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from megaprec.checkpoint.digests import file_digest
from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.saving import require_own_names
from megaprec.data.blend import Blend
from megaprec.data.build import BuildResult, prepare, reusable
from megaprec.data.document_tokens import DocumentTokens, document_tokens, with_begin
from megaprec.data.files import alone, beside, write_whole
from megaprec.data.indexed import IndexedDataset
from megaprec.data.intact import check_vocabulary, contents_of, read_record
from megaprec.data.samples import Resets, Samples, count_samples, split
from megaprec.data.text import Source, has_digest, open_source
from megaprec.data.tokenizer import Tokenizer, load_tokenizer, loaded_once
from megaprec.data.training import train_sentencepiece
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.resources import cores
from models.config import ModelConfig
from tools.config.checks import check_all
from tools.config.relative_paths import beside_run_file
from tools.config.run_file import RunConfig
from tools.console.progress_bar import building
from tools.console.toml import toml
from tools.convert.initial import initial_model
from tools.convert.train_state import newest, read_tokenizer
from tools.training.begin_notes import begin_notes
from tools.training.data_identity import DataSet, Identity, read_identity
from tools.training.tokenizer_notes import tokenizer_notes, unlike_notes
from tools.training.validation_sets import build_validation, check_validation, open_validation


@dataclass(frozen=True)
class Corpus:
    """The opened data of a run. model: the run's, with its vocabulary size. held_out, tokenizer:
    None if the run has none.

    begin: id of the token that stands before each document of the samples, None if none was asked
    for. documents: the tokens that the model sees before and after documents. identity: identifies
    the data in checkpoints; None if it was not checked. notes: lines for the user. validation:
    further sets to evaluate, by name.
    """

    datasets: tuple[IndexedDataset, ...]
    train: Samples | Blend
    held_out: Samples | Blend | None
    tokenizer: Tokenizer | None
    model: ModelConfig
    begin: int | None = None
    documents: DocumentTokens = DocumentTokens(None, None)
    identity: Identity | None = None
    notes: tuple[str, ...] = ()
    validation: Mapping[str, Samples] = field(default_factory=dict)

    @property
    def ids(self) -> int:
        """Return the number of ids that data may have: that of the tokenizer, or of the model if
        there is none."""
        return self.tokenizer.vocab_size if self.tokenizer else self.model.vocab

    @property
    def evaluated(self) -> dict[str, Samples | Blend]:
        """Return the samples of each evaluation, by the field of metrics.jsonl that its loss
        has."""
        held_out = {} if self.held_out is None else {"eval_loss": self.held_out}
        return held_out | {
            f"eval_loss/{name}": samples for name, samples in self.validation.items()
        }


@dataclass(frozen=True)
class _Part:
    """One text or data set of a run. key: the run-file key that names it. name: the value of that
    key."""

    key: str
    name: str
    weight: float
    prefix: Path  # of its data set, which may have to be built

    @property
    def ready(self) -> bool:
        """Return True if the part is a tokenized data set, False if it is text."""
        return self.prefix == Path(self.name)


def check_sources(config: RunConfig) -> None:
    """Raise UserError for parts of [data] that do not exist, cannot be read or do not fit together.
    Builds nothing."""
    check_all(
        config,
        _find_data,
        _find_tokenizer,
        lambda config: check_validation(config, cache_of(config)),
    )


def open_corpus(config: RunConfig, allowed: Collection[str] = ()) -> Corpus:
    """Build missing data sets, open all, and check the files that this machine has not yet checked.

    One process at a time does so. allowed: differences from the checkpoint's data that are
    accepted, of `data_identity.ALLOW`.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for one
    sample, and a token id outside of the vocabulary.
    """
    parts = _parts(config)
    given = _given(config)
    texts = [part for part in parts if not part.ready]
    model_file = _build(config, texts, given, allowed) if texts else given
    corpus = looked_at(config, open_made(config, [part.prefix for part in parts], model_file))
    notes = build_validation(config, corpus.tokenizer, corpus.ids, cache_of(config))
    streams = [
        part.dataset
        for part in (corpus.train.parts if isinstance(corpus.train, Blend) else [corpus.train])
    ]
    of_begin = begin_notes(config, streams, corpus.begin, corpus.documents, corpus.tokenizer)
    said = tuple(dict.fromkeys((*corpus.notes, *of_begin, *notes)))
    return replace(
        corpus, notes=said, validation=open_validation(config, cache_of(config), corpus.begin)
    )


def looked_at(config: RunConfig, corpus: Corpus) -> Corpus:
    """Return the corpus with its identity, after checking its files. Raises UserError for damaged
    data."""
    sets = list[DataSet]()
    notes = list[str]()
    records = dict[Path, dict[str, Any] | None]()
    tokenizer = corpus.tokenizer.path if corpus.tokenizer else None
    for part, dataset in zip(_parts(config), corpus.datasets, strict=True):
        again = f"remove {beside(part.prefix, '.idx')} and the same command makes it anew"
        with _about(config, part):
            seen = contents_of(dataset, *([] if part.ready else [again]))
            record = records[part.prefix] = read_record(dataset.prefix)
            notes += dataset.notes
            notes += tokenizer_notes(dataset.prefix, record, corpus.tokenizer)
        with _about(config, part, *(["model.vocab", "data.tokenizer"] if part.ready else [])):
            check_vocabulary(dataset, seen, corpus.ids)
        what = {key: value for key, value in asdict(seen).items() if key in DataSet.model_fields}
        text = _text_of(record) if record else None
        sets.append(DataSet(source=part.name, weight=part.weight, text=text, **what))
    notes += unlike_notes(records) if corpus.tokenizer is None else ()
    data = config.data
    digest = file_digest(tokenizer) if tokenizer else ""
    identity = Identity(
        sets=sets,
        tokenizer=digest,
        held_out=data.held_out,
        shuffle=data.shuffle,
        seed=config.train.seed,
        begin=corpus.begin,
    )
    return replace(corpus, identity=identity, notes=tuple(dict.fromkeys(notes)))


def _text_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the identity of the text of a data set, and the digest and length of its content if
    they are known."""
    source = record.get("source")
    if not isinstance(source, dict) or "text_sha256" not in record:
        return source
    return {**source, "sha256": record["text_sha256"], "chars": record["chars"]}


def open_made(config: RunConfig, prefixes: Sequence[Path], model_file: Path | None) -> Corpus:
    """Open existing data sets and an existing tokenizer file. Any number of processes may do so at
    once."""
    tokenizer = load_tokenizer(model_file) if model_file else None
    model = config.model.with_vocab(_vocab(config, tokenizer))
    begin = begin_asked_for(config)
    _require_token(config, begin, tokenizer.vocab_size if tokenizer else model.vocab)
    train = config.train
    data = config.data
    parts = _parts(config)
    resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
    datasets = list[IndexedDataset]()
    streams = list[IndexedDataset]()
    halves = list[tuple[Samples, Samples | None]]()
    for part, prefix in zip(parts, prefixes, strict=True):
        with _about(config, part):
            datasets.append(IndexedDataset(prefix))
            streams.append(with_begin(datasets[-1], begin))
        with _about(config, part, "data.held_out", "train.seq_length"):
            trained, held = split(
                streams[-1], train.seq_length, data.held_out, train.seed, data.shuffle, resets
            )
            halves.append((trained, held))
        with _about(config, part):
            trained.require_counted("training samples")
            if held is not None and train.eval_every:
                held.require_counted("held-out samples")
    documents = _tokens_around_documents(streams, begin, tokenizer)
    if not data.blend:
        trained, held = halves[0]
        return Corpus(tuple(datasets), trained, held, tokenizer, model, begin, documents)
    weights = [one.weight for one in data.blend]
    names = [part.name for part in parts]
    totals = [count_samples(stream, train.seq_length) for stream in streams]
    blend = Blend([trained for trained, _ in halves], weights, names, totals)
    evaluated = [held for _, held in halves if held is not None]
    held_out = Blend(evaluated, weights, names, totals) if evaluated else None
    return Corpus(tuple(datasets), blend, held_out, tokenizer, model, begin, documents)


def begin_asked_for(config: RunConfig) -> int | None:
    """Return the id of the token before each document that data.begin asks for, None if it asks for
    none.

    Where the user leaves it open, a resume takes what the checkpoint was trained with: it does not
    use the weights of train.init_from. Otherwise the run file has the id of these weights.
    """
    asked = config.data.begin
    left_open = asked == "auto" or _is_of_first_weights(config)
    store = newest(config.checkpoint_folder) if left_open else None
    identity = read_identity(store) if store else None
    if identity:
        return identity.begin
    return asked if isinstance(asked, int) else None


def _is_of_first_weights(config: RunConfig) -> bool:
    """Return True if the value of data.begin comes from train.init_from."""
    first_weights = config.train.init_from
    return (
        bool(first_weights)
        and config.origin("data.begin") == initial_model(Path(first_weights)).origin
    )


def _require_token(config: RunConfig, begin: int | None, ids: int) -> None:
    """Raise UserError if there is no token `begin` among the ids below `ids`."""
    if begin is not None and begin >= ids:
        raise UserError(
            f"data.begin = {begin} ({config.origin('data.begin')}): ids are below {ids}: give the "
            "id of the token that "
            'begins a document, or "none"'
        )


def _tokens_around_documents(
    streams: Sequence[IndexedDataset], begin: int | None, tokenizer: Tokenizer | None
) -> DocumentTokens:
    """Return the tokens before and after documents of a run, as most of its data sets have them."""
    end = tokenizer.eos if tokenizer else None
    begins = tokenizer.bos if begin is None and tokenizer else begin
    each = [document_tokens(stream, begins, end) for stream in streams]
    return max(each, key=each.count)


def open_kept(config: RunConfig) -> Corpus:
    """Open the data that a run was trained on, from the files in its folder. Builds nothing.

    Raises UserError if they no longer exist.
    """
    parts = _parts(config)
    given = _given(config)
    left = _learned(config)
    if given is None and not all(part.ready for part in parts) and left.is_file():
        given = left
    for part in parts:
        if not beside(part.prefix, ".idx").is_file():
            raise UserError(f"the run's data is gone: there is no {beside(part.prefix, '.idx')}")
    return open_made(config, [part.prefix for part in parts], given)


@contextmanager
def _about(config: RunConfig, part: _Part | None, *keys: str) -> Iterator[None]:
    """Prefix the problems raised inside the context with the part of the data and the keys that
    they concern."""
    try:
        yield
    except UserError as error:
        said = [f"{part.key} = {toml(part.name)}"] if part else []
        said += [f"{key} = {config.value(key)}" for key in keys]
        path = (part.key, part.name) if part else ("data.tokenizer", config.data.tokenizer)
        hint = beside_run_file(config.origin(path[0].split("[")[0]), path[1])
        raise UserError(
            *(f"{', '.join(said)}: {problem}{hint}" for problem in error.problems)
        ) from error


def _parts(config: RunConfig) -> list[_Part]:
    named = [
        (f"data.blend[{n}].source", one.source, one.weight)
        for n, one in enumerate(config.data.blend)
    ]
    parts = []
    for n, (key, name, weight) in enumerate(named or [("data.source", config.data.source, 1.0)]):
        ready = beside(Path(name), ".idx").is_file()
        made = cache_of(config) / (f"text{n}" if named else "text")
        parts.append(_Part(key, name, weight, Path(name) if ready else made))
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
            require_own_names([given])  # it is copied into checkpoints
    elif ready := [part for part in parts if part.ready]:
        _vocab(config, None)
        key = ready[0].key
        if config.log.sample:
            raise UserError(
                f"log.sample needs a tokenizer, but {key} has none: set data.tokenizer or remove "
                "log.sample"
            )
        if len(ready) < len(parts):
            raise UserError(
                f"{key} has no tokenizer, which the texts of the blend need: set data.tokenizer"
            )


def _given(config: RunConfig) -> Path | None:
    """Return the tokenizer file: data.tokenizer, or the one that `megaprec data build` left beside
    its data sets.

    Raises UserError if the data sets of a blend have different tokenizers.
    """
    if config.data.tokenizer:
        return Path(config.data.tokenizer)
    left = [beside(part.prefix, ".model") for part in _parts(config) if part.ready]
    there = [file for file in left if file.is_file()]
    if any(read_whole(file) != read_whole(there[0]) for file in there[1:]):
        raise UserError(
            f"data.blend: {', '.join(map(str, there))} are different tokenizers, so equal token "
            "ids mean different tokens: build the data sets with one --tokenizer"
        )
    return there[0] if there else None


def _source(config: RunConfig, part: _Part) -> Source:
    data = config.data
    with _about(config, part):
        if part.name.endswith((".bin", ".idx")):
            raise UserError(f'give the common prefix of the .bin and .idx pair, "{part.name[:-4]}"')
        return open_source(part.name, text_field=data.text_field, max_chars=data.max_chars or None)


def cache_of(config: RunConfig) -> Path:
    """Return the folder of the data sets that are built of texts."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(config.train.folder) / "data"


def _learned(config: RunConfig) -> Path:
    """Return the path of the tokenizer that is trained on the texts."""
    return beside(cache_of(config) / ("blend" if config.data.blend else "text"), ".model")


@dataclass(frozen=True)
class _Encoding:
    """The tokenizer of texts. kept: its copy in the run's newest checkpoint, if it must stay the
    same.

    file: its path, whether it exists or not. vocab_size: vocabulary size to train if it does not
    exist; None if it is given.
    """

    file: Path
    vocab_size: int | None
    kept: Path | None = None

    def reusable(self, part: _Part, source: Source, by_content: bool = False) -> BuildResult | None:
        """Return the existing data set of a text if it is the one that would be built, otherwise
        None.

        by_content: a text with another name or time is read.
        """
        tokenizer = loaded_once(self.file)
        if tokenizer is None:
            return None
        return reusable(part.prefix, source, tokenizer, self.vocab_size, by_content)

    @property
    def there(self) -> bool:
        """Return True if the file exists and is the required tokenizer."""
        return self.file.is_file() and (
            self.kept is None or read_whole(self.file) == read_whole(self.kept)
        )


def _build(
    config: RunConfig, texts: Sequence[_Part], given: Path | None, allowed: Collection[str]
) -> Path:
    """Build the data sets of texts, one process at a time; return the tokenizer file.

    A data set in the run's own folder may be replaced as long as the run resumes with the data of
    its checkpoint, or may use other data; one in data.cache may not.
    """
    sources = {part: _source(config, part) for part in texts}
    store = newest(config.checkpoint_folder)
    encoding = _encoding(config, given, store if "tokenizer" not in allowed else None)

    def there(part: _Part, by_content: bool = False) -> bool:
        return encoding.there and encoding.reusable(part, sources[part], by_content) is not None

    if all(there(part) for part in texts):
        return encoding.file
    with alone(cache_of(config) / ".lock", partial(_say_busy, cache_of(config))):
        missing = [part for part in texts if not there(part)]
        same = [part for part in missing if there(part, by_content=True)]
        for part in same:
            print(
                f"{part.key}: {toml(part.name)} has another name or time and is the same text",
                file=sys.stderr,
            )
        if len(same) < len(missing):
            _build_alone(config, sources, encoding, store, allowed)
    return encoding.file


def _encoding(config: RunConfig, given: Path | None, store: Store | None) -> _Encoding:
    """Return the tokenizer of texts. store: the checkpoint to resume from, whose tokenizer must
    stay. Raises UserError.
    """
    kept = read_tokenizer(store) if store and not given else None
    if store is None or given or kept is None:
        return _Encoding(given or _learned(config), None if given else config.data.vocab_size)
    copy = (
        f"set data.tokenizer to a copy of {kept}, or give --allow tokenizer to have another one "
        "learned"
    )
    if kept.suffix != ".model":
        raise UserError(
            f"data.tokenizer is empty, but {store.path} was trained with a tokenizer: {copy}"
        )
    if (size := load_tokenizer(kept).vocab_size) != config.data.vocab_size:
        raise UserError(
            f"data.vocab_size = {config.data.vocab_size}, but the tokenizer has {size} tokens: "
            f"{copy}"
        )
    return _Encoding(_learned(config), None, kept)


def _say_busy(cache: Path) -> None:
    print(f"waiting for another process, which builds data in {cache}", file=sys.stderr, flush=True)


def _build_alone(
    config: RunConfig,
    sources: dict[_Part, Source],
    encoding: _Encoding,
    store: Store | None,
    allowed: Collection[str],
) -> None:
    data = config.data
    own = not config.data.cache
    first = next(iter(sources))
    missing = {
        part: source for part, source in sources.items() if not encoding.reusable(part, source)
    }
    problems = [*_other_texts(missing, store, allowed), *_in_the_way(config, missing, encoding)]
    if problems:
        raise UserError(*problems)
    if encoding.kept and not encoding.there:
        write_whole(encoding.file, read_whole(encoding.kept))
        print(f"restored {encoding.file} from {encoding.kept}", file=sys.stderr, flush=True)
    elif encoding.vocab_size is not None:
        texts = chain.from_iterable(sources.values())
        with _about(config, first, "data.vocab_size"):
            train_sentencepiece(
                (text for _, text in texts), encoding.file.with_suffix(""), data.vocab_size, own
            )
    for part, source in sources.items():
        with _about(config, part), building(source) as report:
            prepare(
                source,
                part.prefix,
                tokenizer=encoding.file,
                workers=data.workers or cores(),
                overwrite=own,
                on_progress=report,
            )


def _other_texts(
    texts: dict[_Part, Source], store: Store | None, allowed: Collection[str]
) -> Iterator[str]:
    """Yield a problem if the texts are not those that the checkpoint was trained on."""
    if store is None or "data" in allowed:
        return
    kept = read_identity(store)
    for part, source in texts.items():
        if kept and any(_is_text(one.text, source) for one in kept.sets):
            continue
        there = beside(part.prefix, ".idx").exists()
        compared = any("sha256" in (one.text or {}) for one in kept.sets) if kept else False
        if not there and not compared:
            continue  # it is built, and its tokens are compared with those of the checkpoint
        known = [one.source for one in kept.sets] if kept else []
        was_there = f"{', '.join(map(toml, known))} -> " if part.name not in known else ""
        names = f"{was_there}{toml(part.name)}"
        differs = "its documents are others" if compared else _unknown_text(part)
        yield (
            f"{part.key}: {names}: not the text that {store.path} was trained on ({differs}): "
            "give --allow data to go on with it anyway, or another "
            f"train.folder{_tokens_there(part)}"
        )


def _is_text(kept: dict[str, Any] | None, source: Source) -> bool:
    """Return True if a source is the text that a checkpoint was trained on, by names, sizes and
    times or by content."""
    if kept is None:
        return False
    identity = {key: value for key, value in kept.items() if key not in ("sha256", "chars")}
    if identity == source.identity():
        return True
    digest, chars = (kept.get(key) for key in ("sha256", "chars"))
    return isinstance(digest, str) and isinstance(chars, int) and has_digest(source, digest, chars)


def _unknown_text(part: _Part) -> str:
    """Return the reason why a text is taken for another one where no digest of the text is
    known."""
    index = beside(part.prefix, ".idx")
    return (
        "its files have another name, size or time, or text_field or max_chars is another; if the "
        f"text is the same, remove {index} and the same command makes its tokens anew and "
        "compares them"
    )


def _tokens_there(part: _Part) -> str:
    there = beside(part.prefix, ".idx").exists()
    if there:
        return f"; {part.key}={part.prefix} goes on with the tokens that are there"
    return ""


def _in_the_way(
    config: RunConfig, texts: dict[_Part, Source], encoding: _Encoding
) -> Iterator[str]:
    """Yield problems if data.cache holds data sets of other texts or tokenizers, which other runs
    may use."""
    if not config.data.cache:
        return
    files = [beside(part.prefix, ".idx") for part in texts]
    files += [encoding.file] if encoding.kept and not encoding.there else []
    for file in (file for file in files if file.exists()):
        yield (
            f"{file} was built of another text or tokenizer than [data] names, and other runs may "
            "use it: set another data.cache"
        )


def _vocab(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    asked = config.model.vocab
    if tokenizer is None and asked == 0:
        raise UserError(
            "model.vocab = 0 takes the vocabulary size of the tokenizer, but data.source has "
            "none: set model.vocab or data.tokenizer"
        )
    if tokenizer is not None and 0 < asked < tokenizer.vocab_size:
        initial = config.train.init_from
        if initial:
            raise UserError(
                f"data.tokenizer: {tokenizer.path} has {tokenizer.vocab_size} tokens, but the "
                f"weights of train.init_from = {toml(initial)} have {asked}: remove "
                f"data.tokenizer if the folder has its own, give one of at most {asked} tokens, "
                "or train without train.init_from"
            )
        raise UserError(
            f"model.vocab = {asked} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{tokenizer.path}: use 0 or at least {tokenizer.vocab_size}"
        )
    return asked or (tokenizer.vocab_size if tokenizer else 0)
