"""The part of each global batch that a data-parallel rank trains on, read one step ahead
(`prefetch.py`)."""

from dataclasses import replace

import torch

from megaprec.comm.axis import Axis
from megaprec.data.blend import Blend
from megaprec.data.samples import Samples
from megaprec.diagnose.position import Position
from models.attention.packing import Packing
from models.engine.passes import Share
from tools.config.run_file import RunConfig
from tools.config.settings import Train
from tools.training.prefetch import Prefetch


class Batches:
    """Reads the shares of a run.

    samples: of the training data. position: is told when this rank reads or waits.
    """

    def __init__(
        self, config: RunConfig, samples: Samples | Blend, dp: Axis, position: Position
    ) -> None:
        self._batch = config.train.global_batch
        # the samples of the run, beyond which nothing is read ahead
        self._end = config.train.global_batch * config.train.steps
        self._dp = dp
        self._position = position
        self._prefetch = Prefetch(lambda first: self._read(samples, first, dp.rank))

    def take(self, first: int) -> Share:
        """Return this rank's share of the training batch at `first`, and begin to read the next."""
        self._position.at("reading of samples")
        following = first + self._batch
        return self._prefetch.take(first, following if following < self._end else None)

    def share(
        self,
        samples: Samples | Blend,
        first: int,
        replica: int | None = None,
        end: int | None = None,
    ) -> Share:
        """Return a data-parallel rank's consecutive part of the global batch at `first`.

        replica: the data-parallel rank; None: this one. end: the position from which on samples
        only fill the batch, and do not count in its loss; None: all count.
        """
        self._position.at("reading of samples")
        share = self._read(samples, first, self._dp.rank if replica is None else replica)
        # Decided by the global batch, the same on every rank: all have a mask, or none has.
        if end is None or first + self._batch <= end:
            return share
        begin = first + share.first
        counts = torch.arange(begin, begin + len(share.tokens)) < end
        mask = torch.ones(share.tokens.shape) if share.mask is None else share.mask
        return replace(share, mask=mask * counts[:, None])  # a sample counts as a whole

    def _read(self, samples: Samples | Blend, first: int, replica: int) -> Share:
        share_size = self._batch // self._dp.size
        offset = share_size * replica
        batch = samples.batch(first + offset, share_size)
        packing = Packing(batch.documents, batch.positions)
        return Share(batch.tokens, batch.targets, batch.mask, first=offset, packing=packing)


def evaluated_samples(train: Train, available: int) -> int:
    """Return the number of samples of an evaluation.

    That of train.eval_batches global batches, or all that are available.
    """
    return min(available, train.eval_batches * train.global_batch)
