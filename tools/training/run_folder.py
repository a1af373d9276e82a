"""The folder of a run: that it can be written to, its lock, and that it stays there."""

import errno
import os
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import product
from pathlib import Path

import torch

from megaprec.checkpoint.atomic import require_room
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.tokens.files import exclusive_lock
from megaprec.tokens.places import STANDARD_LIBRARY, is_url
from tools.config.run_file import RunConfig
from tools.config.tables.data_settings import names_of
from tools.journal.records import EVENTS, FILE_OF_EVENT, METRICS

LOCK = ".lock"
Identity = tuple[int, int] | None  # device and inode; None if there is nothing


def check_folders(config: RunConfig) -> None:
    """Raise UserError if the folders of the run cannot be written to."""
    _check_writable("train.folder", config.train.folder)
    _check_writable("data.cache", config.data.cache)
    if not is_url(config.checkpoint.folder):
        _check_writable("checkpoint.folder", config.checkpoint.folder)
    _check_outside(config)
    require_room(config.checkpoint_folder)
    folder = Path(config.train.folder)
    for name in (METRICS, EVENTS, *FILE_OF_EVENT.values()):
        _require_file(folder / name, "the records of steps")
    _require_file(folder / "run.toml", "the run's keys")
    if _lock_path(config).exists():
        with lock_folder(config):  # raises if another process trains there
            pass


def _check_writable(key: str, folder: str) -> None:
    """Raise UserError if `folder`, the value of `key`, cannot be made or written to."""
    if not folder:
        return
    # the folder itself, or the nearest one above it that exists
    existing = Path(folder).absolute()
    # The root always exists.
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError.of("command.folder_is_file", key=key, folder=folder, existing=existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError.of("command.folder_read_only", key=key, folder=folder, existing=existing)


def _require_file(path: Path, content: str) -> None:
    """Raise UserError if something else than a file is where `content` will be written."""
    if os.path.lexists(path) and not path.is_file():
        raise UserError.of("command.name_of_file_taken", path=path, content=content)


def _check_outside(config: RunConfig) -> None:
    """Raise UserError if the run folder or that of its checkpoints lies in a folder of text: its
    records would be read as text the next time.
    """
    data = config.data
    folders = [("train.folder", config.train.folder)]
    if config.checkpoint.folder and not is_url(config.checkpoint.folder):
        folders.append(("checkpoint.folder", config.checkpoint.folder))
    sources = []
    for number, blended in enumerate(data.blend):
        key = f"data.blend[{number}].source"
        sources += [(key, name) for name in names_of(blended.source)]
    # data.source alone is read if there is no blend
    if not sources:
        sources += [("data.source", name) for name in names_of(data.source)]
    for evaluated in data.validation:
        key = f"data.validation {evaluated.name}"
        sources += [(key, name) for name in names_of(evaluated.source)]
    for (folder_key, folder), (source_key, source) in product(folders, sources):
        if _would_be_read(Path(folder).resolve(), source):
            raise UserError.of(
                "command.folder_in_source",
                written=folder_key,
                folder=folder,
                key=source_key,
                source=source,
            )


def _would_be_read(folder: Path, source: str) -> bool:
    """Return True if records in the run folder would be part of a text.

    folder: as an absolute path.
    """
    # "python" names the sources of the interpreter, not a folder
    if source == STANDARD_LIBRARY:
        return False
    if Path(source).is_dir():
        # the text of a folder is all files below it
        return folder.is_relative_to(Path(source).resolve())
    # `*` stands for `/` too: a pattern is refused rather once too often
    pattern = os.path.abspath(source)
    return has_magic(source) and fnmatchcase(str(folder / METRICS), pattern)


def lock_folder(config: RunConfig) -> AbstractContextManager[None]:
    """Return the context in which the run folder is locked, so that no other process trains in it.
    Raises UserError if one does."""

    def refuse() -> None:
        raise UserError.of("command.folder_in_use", folder=config.train.folder)

    # a lock of the operating system, which ends with the process
    return exclusive_lock(_lock_path(config), refuse)


def _lock_path(config: RunConfig) -> Path:
    return Path(config.train.folder) / LOCK


class RunFolder:
    """The run's folder and its lock file, if there is one, as they are now.

    Files that are open stay writable after they are removed, so a run would train on for days and
    leave nothing; and without the lock file a second run could start in the same place. Rank 0
    therefore looks after every step whether the folder and its lock are those that it began with.
    If not, all ranks stop together after the next step. They save nothing: a new folder of that
    name belongs to whoever made it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._identities: dict[Path, Identity] = {}  # of what was there when the run began
        watched = (folder, folder / LOCK) if rank == 0 else ()
        for path in watched:
            identity = _identity(path)
            if identity:
                self._identities[path] = identity

    def is_gone(self) -> bool:
        """Return True if the folder or its lock file was removed or replaced meanwhile."""
        # A filesystem that does not answer for a while is no reason to stop: as before, then.
        for path, identity in self._identities.items():
            if _identity(path, unknown=identity) != identity:
                return True
        return False

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
