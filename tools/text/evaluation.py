"""The loss of a model on texts: sums over all tokens that are predicted, divided by tokens or by bytes of the text.

Bits per byte do not depend on the tokenizer, so they compare models with different ones: the sum of the losses in bits,
divided by the bytes of the text as it stands in the file, in UTF-8.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from megaprec.comm.axis import Axis
from models.stages import Stage
from tools.text.windows import Document, Window, windows

POOL = 512  # windows that are sorted by length together, so that little is padded
LOGITS = 1 << 25  # of a batch at most, unless one window has more
ALONE = Axis("world")


@dataclass
class Score:
    """Sums over texts. nats: of the losses of `tokens` tokens. size: bytes of the texts; None if they are unknown."""

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    size: int | None = 0

    @property
    def loss(self) -> float:
        """Mean loss in nats per predicted token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf if self.loss > 0 else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.size if self.size else None


@torch.no_grad()
def score(
    stage: Stage,
    texts: Iterable[Document],
    begin: int | None,
    length: int,
    stride: int,
    report: Callable[[int], None],
    ranks: Axis = ALONE,
) -> Score:
    """Return the score of a model on documents.

    begin: id of the token before a document; None: the first token of each is not predicted, and the bytes of those
    that are are not known. length, stride: of the windows, in tokens, see
    `tools.text.windows`. report: called with the number of tokens after each batch. ranks: each has the whole model and
    takes its share of the batches; all return the score of all.
    """
    total = Score(size=None if begin is None else 0)

    def cut() -> Iterator[Window]:
        for text in texts:
            total.documents += 1
            total.size = None if total.size is None or text.size is None else total.size + text.size
            yield from windows(text.ids, begin, length, stride)

    every = batches(cut(), LOGITS // stage.config.vocab, stage.config.rope_scaling.kind == "dynamic")
    for number, batch in enumerate(every):
        counted = sum(len(window.targets) - window.first for window in batch)
        total.tokens += counted
        if number % ranks.size == ranks.rank:
            total.nats += _nats(stage, batch)
        report(counted)
    total.nats = ranks.sum_(torch.tensor(total.nats, dtype=torch.float64)).item()
    return total


def batches(every: Iterable[Window], tokens: int, same_length: bool) -> Iterator[list[Window]]:
    """Yield the windows in batches of about `tokens` tokens, padding included, those of similar length together.

    same_length: the windows of a batch have the same length, for models whose angles depend on it.
    """
    waiting = iter(every)
    while pool := sorted(islice(waiting, POOL), key=lambda window: len(window.tokens)):
        batch = [pool[0]]
        for window in pool[1:]:
            long = len(window.tokens)
            if (len(batch) + 1) * long > tokens or (same_length and long > len(batch[-1].tokens)):
                yield batch
                batch = []
            batch.append(window)
        yield batch


def _nats(stage: Stage, batch: list[Window]) -> float:
    """Return the sum of the losses of the targets that count. Padding is on the right, so no token attends to it."""
    longest = max(len(window.tokens) for window in batch)
    tokens, targets = np.zeros((2, longest, len(batch)), np.int64)
    counts = np.zeros((longest, len(batch)), bool)
    for column, window in enumerate(batch):
        here = len(window.tokens)
        tokens[:here, column], targets[:here, column] = window.tokens, window.targets
        counts[window.first : here, column] = True
    logits = stage(torch.from_numpy(tokens))
    losses = stage.losses(logits, torch.from_numpy(targets))
    return float(losses[torch.from_numpy(counts)].double().sum())
