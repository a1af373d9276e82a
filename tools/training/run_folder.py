"""The folder of a live run, which somebody may remove or replace.

Files that are open stay writable after they are removed, so a run would train on for days and leave
nothing; and without the lock file a second run could start in the same place. Rank 0 therefore
looks after every step whether the folder and its lock are those that it began with. If not, all
ranks stop together after the next step. They save nothing: a new folder of that name belongs to
whoever made it.
"""

import errno
import os
from pathlib import Path

import torch

from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer

LOCK = ".lock"
Identity = tuple[int, int] | None  # device and inode; None if there is nothing


class RunFolder:
    """The run's folder and its lock file, if there is one, as they are now.

    Only rank 0 looks at them.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._identities: dict[Path, Identity] = {}  # of what was there when the run began
        for path in (folder, folder / LOCK) if rank == 0 else ():
            identity = _identity(path)
            if identity:
                self._identities[path] = identity

    def is_gone(self) -> bool:
        """Return True if the folder or its lock file was removed or replaced meanwhile."""
        # A filesystem that does not answer for a while is no reason to stop.
        return any(_identity(path, before) != before for path, before in self._identities.items())

    def require_there(self, step: int, optimizer: ParallelAMPOptimizer) -> None:
        """Raise UserError on every rank if rank 0 finds that the folder is gone.

        Collective over the world.
        """
        gone = torch.tensor(float(self.is_gone()), device=optimizer.device)
        if optimizer.world.max_(gone).item():
            raise UserError.of(
                "training.removed_while_training", folder=self._folder, lock=LOCK, step=step
            )


def _identity(path: Path, unknown: Identity = None) -> Identity:
    """Return device and inode, None if there is nothing.

    unknown: returned if the filesystem does not say.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None
        return unknown
    return status.st_dev, status.st_ino
