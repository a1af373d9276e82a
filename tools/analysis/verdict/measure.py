"""Making of a run's yardsticks from its data, once, in seconds at most."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megaprec.errors import UserError
from megaprec.text.token_bytes import NOT_KNOWN, TokensOfText, bytes_of_tokens
from megaprec.tokens.blend import Blend
from megaprec.tokens.intact import read_record
from megaprec.tokens.samples import Batch, Samples
from models.parameter_counts import num_parameters
from tools.analysis.verdict.counts import Counts, Ids
from tools.config.run_file import RunConfig, saved_run
from tools.journal.records import HELD_OUT_LOSS
from tools.journal.yardsticks import Yardsticks, read_yardsticks
from tools.training.batches import evaluated_samples
from tools.training.corpus import Corpus, open_run_data

COUNTED = 1 << 21  # tokens of the training text that are counted, at most
CHECKED = 1 << 24  # tokens of a data set whose bytes are compared with those of its text
PIECES = 256  # of the training text, from which they are
BATCH = 64  # samples that are read at once


def make_yardsticks(config: RunConfig, corpus: Corpus) -> Yardsticks | None:
    """Return the yardsticks of a run, those of its folder if they are of the same data; None if it
    evaluates no held-out text, or no token counts. Raises UserError and OSError.
    """
    held_out = corpus.evaluated.get(HELD_OUT_LOSS)
    if held_out is None or not config.train.evaluates:
        return None
    num_samples = evaluated_samples(config.train, len(held_out))
    digest = _digest(config, corpus, num_samples)
    kept = read_yardsticks(Path(config.train.folder))
    if kept is not None and kept.of == digest:
        return kept
    before, tokens = _targets(_first_batches(held_out, num_samples))
    counted_before, counted = _targets(_spread_batches(corpus.train.tiled, config.train.seq_length))
    if not len(tokens) or not len(counted):
        return None
    counts = Counts.of(counted_before, counted, corpus.ids)
    nbytes, reason = _count_bytes(corpus, tokens)
    model = corpus.model
    return Yardsticks(
        of=digest,
        guessing=math.log(corpus.ids),
        unigram=float(counts.single_losses(tokens).mean()),
        bigram=float(counts.pair_losses(before, tokens).mean()),
        counted_tokens=len(counted),
        samples=num_samples,
        tokens=len(tokens),
        nbytes=nbytes,
        no_bytes=reason,
        parameters=0 if model.factory else num_parameters(model),
        epoch_tokens=len(corpus.train) * config.train.seq_length,
    )


def find_yardsticks(folder: Path) -> Yardsticks | None:
    """Return the yardsticks of a run folder, made of its data if the run has not kept them; None if
    that is not possible. Writes nothing.
    """
    kept = read_yardsticks(folder)
    if kept is not None:
        return kept
    try:
        config = saved_run(folder)
        return make_yardsticks(config, open_run_data(config))
    except (UserError, OSError, ValueError):  # the run's data may be anywhere by now
        return None


def _digest(config: RunConfig, corpus: Corpus, num_samples: int) -> str:
    """Return the digest of what the yardsticks follow from."""
    facts = {
        "data": corpus.identity.model_dump(mode="json") if corpus.identity else None,
        "seq_length": config.train.seq_length,
        "eod_mask_loss": config.data.eod_mask_loss,
        "loss_on": config.data.loss_on,
        "samples": num_samples,
        "model": corpus.model.model_dump(mode="json"),
        "counted": COUNTED,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _first_batches(samples: Samples | Blend, count: int) -> Iterator[Batch]:
    """Yield the first `count` samples."""
    for first in range(0, count, BATCH):
        yield samples.batch(first, min(BATCH, count - first))


def _spread_batches(samples: Samples | Blend, seq_length: int) -> Iterator[Batch]:
    """Yield samples of an epoch, of at most COUNTED tokens: all, or pieces from all over it."""
    available = len(samples)
    wanted = max(1, COUNTED // seq_length)
    if available <= wanted:
        yield from _first_batches(samples, available)
        return
    pieces = min(PIECES, wanted)
    piece = wanted // pieces
    for number in range(pieces):
        yield samples.batch(available * number // pieces, piece)


def _targets(batches: Iterable[Batch]) -> tuple[Ids, Ids]:
    """Return the targets of samples that count in the loss, and the token before each one."""
    before = list[Ids]()
    tokens = list[Ids]()
    for batch in batches:
        counts = np.ones(batch.targets.shape, bool)
        if batch.mask is not None:
            counts = batch.mask.numpy() > 0
        before.append(batch.tokens.numpy()[counts])
        tokens.append(batch.targets.numpy()[counts])
    return np.concatenate(before), np.concatenate(tokens)


def _count_bytes(corpus: Corpus, tokens: Ids) -> tuple[int | None, str]:
    """Return the bytes of the text of tokens; None if they are not known, and why."""
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        return None, "the run has no tokenizer"
    texts = _texts_of_known_bytes(corpus)
    evaluated = TokensOfText.of(tokens, 0)
    sizes = bytes_of_tokens(tokenizer, evaluated.ids.tolist(), [*texts.values()])
    if sizes is None:
        return None, "the tokenizer does not give texts back as they were"
    if (sizes == NOT_KNOWN).any():
        return None, "the text has characters that the tokenizer does not know"
    for prefix, text in texts.items():
        text_sizes = bytes_of_tokens(tokenizer, text.ids.tolist(), [*texts.values()])
        nbytes = None
        if text_sizes is not None and not (text_sizes == NOT_KNOWN).any():
            nbytes = int(text.counts @ text_sizes)
        if nbytes != text.nbytes:
            return None, f"tokens of {nbytes} bytes where the text of {prefix} had {text.nbytes}"
    return int(evaluated.counts @ sizes), ""


def _texts_of_known_bytes(corpus: Corpus) -> dict[str, TokensOfText]:
    """Return the tokens of the training texts by their prefixes, but of those that are too long to
    be counted, and of those whose builds have not recorded how many bytes they had."""
    texts = dict[str, TokensOfText]()
    for dataset in corpus.datasets:
        record = read_record(dataset.prefix)
        recorded = record.get("bytes") if record else None
        if recorded is not None and dataset.num_tokens <= CHECKED:
            tokens = dataset.tokens(0, dataset.num_tokens)
            texts[str(dataset.prefix)] = TokensOfText.of(tokens, recorded)
    return texts
