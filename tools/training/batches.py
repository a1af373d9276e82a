"""The part of each global batch that a data-parallel rank trains on, read one step ahead."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Generic, TypeVar

import torch

from megaprec.comm.axis import Axis
from megaprec.diagnose.position import Position
from megaprec.tokens.blend import Blend
from megaprec.tokens.samples import Samples
from models.attention.packing import Packing
from models.engine.passes import Share, Sources
from tools.config.run_file import RunConfig
from tools.config.tables.settings import Train
from tools.parts import optional_parts

Batch = TypeVar("Batch")


class Batches:
    """Reads the shares of a run.

    samples: of the training data. position: is told when this rank reads or waits.
    """

    def __init__(
        self, config: RunConfig, samples: Samples | Blend, dp: Axis, position: Position
    ) -> None:
        self._batch_sizes = config.batches
        self._lengths = config.lengths
        self._evaluated_size = config.train.global_batch
        self._samples = samples
        self._dp = dp
        self._position = position
        self._prefetch = Prefetch(lambda first_sample: self._read_next(first_sample, dp.rank))

    def take(self, first_sample: int, is_last: bool) -> Share:
        """Return this rank's share of the training batch that begins at `first_sample`, and begin
        to read the next. is_last: no other is taken after it.
        """
        self._position.note_action("reading of samples")
        following = first_sample + self._batch_sizes.at(first_sample)
        return self._prefetch.take(first_sample, None if is_last else following)

    def share(self, first_sample: int, replica: int | None = None) -> Share:
        """Return a data-parallel rank's consecutive part of the training batch that begins at
        `first_sample`. replica: the data-parallel rank; None: this one.
        """
        self._position.note_action("reading of samples")
        return self._read_next(first_sample, self._dp.rank if replica is None else replica)

    def evaluation_share(self, samples: Samples | Blend, first_sample: int, end: int) -> Share:
        """Return this rank's consecutive part of the evaluated batch that begins at `first_sample`
        of `samples`.

        end: the position from which on samples only fill the batch, and do not count in its loss.
        """
        self._position.note_action("reading of samples")
        share = self._read(samples, first_sample, self._evaluated_size, self._dp.rank)
        # Decided by the global batch, the same on every rank: all have a mask, or none has.
        if first_sample + self._evaluated_size <= end:
            return share
        begin = first_sample + share.first
        is_evaluated = torch.arange(begin, begin + len(share.tokens)) < end
        mask = share.mask
        if mask is None:
            mask = torch.ones(share.tokens.shape)
        # a sample counts with all its tokens, or with none
        return replace(share, mask=mask * is_evaluated[:, None])

    def _read_next(self, first_sample: int, replica: int) -> Share:
        """Return a replica's share of the training batch that begins at `first_sample`."""
        return self._read(
            self._samples,
            first_sample,
            self._batch_sizes.at(first_sample),
            replica,
            self._lengths.pieces_at(first_sample),
        )

    def _read(
        self,
        samples: Samples | Blend,
        first_sample: int,
        global_batch: int,
        replica: int,
        pieces: int = 1,
    ) -> Share:
        """Return a replica's share of a batch of `samples`.

        pieces: the number of equal parts that each sample is cut into, each a sequence of its own
            (train.seq_schedule). `first` of the share counts in these sequences.
        """
        # The checks of a run file see to it that the replicas divide the batch.
        share_size = global_batch // self._dp.size
        # Consecutive shares: together the replicas read the batch in the order of one process.
        offset = share_size * replica
        batch = samples.batch(first_sample + offset, share_size)
        if pieces > 1:
            batch = optional_parts.in_pieces(batch, pieces)
        packing = Packing(batch.documents, batch.positions)
        sources = None
        if isinstance(samples, Blend) and batch.sources is not None:
            sources = Sources(batch.sources, len(samples.parts))
        return Share(
            batch.tokens,
            batch.targets,
            batch.mask,
            first=offset * pieces,
            packing=packing,
            sources=sources,
            pieces=pieces,
        )


def evaluated_samples(train: Train, available: int) -> int:
    """Return the number of samples of an evaluation: train.eval_samples, or else
    train.eval_batches global batches; or all that are available.
    """
    requested = train.eval_samples or train.eval_batches * train.global_batch
    return min(available, requested)


def describe_requested(train: Train) -> str:
    """Return the keys that decide on the samples of an evaluation, with their values."""
    if train.eval_samples:
        return f"train.eval_samples = {train.eval_samples}"
    return f"train.eval_batches = {train.eval_batches} of train.global_batch = {train.global_batch}"


class Prefetch(Generic[Batch]):
    """Reads one batch ahead, in a thread, while the step before is computed.

    What is read depends on the position only, so a batch is the same whether it was read ahead or
    not. An error of the reading is raised where the batch is asked for, so it ends the step that it
    belongs to and no other; the state before that step is what a checkpoint holds. Nothing is read
    ahead that is not asked for next: a run that resumes, repeats a step or ends leaves what was
    read ahead unused.

    read: a function of the position alone, which may run in another thread.
    """

    def __init__(self, read: Callable[[int], Batch]) -> None:
        self._read = read
        self._position_ahead: int | None = None
        self._batch_ahead = Future[Batch]()

    def take(self, position: int, following: int | None = None) -> Batch:
        """Return what is read at `position`, and begin to read at `following`.

        Raises what `read` raises there.
        """
        # After a resume or a repeated step the position is another one.
        is_read_ahead = position == self._position_ahead
        self._position_ahead = None
        batch = self._batch_ahead.result() if is_read_ahead else self._read(position)
        if following is not None:
            self._position_ahead = following
            self._batch_ahead = Future[Batch]()
            # A daemon, not an executor's thread: a reading that hangs must not keep the process.
            Thread(
                target=_read_into,
                args=(self._batch_ahead, self._read, following),
                name="prefetch",
                daemon=True,
            ).start()
        return batch


def _read_into(future: Future[Batch], read: Callable[[int], Batch], position: int) -> None:
    """Put what is read at `position` into the future, or the error that `read` raised."""
    try:
        future.set_result(read(position))
    except BaseException as error:  # raised in the thread that takes the batch
        future.set_exception(error)
