"""The data of a run: text or token files of [data], tokenized if necessary, split into training and
held-out samples.

A run has one text or data set (data.source) or a blend of several (data.blend). All share one
tokenizer: the given one, the one that lies beside the data sets, or one that is trained on all
texts of the run.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from megaprec.data.files import exclusive_lock, with_suffix, write_whole
from megaprec.data.indexed import IndexedDataset
from megaprec.data.intact import Contents, check_vocabulary, contents_of, read_record
from megaprec.data.samples import Resets, Samples, count_samples, split
from megaprec.data.text import Source, has_digest, left_out_words
from megaprec.data.tokenizer import Tokenizer, load_tokenizer, loaded_once
from megaprec.data.training import train_sentencepiece
from megaprec.durable import read_whole
from megaprec.errors import UserError
from megaprec.resources import cores
from models.config import ModelConfig
from tools.config.checks import check_all
from tools.config.relative_paths import beside_run_file
from tools.config.run_file import RunConfig
from tools.console.progress_bar import build_progress
from tools.console.toml import toml
from tools.convert.initial import initial_model
from tools.convert.train_state import open_newest_checkpoint, read_tokenizer
from tools.training.begin_notes import begin_notes
from tools.training.data_identity import DataSet, Identity, read_identity
from tools.training.tokenizer_notes import different_tokenizer_notes, tokenizer_notes
from tools.training.validation_sets import (
    build_validation,
    check_validation,
    open_text,
    open_validation,
    say_busy,
)


@dataclass(frozen=True)
class Corpus:
    """The opened data of a run.

    model: the run's, with its vocabulary size. held_out, tokenizer: None if the run has none.
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
        """Return the number of ids that data may have: the tokenizer's, or else the model's."""
        return self.tokenizer.vocab_size if self.tokenizer else self.model.vocab

    @property
    def evaluated(self) -> dict[str, Samples | Blend]:
        """Return the samples of each evaluation, by the field of metrics.jsonl with its loss."""
        evaluated: dict[str, Samples | Blend] = {}
        if self.held_out is not None:
            evaluated["eval_loss"] = self.held_out
        for name, samples in self.validation.items():
            evaluated[f"eval_loss/{name}"] = samples
        return evaluated


@dataclass(frozen=True)
class _Part:
    """One text or data set of a run.

    key: the run-file key that names it. name: the value of that key. prefix: of its data set, which
    may have to be built.
    """

    key: str
    name: str
    weight: float
    prefix: Path

    @property
    def tokenized(self) -> bool:
        """Return True if the part is a tokenized data set, False if it is text."""
        return self.prefix == Path(self.name)

    @property
    def index_file(self) -> Path:
        return with_suffix(self.prefix, ".idx")


def check_sources(config: RunConfig) -> None:
    """Raise UserError for parts of [data] that do not exist, cannot be read or do not fit together.

    Builds nothing.
    """
    check_all(
        config,
        _check_parts,
        _check_tokenizer,
        lambda config: check_validation(config, data_folder(config)),
    )


def open_corpus(config: RunConfig, allowed: Collection[str] = ()) -> Corpus:
    """Build missing data sets, open all, and check the files that this machine has not yet checked.

    One process at a time does so. allowed: differences from the checkpoint's data that are
    accepted, of `data_identity.ALLOW`.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for one
    sample, and a token id outside of the vocabulary.
    """
    parts = _parts(config)
    tokenizer_file = _existing_tokenizer(config)
    texts = [part for part in parts if not part.tokenized]
    if texts:
        tokenizer_file = _build(config, texts, tokenizer_file, allowed)
    corpus = open_built(config, [part.prefix for part in parts], tokenizer_file)
    corpus = looked_at(config, corpus)

    # The validation sets need the tokenizer, and so come after the training data.
    cache = data_folder(config)
    validation_notes = build_validation(config, corpus.tokenizer, corpus.ids, cache)
    notes = [*corpus.notes, *_notes_of_begin(config, corpus), *validation_notes]
    return replace(
        corpus,
        notes=tuple(dict.fromkeys(notes)),  # each once, in this order
        validation=open_validation(config, cache, corpus.begin),
    )


def _notes_of_begin(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    samples = corpus.train.parts if isinstance(corpus.train, Blend) else [corpus.train]
    streams = [part.dataset for part in samples]
    yield from begin_notes(config, streams, corpus.begin, corpus.documents, corpus.tokenizer)


def looked_at(config: RunConfig, corpus: Corpus) -> Corpus:
    """Return the corpus with its identity, after checking its files.

    Raises UserError for damaged data.
    """
    sets = list[DataSet]()
    notes = list[str]()
    records = dict[Path, dict[str, Any] | None]()
    for part, dataset in zip(_parts(config), corpus.datasets, strict=True):
        with _naming(config, part):
            contents = _check_contents(part, dataset)
            record = read_record(dataset.prefix)
            records[part.prefix] = record
            notes += dataset.notes
            notes += tokenizer_notes(dataset.prefix, record, corpus.tokenizer)
        # What a tokenized set has to fit is set by these keys; a text's ids are the tokenizer's.
        keys = ["model.vocab", "data.tokenizer"] if part.tokenized else []
        with _naming(config, part, *keys):
            check_vocabulary(dataset, contents, corpus.ids)
        sets.append(_identify(part, contents, record))
    if corpus.tokenizer is None:
        notes += different_tokenizer_notes(records)

    identity = Identity(
        sets=sets,
        tokenizer=file_digest(corpus.tokenizer.path) if corpus.tokenizer else "",
        held_out=config.data.held_out,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
        begin=corpus.begin,
    )
    return replace(corpus, identity=identity, notes=tuple(dict.fromkeys(notes)))


def _check_contents(part: _Part, dataset: IndexedDataset) -> Contents:
    """Return the digests and sizes of a data set.

    Raises UserError, with the remedy, if it is damaged.
    """
    if part.tokenized:
        return contents_of(dataset)
    return contents_of(dataset, f"remove {part.index_file} and the same command makes it anew")


def _identify(part: _Part, contents: Contents, record: dict[str, Any] | None) -> DataSet:
    """Return the identity of a data set. record: what its build has recorded, if anything."""
    return DataSet(
        source=part.name,
        weight=part.weight,
        text=_text_identity(record) if record else None,
        tokens=contents.tokens,
        documents=contents.documents,
        bin_sha256=contents.bin_sha256,
        idx_sha256=contents.idx_sha256,
        sampled=contents.sampled,
    )


def _text_identity(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the identity of the text of a data set.

    With the digest and length of its content if they are known.
    """
    source = record.get("source")
    if not isinstance(source, dict) or "text_sha256" not in record:
        return source
    return {**source, "sha256": record["text_sha256"], "chars": record["chars"]}


def open_built(config: RunConfig, prefixes: Sequence[Path], model_file: Path | None) -> Corpus:
    """Open existing data sets and an existing tokenizer file.

    Any number of processes may do so at once.
    """
    tokenizer = load_tokenizer(model_file) if model_file else None
    model = config.model.with_vocab(_vocabulary_size(config, tokenizer))
    begin = begin_asked_for(config)
    _require_token(config, begin, tokenizer.vocab_size if tokenizer else model.vocab)
    parts = _parts(config)
    datasets = list[IndexedDataset]()
    streams = list[IndexedDataset]()  # the data sets with the token before each document
    trained = list[Samples]()
    held_out = list[Samples | None]()
    for part, prefix in zip(parts, prefixes, strict=True):
        with _naming(config, part):
            dataset = IndexedDataset(prefix)
            stream = with_begin(dataset, begin)
        train_samples, held_out_samples = _split(config, part, stream)
        datasets.append(dataset)
        streams.append(stream)
        trained.append(train_samples)
        held_out.append(held_out_samples)

    opened = Corpus(
        datasets=tuple(datasets),
        train=trained[0],
        held_out=held_out[0],
        tokenizer=tokenizer,
        model=model,
        begin=begin,
        documents=_tokens_around_documents(streams, begin, tokenizer),
    )
    if not config.data.blend:
        return opened
    weights = [source.weight for source in config.data.blend]
    names = [part.name for part in parts]
    totals = [count_samples(stream, config.train.seq_length) for stream in streams]
    evaluated = [samples for samples in held_out if samples is not None]
    return replace(
        opened,
        train=Blend(trained, weights, names, totals),
        held_out=Blend(evaluated, weights, names, totals) if evaluated else None,
    )


def _split(
    config: RunConfig, part: _Part, stream: IndexedDataset
) -> tuple[Samples, Samples | None]:
    """Return the training and the held-out samples of a part.

    Raises UserError if it is too short.
    """
    data = config.data
    train = config.train
    resets = Resets(data.reset_attention_mask, data.reset_position_ids, data.eod_mask_loss)
    with _naming(config, part, "data.held_out", "train.seq_length"):
        trained, held_out = split(
            stream, train.seq_length, data.held_out, train.seed, data.shuffle, resets
        )
    with _naming(config, part):
        trained.require_counted("training samples")
        if held_out is not None and train.eval_every:
            held_out.require_counted("held-out samples")
    return trained, held_out


def begin_asked_for(config: RunConfig) -> int | None:
    """Return the id of the token before each document that data.begin asks for.

    None if it asks for none.

    Where the user leaves it open, a resume takes what the checkpoint was trained with: it does not
    use the weights of train.init_from. Otherwise the run file has the id of these weights.
    """
    begin = config.data.begin
    left_open = begin == "auto" or _is_of_first_weights(config)
    checkpoint = open_newest_checkpoint(config.checkpoint_folder) if left_open else None
    identity = read_identity(checkpoint) if checkpoint else None
    if identity:
        return identity.begin
    return begin if isinstance(begin, int) else None


def _is_of_first_weights(config: RunConfig) -> bool:
    """Return True if the value of data.begin comes from train.init_from."""
    first_weights = config.train.init_from
    if not first_weights:
        return False
    return config.origin("data.begin") == initial_model(Path(first_weights)).origin


def _require_token(config: RunConfig, begin: int | None, ids: int) -> None:
    """Raise UserError if there is no token `begin` among the ids below `ids`."""
    if begin is not None and begin >= ids:
        raise UserError.of(
            "training.begin_token", begin=begin, origin=config.origin("data.begin"), ids=ids
        )


def _tokens_around_documents(
    streams: Sequence[IndexedDataset], begin: int | None, tokenizer: Tokenizer | None
) -> DocumentTokens:
    """Return the tokens before and after documents of a run, as most of its data sets have them."""
    end = tokenizer.eos if tokenizer else None
    if begin is None and tokenizer:
        begin = tokenizer.bos
    tokens_of_sets = [document_tokens(stream, begin, end) for stream in streams]
    return max(tokens_of_sets, key=tokens_of_sets.count)


def open_run_data(config: RunConfig) -> Corpus:
    """Open the data that a run was trained on, from the files in its folder. Builds nothing.

    Raises UserError if they no longer exist.
    """
    parts = _parts(config)
    tokenizer_file = _existing_tokenizer(config)
    trained_tokenizer = _trained_tokenizer(config)
    has_texts = not all(part.tokenized for part in parts)
    if tokenizer_file is None and has_texts and trained_tokenizer.is_file():
        tokenizer_file = trained_tokenizer
    for part in parts:
        if not part.index_file.is_file():
            raise UserError.of("training.data_gone", index_file=part.index_file)
    return open_built(config, [part.prefix for part in parts], tokenizer_file)


@contextmanager
def _naming(config: RunConfig, part: _Part | None, *keys: str) -> Iterator[None]:
    """Prefix the problems raised inside the context with what they concern."""
    try:
        yield
    except UserError as error:
        settings = [f"{key} = {config.value(key)}" for key in keys]
        if part:
            settings.insert(0, f"{part.key} = {toml(part.name)}")
            table_key, _, _ = part.key.partition("[")
            hint = beside_run_file(config.origin(table_key), part.name)
        else:
            hint = beside_run_file(config.origin("data.tokenizer"), config.data.tokenizer)
        subject = ", ".join(settings)
        raise UserError(
            *(problem.within(f"{subject}: ", hint) for problem in error.problems)
        ) from error


def _parts(config: RunConfig) -> list[_Part]:
    cache = data_folder(config)
    if not config.data.blend:
        return [_part("data.source", config.data.source, 1.0, cache / "text")]
    return [
        _part(f"data.blend[{i}].source", source.source, source.weight, cache / f"text{i}")
        for i, source in enumerate(config.data.blend)
    ]


def _part(key: str, name: str, weight: float, built: Path) -> _Part:
    """Return a part; a text's data set has the prefix `built`."""
    path = Path(name)
    tokenized = with_suffix(path, ".idx").is_file()
    return _Part(key, name, weight, path if tokenized else built)


def _check_parts(config: RunConfig) -> None:
    checks = [partial(_check_part, part=part) for part in _parts(config)]
    check_all(config, *checks)


def _check_part(config: RunConfig, part: _Part) -> None:
    if not part.tokenized:
        _open_part(config, part)
        return
    with _naming(config, part):
        IndexedDataset(part.prefix)


def _check_tokenizer(config: RunConfig) -> None:
    parts = _parts(config)
    if file := _existing_tokenizer(config):
        # The problem is named with the data set that the file lies beside, or with its own key.
        origin = next((part for part in parts if with_suffix(part.prefix, ".model") == file), None)
        keys = [] if origin else ["data.tokenizer"]
        with _naming(config, origin, *keys):
            _vocabulary_size(config, load_tokenizer(file))
            require_own_names([file])  # it is copied into checkpoints
        return

    tokenized = [part for part in parts if part.tokenized]
    if not tokenized:
        return
    _vocabulary_size(config, None)
    key = tokenized[0].key
    if config.log.sample:
        raise UserError.of("training.sample_without_tokenizer", key=key)
    if len(tokenized) < len(parts):
        raise UserError.of("training.blend_without_tokenizer", key=key)


def _existing_tokenizer(config: RunConfig) -> Path | None:
    """Return the tokenizer file: data.tokenizer, or the one beside the data sets.

    `megaprec data build` leaves it there.

    Raises UserError if the data sets of a blend have different tokenizers.
    """
    if config.data.tokenizer:
        return Path(config.data.tokenizer)
    tokenized = [part for part in _parts(config) if part.tokenized]
    files = [with_suffix(part.prefix, ".model") for part in tokenized]
    existing = [file for file in files if file.is_file()]
    if not existing:
        return None
    first, *others = existing
    # Compared by content: the same tokenizer may be copied beside each data set.
    if any(read_whole(file) != read_whole(first) for file in others):
        raise UserError.of("training.blend_tokenizers", map=", ".join(map(str, existing)))
    return first


def _open_part(config: RunConfig, part: _Part) -> Source:
    """Open the text of a part. Raises UserError."""
    with _naming(config, part):
        return open_text(part.name, config.data, config.data.max_chars or None)


def data_folder(config: RunConfig) -> Path:
    """Return the folder of the data sets that are built of texts."""
    if config.data.cache:
        return Path(config.data.cache)
    return Path(config.train.folder) / "data"


def _trained_tokenizer(config: RunConfig) -> Path:
    """Return the path of the tokenizer that is trained on the texts."""
    name = "blend" if config.data.blend else "text"
    return with_suffix(data_folder(config) / name, ".model")


@dataclass(frozen=True)
class _Encoding:
    """The tokenizer of texts.

    file: its path, whether it exists or not. vocab_size: vocabulary size to train if it does not
    exist; None if it is given. saved: its copy in the run's newest checkpoint, if it must stay the
    same.
    """

    file: Path
    vocab_size: int | None
    saved: Path | None = None

    def reusable(self, part: _Part, source: Source, by_content: bool = False) -> BuildResult | None:
        """Return the existing data set of a text if it is the one that would be built.

        Otherwise None.

        by_content: a text with another name or time is read.
        """
        tokenizer = loaded_once(self.file)
        if tokenizer is None:
            return None
        return reusable(part.prefix, source, tokenizer, self.vocab_size, by_content)

    @property
    def exists(self) -> bool:
        """Return True if the file exists and is the required tokenizer."""
        if not self.file.is_file():
            return False
        return self.saved is None or read_whole(self.file) == read_whole(self.saved)


def _build(
    config: RunConfig,
    texts: Sequence[_Part],
    tokenizer_file: Path | None,
    allowed: Collection[str],
) -> Path:
    """Build the data sets of texts, one process at a time; return the tokenizer file.

    A data set in the run's own folder may be replaced as long as the run resumes with the data of
    its checkpoint, or may use other data; one in data.cache may not.

    tokenizer_file: the existing one, None if it is to be trained.
    """
    sources = {part: _open_part(config, part) for part in texts}
    checkpoint = open_newest_checkpoint(config.checkpoint_folder)
    if "tokenizer" in allowed:
        encoding = _encoding(config, tokenizer_file, None)
    else:
        encoding = _encoding(config, tokenizer_file, checkpoint)

    def is_built(part: _Part, by_content: bool = False) -> bool:
        if not encoding.exists:
            return False
        return encoding.reusable(part, sources[part], by_content) is not None

    if all(is_built(part) for part in texts):
        return encoding.file
    with exclusive_lock(data_folder(config) / ".lock", partial(say_busy, data_folder(config))):
        # Asked again: another process may have built them while this one waited.
        missing = [part for part in texts if not is_built(part)]
        same_text = [part for part in missing if is_built(part, by_content=True)]
        for part in same_text:
            print(
                f"{part.key}: {toml(part.name)} has another name or time and is the same text",
                file=sys.stderr,
            )
        if len(same_text) < len(missing):
            _build_alone(config, sources, encoding, checkpoint, allowed)
    return encoding.file


def _encoding(
    config: RunConfig, tokenizer_file: Path | None, checkpoint: Store | None
) -> _Encoding:
    """Return the tokenizer of texts. Raises UserError.

    tokenizer_file: the existing one. checkpoint: to resume from, whose tokenizer must stay.
    """
    if tokenizer_file:
        return _Encoding(tokenizer_file, None)
    saved = read_tokenizer(checkpoint) if checkpoint else None
    if checkpoint is None or saved is None:
        return _Encoding(_trained_tokenizer(config), config.data.vocab_size)

    remedy = (
        f"set data.tokenizer to a copy of {saved}, or give --allow tokenizer to have another one "
        "learned"
    )
    if saved.suffix != ".model":
        raise UserError.of("training.tokenizer_lost", path=checkpoint.path, remedy=remedy)
    size = load_tokenizer(saved).vocab_size
    if size != config.data.vocab_size:
        raise UserError.of(
            "training.vocabulary_differs",
            vocab_size=config.data.vocab_size,
            size=size,
            remedy=remedy,
        )
    return _Encoding(_trained_tokenizer(config), None, saved)


def _build_alone(
    config: RunConfig,
    sources: dict[_Part, Source],
    encoding: _Encoding,
    checkpoint: Store | None,
    allowed: Collection[str],
) -> None:
    """Build the tokenizer and the data sets, while no other process does.

    sources: the opened texts, of which some may be built already.
    """
    data = config.data
    missing = {
        part: source for part, source in sources.items() if not encoding.reusable(part, source)
    }
    problems = [
        *_other_texts(missing, checkpoint, allowed),
        *_cached_of_others(config, missing, encoding),
    ]
    if problems:
        raise UserError(*problems)

    in_run_folder = not data.cache  # where files of the run may be replaced
    if encoding.saved and not encoding.exists:
        write_whole(encoding.file, read_whole(encoding.saved))
        print(f"restored {encoding.file} from {encoding.saved}", file=sys.stderr, flush=True)
    elif encoding.vocab_size is not None:
        documents = chain.from_iterable(sources.values())
        first_part = next(iter(sources))
        with _naming(config, first_part, "data.vocab_size"):
            train_sentencepiece(
                (text for _, text in documents),
                encoding.file.with_suffix(""),
                data.vocab_size,
                in_run_folder,
            )
    # `prepare` leaves a data set as it is if it is the one that would be built.
    for part, source in sources.items():
        with (
            _naming(config, part),
            build_progress(
                source.name, source.total_chars(), left_out_words(source.left_out)
            ) as report,
        ):
            prepare(
                source,
                part.prefix,
                tokenizer=encoding.file,
                workers=data.workers or cores(),
                overwrite=in_run_folder,
                on_progress=report,
            )


def _other_texts(
    texts: dict[_Part, Source], checkpoint: Store | None, allowed: Collection[str]
) -> Iterator[str]:
    """Yield a problem if the texts are not those that the checkpoint was trained on."""
    if checkpoint is None or "data" in allowed:
        return
    identity = read_identity(checkpoint)
    saved_sets = identity.sets if identity else []
    by_content = any(_has_digest(saved) for saved in saved_sets)
    for part, source in texts.items():
        if any(_is_text(saved.text, source) for saved in saved_sets):
            continue
        if not part.index_file.exists() and not by_content:
            continue  # it is built, and its tokens are compared with those of the checkpoint
        names = _describe_names(part.name, [saved.source for saved in saved_sets])
        reason = "its documents are others" if by_content else _reason_without_digest(part)
        yield (
            f"{part.key}: {names}: not the text that {checkpoint.path} was trained on ({reason}): "
            "give --allow data to go on with it anyway, or another "
            f"train.folder{_hint_at_existing_tokens(part)}"
        )


def _has_digest(saved_set: DataSet) -> bool:
    return saved_set.text is not None and "sha256" in saved_set.text


def _describe_names(name: str, saved_names: Sequence[str]) -> str:
    """Return the name of a text, after those of the checkpoint's if it is not one of them."""
    if name in saved_names:
        return toml(name)
    return f"{', '.join(map(toml, saved_names))} -> {toml(name)}"


def _is_text(saved: dict[str, Any] | None, source: Source) -> bool:
    """Return True if a source is the text that a checkpoint was trained on.

    By names, sizes and times, or by content.
    """
    if saved is None:
        return False
    identity = {key: value for key, value in saved.items() if key not in ("sha256", "chars")}
    if identity == source.identity():
        return True
    digest = saved.get("sha256")
    chars = saved.get("chars")
    if not isinstance(digest, str) or not isinstance(chars, int):
        return False
    return has_digest(source, digest, chars)


def _reason_without_digest(part: _Part) -> str:
    """Return why a text is taken for another one where no digest of it is known."""
    return (
        "its files have another name, size or time, or text_field or max_chars is another; if the "
        f"text is the same, remove {part.index_file} and the same command makes its tokens anew "
        "and compares them"
    )


def _hint_at_existing_tokens(part: _Part) -> str:
    if part.index_file.exists():
        return f"; {part.key}={part.prefix} goes on with the tokens that are there"
    return ""


def _cached_of_others(
    config: RunConfig, texts: dict[_Part, Source], encoding: _Encoding
) -> Iterator[str]:
    """Yield problems if data.cache holds data sets of other texts or tokenizers.

    Other runs may use them.
    """
    if not config.data.cache:
        return
    files = [part.index_file for part in texts]
    if encoding.saved and not encoding.exists:
        files.append(encoding.file)
    for file in files:
        if file.exists():
            yield (
                f"{file} was built of another text or tokenizer than [data] names, and other runs "
                "may use it: set another data.cache"
            )


def _vocabulary_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Return the vocabulary size of the model: model.vocab, or the tokenizer's.

    Raises UserError.
    """
    size = config.model.vocab
    if tokenizer is None:
        if size == 0:
            raise UserError.of("training.vocabulary_unknown")
        return size
    if 0 < size < tokenizer.vocab_size:
        raise UserError(_too_small_vocabulary(config, tokenizer))
    return size or tokenizer.vocab_size


def _too_small_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> str:
    size = config.model.vocab
    initial = config.train.init_from
    if initial:
        return (
            f"data.tokenizer: {tokenizer.path} has {tokenizer.vocab_size} tokens, but the weights "
            f"of train.init_from = {toml(initial)} have {size}: remove data.tokenizer if the "
            f"folder has its own, give one of at most {size} tokens, or train without "
            "train.init_from"
        )
    return (
        f"model.vocab = {size} is smaller than the {tokenizer.vocab_size} tokens of "
        f"{tokenizer.path}: use 0 or at least {tokenizer.vocab_size}"
    )
