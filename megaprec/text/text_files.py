"""The files of a text source: those that a name, a folder or a pattern stands for, and how many
are left out, by the reason."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from megaprec.errors import Problem, UserError
from megaprec.parsing import home_expanded
from megaprec.text.described_folders import described_files
from megaprec.text.forms import JSON, form, require_read
from megaprec.text.json_rows import is_list
from megaprec.text.packed_files import PACKED
from megaprec.text.readers import FOLDER_ENDINGS, TextOptions, lacks_column
from megaprec.text.walking import matching, walk
from megaprec.tokens.places import (
    is_folder,
    is_remote,
    is_url,
    naming_url,
    remote_path,
    require_there,
    size_of,
    without_query,
)

MOST_SHOWN = 20  # lines about files that cannot be read
NAMED_TWICE = "named twice"
LINKS = "links to folders"


@dataclass(frozen=True)
class FoundFiles:
    """Files to read, in this order, all below `root`.

    left_out: number of files that are not read, by the reason; empty ones, which give no text, are
        among `files` too.
    """

    root: Path
    files: tuple[Path, ...]
    left_out: Mapping[str, int]


def text_files(names: Sequence[str], options: TextOptions) -> FoundFiles:
    """Return the files that names of files and folders and patterns stand for.

    Raises UserError for a name that stands for no file, and for one that cannot be read.
    """
    left_out = Counter[str]()
    files: dict[Path, None] = {}  # a set that keeps its order
    roots: list[Path] = []
    paths = _all_paths(names, left_out)
    for path in paths:
        root = path if is_folder(path) else path.parent
        roots.append(root)
        for file in _files_at(path, root, options, left_out):
            # the same file may be spelled otherwise
            spelled = file if len(paths) == 1 else file.absolute()
            if spelled in files:
                left_out[NAMED_TWICE] += 1
            files[spelled] = None
    for file in files:
        if size_of(file) == 0:
            left_out["empty"] += 1
    root = roots[0] if len(paths) == 1 else _common_folder(roots)
    counts = dict(+left_out)  # + leaves out what was not found
    for pattern in options.exclude:
        # a pattern that excludes nothing may be misspelled
        counts.setdefault(_excluded_by(pattern), 0)
    return FoundFiles(root, tuple(files), counts)


def _all_paths(names: Sequence[str], left_out: Counter[str]) -> list[Path]:
    """Return the files and folders of all names. Raises UserError if some are URLs and some not."""
    paths = [path for name in names for path in _paths(name, left_out)]
    num_remote = sum(map(is_remote, paths))
    if 0 < num_remote < len(paths):
        raise UserError.of("data.url_beside_files", names=", ".join(names))
    return paths


def _paths(name: str, left_out: Counter[str]) -> list[Path]:
    """Return the file or folder of a name, or those that match a pattern, by path. Raises
    UserError if there is none."""
    if is_url(name):
        with naming_url(name):
            return _remote_paths(name)
    expanded = home_expanded(name)
    path = Path(expanded)
    if not path.exists() and has_magic(expanded):
        matches, links = matching(expanded)
        if not matches:
            raise UserError.of("data.pattern_without_match", pattern=name)
        # What lies in a folder that matches too is read with the folder.
        folders = {match for match in matches if match.is_dir()}
        other_links = [link for link in links if folders.isdisjoint(link.parents)]
        left_out[LINKS] += len(other_links)
        return [match for match in matches if folders.isdisjoint(match.parents)]
    if not path.exists():
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserError.of("data.source_missing", name=name, folder=folder)
    if not (path.is_dir() or path.is_file()):
        raise UserError.of("data.source_not_file", name=name)
    return [path]


def _remote_paths(url: str) -> list[Path]:
    """Return the file or folder of a URL, or those that match a pattern, by path. Raises UserError
    if there is none."""
    path = remote_path(url)
    if not has_magic(without_query(url)):
        require_there(path, url)
        return [path]
    # the deepest folder whose name is no pattern
    folder = next(parent for parent in path.parents if not has_magic(str(parent)))
    pattern = path.relative_to(folder).as_posix()
    matches = sorted(match for match in folder.glob(pattern) if not match.is_dir())
    if not matches:
        raise UserError.of("data.pattern_without_match", pattern=url)
    return matches


def _common_folder(folders: Sequence[Path]) -> Path:
    """Return the deepest folder that all of these lie in."""
    if is_remote(folders[0]):
        candidates = [folders[0], *folders[0].parents]
        return next(
            candidate
            for candidate in candidates
            if all(candidate == folder or candidate in folder.parents for folder in folders)
        )
    return Path(os.path.commonpath([folder.absolute() for folder in folders]))


def _files_at(
    path: Path, root: Path, options: TextOptions, left_out: Counter[str]
) -> Sequence[Path]:
    """Return the files to read at a path, a file or a folder, and count the others in `left_out`.

    root: the path itself if it is a folder, else the folder of the file.
    Raises UserError.
    """
    if path is root:  # a folder
        described = described_files(path)
        if described is not None:
            return list(_not_excluded(described, path, options.exclude, left_out))
        if is_remote(path):
            return _remote_files(path, options, left_out)
        return _files_of_folder(path, options, left_out)
    if pattern := _excluding(path, root, options.exclude):
        left_out[_excluded_by(pattern)] += 1
        return []
    require_read(path)
    return [path]


def _not_excluded(
    files: Sequence[Path], root: Path, exclude: Sequence[str], left_out: Counter[str]
) -> Iterator[Path]:
    """Yield the files that no pattern excludes, and count the others."""
    for file in files:
        if pattern := _excluding(file, root, exclude):
            left_out[_excluded_by(pattern)] += 1
        else:
            yield file


def _files_of_folder(root: Path, options: TextOptions, left_out: Counter[str]) -> list[Path]:
    """Return the files of a folder that are read, by path, and count the others by the reason."""
    files: list[Path] = []
    unreadable: list[Problem] = []
    for folder, subfolders, names in walk(root):
        kept_folders = [*_kept(folder, subfolders, root, options.exclude, left_out)]
        # in place: the walk goes on with what is left
        subfolders[:] = [kept.name for kept in kept_folders]
        links = {name for name in names if (folder / name).is_dir()}
        left_out[LINKS] += len(links)
        files_and_links = [name for name in names if name not in links]
        for file in _kept(folder, files_and_links, root, options.exclude, left_out):
            try:
                reason = _why_left_out(file, options)
            except UserError as error:
                unreadable += error.problems
                continue
            if reason:
                left_out[reason] += 1
            else:
                files.append(file)
    if unreadable:
        problems = sorted(unreadable)[:MOST_SHOWN]
        if len(unreadable) > MOST_SHOWN:
            num_others = len(unreadable) - MOST_SHOWN
            problems.append(Problem.of("data.other_bad_files", root=root, num_others=num_others))
        raise UserError(*problems)
    return sorted(files)


def _remote_files(root: Path, options: TextOptions, left_out: Counter[str]) -> list[Path]:
    """Return the files of a folder at a URL that are read, by path, and count the others."""
    files: list[Path] = []
    for file in root.rglob("*"):
        if file.is_dir():
            continue
        folders = [folder for folder in file.parents if root in folder.parents]
        at_or_above = [*reversed(folders), file]
        patterns = [_excluding(path, root, options.exclude) for path in at_or_above]
        excluding = next(filter(None, patterns), "")
        if any(is_hidden(path.name) for path in at_or_above):
            left_out["hidden"] += 1
        elif excluding:
            left_out[_excluded_by(excluding)] += 1
        elif reason := _why_left_out(file, options):
            left_out[reason] += 1
        else:
            files.append(file)
    return sorted(files)


def _kept(
    folder: Path, names: Sequence[str], root: Path, exclude: Sequence[str], left_out: Counter[str]
) -> Iterator[Path]:
    """Yield what lies in a folder under these names and is not hidden nor excluded; count the
    others."""
    for name in names:
        path = folder / name
        if is_hidden(name):
            left_out["hidden"] += 1
        elif pattern := _excluding(path, root, exclude):
            left_out[_excluded_by(pattern)] += 1
        else:
            yield path


def _excluding(path: Path, root: Path, exclude: Sequence[str]) -> str:
    """Return the first pattern that matches a path below `root` or its name; "" if none does."""
    below = path.relative_to(root).as_posix()
    for pattern in exclude:
        if fnmatchcase(below, pattern) or fnmatchcase(path.name, pattern):
            return pattern
    return ""


def _excluded_by(pattern: str) -> str:
    """Return the reason of files that a pattern leaves out."""
    return f"excluded by {pattern}"


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file."""
    return name.startswith(".")


def _why_left_out(file: Path, options: TextOptions) -> str:
    """Return the reason why a file of a folder is no text; empty if it is one."""
    if not file.is_file():
        return "broken links or devices"
    file_form = form(file)
    if file_form not in FOLDER_ENDINGS:
        endings = file.suffixes[-2:] if file.suffix in PACKED else [file.suffix]
        return "".join(endings).lower() or "without ending"
    if file_form == JSON and not is_list(file):
        return ".json that is no list"
    if lacks_column(file, options):
        return f"{file_form} without a column {options.field!r}"
    return ""


def left_out_words(left_out: Mapping[str, int]) -> list[str]:
    """Return the counts of files that are not read: 3 .html, 1 .pdf."""

    def most_first(reason: str) -> tuple[int, str]:
        return -left_out[reason], reason

    reasons = sorted(left_out, key=most_first)
    return [f"{left_out[reason]:,} {reason}" for reason in reasons]
