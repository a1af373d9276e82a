"""Warnings about a run that can be trained but is surely not meant so: one line each, before the
first step.

A text that is repeated without end, a warm-up that never ends, more processes than cores, and
documents to evaluate that are training documents too, whose loss then says nothing about new text;
a key that has no effect on these data. Keys that have none beside other keys are in
`tools.config.effectless`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaprec.data.blend import Blend
from megaprec.data.files import beside
from megaprec.data.indexed import IndexedDataset
from megaprec.data.samples import Samples
from megaprec.resources import cores
from models.router import PLAIN
from tools.config.data_settings import Data
from tools.config.run_file import RunConfig
from tools.console.toml import toml
from tools.console.units import counted
from tools.journal.records import NAMED
from tools.training.corpus import Corpus

# repetitions after which text teaches nothing new: "Scaling data-constrained language models", 2023
MANY_EPOCHS = 40
SHORTEST = 16  # tokens of a document; shorter ones are equal by chance
COMPARED = 300  # documents of an evaluated set that are looked for in the training data
TOKENS = "it is tokens, not text"
MOST_READ = 30_000  # training documents that are read for this; they are those of equal length


def doubts(config: RunConfig, corpus: Corpus, local_ranks: int, device: str) -> Iterator[str]:
    """Yield the warnings. local_ranks: the ranks of this machine. device: cpu or cuda."""
    yield from _repetitions(config, corpus)
    yield from _warmup(config)
    yield from _more_than_there(config, corpus)
    yield from _groups(config)
    yield from _without_text(config, corpus)
    if device == "cuda":
        yield from _overruled(config)
    if device == "cpu" and local_ranks > cores():
        share = f"{local_ranks} ranks share {counted(cores(), 'CPU core')} and wait for each other"
        yield f"{share}: this shows that the layout works, but one process is faster here"
    if config.train.eval_every:
        yield from _seen_in_training(config, corpus)


def _repetitions(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    train = config.train
    taken = config.train.steps * config.train.global_batch
    parts = corpus.train.parts if isinstance(corpus.train, Blend) else [corpus.train]
    shares = corpus.train.taken(taken) if isinstance(corpus.train, Blend) else [taken]
    names = config.data.sources
    for name, part, share in zip(names, parts, shares, strict=True):
        if (epochs := share / len(part)) > MANY_EPOCHS:
            yield (
                f"{name} has {_samples(len(part))} of train.seq_length {train.seq_length}, so "
                f"train.steps = {train.steps} repeat it {epochs:,.0f} times: give more text, or "
                "fewer or smaller steps"
            )


def _samples(count: int) -> str:
    return counted(count, "sample")


def _warmup(config: RunConfig) -> Iterator[str]:
    lr = config.lr
    train = config.train
    total = train.steps * (train.global_batch if lr.unit == "samples" else 1)
    if lr.warmup >= total:
        yield (
            f"lr.warmup = {lr.warmup} {lr.unit} is the whole run, so the learning rate never "
            f"reaches lr.peak = {lr.peak:g}: make the warm-up shorter or the run longer"
        )


def _more_than_there(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each number that asks for more than the run has."""
    train = config.train
    fp8 = config.fp8
    asked = train.eval_batches * train.global_batch
    sets = {name.removeprefix(NAMED): samples for name, samples in corpus.evaluated.items()}
    for name, samples in (
        sets.items() if train.eval_every and config.given("train.eval_batches") else ()
    ):
        if len(samples) < asked:
            of = "the held-out text" if name == "eval_loss" else name
            yield (
                f"train.eval_batches = {train.eval_batches} of train.global_batch = "
                f"{train.global_batch} asks for {asked:,} samples, but {of} has {len(samples):,}: "
                "all of them are evaluated"
            )
    if fp8.kind != "none" and fp8.calibrate >= train.steps:
        yield (
            f"fp8.calibrate = {fp8.calibrate} steps are the whole run, so no product is in FP8: "
            "calibrate for fewer steps or make the run longer"
        )


def _overruled(config: RunConfig) -> Iterator[str]:
    """Yield a line if the environment decides on TF32 inside NVIDIA's libraries otherwise than the
    run does."""
    said = os.environ.get("NVIDIA_TF32_OVERRIDE", "")
    wanted = config.plan.tf32
    if said in ("0", "1") and wanted != (said == "1"):
        does = "forces" if said == "1" else "forbids"
        yield (
            f"NVIDIA_TF32_OVERRIDE={said} {does} TF32, against precision.tf32 = {toml(wanted)}: "
            "unset the variable"
        )


def _groups(config: RunConfig) -> Iterator[str]:
    router = config.model.router
    if not router.limits and router.group_best != PLAIN.group_best:
        yield (
            f"model.router.group_best = {router.group_best} has no effect: it compares groups, of "
            f"which groups_per_token = {router.groups_per_token} takes all"
        )


def _without_text(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each key of texts that has no effect on data sets that are tokens
    already."""
    data = config.data
    usual = Data()
    trained = data.sources
    evaluated = [one.source for one in data.validation]
    made = [name for name in trained if beside(Path(name), ".idx").is_file()]
    if data.max_chars and made:
        yield (
            f"data.max_chars = {data.max_chars} has no effect on {', '.join(made)}: {TOKENS}, of "
            "which all is used"
        )
    texts = [name for name in (*trained, *evaluated) if not beside(Path(name), ".idx").is_file()]
    if data.text_field != usual.text_field and not texts:
        yield (
            f"data.text_field = {toml(data.text_field)} has no effect on {', '.join(made)}: "
            f"{TOKENS}"
        )
    if data.vocab_size not in (usual.vocab_size, corpus.ids, config.model.vocab):
        yield (
            f"data.vocab_size = {data.vocab_size} has no effect: no tokenizer is trained; ids are "
            f"below {corpus.ids}"
        )


def _seen_in_training(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each evaluated set with documents that are training documents too."""
    parts: Sequence[Samples]
    if isinstance(corpus.train, Blend):
        parts = corpus.train.parts
    else:
        parts = [corpus.train]
    borders = [len(part) * config.train.seq_length for part in parts]
    held: set[bytes] = set()
    for part, border in zip(parts, borders, strict=True):
        held |= _contents(part.dataset, border)
    sets = {name: _contents(samples.dataset, 0) for name, samples in corpus.validation.items()}
    every = held.union(*sets.values())
    lengths = np.array(sorted({len(content) // 8 for content in every}), np.int64)  # bytes of int64
    trained: set[bytes] = set()
    for part, border in zip(parts, borders, strict=True):
        trained |= every.intersection(
            document.tobytes() for document in _of_length(part.dataset, border, lengths)
        )
    if seen := held & trained:
        yield (
            f"data.held_out: {len(seen):,} of {len(held):,} held-out documents are in the "
            "training data too, so the held-out loss is no measure for new text: remove repeated "
            "documents"
        )
    for name, documents in sets.items():
        if seen := documents & trained:
            yield (
                f"data.validation: {len(seen):,} of {len(documents):,} documents of {name} are in "
                "the training data too, so its loss is no measure for new text: remove them from "
                "one of the two"
            )


def _contents(dataset: IndexedDataset, border: int) -> set[bytes]:
    return {
        document.tobytes() for document in _evenly(dataset, _held_out(dataset, border), COMPARED)
    }


def _held_out(dataset: IndexedDataset, border: int) -> NDArray[np.int64]:
    """Return the numbers of the documents that begin at the token `border` or later, short ones
    left out."""
    lengths = dataset.document_lengths()
    return np.flatnonzero((np.cumsum(lengths) - lengths >= border) & (lengths >= SHORTEST))


def _of_length(
    dataset: IndexedDataset, border: int, wanted: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of the wanted lengths of which at least half is before the token
    `border`."""
    lengths = dataset.document_lengths()
    numbers = np.flatnonzero(
        (np.cumsum(lengths) - lengths // 2 <= border) & np.isin(lengths, wanted)
    )
    yield from _evenly(dataset, numbers, MOST_READ)


def _evenly(
    dataset: IndexedDataset, numbers: NDArray[np.int64], most: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of at most `most` of the documents, spread over all of them."""
    places = np.linspace(0, len(numbers) - 1, min(most, len(numbers))).astype(np.int64)
    yield from (dataset.document(int(number)).astype(np.int64) for number in numbers[places])
