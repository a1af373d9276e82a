"""The tracker TensorBoard: event files in the folder tensorboard of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writer of the numbers of a run as scalars. See `tools.journal.trackers.Tracker`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and slow to import

        self._make_writer = SummaryWriter
        self._folder = folder / "tensorboard"

    def start(self, configuration: Mapping[str, Any], step: int) -> None:
        """Open a file. TensorBoard then hides the events of an earlier, longer run after `step`."""
        self._writer = self._make_writer(str(self._folder), purge_step=step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, complete: bool) -> None:
        """Write what waits, and close the file."""
        self._writer.close()
