"""A folder of checkpoints, of which each is whole or is not there.

A checkpoint is written under a hidden name; renaming it is what makes it one. So a process that is killed at any
moment leaves all earlier checkpoints and, at worst, a hidden folder that the next save removes.
"""

import os
import re
import shutil
from pathlib import Path

from megaprec.checkpoint.store import INDEX


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"step_{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where it lies until it is whole."""
    return folder / f".step_{step:08d}.partial"


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints of `folder`, oldest first."""
    found = folder.glob("step_*") if folder.is_dir() else ()
    whole = (p for p in found if re.fullmatch(r"step_\d{8,}", p.name) and (p / INDEX).is_file())
    return sorted(whole, key=lambda p: int(p.name.removeprefix("step_")))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(checkpoints(folder)), None)


def remedy(path: Path) -> str:
    """What to do about the damaged checkpoint `path`; names the one before it, if there is one."""
    there = checkpoints(path.parent)
    earlier = there[: there.index(path)] if path in there else []
    return f"restore it, or remove it to {f'go on from {earlier[-1].name}' if earlier else 'start anew'}"


def begin(folder: Path, step: int) -> Path:
    """An empty hidden folder to write into; leftovers of interrupted saves are removed."""
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    partial = partial_path(folder, step)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path, step: int, keep: int) -> Path:
    """Makes the hidden folder the checkpoint of `step`, then removes all others but the newest `keep`."""
    final = checkpoint_path(folder, step)
    partial = partial_path(folder, step)
    sync(partial)
    hidden = [_hide(final)] if final.exists() else []
    partial.rename(final)
    sync(folder)
    hidden += [_hide(old) for old in checkpoints(folder)[: -keep or None] if old != final]
    for old in hidden:
        shutil.rmtree(old)
    return final


def _hide(path: Path) -> Path:
    """Before its files go, so that a checkpoint of which half is gone is not taken for a whole one."""
    return path.rename(path.with_name(f".{path.name}.removed.partial"))


def sync(path: Path) -> None:
    """Returns when the file, or the list of files of the folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
