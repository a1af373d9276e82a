"""Text sources: the standard library, a file, a folder, JSONL, Parquet.

A source is a stream of pieces `(document, text)`; consecutive pieces of one document have the same name. Large
files come in pieces of about a million characters, cut at line ends, so that no file need fit into memory.

| given as                        | documents                                                                    |
|---------------------------------|------------------------------------------------------------------------------|
| `python`                        | the running interpreter's standard library, its tests left out, in an order   |
|                                 | that is scattered but always the same: any beginning holds varied modules     |
| `FILE.jsonl`, `.gz` and `.zst`  | one a line, the text under `text_field`                                       |
| `FILE.parquet`                  | one a row, the text in column `text_field`                                    |
| any other file                  | one, the whole file                                                           |
| a folder                        | one a file (line, row) of its `SUFFIXES`, by path; names with a dot left out    |

Text is UTF-8 and is not changed, line ends included. A folder called `python` is given as `./python`.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaprec.data.readers import JSONL, PARQUET, SUFFIXES, Piece, check_readable, pieces
from megaprec.errors import UserError

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A text source that can be read any number of times; iterating it yields its pieces.

    name: the name that the user gave. files: the files to read, in this order, below `root`. max_chars: number of
    characters after which reading stops, even within a document. skip_undecodable: skip files that are not UTF-8
    instead of raising UserError.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"
    max_chars: int | None = None
    skip_undecodable: bool = False

    def __iter__(self) -> Iterator[Piece]:
        left = self.max_chars
        for name, text in (piece for file in self.files for piece in self._pieces(file)):
            yield name, text[:left]
            if left is not None and (left := left - len(text)) <= 0:
                return

    def total_chars(self) -> int | None:
        """Return an estimate of the number of characters, from file sizes; `max_chars` for JSONL and Parquet, whose
        sizes do not tell."""
        if any(file.name.endswith((*JSONL, PARQUET)) for file in self.files):
            return self.max_chars
        size = sum(file.stat().st_size for file in self.files)
        return size if self.max_chars is None else min(size, self.max_chars)

    def identity(self) -> dict[str, str | int | None]:
        """Return the identity of this text for the build record; it changes when a file's name, size or time does."""
        digest = hashlib.sha256()
        for file in self.files:
            state = file.stat()
            digest.update(f"{self._document(file)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
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

    def _pieces(self, file: Path) -> Iterator[Piece]:
        return pieces(file, self._document(file), self.text_field, self.skip_undecodable)

    def _document(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def open_source(name: str, *, text_field: str = "text", max_chars: int | None = None) -> Source:
    """Return the source `name` (see the module's table). Raises UserError if it does not exist or has no text."""
    if max_chars is not None and max_chars < 1:
        raise UserError(f"a limit of {max_chars} characters leaves no text; give at least 1 or no limit")
    if name == "python":
        return _standard_library(max_chars)
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(
            f"{name}: no such file or folder; give 'python', a text file, a folder, a .jsonl or .parquet file"
        )
    if not (path.is_dir() or path.is_file()):
        raise UserError(f"{name} is neither a file nor a folder; give 'python', a text file, a folder, ...")
    files = _walk(path, lambda file: file.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{name}: the folder has no text: no file ending in {', '.join(SUFFIXES)}")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{name} is empty; give a text of some length")
    check_readable(files)
    return Source(name, path if path.is_dir() else path.parent, tuple(files), text_field, max_chars)


def _standard_library(max_chars: int | None) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, lambda file: file.suffix == ".py" and not NOT_LIBRARY & set(file.relative_to(root).parts))
    if not files:
        raise UserError(f"this Python has no standard library sources in {root}; give a text file or a folder")
    files.sort(key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())
    return Source("python", root, tuple(files), max_chars=max_chars, skip_undecodable=True)


def _walk(root: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the wanted files below `root`, sorted by path, without names with a leading dot and links to folders."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if wanted(file) and file.is_file())
