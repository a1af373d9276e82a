"""The files of folders and patterns of this machine.

A link to a folder is followed only where its name is spelled out: neither folders nor the parts of
a pattern with signs such as `*` go through one, for links may lead back to where they are.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from megaprec.errors import UserError
from megaprec.tokens.bounds import MAX_FOLDERS

ANY_FOLDERS = "**"


def walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder from `root` down, the names of folders in it, and of what else is in it:
    files and links. Folders whose names are taken out of the list are not gone into.

    Raises UserError for folders too deep in each other, and for one that cannot be listed.
    """
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        if depth > MAX_FOLDERS:
            raise UserError.of("data.folders_too_deep", root=root, most=MAX_FOLDERS)
        folders: list[str] = []
        others: list[str] = []
        for entry in _entries(folder):
            kind = folders if entry.is_dir(follow_symlinks=False) else others
            kind.append(entry.name)
        yield folder, folders, others
        waiting += [(folder / name, depth + 1) for name in folders]


def matching(pattern: str) -> tuple[list[Path], set[Path]]:
    """Return the files and folders that match a pattern, by path, and the links to folders that
    were not followed.

    Names with a leading dot match only a part that has one too.
    """
    first, *parts = Path(pattern).parts
    # what matches the parts so far, in a set that keeps its order
    if first == os.sep:
        matches = {Path(first): None}
    else:
        matches = {Path(): None}
        parts = [first, *parts]
    links: set[Path] = set()
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        matches_with_part: dict[Path, None] = {}
        for path in matches:
            for match in _matches(path, part, is_last, links):
                matches_with_part[match] = None
        matches = matches_with_part
    return sorted(matches), links


def _matches(path: Path, part: str, is_last: bool, links: set[Path]) -> Iterator[Path]:
    """Yield what matches a part of a pattern at a path: only folders if the part has signs and is
    not the last one. Links to folders that are not followed are added to `links`."""
    if part == ANY_FOLDERS:
        yield from _below(path, is_last, links)
    elif has_magic(part):
        for name in _names_in(path, links, with_files=is_last):
            if fnmatchcase(name, part) and (part.startswith(".") or not name.startswith(".")):
                yield path / name
    elif (path / part).exists():
        yield path / part


def _below(root: Path, with_files: bool, links: set[Path]) -> Iterator[Path]:
    """Yield a folder, and all folders below it, and files with `with_files`, whose names have no
    leading dot. Links to folders are added to `links`."""
    if not root.is_dir():
        return
    for folder, folders, others in walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield folder
        for name in others:
            path = folder / name
            if path.is_dir():
                links.add(path)
            elif with_files and not name.startswith("."):
                yield path


def _names_in(folder: Path, links: set[Path], with_files: bool) -> Iterator[str]:
    """Yield the names in a folder but for those of links to folders, which are added to
    `links`."""
    if not folder.is_dir():
        return
    for entry in _entries(folder):
        # not by the entry, which raises an error for a link to itself
        is_folder = os.path.isdir(entry.path)
        if is_folder and entry.is_symlink():
            links.add(folder / entry.name)
        elif with_files or is_folder:
            yield entry.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, by name. Raises UserError, which names it, if it cannot be
    listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as problem:
        raise UserError.of(
            "data.folder_not_listable", folder=folder, reason=problem.strerror
        ) from problem
