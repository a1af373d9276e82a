"""The part of each global batch that a data-parallel rank trains on, read one step ahead (`prefetch.py`)."""

from megaprec.comm.axis import Axis
from megaprec.data.blend import Blend
from megaprec.data.samples import Samples
from megaprec.diagnose.position import Position
from models.packing import Packing
from models.passes import Share
from tools.config.run_file import RunConfig
from tools.training.prefetch import Prefetch


class Batches:
    """Reads the shares of a run. samples: of the training data. position: is told when this rank reads or waits."""

    def __init__(self, config: RunConfig, samples: Samples | Blend, dp: Axis, position: Position) -> None:
        self._batch, self._end = config.train.global_batch, config.train.global_batch * config.train.steps
        self._dp, self._position = dp, position
        self._ahead = Prefetch(lambda first: self._read(samples, first, dp.rank))

    def take(self, first: int) -> Share:
        """Return this rank's share of the training batch that begins at `first`, and begin to read the next step's."""
        self._position.at("reading of samples")
        following = first + self._batch
        return self._ahead.take(first, following if following < self._end else None)

    def share(self, samples: Samples | Blend, first: int, replica: int | None = None) -> Share:
        """Return a data-parallel rank's consecutive part of the global batch that begins at `first`.

        replica: the data-parallel rank; None: this one.
        """
        self._position.at("reading of samples")
        return self._read(samples, first, self._dp.rank if replica is None else replica)

    def _read(self, samples: Samples | Blend, first: int, replica: int) -> Share:
        own = self._batch // self._dp.size
        batch = samples.batch(first + own * replica, own)
        packing = Packing(batch.documents, batch.positions)
        return Share(batch.tokens, batch.targets, batch.mask, first=own * replica, packing=packing)
