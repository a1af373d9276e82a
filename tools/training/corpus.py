"""The data of a run: its data sets, split into training and held-out samples, and its tokenizer.

A run has one text or data set (data.source) or a blend of several (data.blend). All share one
tokenizer: the given one, the one that lies beside the data sets, or one that is trained on all
texts of the run. The named sets of data.validation are evaluated beside the held-out part of the
training data. They have its tokenizer, its samples of train.seq_length and its rules at document
ends; no sample of them is trained on.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megaprec.checkpoint.digests import file_digest
from megaprec.errors import UserError
from megaprec.text.tokenizer import Tokenizer, load_tokenizer
from megaprec.tokens.blend import Blend, WeightedStretch
from megaprec.tokens.blend_phases import Points
from megaprec.tokens.copies import is_there
from megaprec.tokens.document_tokens import DocumentTokens, document_tokens, with_begin
from megaprec.tokens.held_out import HeldOutRule, all_evaluated
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.intact import DataSetContents, check_vocabulary, contents_of, read_record
from megaprec.tokens.places import path_of
from megaprec.tokens.samples import Resets, Samples, count_samples, split
from models.config import ModelConfig
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import Data
from tools.journal.records import HELD_OUT_LOSS, VALIDATION_PREFIX
from tools.parts import optional_parts
from tools.training.blend_place import stretches_of
from tools.training.branch import open_start
from tools.training.data_identity import (
    BlendStretch,
    DataSet,
    Identity,
    WeightFrom,
    read_identity,
)
from tools.training.data_sources import (
    DataSource,
    existing_tokenizer,
    naming_settings,
    trained_tokenizer,
    training_sources,
    validation_sources,
    vocabulary_size,
)


@dataclass(frozen=True)
class Corpus:
    """The opened data of a run.

    model: the run's, with its vocabulary size. held_out, tokenizer: None if the run has none.
    begin_token: id of the token that stands before each document of the samples, None if none was
    asked for. documents: the tokens that the model sees before and after documents. identity:
    identifies the data in checkpoints; None if it was not checked. notes: lines for the user.
    validation: further sets to evaluate, by name.
    """

    datasets: tuple[IndexedDataset, ...]
    train: Samples | Blend
    held_out: Samples | Blend | None
    tokenizer: Tokenizer | None
    model: ModelConfig
    begin_token: int | None = None
    documents: DocumentTokens = DocumentTokens(None, None)
    identity: Identity | None = None
    notes: tuple[str, ...] = ()
    validation: Mapping[str, Samples] = field(default_factory=dict)

    @property
    def ids(self) -> int:
        """Return the number of ids that data may have: the tokenizer's, or else the model's."""
        return self.tokenizer.vocab_size if self.tokenizer else self.model.vocab

    @property
    def training_parts(self) -> Sequence[Samples]:
        """Return the training samples of each data set."""
        return self.train.parts if isinstance(self.train, Blend) else [self.train]

    @property
    def evaluated(self) -> dict[str, Samples | Blend]:
        """Return the samples of each evaluation, by the field of metrics.jsonl with its loss."""
        evaluated: dict[str, Samples | Blend] = {}
        if self.held_out is not None:
            evaluated[HELD_OUT_LOSS] = self.held_out
        for name, samples in self.validation.items():
            evaluated[f"{VALIDATION_PREFIX}{name}"] = samples
        return evaluated


def open_corpus(config: RunConfig, allowed: Collection[str] = ()) -> Corpus:
    """Build missing data sets, open all, and check the files that this machine has not yet checked.

    One process at a time does so. allowed: differences from the checkpoint's data that are
    accepted, of `data_identity.ALLOW`.

    Raises UserError for a missing or empty text, a damaged data set, a text too short for one
    sample, and a token id outside of the vocabulary.
    """
    sources = training_sources(config)
    tokenizer_file = existing_tokenizer(config)
    texts = [source for source in sources if not source.is_tokenized]
    if texts:
        tokenizer_file = optional_parts.build_texts(config, texts, tokenizer_file, allowed)
    corpus = open_built(config, [source.prefix for source in sources], tokenizer_file)
    corpus = identified(config, corpus)

    notes = list(corpus.notes)
    # The data sets as they are trained on, which may put a token before each document.
    streams = [samples.dataset for samples in corpus.training_parts]
    notes += optional_parts.begin_notes(
        config, streams, corpus.begin_token, corpus.documents, corpus.tokenizer
    )
    notes += optional_parts.loss_mask_notes(config.data, corpus.training_parts)
    if config.data.pack != "none":
        notes += optional_parts.packing_notes(config, corpus.training_parts)
    # The validation sets need the tokenizer, and so come after the training data.
    notes += _build_validation(config, corpus)
    return replace(
        corpus,
        notes=tuple(dict.fromkeys(notes)),  # each once, in this order
        validation=open_validation(config, corpus.begin_token),
    )


def identified(config: RunConfig, corpus: Corpus) -> Corpus:
    """Return the corpus with its identity and notes, after checking its files. Raises UserError for
    damaged data.
    """
    sets = list[DataSet]()
    notes = list[str]()
    records = dict[Path, dict[str, Any] | None]()
    phases = blend_phases(config.data)
    opened = zip(training_sources(config), corpus.datasets, phases.points, strict=True)
    for source, dataset, points in opened:
        with naming_settings(config, source):
            contents = _check_contents(source, dataset)
            record = read_record(dataset.prefix)
            records[source.prefix] = record
            notes += dataset.notes
            notes += optional_parts.tokenizer_notes(dataset.prefix, record, corpus.tokenizer)
        # What a tokenized set has to fit is set by these keys; a text's ids are the tokenizer's.
        keys = ["model.vocab", "data.tokenizer"] if source.is_tokenized else []
        with naming_settings(config, source, *keys):
            check_vocabulary(dataset, contents, corpus.ids)
        sets.append(_identify(source, points, contents, record))
    if corpus.tokenizer is None:
        notes += optional_parts.different_tokenizer_notes(records)

    identity = Identity(
        sets=sets,
        tokenizer=file_digest(corpus.tokenizer.path) if corpus.tokenizer else "",
        held_out=config.data.held_out,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
        begin=corpus.begin_token,
        held_out_from=held_out_rule(config),
        stretches=_identify_stretches(corpus.train),
        windows=config.data.windows,
        pack=config.data.pack,
        linear=phases.linear,
    )
    return replace(corpus, identity=identity, notes=tuple(dict.fromkeys(notes)))


def _identify_stretches(samples: Samples | Blend) -> list[BlendStretch]:
    """Return the stretches of a blend whose weights change or have changed, as checkpoints store
    them; none of other data."""
    if not isinstance(samples, Blend):
        return []
    stretches = samples.stretches
    # one stretch from the first sample on: the weights of the run file say it
    if len(stretches) == 1 and not stretches[0].begin:
        return []
    return [
        BlendStretch(begin=begin, weights=list(weights), taken=list(taken))
        for begin, weights, taken in stretches
    ]


def _check_contents(source: DataSource, dataset: IndexedDataset) -> DataSetContents:
    """Return the digests and sizes of a data set. Raises UserError, with the remedy, if it is
    damaged.
    """
    if source.is_tokenized:
        return contents_of(dataset)
    return contents_of(dataset, f"remove {source.index_file} and the same command makes it anew")


def _identify(
    source: DataSource,
    points: Points,
    contents: DataSetContents,
    record: dict[str, Any] | None,
) -> DataSet:
    """Return the identity of a data set.

    points: (sample from which it holds, weight) of each of its weights. record: of its build, if
    there is one.
    """
    _, first_weight = points[0]
    return DataSet(
        source=source.name,
        weight=first_weight,
        later_weights=[WeightFrom(samples=begin, weight=weight) for begin, weight in points[1:]],
        text=_text_identity(record) if record else None,
        tokens=contents.tokens,
        documents=contents.documents,
        bin_sha256=contents.bin_sha256,
        idx_sha256=contents.idx_sha256,
        sampled=contents.sampled,
        loss_mask_sha256=contents.loss_mask_sha256,
    )


def _text_identity(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the identity of the text of a data set, with the digest and length of its content if
    they are known.
    """
    text = record.get("source")
    if not isinstance(text, dict) or "text_sha256" not in record:
        return text
    return {**text, "sha256": record["text_sha256"], "chars": record["chars"]}


def open_built(
    config: RunConfig,
    prefixes: Sequence[Path],
    tokenizer_file: Path | None,
    stretches: Sequence[WeightedStretch] = (),
) -> Corpus:
    """Open existing data sets and an existing tokenizer file, and return the corpus, without
    identity, notes and validation sets. Any number of processes may do so at once.

    stretches: ranges of the run's samples with the weights of the data sets there; if empty, those
    of `stretches_of`.
    """
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file else None
    model = config.model.with_vocab(vocabulary_size(config, tokenizer))
    begin_token = requested_begin_token(config)
    ids = tokenizer.vocab_size if tokenizer else model.vocab
    _require_token(config, begin_token, ids)
    sources = training_sources(config)
    datasets = list[IndexedDataset]()
    streams = list[IndexedDataset]()  # the data sets with the token before each document
    rule = held_out_rule(config)
    for source, prefix in zip(sources, prefixes, strict=True):
        with naming_settings(config, source):
            dataset = IndexedDataset(prefix)
            _require_loss_mask(config.data, dataset)
            streams.append(with_begin(dataset, begin_token))
        datasets.append(dataset)
    # Decided for a blend as a whole, so that all its batches have a mask, or none has.
    resets = _resets(config.data, datasets)
    trained = list[Samples]()
    held_out = list[Samples | None]()
    for source, stream in zip(sources, streams, strict=True):
        train_samples, held_out_samples = _split(config, source, stream, rule, resets)
        trained.append(train_samples)
        held_out.append(held_out_samples)

    # as if there were one data set; of a blend all are mixed below
    opened = Corpus(
        datasets=tuple(datasets),
        train=trained[0],
        held_out=held_out[0],
        tokenizer=tokenizer,
        model=model,
        begin_token=begin_token,
        documents=_tokens_around_documents(streams, begin_token, tokenizer),
    )
    stretches = stretches or stretches_of(config, datasets)
    # A single data set goes on in its own order, unless the checkpoint's run had a blend: then it
    # begins after the samples that the blend has taken of it.
    if not config.data.blend and len(stretches) == 1 and not stretches[0].begin:
        return opened
    return replace(
        opened,
        train=Blend(trained, stretches, [source.name for source in sources]),
        held_out=_held_out_blend(config, held_out),
    )


def _held_out_blend(config: RunConfig, held_out: Sequence[Samples | None]) -> Blend | None:
    """Return the held-out samples of all data sets, mixed by the first weights of the run, wherever
    the run is; None if nothing is held out."""
    evaluated = [samples for samples in held_out if samples is not None]
    if not evaluated:
        return None
    stretch = WeightedStretch.first(blend_phases(config.data).first_weights)
    names = [source.name for source in training_sources(config)]
    return Blend(evaluated, [stretch], names)


def _split(
    config: RunConfig,
    source: DataSource,
    stream: IndexedDataset,
    rule: HeldOutRule,
    resets: Resets,
) -> tuple[Samples, Samples | None]:
    """Return the training and the held-out samples of a data set. Raises UserError if it is too
    short.
    """
    data = config.data
    train = config.train
    with naming_settings(config, source, "data.held_out", "train.seq_length"):
        # random windows are of a stream, and not packed
        divide = partial(split, windows=data.windows)
        if data.pack != "none":
            divide = optional_parts.split_packed
        trained, held_out = divide(
            dataset=stream,
            seq_length=train.seq_length,
            held_out=data.held_out,
            seed=train.seed,
            shuffle=data.shuffle,
            resets=resets,
            rule=rule,
        )
    with naming_settings(config, source):
        trained.require_counted("training samples")
        if held_out is not None and train.evaluates:
            held_out.require_counted("held-out samples")
    return trained, held_out


def requested_begin_token(config: RunConfig) -> int | None:
    """Return the id of the token before each document that data.begin asks for, None for none.

    A run that goes on from a checkpoint takes the token that the checkpoint was trained with, if
    the user has left data.begin open ("auto") or its value comes from train.init_from, whose
    weights such a run does not load.
    """
    begin_token = config.data.begin
    if begin_token == "auto" or _is_of_first_weights(config):
        checkpoint = open_start(config)
        identity = read_identity(checkpoint) if checkpoint else None
        if identity:
            return identity.begin
    return begin_token if isinstance(begin_token, int) else None


def held_out_rule(config: RunConfig) -> HeldOutRule:
    """Return the rule of the run's held-out part: where the user leaves it open, that of the
    checkpoint that the run goes on from.
    """
    rule = config.data.held_out_from
    if rule != "auto":
        return rule
    checkpoint = open_start(config)
    if checkpoint is None:
        return "everywhere"
    identity = read_identity(checkpoint)
    # Versions that recorded no data had one rule.
    return identity.held_out_from if identity else "end"


def _is_of_first_weights(config: RunConfig) -> bool:
    """Return True if the value of data.begin comes from train.init_from."""
    first_weights = config.train.init_from
    if not first_weights:
        return False
    return (
        config.origin("data.begin")
        == optional_parts.initial_model(path_of(first_weights), config.model).origin
    )


def _require_token(config: RunConfig, begin_token: int | None, ids: int) -> None:
    """Raise UserError if there is no token `begin_token` among the ids below `ids`."""
    if begin_token is not None and begin_token >= ids:
        raise UserError.of(
            "training.begin_token", begin=begin_token, origin=config.origin("data.begin"), ids=ids
        )


def _tokens_around_documents(
    streams: Sequence[IndexedDataset], begin_token: int | None, tokenizer: Tokenizer | None
) -> DocumentTokens:
    """Return the tokens before and after documents of a run, as most of its data sets have them."""
    end = tokenizer.eos if tokenizer else None
    if begin_token is None and tokenizer:
        begin_token = tokenizer.bos
    candidates = [document_tokens(stream, begin_token, end) for stream in streams]
    # Of equally frequent ones the first.
    return max(candidates, key=candidates.count)


def open_run_data(config: RunConfig) -> Corpus:
    """Return the data that a run was trained on, opened from the files in its folder. Builds
    nothing. Raises UserError if they no longer exist.
    """
    sources = training_sources(config)
    tokenizer_file = existing_tokenizer(config)
    has_texts = not all(source.is_tokenized for source in sources)
    if tokenizer_file is None and has_texts and trained_tokenizer(config).is_file():
        tokenizer_file = trained_tokenizer(config)
    for source in sources:
        if not is_there(source.prefix, ".idx"):
            raise UserError.of("training.data_gone", index_file=source.index_file)
    return open_built(config, [source.prefix for source in sources], tokenizer_file)


def _build_validation(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Build the missing data sets of data.validation, and check all. Yields notes for the user.
    Raises UserError.
    """
    if config.data.validation and not config.train.evaluates:
        yield "data.validation is not evaluated, because train.eval_every is 0"
        return
    for source in validation_sources(config):
        prefix = source.prefix
        with naming_settings(config, source):
            if not source.is_tokenized:
                optional_parts.build_validation_set(config, source, corpus.tokenizer)
            dataset = IndexedDataset(prefix)
            contents = contents_of(dataset)
            check_vocabulary(dataset, contents, corpus.ids)
            record = read_record(prefix)
            yield from dataset.notes
            yield from optional_parts.tokenizer_notes(prefix, record, corpus.tokenizer)


def open_validation(config: RunConfig, begin_token: int | None) -> Mapping[str, Samples]:
    """Open the existing data sets of data.validation, by name; none if the run never evaluates.
    Raises UserError for too short ones.

    begin_token: id of the token before each document, as in the training data; None: no token is
        put there.
    """
    train = config.train
    opened = dict[str, Samples]()
    if not train.evaluates:
        return opened
    rule = held_out_rule(config)
    for source in validation_sources(config):
        with naming_settings(config, source):
            stored = IndexedDataset(source.prefix)
            _require_loss_mask(config.data, stored)
            dataset = with_begin(stored, begin_token)
            resets = _resets(config.data, [stored])
            samples = _all_samples(config, dataset, rule, resets)
            samples.require_counted("evaluated samples")
            opened[source.validation_name] = samples
    return opened


def _all_samples(
    config: RunConfig, dataset: IndexedDataset, rule: HeldOutRule, resets: Resets
) -> Samples:
    """Return all samples of a data set that is evaluated. Raises UserError if there is none."""
    train = config.train
    if config.data.pack != "none":
        return optional_parts.evaluated_packed(dataset, train.seq_length, train.seed, resets, rule)
    chosen = all_evaluated(count_samples(dataset, train.seq_length), rule)
    return Samples(dataset, train.seq_length, train.seed, False, chosen, resets)


def _resets(data: Data, datasets: Sequence[IndexedDataset]) -> Resets:
    """Return how samples of these data sets, which are mixed with each other, treat the ends of
    documents and the loss mask."""
    has_mask = any(dataset.has_mask for dataset in datasets)
    return Resets(
        attention_mask=data.reset_attention_mask,
        position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
        loss_mask=has_mask and data.loss_on != "all",
    )


def _require_loss_mask(data: Data, dataset: IndexedDataset) -> None:
    """Raise UserError for a data set without a loss mask if data.loss_on asks for one."""
    if data.loss_on == "answers" and not dataset.has_mask:
        raise UserError.of("training.no_loss_mask", prefix=dataset.prefix)
