"""Atomic checkpoints: a folder in which each checkpoint is either complete or absent.

A checkpoint is written under a hidden name, and renaming it completes it. A process that is killed at any moment thus
leaves all earlier checkpoints intact and, at worst, a hidden folder that the next save removes. What cannot be removed
is never in the way: it is told in a warning, a new save takes another name, and each later save tries again.

Consequently a folder with the name of a checkpoint that is not a checkpoint was damaged later. It is refused, and so is
a folder that cannot be listed: ignoring it would start training from scratch and overwrite what may be the only copy.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path

from megaprec.checkpoint.reader import INDEX
from megaprec.durable import file_error, make_folder, sync
from megaprec.errors import UserError

NAME = re.compile(r"step_\d{8,}")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step_{step:08d}"


def partial_path(folder: Path, step: int, number: int = 1) -> Path:
    """Return the hidden path of the checkpoint of `step` while it is being written.

    number: from 2 on, if a leftover that cannot be removed has the names of smaller numbers.
    """
    return folder / f".step_{step:08d}{f'.{number}' if number > 1 else ''}.partial"


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


def begin(folder: Path, step: int) -> int:
    """Create an empty hidden folder for the checkpoint of `step`; return the number that `partial_path` needs.

    Raises OSError.
    """
    make_folder(folder)
    number = next(n for n in count(1) if not os.path.lexists(partial_path(folder, step, n)))
    partial_path(folder, step, number).mkdir()
    return number


def commit(folder: Path, step: int, partial: Path) -> Path:
    """Rename the hidden folder `partial` to the checkpoint of `step` and return its path.

    Raises OSError; then the checkpoints that were there before are still there, unless only the last flush failed.
    """
    final, hidden = checkpoint_path(folder, step), None
    sync(partial)
    if os.path.lexists(final):
        if _damage(final):  # damaged since the run began
            final.rename(_damaged_name(final))
        else:
            hidden = _hide(final)
    try:
        partial.rename(final)
    except OSError:
        if hidden is not None:
            hidden.rename(final)
        raise
    sync(folder)
    return final


def remove_leftovers(folder: Path) -> list[str]:
    """Remove hidden folders of interrupted saves and removals. Return a warning for each that cannot be removed."""
    leftovers = sorted(folder.glob(".step_*.partial"))
    return [_cannot_remove(path, error) for path in leftovers if (error := _remove(path))]


def remove_old(folder: Path, keep: int, new: Path) -> list[str]:
    """Remove all complete checkpoints but the newest `keep` and `new`, and all leftovers. Return a warning for each
    that cannot be removed.
    """
    warnings = []
    try:
        whole = [path for path in _named(folder) if not _damage(path)]
    except UserError as error:
        return list(error.problems)
    for old in whole[: -keep or None]:
        if old == new:
            continue
        try:
            _hide(old)
        except OSError as error:
            warnings.append(_cannot_remove(old, error))
    return [*warnings, *remove_leftovers(folder)]


def _cannot_remove(path: Path, error: OSError) -> str:
    return f"{path} cannot be removed, and each later save tries again: {file_error(error)}"


def _remove(path: Path) -> OSError | None:
    """Remove a folder; return the error that prevented it."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        return error
    return None


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
    return path.rename(_free(path, lambda n: f".{path.name}.removed{n if n > 1 else ''}.partial"))


def _damaged_name(path: Path) -> Path:
    """Return the first unused path among *.damaged, *.damaged2, ..."""
    return _free(path, lambda n: f"{path.name}.damaged{n if n > 1 else ''}")


def _free(path: Path, name: Callable[[int], str]) -> Path:
    return next(free for n in count(1) if not os.path.lexists(free := path.with_name(name(n))))
