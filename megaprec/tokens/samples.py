"""Samples: the token stream split into training examples.

Sample `i` is the tokens [i * seq, i * seq + seq + 1) of the stream: `seq` inputs and, shifted by
one, their `seq` targets. Neighbouring samples share one token: the last target of one is the first
input of the next. So every token but the first is a target exactly once an epoch.

With random windows, as nanoGPT draws its batches, a sample begins at any token instead: each is
drawn from all windows of seq + 1 tokens of the chosen samples, with replacement. Of n samples that
follow each other these are (n - 1) * seq + 1. A window goes over no other sample, so none reaches
into a held-out part.

`Resets` tells the model where documents meet within a sample; the tokens of the samples do not
change.

A run consumes positions 0, 1, 2, … over endless epochs; `order` maps a position to a sample by a
pure function, and `draw` to a window. A rank asks for its own positions, and the result depends on
nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megaprec.errors import UserError
from megaprec.tokens.held_out import HeldOutRule, Ranges, divide
from megaprec.tokens.indexed import IndexedDataset
from megaprec.tokens.order import draw, order

Windows = Literal["tiled", "random"]
Pack = Literal["none", "best_fit"]  # how documents are put into samples
CHUNK = 1 << 20  # tokens at a time that are searched for one that counts


@dataclass(frozen=True)
class Resets:
    """Settings that restart with each document within a sample, and of what counts. The first three
    have Megatron's names.

    attention_mask: a token attends only to its own document. position_ids: positions restart with
        each document.
    eod_mask_loss: the first token of a document, which nothing before it predicts, is no target in
        the loss.
    loss_mask: targets that the loss mask of a data set leaves out are none; of a data set without
        one all are. It must be the same on all ranks, which then all have a mask.
    """

    attention_mask: bool = False
    position_ids: bool = False
    eod_mask_loss: bool = False
    loss_mask: bool = False


NO_RESETS = Resets()


@dataclass(frozen=True, eq=False)
class Batch:
    """Training examples, ready for a model.

    tokens, targets: int64 [count, seq].
    ids: int64 [count], each sample's number in the whole stream, the same in every epoch and
        layout; of random windows the number of the first token.
    mask: float32 [count, seq], 1 if the target counts in the loss; None if all targets count.
    documents, positions: int64 [count, seq], for each token the number of its document and its
        position within the document; both start at 0 in each sample. None without the respective
        reset.
    sources: int64 [count], the number of each sample's data set in a blend; None without a blend.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    sources: torch.Tensor | None = None


class SampleLocation(NamedTuple):
    """The place of a sample on disk: its data set, its id, and the tokens [start, stop) there that
    it is read from, in its order."""

    dataset: IndexedDataset
    sample: int
    spans: tuple[tuple[int, int], ...]

    @property
    def first_token(self) -> int:
        """Return the first token of the sample."""
        start, _ = self.spans[0]
        return start

    def documents(self) -> NDArray[np.int64]:
        """Return the document number of each token of the sample, int64."""
        numbers = [self.dataset.documents_of(start, stop - start) for start, stop in self.spans]
        return np.concatenate(numbers)


class Samples:
    """Samples of a data set, in an order that `seed` determines.

    chosen: their numbers in the whole stream; None: all that fit. windows: "random" draws windows
    of the chosen samples, and `shuffle` has no effect. Raises UserError if there is no sample at
    all.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        seed: int,
        shuffle: bool,
        chosen: Ranges | None = None,
        resets: Resets = NO_RESETS,
        windows: Windows = "tiled",
    ) -> None:
        if chosen is None:
            chosen = Ranges.single(0, count_samples(dataset, seq_length))
        self._count = len(chosen)
        if self._count < 1:
            raise _too_short(dataset, seq_length, 1)
        self._dataset = dataset
        self._seq_length = seq_length
        self._chosen = chosen
        self._seed = seed
        self._shuffle = shuffle
        self._resets = resets
        self._windows: Windows = windows
        self._stride = 1 if windows == "random" else seq_length  # tokens from one id to the next

    @property
    def dataset(self) -> IndexedDataset:
        """Return the data set of the samples."""
        return self._dataset

    @property
    def chosen(self) -> Ranges:
        """Return the numbers of the samples in the whole stream."""
        return self._chosen

    @property
    def windows(self) -> Windows:
        """Return how samples are cut from the stream."""
        return self._windows

    @property
    def total_ids(self) -> int:
        """Return a number that all ids of the stream are below, whatever is held out."""
        if self._windows == "random":
            return self._dataset.num_tokens
        return count_samples(self._dataset, self._seq_length)

    @property
    def tiled(self) -> "Samples":
        """Return the samples of the same text without random windows, each once an epoch."""
        return Samples(
            self._dataset, self._seq_length, self._seed, self._shuffle, self._chosen, self._resets
        )

    def __len__(self) -> int:
        """Return the number of samples in one epoch, of random windows those of as much text."""
        return self._count

    def location_of(self, position: int) -> SampleLocation:
        """Return where the sample at a position of the run is on disk."""
        (sample_id,) = self._ids(np.array([position], np.int64)).tolist()
        start = sample_id * self._stride
        span = start, start + self._seq_length + 1
        return SampleLocation(self._dataset, sample_id, (span,))

    def _ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of the samples at positions of the run."""
        if self._windows == "random":
            begins = self._window_begins()
            drawn = draw(positions, len(begins), self._seed)
            return begins.numbers(drawn)
        ordered = order(positions, self._count, self._seed, self._shuffle)
        return self._chosen.numbers(ordered)

    def _window_begins(self) -> Ranges:
        """Return the tokens at which a window of the chosen samples may begin."""
        tokens = self._chosen.tokens(self._seq_length)
        # the last window of a range is its last sample
        return Ranges(tokens.begins, tokens.ends - self._seq_length + 1)

    def labels(self, ids: torch.Tensor) -> list[int]:
        """Return the names of samples for messages: their ids."""
        return ids.tolist()

    def batch(self, position: int, count: int) -> Batch:
        """Return the samples at positions [position, position + count) of the run, which may span
        epochs."""
        positions = np.arange(position, position + count, dtype=np.int64)
        ids = self._ids(positions)
        seq_length = self._seq_length
        # one token more: inputs and targets are shifted against each other
        rows = np.empty((count, seq_length + 1), dtype=np.int64)
        starts = (ids * self._stride).tolist()
        self._dataset.prepare(starts, seq_length + 1)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self._dataset.tokens(start, seq_length + 1)
        text = torch.from_numpy(rows)
        inputs = text[:, :-1].contiguous()
        targets = text[:, 1:].contiguous()
        batch = Batch(inputs, targets, torch.from_numpy(ids))
        # the boundaries of documents cost a search in the index, so only if somebody asks
        if self._resets == NO_RESETS:
            return batch
        return self._with_structure(batch, starts)

    def require_counted(self, what: str) -> None:
        """Raise UserError if no target of an epoch counts in the loss.

        what: what the samples are for, in words.
        """
        if not (self._resets.eod_mask_loss or self._resets.loss_mask):
            return
        for first, last in zip(self._chosen.begins, self._chosen.ends, strict=True):
            begin = int(first) * self._seq_length
            end = int(last) * self._seq_length
            if self._has_counted(begin, end):
                return
        raise UserError.of("data.no_token_counts", what=what)

    def tokens_by_document(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each document are inputs of the chosen samples, int64
        [documents].

        lengths: of the documents of the data set, in tokens.
        """
        tokens = self._chosen.tokens(self._seq_length)
        ends = np.cumsum(lengths)
        return tokens.count_below(ends) - tokens.count_below(ends - lengths)

    @property
    def num_different(self) -> int:
        """Return how many different samples there are: those of an epoch, or all windows."""
        return len(self._window_begins()) if self._windows == "random" else self._count

    def count_without_target(self) -> int:
        """Return of how many different samples no target counts in the loss."""
        seq_length = self._seq_length
        begins = self._window_begins()
        # multiples of the stride, so that each run of tokens begins with a sample
        tokens_at_a_time = max(1, CHUNK // self._stride) * self._stride
        num_without = 0
        for begin, end in zip(begins.begins.tolist(), begins.ends.tolist(), strict=True):
            for start in range(begin, end, tokens_at_a_time):
                stop = min(start + tokens_at_a_time, end)
                # of windows of seq_length targets that begin at the tokens [start, stop)
                counted = self._counted(start, stop - start + seq_length - 1)
                counted_before = np.concatenate(([0], np.cumsum(counted)))
                counted_in_window = counted_before[seq_length:] - counted_before[:-seq_length]
                counted_in_sample = counted_in_window[:: self._stride]
                num_without += int((counted_in_sample == 0).sum())
        return num_without

    def _has_counted(self, begin: int, end: int) -> bool:
        """Return True if a target of the samples that begin in the tokens [begin, end) counts."""
        starts = range(begin, end, CHUNK)
        return any(self._counted(start, min(CHUNK, end - start)).any() for start in starts)

    def _counted(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return whether the target of each of the tokens [start, start + length), which is the
        token after it, counts in the loss, [length]."""
        counted = np.ones(length, bool)
        if self._resets.loss_mask:
            counted &= self._dataset.counted(start + 1, length)
        if self._resets.eod_mask_loss:
            # the token before it must be of the same document
            documents = self._dataset.documents_of(start, length + 1)
            counted &= documents[1:] == documents[:-1]
        return counted

    def _with_structure(self, batch: Batch, starts: Sequence[int]) -> Batch:
        """Return the batch with mask, documents and positions, each if its reset is on.

        starts: the first token of each sample.
        """
        seq_length = self._seq_length
        resets = self._resets
        if resets.eod_mask_loss or resets.loss_mask:
            mask = np.stack([self._counted(start, seq_length) for start in starts])
            batch = replace(batch, mask=torch.from_numpy(mask.astype(np.float32)))
        if not (resets.attention_mask or resets.position_ids):
            return batch
        # int64 [count, seq + 1]
        documents = np.stack(
            [self._dataset.documents_of(start, seq_length + 1) for start in starts]
        )
        same_as_next = documents[:, 1:] == documents[:, :-1]
        if resets.attention_mask:
            numbers = documents[:, :-1] - documents[:, :1]
            batch = replace(batch, documents=torch.from_numpy(numbers))
        if resets.position_ids:
            positions_in_sample = np.arange(seq_length)
            # whether a token is of the document of the token before it; for the first, of which 0
            # is the begin in either case, any value does
            first_column = np.ones_like(same_as_next[:, :1])
            continues = np.concatenate((first_column, same_as_next[:, :-1]), axis=1)
            # where each token's document begins in the sample: the largest begin so far
            begins = np.where(continues, 0, positions_in_sample)
            begins = np.maximum.accumulate(begins, axis=1)
            positions = torch.from_numpy(positions_in_sample - begins)
            batch = replace(batch, positions=positions)
        return batch


def split(
    dataset: IndexedDataset,
    seq_length: int,
    held_out: float,
    seed: int,
    shuffle: bool = True,
    resets: Resets = NO_RESETS,
    rule: HeldOutRule = "end",
    windows: Windows = "tiled",
) -> tuple[Samples, Samples | None]:
    """Return samples for training, and the `held_out` fraction of the stream that `rule` keeps for
    evaluation, which is never shuffled and has no random windows.

    At least one sample is held out, unless the fraction is 0: then the second value is None. No
    token is a target in both. Raises UserError if the fraction is outside [0, 1) or the text is too
    short for one sample of each.
    """
    require_fraction(held_out)
    total = count_samples(dataset, seq_length)
    held_out_count = held_out_samples(total, held_out)
    needed = 2 if held_out_count else 1
    if total < needed:
        raise _too_short(dataset, seq_length, needed)
    if not held_out_count:
        return Samples(dataset, seq_length, seed, shuffle, resets=resets, windows=windows), None
    # a fraction near 1 must leave one for training
    trained, kept = divide(total, min(held_out_count, total - 1), rule)
    training = Samples(dataset, seq_length, seed, shuffle, trained, resets, windows)
    # never shuffled: an evaluation takes the same samples each time
    return training, Samples(dataset, seq_length, seed, False, kept, resets)


def require_fraction(held_out: float) -> None:
    """Raise UserError if the held-out fraction is outside [0, 1)."""
    if not 0 <= held_out < 1:
        raise UserError.of("data.held_out_fraction", held_out=held_out)


def training_numbers(
    dataset: IndexedDataset,
    seq_length: int,
    held_out: float,
    rule: HeldOutRule,
) -> Ranges:
    """Return the numbers of the samples that `split` leaves for training."""
    total = count_samples(dataset, seq_length)
    held_out_count = min(held_out_samples(total, held_out), total - 1)
    if held_out_count < 1:
        return Ranges.single(0, total)
    training, _ = divide(total, held_out_count, rule)
    return training


def held_out_samples(total: int, fraction: float) -> int:
    """Return how many of all samples of a stream are kept for evaluation: at least one, unless the
    fraction is 0."""
    return max(1, round(total * fraction)) if fraction else 0


def count_samples(dataset: IndexedDataset, seq_length: int) -> int:
    """Return the number of samples that fit into the stream; the last target needs one more
    token."""
    return max(0, dataset.num_tokens - 1) // seq_length


def _too_short(
    dataset: IndexedDataset,
    seq_length: int,
    samples: int,
) -> UserError:
    """Return the error of a data set that has fewer tokens than so many samples need."""
    return UserError.of(
        "data.data_too_short",
        prefix=dataset.prefix,
        num_tokens=dataset.num_tokens,
        samples=samples,
        seq_length=seq_length,
        needed_tokens=samples * seq_length + 1,
    )
