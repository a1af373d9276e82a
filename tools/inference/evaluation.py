"""The loss of a model on texts: sums over all tokens that are predicted, divided by tokens or by
bytes of the text.

Bits per byte do not depend on the tokenizer, so they compare models with different ones: the sum of
the losses in bits, divided by the bytes of the text as it stands in the file, in UTF-8.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.engine.relay import Relay
from tools.inference.windows import TokenizedDocument, Window, windows

POOL = 512  # windows that are sorted by length together, so that little is padded
LOGITS = 1 << 25  # of a batch at most, unless one window has more
LARGEST_EXPONENT = 700  # math.exp overflows above 709


@dataclass
class Score:
    """Sums over texts.

    nats: of the losses of `tokens` tokens. frequency_nats: of their losses by a model that knows
        only how often each token occurs among them.
    size: bytes of the texts; None if they are unknown.
    """

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    size: int | None = 0
    frequency_nats: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss in nats per predicted token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def frequency_loss(self) -> float:
        """The loss of a model that knows only how often each token occurs, in nats per predicted
        token: a yardstick for `loss`. NaN without tokens."""
        return self.frequency_nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        if self.loss < LARGEST_EXPONENT:
            return math.exp(self.loss)
        if self.loss > 0:
            return math.inf
        return math.nan

    @property
    def bits_per_byte(self) -> float | None:
        if not self.size:
            return None
        return self.nats / math.log(2) / self.size

    def add_document(self, size: int | None) -> None:
        """Count a document. size: bytes of its text; None if they are unknown."""
        self.documents += 1
        if self.size is None or size is None:
            self.size = None
        else:
            self.size += size


@torch.no_grad()
def score(
    model: Relay,
    texts: Iterable[TokenizedDocument],
    begin: int | None,
    length: int,
    stride: int,
    report: Callable[[int], None],
) -> Score:
    """Return the score of a model on documents. Replicas share the batches; all ranks of the
    model's layout return the same score.

    begin: id of the token before a document; None: the first token of each is not predicted.
    length, stride: of the windows, in tokens, see `tools.inference.windows`.
    report: called with the number of tokens after each batch.
    """
    config = model.local_stage.config
    total = Score()

    def all_windows() -> Iterator[Window]:
        for text in texts:
            total.add_document(text.size)
            yield from windows(text.ids, begin, length, stride, text.counted)

    tokens_per_batch = LOGITS // config.vocab
    # Dynamic angles follow from the length of the sequence, padding included.
    same_length = config.rope_scaling.kind == "dynamic"
    occurrences = np.zeros(config.vocab, np.int64)  # of each token among those predicted
    all_batches = batches(all_windows(), tokens_per_batch, same_length)
    for number, batch in enumerate(all_batches):
        targets = sum(int(window.counts.sum()) for window in batch)
        total.tokens += targets
        for window in batch:
            occurrences += np.bincount(window.targets[window.counts], minlength=config.vocab)
        # Replicas take the batches in turn.
        replica = number % model.dp.size
        if replica == model.dp.rank:
            total.nats += _nats(model, batch)
        report(targets)
    nats = torch.tensor(total.nats, dtype=torch.float64, device=model.device)
    total.nats = model.world.sum_(nats).item()
    total.frequency_nats = _frequency_nats(occurrences)
    return total


def _frequency_nats(occurrences: NDArray[np.int64]) -> float:
    """Return the sum of the losses of tokens by their own frequencies, in nats. occurrences: of
    each token."""
    counts = occurrences[occurrences > 0]
    if not len(counts):
        return 0.0
    return float(counts @ -np.log(counts / counts.sum()))


def batches(samples: Iterable[Window], tokens: int, same_length: bool) -> Iterator[list[Window]]:
    """Yield the windows in batches of about `tokens` tokens, padding included, those of similar
    length together.

    same_length: the windows of a batch have the same length, for models whose angles depend on it.
    """
    unsorted = iter(samples)
    while pool := list(islice(unsorted, POOL)):
        pool.sort(key=lambda window: len(window.tokens))
        batch = [pool[0]]
        for window in pool[1:]:
            length = len(window.tokens)  # at least that of all windows before
            is_full = (len(batch) + 1) * length > tokens
            is_longer = length > len(batch[-1].tokens)
            if is_full or (same_length and is_longer):
                yield batch
                batch = []
            batch.append(window)
        yield batch


def _nats(model: Relay, batch: list[Window]) -> float:
    """Return the sum of the losses of the targets that count, on the last stage's first tensor
    rank; 0 on others."""
    tokens, targets, counts = padded(batch, model)
    # Collective over the stages and tensor ranks: all of a replica get here.
    logits = model.logits(tokens)
    if logits is None or model.last_stage is None:
        return 0.0
    losses = model.last_stage.losses(logits, targets)
    if model.last_stage.context.tp.rank:  # it has the same losses as the first
        return 0.0
    # In float64, for a sum over many tokens.
    return float(losses[counts].double().sum())


def padded(batch: list[Window], model: Relay) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and which targets count, [s, b] each, on the model's device.

    Padding is on the right, so no token attends to it. Sequence-parallel ranks have equal parts of
    s.
    """
    context = model.local_stage.context
    unit = context.sequence_ranks
    longest = max(len(window.tokens) for window in batch)
    padded_length = -(-longest // unit) * unit
    shape = (padded_length, len(batch))
    tokens = np.zeros(shape, np.int64)
    targets = np.zeros(shape, np.int64)
    counts = np.zeros(shape, bool)
    for column, window in enumerate(batch):
        length = len(window.tokens)
        tokens[:length, column] = window.tokens
        targets[:length, column] = window.targets
        counts[:length, column] = window.counts
    return (
        torch.from_numpy(tokens).to(model.device),
        torch.from_numpy(targets).to(model.device),
        torch.from_numpy(counts).to(model.device),
    )
