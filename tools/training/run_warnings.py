"""Warnings about a run that can be trained but is surely not meant so: one line each, before the
first step.

A text that is repeated without end, a warm-up that never ends, more processes than cores, and
documents to evaluate that are training documents too, whose loss then says nothing about new text;
a key that has no effect on these data. Keys that have none beside other keys are in
`tools.config.rules.effectless`.
"""

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megaprec.resources import cores
from megaprec.tokens.blend import Blend
from megaprec.tokens.copies import is_there
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.places import path_of
from megaprec.tokens.samples import Samples
from models.router_settings import PLAIN
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig
from tools.config.tables.batch_schedule import BatchSchedule
from tools.config.tables.data_settings import Data, names_of
from tools.config.tables.table import MAX_SIZE
from tools.console.toml import toml
from tools.console.units import counted
from tools.journal.records import VALIDATION_PREFIX
from tools.training.batches import describe_requested, evaluated_samples
from tools.training.blend_plan import GOOD_EPOCHS, set_plans
from tools.training.corpus import Corpus

# repetitions after which text teaches nothing new: "Scaling data-constrained language models", 2023
MANY_EPOCHS = 40
# layers that are kept wide: "Pretraining Large Language Models with NVFP4", NVIDIA, 2025
NVFP4_WIDE_SHARE = 0.15
SHORTEST_DOCUMENT = 16  # tokens; shorter documents are equal by chance
COMPARED = 300  # documents of an evaluated set that are looked for in the training data
MOST_READ = 30_000  # training documents that are read for this; they are those of equal length
ALREADY_TOKENS = "it is tokens, not text"
TOKEN_BYTES = 8  # of an int64, in which documents are compared


def run_warnings(config: RunConfig, corpus: Corpus, local_ranks: int, device: str) -> Iterator[str]:
    """Yield the warnings. local_ranks: the ranks of this machine. device: cpu or cuda."""
    yield from _many_epochs(config, corpus)
    yield from _repeated_in_a_batch(config, corpus)
    yield from _phases_after_the_end(config)
    yield from _endless_warmup(config)
    yield from _more_than_available(config, corpus)
    yield from _all_layers_in_nvfp4(config)
    yield from _groups_without_effect(config)
    yield from _text_keys_without_effect(config, corpus)
    if device == "cuda":
        yield from _tf32_overruled(config)
    if device == "cpu" and config.parallel.async_tensor:
        yield (
            "parallel.async_tensor = true on a CPU: torch's unfused forms stand for fused "
            "products, which shows their numbers and gains no time"
        )
    if device == "cpu" and config.log.memory_history:
        yield "log.memory_history = true has no effect on a CPU: torch has no history of its memory"
    if device == "cpu" and local_ranks > cores():
        yield (
            f"{local_ranks} ranks share {counted(cores(), 'CPU core')} and wait for each other: "
            "this shows that the layout works, but one process is faster here"
        )
    if config.train.evaluates:
        yield from _evaluated_in_training(config, corpus)


def _many_epochs(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each data set that the run repeats too often; a smaller number is too often
    in a blend, where other sets could take more."""
    train = config.train
    is_blend = isinstance(corpus.train, Blend)
    for plan in set_plans(config, corpus):
        epochs = plan.epochs
        if is_blend and GOOD_EPOCHS < epochs <= MANY_EPOCHS:
            yield (
                f"{plan.source} is repeated {epochs:,.1f} times in train.steps = {train.steps}: up "
                f"to about {GOOD_EPOCHS} times repeated text is as good as new; give more of it, "
                "or a smaller weight in data.blend"
            )
        if epochs > MANY_EPOCHS:
            yield (
                f"{plan.source} has {counted(plan.available, 'sample')} of train.seq_length "
                f"{train.seq_length}, so train.steps = {train.steps} repeat it {epochs:,.0f} "
                "times: give more text, or fewer or smaller steps"
            )


def _endless_warmup(config: RunConfig) -> Iterator[str]:
    """Yield a line if the warm-up of the learning rate is as long as the run, or longer."""
    lr = config.lr
    total_count = config.total_samples if lr.unit == "samples" else config.train.steps
    if lr.warmup >= total_count:
        yield (
            f"lr.warmup = {lr.warmup} {lr.unit} is the whole run, so the learning rate never "
            f"reaches lr.peak = {lr.peak:g}: make the warm-up shorter or the run longer"
        )


def _more_than_available(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each number that asks for more than the run has."""
    train = config.train
    fp8 = config.fp8
    is_given = config.given("train.eval_batches") or config.given("train.eval_samples")
    if train.evaluates and is_given:
        yield from _large_evaluations(config, corpus)
    if fp8.kind != "none" and fp8.calibrate >= train.steps:
        yield (
            f"fp8.calibrate = {fp8.calibrate} steps are the whole run, so no product is in FP8: "
            "calibrate for fewer steps or make the run longer"
        )


def _all_layers_in_nvfp4(config: RunConfig) -> Iterator[str]:
    """Yield a line if NVFP4 is asked for without the wide layers of its published recipe."""
    fp8 = config.fp8
    if fp8.four_bits and not (fp8.first_layers or fp8.last_layers or fp8.wide):
        layers = math.ceil(NVFP4_WIDE_SHARE * config.model.layers)
        yield (
            "fp8.kind = nvfp4 in all layers: its recipe keeps about "
            f"{NVFP4_WIDE_SHARE:.0%} of them in {config.precision.compute}, mostly the last: "
            f"fp8.last_layers = {layers}"
        )


def _large_evaluations(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each evaluated set with fewer samples than the run file asks for."""
    train = config.train
    for field, samples in corpus.evaluated.items():
        if len(samples) < evaluated_samples(train, MAX_SIZE):
            set_name = field.removeprefix(VALIDATION_PREFIX)
            if field == "eval_loss":
                set_name = "the held-out text"
            yield (
                f"{describe_requested(train)} asks for {evaluated_samples(train, MAX_SIZE):,} "
                f"samples, but {set_name} has {len(samples):,}: all of them are evaluated"
            )


def _tf32_overruled(config: RunConfig) -> Iterator[str]:
    """Yield a line if the environment, which NVIDIA's libraries follow, decides on TF32 otherwise
    than the run does.
    """
    override = os.environ.get("NVIDIA_TF32_OVERRIDE", "")
    allowed = config.plan.tf32
    if override in ("0", "1") and allowed != (override == "1"):
        effect = "forces" if override == "1" else "forbids"
        yield (
            f"NVIDIA_TF32_OVERRIDE={override} {effect} TF32, against precision.tf32 = "
            f"{toml(allowed)}: unset the variable"
        )


def _repeated_in_a_batch(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each data set of which a batch takes more samples than there are."""
    batch = max(batch for _, batch in BatchSchedule.of(config.train).changes)
    shares = [batch * share for share in _largest_shares(config)]
    for name, part, share in zip(config.data.sources, corpus.training_parts, shares, strict=True):
        if share > len(part):
            yield (
                f"{name} has {counted(len(part), 'sample')} of train.seq_length "
                f"{config.train.seq_length}, and a batch takes {share:g}: it has some of them "
                "more than once; give more text, or a smaller train.global_batch"
            )


def _largest_shares(config: RunConfig) -> list[float]:
    """Return the largest share of each data set in any phase; without a blend there is one set."""
    phases = blend_phases(config.data)
    # Shares that change linearly are largest where a phase begins or ends.
    shares_by_phase = [phases.shares_at(begin) for begin in phases.begins]
    return [float(max(shares_of_set)) for shares_of_set in zip(*shares_by_phase, strict=True)]


def _phases_after_the_end(config: RunConfig) -> Iterator[str]:
    """Yield a line if weights of a blend change after the last sample of the run."""
    samples = config.total_samples
    phases = blend_phases(config.data)
    # weights that change linearly may reach their last values with the last sample
    first_late = samples + 1 if phases.linear else samples
    late = [begin for begin in phases.begins if begin >= first_late]
    if late:
        yield (
            f"data.blend changes weights at {late[0]:,} samples, but train.steps = "
            f"{config.train.steps} are {samples:,} samples: the run ends before"
        )


def _groups_without_effect(config: RunConfig) -> Iterator[str]:
    """Yield a line if a key about the choice of groups of experts is set where all are taken."""
    router = config.model.router
    if not router.limits and router.group_best != PLAIN.group_best:
        yield (
            f"model.router.group_best = {router.group_best} has no effect: it compares groups, of "
            f"which groups_per_token = {router.groups_per_token} takes all"
        )


# how texts are read
TEXT_KEYS = (
    "data.text_field",
    "data.chat_template",
    "data.encoding",
    "data.exclude",
    "data.skip_bad",
)


def _text_keys_without_effect(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each key of texts without effect: the data sets are tokens already, or, of
    data.vocab_size, no tokenizer is trained, as where one is given."""
    data = config.data
    defaults = Data()
    evaluated = [", ".join(names_of(source.source)) for source in data.validation]
    tokenized = [name for name in data.sources if _is_tokenized(name)]
    if data.max_chars and tokenized:
        yield (
            f"data.max_chars = {data.max_chars} has no effect on {', '.join(tokenized)}: "
            f"{ALREADY_TOKENS}, of which all is used"
        )
    texts = [name for name in (*data.sources, *evaluated) if not _is_tokenized(name)]
    if not texts:
        for key in TEXT_KEYS:
            value = config.get(key)
            if value != getattr(defaults, key.removeprefix("data.")):
                yield (
                    f"{key} = {toml(value)} has no effect on {', '.join(tokenized)}: "
                    f"{ALREADY_TOKENS}"
                )
    # A size that the data has anyway is no contradiction: it may be a leftover of a text run.
    if data.vocab_size not in (defaults.vocab_size, corpus.ids, config.model.vocab):
        yield (
            f"data.vocab_size = {data.vocab_size} has no effect: no tokenizer is trained; ids are "
            f"below {corpus.ids}"
        )


def _is_tokenized(name: str) -> bool:
    return is_there(path_of(name), ".idx")


def _evaluated_in_training(config: RunConfig, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each evaluated set with documents that are training documents too."""
    parts = corpus.training_parts
    held_out = set[bytes]()
    for part in parts:
        held_out |= _sampled_contents(part.dataset, _held_out_documents(part))
    sets = dict[str, set[bytes]]()
    for set_name, samples in corpus.validation.items():
        dataset = samples.dataset
        long_documents = np.flatnonzero(dataset.document_lengths() >= SHORTEST_DOCUMENT)
        sets[set_name] = _sampled_contents(dataset, long_documents)

    trained = _trained_among(held_out.union(*sets.values()), parts)
    if repeated := held_out & trained:
        yield (
            f"data.held_out: {len(repeated):,} of {len(held_out):,} held-out documents are in the "
            "training data too, so the held-out loss is no measure for new text: remove repeated "
            "documents"
        )
    for set_name, documents in sets.items():
        if repeated := documents & trained:
            yield (
                f"data.validation: {len(repeated):,} of {len(documents):,} documents of {set_name} "
                "are in the training data too, so its loss is no measure for new text: remove "
                "them from one of the two"
            )


def _trained_among(evaluated: set[bytes], parts: Sequence[Samples]) -> set[bytes]:
    """Return the contents of evaluated documents that are those of training documents, too.

    A content is the bytes of a document's token ids, whose hash a set can look up. parts: the
    training samples of each data set.
    """
    # Only training documents as long as one of the evaluated ones can be equal to it.
    token_counts = sorted({len(content) // TOKEN_BYTES for content in evaluated})
    lengths = np.array(token_counts, np.int64)
    trained = set[bytes]()
    for part in parts:
        for document in _training_documents(part, lengths):
            content = document.tobytes()
            if content in evaluated:
                trained.add(content)
    return trained


def _sampled_contents(dataset: IndexedDataset, numbers: NDArray[np.int64]) -> set[bytes]:
    """Return the content of at most COMPARED of the documents with these numbers."""
    return {document.tobytes() for document in _read_evenly(dataset, numbers, COMPARED)}


def _held_out_documents(training: Samples) -> NDArray[np.int64]:
    """Return the numbers of the documents that no training sample has a token of, short ones left
    out.
    """
    lengths = training.dataset.document_lengths()
    is_held_out = training.tokens_by_document(lengths) == 0
    return np.flatnonzero(is_held_out & (lengths >= SHORTEST_DOCUMENT))


def _training_documents(
    training: Samples, wanted_lengths: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of the wanted lengths of which at least half is in training samples."""
    dataset = training.dataset
    lengths = dataset.document_lengths()
    is_trained = 2 * training.tokens_by_document(lengths) >= lengths
    numbers = np.flatnonzero(is_trained & np.isin(lengths, wanted_lengths))
    yield from _read_evenly(dataset, numbers, MOST_READ)


def _read_evenly(
    dataset: IndexedDataset, numbers: NDArray[np.int64], max_documents: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of at most `max_documents` of the documents, spread over all of them."""
    count = min(max_documents, len(numbers))
    chosen = np.linspace(0, len(numbers) - 1, count).astype(np.int64)
    for number in numbers[chosen]:
        yield dataset.document(int(number)).astype(np.int64)
