"""Atomic checkpoints: a folder in which each checkpoint is either complete or absent.

A checkpoint is written under a hidden name, and renaming it completes it. A process that is killed at any moment thus
leaves all earlier checkpoints intact and, at worst, a hidden folder that the next save removes.

Consequently a folder with the name of a checkpoint that is not a checkpoint was damaged later. It is refused, and so is
a folder that cannot be listed: ignoring it would start training from scratch and overwrite what may be the only copy.
"""

import os
import re
import shutil
import stat
from itertools import count
from pathlib import Path

from megaprec.checkpoint.reader import INDEX
from megaprec.errors import UserError

NAME = re.compile(r"step_\d{8,}")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step_{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the hidden path of the checkpoint of `step` while it is being written."""
    return folder / f".step_{step:08d}.partial"


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in `folder`, oldest first; none if the folder does not exist.

    Raises UserError if the folder cannot be listed, or if an entry has the name of a checkpoint but is not one.
    """
    found = _named(folder)
    damage = {path: _damage(path) for path in found}
    found = [path for path in found if os.path.lexists(path)]  # a run may have removed an old one in the meantime
    if problems := [f"{path} is damaged: {damage[path]}: {remedy(path)}" for path in found if damage[path]]:
        raise UserError(*problems)
    return found


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder`, None if there is none. Raises UserError as `checkpoints` does."""
    return next(reversed(checkpoints(folder)), None)


def checkpoint_at(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, else the newest checkpoint in it, a run directory or folder of checkpoints.

    None if there is no checkpoint. Raises UserError as `checkpoints` does.
    """
    if not path.is_dir():
        return None
    if NAME.fullmatch(path.name) and (why := _damage(path)):
        raise UserError(f"{path} is damaged: {why}: restore it, or give another")
    if (path / INDEX).is_file():
        return path
    return latest(path / "checkpoints") or latest(path)


def require_room(folder: Path) -> None:
    """Raise UserError if a save into `folder` would fail: no write permission, or another file has a hidden name."""
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} may not be written to, and checkpoints belong there: allow it, or move it away")
    for left in sorted(folder.glob(".step_*.partial")):
        if left.is_symlink() or not left.is_dir():
            raise UserError(f"{left} is no folder, but has the name of an unfinished checkpoint: move it away")


def remedy(path: Path) -> str:
    """Return advice about the damaged checkpoint `path`; it names the previous checkpoint, if there is one."""
    earlier = [other for other in _named(path.parent) if _step(other) < _step(path) and not _damage(other)]
    return f"restore it, or move it away to {f'go on from {earlier[-1].name}' if earlier else 'start anew'}"


def begin(folder: Path, step: int) -> Path:
    """Create the empty hidden folder for the checkpoint of `step` and return it; remove those of interrupted saves."""
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    partial = partial_path(folder, step)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path, step: int, keep: int) -> Path:
    """Rename the hidden folder to the checkpoint of `step`, then remove all complete ones but the newest `keep`."""
    final = checkpoint_path(folder, step)
    partial = partial_path(folder, step)
    sync(partial)
    hidden = []
    if os.path.lexists(final) and _damage(final):  # damaged since the run began
        final.rename(_damaged_name(final))
    elif final.exists():
        hidden.append(_hide(final))
    partial.rename(final)
    sync(folder)
    whole = [path for path in _named(folder) if not _damage(path)]
    hidden += [_hide(old) for old in whole[: -keep or None] if old != final]
    for old in hidden:
        shutil.rmtree(old)
    return final


def _named(folder: Path) -> list[Path]:
    """Return the entries of `folder` that have the name of a checkpoint, oldest first."""
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be looked at ({error.strerror}): allow it, or give another folder") from error
    if not folder.exists():
        raise UserError(f"{folder} is a link to {os.readlink(folder)}, which is not there: mount it, or move the link")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder, but checkpoints belong there: move it away")
    try:
        names = [name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except OSError as error:
        raise UserError(
            f"{folder} cannot be listed ({error.strerror}), and there may be checkpoints in it: allow it to be read, "
            "or move it away"
        ) from error
    return sorted((folder / name for name in names), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _damage(path: Path) -> str:
    """Return the reason why `path` is not a checkpoint; empty if its index is a file, whose content is not read."""
    index = path / INDEX
    try:
        if stat.S_ISREG(index.stat().st_mode):
            return ""
    except FileNotFoundError:
        return f"its {INDEX} is a link to nothing" if index.is_symlink() else f"it has no {INDEX}"
    except NotADirectoryError:
        return "it is no folder"
    except OSError as error:
        return f"its {INDEX} cannot be looked at ({error.strerror})"
    return f"its {INDEX} is no file"


def _hide(path: Path) -> Path:
    """Rename a checkpoint to a hidden name before it is removed, so that a half-removed one is not taken for a
    complete one."""
    return path.rename(path.with_name(f".{path.name}.removed.partial"))


def _damaged_name(path: Path) -> Path:
    """Return the first unused path among *.damaged, *.damaged2, ..."""
    names = (f"{path.name}.damaged{number if number > 1 else ''}" for number in count(1))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def sync(path: Path) -> None:
    """Wait until the file, or the list of files of the folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
