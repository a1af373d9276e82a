"""Text sources: the standard library, a file, a folder, JSONL, Parquet.

A source is a stream of pieces `(document, text)`; consecutive pieces of one document have the same
name. Large files come in pieces of about a million characters, cut at line ends, so that no file
need fit into memory.

| given as            | documents                                                               |
|---------------------|-------------------------------------------------------------------------|
| `python`            | the running interpreter's standard library, its tests left out, in an   |
|                     | order that is scattered but always the same: any beginning is varied    |
| `FILE.jsonl`        | one a line, the text under `text_field`; also `.ndjson`, `.jsonlines`   |
| `FILE.json`, a list | one an item: a text, or an object with the text under `text_field`      |
| `FILE.parquet`      | one a row, the text in column `text_field`                              |
| any other file      | one, the whole file; tables, archives and the like (`NOT_READ`) are     |
|                     | refused                                                                 |
| a folder            | one a file (line, item, row) of its `SUFFIXES`, by path; `left_out` has |
|                     | the others: other endings, JSON that is no list, names with a leading   |
|                     | dot, links                                                              |

All but Parquet may be packed, with `.gz` or `.zst` at the end of the name. Endings may have any
case.

Text is UTF-8 and is not changed, line ends included. A folder called `python` is given as
`./python`.
"""

import hashlib
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaprec.data.readers import (
    JSON,
    PACKED,
    SUFFIXES,
    TEXT,
    OnFault,
    Piece,
    check_readable,
    form,
    is_list,
    pieces,
    raise_fault,
    require_read,
)
from megaprec.errors import Problem, UserError
from megaprec.parsing import home_expanded

SHOWN = 20  # lines about bad files and rows
ROW = re.compile(r"(.*?):\d+: (.*)", re.DOTALL)  # a line about a row: its file, and the reason
SEARCH_SECONDS = 60.0  # in which bad files and rows are searched for, once there is one
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A text source that can be read any number of times; iterating it yields its pieces.

    name: the name that the user gave.
    files: the files to read, in this order, below `root`.
    max_chars: number of characters after which reading stops, even within a document.
    skip_undecodable: skip files that are not UTF-8 instead of raising UserError.
    left_out: number of files of a folder that are not read, by the reason; empty ones, which give
        no text, are among `files` too.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"
    max_chars: int | None = None
    skip_undecodable: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces.

        Raises UserError that names all bad files and rows of the source, the first of many.
        """
        try:
            yield from self._read(raise_fault)
        except UserError as error:
            raise self._all_faults(error) from error

    def _read(self, on_fault: OnFault) -> Iterator[Piece]:
        """Yield the pieces.

        on_fault: called with the error of each document that is none and of each file that ends
            early.
        Raises the error where `on_fault` does.
        """
        remaining = self.max_chars
        for file in self.files:
            document = self._document(file)
            try:
                file_pieces = pieces(
                    file, document, self.text_field, self.skip_undecodable, on_fault
                )
                for name, text in file_pieces:
                    # the last piece may be cut
                    yield name, text[:remaining]
                    if remaining is not None:
                        remaining -= len(text)
                        if remaining <= 0:
                            return
            except UserError as error:
                on_fault(error)

    def _all_faults(self, first: UserError) -> UserError:
        """Return an error about all bad files and rows: a line for each file and reason, at most
        SHOWN of them.

        The whole source is read for it, for at most SEARCH_SECONDS seconds.
        first: the error that reading stopped at.
        """
        first_problems: dict[tuple[str, str], Problem] = {}  # by file and reason
        counts = Counter[tuple[str, str]]()

        def note(error: UserError) -> None:
            for problem in error.problems:
                row = ROW.fullmatch(problem)
                key = (row[1], row[2]) if row else (problem, "")
                first_problems.setdefault(key, problem)
                counts[key] += 1

        deadline = time.monotonic() + SEARCH_SECONDS
        # Read for its faults alone, which are noted on the way.
        for _ in self._read(note):
            if time.monotonic() > deadline:
                break
        if not first_problems:  # it can be read by now
            return first
        problems: list[Problem] = []
        num_others = 0
        for key, problem in first_problems.items():
            if len(problems) < SHOWN:
                problems.append(_with_others(problem, counts[key] - 1))
            else:
                num_others += counts[key]
        if num_others:
            at_least = "at least " if time.monotonic() > deadline else ""
            problems.append(
                Problem.of(
                    "data.other_bad_rows", name=self.name, at_least=at_least, num_others=num_others
                )
            )
        return UserError(*problems)

    def total_chars(self) -> int | None:
        """Return an estimate of the number of characters, from file sizes.

        It is `max_chars` if a file is packed or a table, whose sizes do not tell.
        """
        for file in self.files:
            is_packed = file.suffix.lower() in PACKED
            is_table = form(file) in SUFFIXES[len(TEXT) :]  # those after plain text
            if is_packed or is_table:
                return self.max_chars
        size = self.total_bytes()
        return size if self.max_chars is None else min(size, self.max_chars)

    def identity(self) -> dict[str, str | int | None]:
        """Return the identity of this text for the build record; it changes when a file's name,
        size or time does."""
        digest = hashlib.sha256()
        for file in self.files:
            state = file.stat()
            name = os.fsencode(self._document(file))  # a name need not be UTF-8
            digest.update(name + f"\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
        return {
            "name": self.name,
            "text_field": self.text_field,
            "max_chars": self.max_chars,
            "files": len(self.files),
            "files_sha256": digest.hexdigest(),
        }

    def total_bytes(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def _document(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


class TextDigest:
    """SHA-256 of the documents of a text, whatever their names are and in which pieces they come.

    chars: number of characters that were read.
    """

    def __init__(self) -> None:
        self.chars = 0
        self._hash = hashlib.sha256()

    def reading(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces of a text, and add them to the digest."""
        document: str | None = None
        for name, text in pieces:
            if name != document:
                self._hash.update(b"\xff")  # no byte of UTF-8
                document = name
            self._hash.update(text.encode(errors="surrogatepass"))
            self.chars += len(text)
            yield name, text

    def hexdigest(self) -> str:
        """Return the digest of what was read."""
        return self._hash.hexdigest()


def has_digest(
    source: Source,
    digest: str,
    chars: int,
) -> bool:
    """Return True if the text of a source has this digest. chars: its length; no more is read."""
    actual = TextDigest()
    for _ in actual.reading(source):
        if actual.chars > chars:
            return False
    return actual.chars == chars and actual.hexdigest() == digest


def open_source(
    name: str,
    *,
    text_field: str = "text",
    max_chars: int | None = None,
) -> Source:
    """Return the source `name` (see the module's table).

    Raises UserError if it does not exist or has no text.
    """
    if max_chars is not None and max_chars < 1:
        raise UserError.of("data.max_chars_zero", max_chars=max_chars)
    if name == "python":
        return _standard_library(max_chars)
    path = Path(home_expanded(name))
    _require_file_or_folder(name, path)
    left_out: dict[str, int] = {}
    if path.is_dir():
        root = path
        files, left_out = _text_files(path)
    else:
        require_read(path)
        root = path.parent
        files = [path]
    if not files:
        reasons = f" ({', '.join(left_out_words(left_out))} left out)" if left_out else ""
        raise UserError.of(
            "data.folder_without_text", name=name, suffixes=", ".join(SUFFIXES), reasons=reasons
        )
    if not any(file.stat().st_size for file in files):
        raise UserError.of("data.source_empty", name=name)
    check_readable(files)
    return Source(
        name,
        root,
        tuple(files),
        text_field,
        max_chars,
        left_out=left_out,
    )


def _require_file_or_folder(name: str, path: Path) -> None:
    """Raise UserError unless there is a file or folder at the path of this name."""
    if not path.exists():
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserError.of("data.source_missing", name=name, folder=folder)
    if not (path.is_dir() or path.is_file()):
        raise UserError.of("data.source_not_file", name=name)


def _with_others(problem: Problem, others: int) -> Problem:
    """Return the problem of a bad row, with the number of other rows of its file that have the same
    fault."""
    return problem.within(after=f"; so {others:,} other rows of this file") if others else problem


def left_out_words(left_out: Mapping[str, int]) -> list[str]:
    """Return the counts of files that are not read: 3 .html, 1 .pdf."""

    def most_first(reason: str) -> tuple[int, str]:
        return -left_out[reason], reason

    reasons = sorted(left_out, key=most_first)
    return [f"{left_out[reason]:,} {reason}" for reason in reasons]


def _text_files(root: Path) -> tuple[list[Path], dict[str, int]]:
    """Return the files of a folder that are read, by path, and the number of the others by the
    reason."""
    files: list[Path] = []
    left_out = Counter[str]()
    unreadable: list[Problem] = []
    for folder, subfolders, names in os.walk(root):
        # os.walk does not follow them
        left_out["links to folders"] += sum(Path(folder, name).is_symlink() for name in subfolders)
        left_out["hidden"] += sum(map(_is_hidden, [*subfolders, *names]))
        # in place: os.walk goes on with what is left
        subfolders[:] = [name for name in subfolders if not _is_hidden(name)]
        for name in names:
            if _is_hidden(name):
                continue
            file = Path(folder, name)
            try:
                reason = _why_left_out(file)
            except UserError as error:
                unreadable += error.problems
                continue
            if reason:
                left_out[reason] += 1
            else:
                files.append(file)
                left_out["empty"] += not file.stat().st_size
    if unreadable:
        problems = sorted(unreadable)[:SHOWN]
        if len(unreadable) > SHOWN:
            num_others = len(unreadable) - SHOWN
            problems.append(Problem.of("data.other_bad_files", root=root, num_others=num_others))
        raise UserError(*problems)
    return sorted(files), dict(+left_out)  # + leaves out what was not found


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _why_left_out(file: Path) -> str:
    """Return the reason why a file of a folder is no text; empty if it is one."""
    if not file.is_file():
        return "broken links or devices"
    file_form = form(file)
    if file_form not in SUFFIXES:
        endings = file.suffixes[-2:] if file.suffix in PACKED else [file.suffix]
        return "".join(endings).lower() or "without ending"
    if file_form == JSON and not is_list(file):
        return ".json that is no list"
    return ""


def _standard_library(max_chars: int | None) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root).as_posix(): file for file in _library_files(root)}
    if not files:
        raise UserError.of("data.no_standard_library", root=root)
    # by digest, so that any beginning has varied modules, and the same on every machine
    scattered = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    return Source(
        "python",
        root,
        tuple(files[name] for name in scattered),
        max_chars=max_chars,
        skip_undecodable=True,
    )


def _library_files(root: Path) -> Iterator[Path]:
    """Yield the sources below `root`.

    Installed packages, which may be large, are not even listed.
    """
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if name not in NOT_LIBRARY]
        subfolders[:] = [name for name in kept if not _is_hidden(name)]
        for name in names:
            file = Path(folder, name)
            if name.endswith(".py") and not _is_hidden(name) and file.is_file():
                yield file
