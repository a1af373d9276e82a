"""Atomic checkpoints: a folder or URL in which each checkpoint is either complete or absent.

A checkpoint is written under a hidden name, and renaming it completes it. A process that is killed
at any moment thus leaves all earlier checkpoints intact and, at worst, a hidden folder that the
next save removes. What cannot be removed is never in the way: it is told in a warning, a new save
takes another name, and each later save tries again.

Consequently a folder with the name of a checkpoint that is not a checkpoint was damaged later. It
is refused, and so is a folder that cannot be listed: ignoring it would start training from scratch
and overwrite what may be the only copy.

At a URL nothing can be renamed: checkpoint.json, which is written last, completes a checkpoint
there (`object_store`). A path of a URL stands under the type `Path` (`megaprec.tokens.places`).
"""

import math
import os
import re
import shutil
import stat
from itertools import count
from pathlib import Path

from megaprec.checkpoint import object_store
from megaprec.durable import PlaceError, file_error, make_folder, sync, write_file
from megaprec.errors import Problem, UserError
from megaprec.tokens.places import is_remote

INDEX = "checkpoint.json"  # in each checkpoint
# more digits from step 100,000,000 on
NAME = re.compile(r"step_\d{8,}")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step_{step:08d}"


def partial_path(folder: Path, step: int, number: int = 1) -> Path:
    """Return the hidden path of the checkpoint of `step` while it is being written.

    number: from 2 on, if a leftover that cannot be removed has the names of smaller numbers. At a
    URL the path is that of the checkpoint itself.
    """
    if is_remote(folder):
        return checkpoint_path(folder, step)
    suffix = f".{number}" if number > 1 else ""
    return folder / f".step_{step:08d}{suffix}.partial"


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in `folder`, oldest first; none if the folder does not exist.

    Raises UserError if the folder cannot be listed, or if an entry has the name of a checkpoint but
    is not one.
    """
    paths: list[Path] = []
    problems: list[Problem] = []
    for path in _entries(folder):
        damage = _damage(path)
        # a run may have removed an old one since it was listed, which is no damage
        if not is_there(path):
            continue
        paths.append(path)
        if damage:
            problems.append(
                Problem.of("checkpoint.damaged", path=path, damage=damage, remedy=remedy(path))
            )
    if problems:
        raise UserError(*problems)
    return paths


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder`, None if there is none. Older ones may be damaged:
    see `damaged_beside`.

    Raises UserError if the folder cannot be listed, or if its newest entry with the name of a
    checkpoint is not one.
    """
    # A run may remove the newest entry after it was listed: then the folder is listed again.
    while entries := _entries(folder):
        newest = entries[-1]
        damage = _damage(newest)
        if not damage:
            return newest
        if is_there(newest):
            raise UserError.of(
                "checkpoint.damaged_newest", newest=newest, damage=damage, remedy=remedy(newest)
            )
    return None  # it was removed in the meantime, or there never was one


def damaged_beside(newest: Path) -> list[str]:
    """Return a line for each older entry beside a checkpoint that has the name of one but is not
    one."""
    lines: list[str] = []
    for path in _entries(newest.parent):
        damage = _damage(path)
        if damage and step_of(path) < step_of(newest) and is_there(path):
            lines.append(f"{path} is damaged: {damage}: it is not used, and stays")
    return lines


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first, without what is damaged.

    Raises UserError if the folder cannot be listed.
    """
    return [path for path in _entries(folder) if not _damage(path)]


def checkpoint_at(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, else the newest checkpoint in it, a run directory or
    folder of checkpoints.

    None if there is no checkpoint. Raises UserError as `checkpoints` does.
    """
    if is_remote(path):
        return _checkpoint_at_url(path)
    if not path.is_dir():
        return None
    if NAME.fullmatch(path.name) and (damage := _damage(path)):
        raise UserError.of("checkpoint.damaged_named", path=path, damage=damage)
    if (path / INDEX).is_file():  # a checkpoint that was renamed
        return path
    return latest(path / "checkpoints") or latest(path)


def _checkpoint_at_url(url: Path) -> Path | None:
    """Return what `checkpoint_at` does for a URL, which may also be one of checkpoints alone."""
    object_store.require_read_from(url)
    if _is_whole_at_url(url):
        return url
    if NAME.fullmatch(url.name) and is_there(url):
        raise UserError.of("checkpoint.damaged_named", path=url, damage=_damage(url))
    return latest(url / "checkpoints") or latest(url)


def _is_whole_at_url(url: Path) -> bool:
    """Return True if the index of a checkpoint is at a URL. Raises UserError if its server does not
    say."""
    try:
        return object_store.is_object(url / INDEX)
    except PlaceError as error:
        raise _unreachable(error) from error


def _unreachable(error: PlaceError) -> UserError:
    return UserError.of("checkpoint.url_failed", url=error.filename, reason=error.reason)


def is_there(path: Path) -> bool:
    """Return True if something has this path, also a link to nothing. Raises UserError for a URL
    whose server does not say."""
    if not is_remote(path):
        return os.path.lexists(path)
    try:
        return bool(object_store.entry_names(path))
    except PlaceError as error:
        raise _unreachable(error) from error


def replaced_since(moment: float, error_text: str, run: Path) -> bool:
    """Return True if an error names a checkpoint of a run that a save has removed or replaced since
    `moment`: then it says nothing about the run, and looking again helps.

    moment: as of time.time(), before the checkpoint was looked for.
    error_text: of the error.
    run: the run directory, or its folder of checkpoints, in which the newest was looked for.
    """
    if is_remote(run) or NAME.fullmatch(run.name) or not run.is_dir():
        return False
    for name in set(NAME.findall(error_text)):
        for path in (run / "checkpoints" / name, run / name):
            if str(path) in error_text and _changed_at(path) >= moment:
                return True
    return False


def _changed_at(path: Path) -> float:
    """Return the time at which an entry of a folder was made or changed, infinity if it is not
    there."""
    try:
        return path.lstat().st_ctime  # a renaming changes it, but not the time of modification
    except FileNotFoundError:
        return math.inf


def require_room(folder: Path) -> None:
    """Raise UserError if a save into `folder` would fail: no write permission, or another file has
    a hidden name. At a URL an object is written and removed for it."""
    if is_remote(folder):
        object_store.require_saved_to(str(folder))
        try:
            object_store.require_writable(folder)
        except PlaceError as error:
            raise _unreachable(error) from error
        return
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError.of("checkpoint.folder_not_writable", folder=folder)
    for leftover in sorted(folder.glob(".step_*.partial")):
        # a link is not followed: what it leads to is not a save's to remove
        if leftover.is_symlink() or not leftover.is_dir():
            raise UserError.of("checkpoint.unfinished_name_taken", left=leftover)


def remedy(path: Path) -> str:
    """Return advice about the damaged checkpoint `path`; it names the previous checkpoint, if there
    is one."""
    if not NAME.fullmatch(path.name):  # a copy of one, or a merged one, which no run goes on from
        return "restore it"
    step = step_of(path)
    earlier = [
        entry for entry in _entries(path.parent) if step_of(entry) < step and not _damage(entry)
    ]
    if earlier:
        return f"restore it, or move it away to go on from {earlier[-1].name}"
    return "restore it, or move it away to start anew"


def begin(folder: Path, step: int) -> int:
    """Create an empty hidden folder for the checkpoint of `step`; return the number that
    `partial_path` needs.

    Raises OSError. At a URL the folder has the checkpoint's own name, and is refused if anything is
    in it: nothing there is ever replaced.
    """
    if is_remote(folder):
        path = checkpoint_path(folder, step)
        if object_store.entry_names(path):
            raise PlaceError(path, "it is there already, and is not replaced: move it away")
        object_store.begin_prefix(path)
        return 1
    make_folder(folder)
    number = 1
    while os.path.lexists(partial_path(folder, step, number)):
        number += 1
    partial_path(folder, step, number).mkdir()
    return number


def stage_index(partial: Path, index: bytes) -> None:
    """Write the index of a checkpoint into its hidden folder; at a URL, where it would complete the
    checkpoint, `commit` writes it. Raises OSError."""
    if not is_remote(partial):
        write_file(partial / INDEX, index)


def commit(folder: Path, step: int, partial: Path, index: bytes) -> Path:
    """Rename the hidden folder `partial` to the checkpoint of `step`, in place of one that is
    there; at a URL, write its index. Return its path.

    Raises OSError; then the checkpoints that were there before are still there, unless only the
    last flush failed.
    """
    final = checkpoint_path(folder, step)
    if is_remote(folder):
        object_store.commit_prefix(final, INDEX, index)
        return final
    sync(partial)  # what is in it is on the disk before its name says that it is complete
    hidden = _hide(final) if os.path.lexists(final) else None
    try:
        partial.rename(final)
    except OSError:
        # the checkpoint that was there is put back
        if hidden is not None:
            hidden.rename(final)
        raise
    sync(folder)  # without it a power cut could undo the renaming
    return final


def remove_leftovers(folder: Path) -> list[str]:
    """Remove hidden folders of interrupted saves and removals. Return a warning for each that
    cannot be removed."""
    if is_remote(folder):
        return _remove_leftovers_at_url(folder)
    warnings: list[str] = []
    for path in sorted(folder.glob(".step_*.partial")):
        error = _remove(path)
        if error is not None:
            warnings.append(_removal_warning(path, error))
    return warnings


def _remove_leftovers_at_url(folder: Path) -> list[str]:
    """Do what `remove_leftovers` does for a URL: remove what is unfinished, and the mark
    `.unfinished` that a save has left beside a complete checkpoint."""
    try:
        names = sorted(filter(NAME.fullmatch, object_store.entry_names(folder)))
    except PlaceError as error:
        return [_removal_warning(folder, error)]
    warnings: list[str] = []
    for path in (folder / name for name in names):
        try:
            found = object_store.entry_names(path)
            if object_store.is_unfinished(found, INDEX):
                object_store.remove_prefix(path)
            elif object_store.UNFINISHED in found:
                object_store.remove_object(path / object_store.UNFINISHED)
        except PlaceError as error:
            warnings.append(_removal_warning(path, error))
    return warnings


def hide(path: Path) -> list[str]:
    """Give a checkpoint a hidden name, by which `remove_leftovers` finds it; at a URL, make it an
    unfinished one. Return a warning if that fails."""
    try:
        if is_remote(path):
            object_store.hide_prefix(path, INDEX)
            return []
        _hide(path)
    except OSError as error:
        return [_removal_warning(path, error)]
    return []


def _removal_warning(path: Path, error: OSError) -> str:
    return f"{path} cannot be removed, and each later save tries again: {file_error(error)}"


def _remove(path: Path) -> OSError | None:
    """Remove a folder; return the error that prevented it."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        return error
    return None


def _entries(folder: Path) -> list[Path]:
    """Return the entries of `folder` that have the name of a checkpoint, oldest first; none if it
    does not exist. Raises UserError if it cannot be listed."""
    if is_remote(folder):
        return _entries_at_url(folder)
    # each case is told apart: what cannot be seen is not the same as what is not there
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError.of(
            "checkpoint.folder_not_visible", folder=folder, reason=error.strerror
        ) from error
    if not folder.exists():
        raise UserError.of(
            "checkpoint.folder_link_broken", folder=folder, target=os.readlink(folder)
        )
    if not folder.is_dir():
        raise UserError.of("checkpoint.folder_is_file", folder=folder)
    try:
        names = [name for name in os.listdir(folder) if NAME.fullmatch(name)]
    except OSError as error:
        raise UserError.of(
            "checkpoint.folder_not_listable", folder=folder, reason=error.strerror
        ) from error
    return sorted((folder / name for name in names), key=step_of)


def _entries_at_url(folder: Path) -> list[Path]:
    """Return what `_entries` does for a URL, without what is unfinished."""
    object_store.require_read_from(folder)
    entries: list[Path] = []
    try:
        for name in filter(NAME.fullmatch, object_store.entry_names(folder)):
            found = object_store.entry_names(folder / name)
            # one that has just been removed has nothing
            if found and not object_store.is_unfinished(found, INDEX):
                entries.append(folder / name)
    except PlaceError as error:
        raise _unreachable(error) from error
    return sorted(entries, key=step_of)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def _damage(path: Path) -> str:
    """Return the reason why `path` is not a checkpoint; empty if its index is a file, whose content
    is not read."""
    index = path / INDEX
    if is_remote(path):
        return "" if _is_whole_at_url(path) else f"it has no {INDEX}"
    try:
        if stat.S_ISREG(index.stat().st_mode):
            return ""
    except FileNotFoundError:
        if index.is_symlink():
            return f"its {INDEX} is a link to nothing"
        return f"it has no {INDEX}"
    except NotADirectoryError:
        return "it is no folder"
    except OSError as error:
        return f"its {INDEX} cannot be looked at ({error.strerror})"
    return f"its {INDEX} is no file"


def _hide(path: Path) -> Path:
    """Rename a checkpoint to a hidden name before it is removed, so that a half-removed one is not
    taken for a complete one."""
    return path.rename(free_path(path, f".{path.name}.removed", ".partial"))


def free_path(path: Path, name: str, suffix: str = "") -> Path:
    """Return the first unused path beside `path` among NAME, NAME2, NAME3, ..., each with the
    suffix."""
    for number in count(1):
        free = path.with_name(f"{name}{number if number > 1 else ''}{suffix}")
        if not os.path.lexists(free):
            return free
    raise AssertionError("count has no end")
