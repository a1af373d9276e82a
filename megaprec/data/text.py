"""Where text comes from: the standard library, a file, a folder, JSONL.

A source is a stream of pieces `(document, text)`; consecutive pieces of one document have the same name. Large
files come in pieces of about a million characters, cut at line ends, so that no file need fit into memory.

| given as                        | documents                                                                    |
|---------------------------------|------------------------------------------------------------------------------|
| `python`                        | the running interpreter's standard library, its tests left out, in an order   |
|                                 | that is scattered but always the same: any beginning holds varied modules     |
| `FILE.jsonl`, `FILE.jsonl.gz`   | one a line, the text under `text_field`                                       |
| any other file                  | one, the whole file                                                           |
| a folder                        | one a file (or line) of its `SUFFIXES`, by path; names with a dot left out    |

Text is UTF-8 and kept to the character, line ends too. A folder called `python` is given as `./python`.
"""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaprec.errors import UserError

JSONL = (".jsonl", ".jsonl.gz")
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *JSONL)
PIECE_CHARS = 1 << 20
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Piece = tuple[str, str]


@dataclass(frozen=True)
class Source:
    """A text source that can be read any number of times; iterate it for its pieces.

    name: as the user gave it. files: what is read, in this order, from `root`. max_chars: where reading stops,
    in the middle of a document if need be. skip_undecodable: leave files out that are not UTF-8, else an error.
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
        """About how many characters there are, from file sizes; None where those do not tell (JSONL)."""
        if any(file.name.endswith(JSONL) for file in self.files):
            return self.max_chars
        size = sum(file.stat().st_size for file in self.files)
        return size if self.max_chars is None else min(size, self.max_chars)

    def identity(self) -> dict[str, str | int | None]:
        """What tells this text from another, for the record: it changes when a file's name, size or time does."""
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

    def _pieces(self, file: Path) -> Iterator[Piece]:
        if file.name.endswith(JSONL):
            return _jsonl_pieces(file, self._document(file), self.text_field)
        return _text_pieces(file, self._document(file), self.skip_undecodable)

    def _document(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def open_source(name: str, *, text_field: str = "text", max_chars: int | None = None) -> Source:
    """The source that `name` means (see above). `UserError` if it does not exist or holds no text."""
    if max_chars is not None and max_chars < 1:
        raise UserError(f"a limit of {max_chars} characters leaves no text; give at least 1 or no limit")
    if name == "python":
        return _standard_library(max_chars)
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{name}: no such file or folder; give 'python', a text file, a folder or a .jsonl file")
    files = _walk(path, lambda file: file.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{name}: the folder has no text: no file ending in {', '.join(SUFFIXES)}")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{name} is empty; give a text of some length")
    return Source(name, path if path.is_dir() else path.parent, tuple(files), text_field, max_chars)


def _standard_library(max_chars: int | None) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, lambda file: file.suffix == ".py" and not NOT_LIBRARY & set(file.relative_to(root).parts))
    if not files:
        raise UserError(f"this Python has no standard library sources in {root}; give a text file or a folder")
    files.sort(key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())
    return Source("python", root, tuple(files), max_chars=max_chars, skip_undecodable=True)


def _walk(root: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """Files below `root` that are wanted, by path; names with a leading dot and links to folders are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if wanted(file) and file.is_file())


def _text_pieces(file: Path, document: str, skip_undecodable: bool) -> Iterator[Piece]:
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            while text := stream.read(PIECE_CHARS):
                yield document, text + stream.readline(PIECE_CHARS)
    except UnicodeDecodeError as problem:
        if not skip_undecodable:
            raise UserError(f"{file} is not UTF-8 text ({problem.reason}); convert it or leave it out") from problem


def _jsonl_pieces(file: Path, document: str, field: str) -> Iterator[Piece]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield f"{document}:{number}", _field(line, field, f"{file}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise UserError(f"{file} is not a whole gzip file ({problem}); copy it again") from problem


def _field(line: bytes, field: str, where: str) -> str:
    """The text in one line of JSONL; `UserError` naming `where` if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{where}: not JSON ({problem}); each line must be one JSON object") from problem
    if not isinstance(record, dict) or field not in record:
        there = ", ".join(sorted(record)) or "none" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where}: no field {field!r} (there is: {there}); name the field that holds the text")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} is {json.dumps(text)[:40]}, not a text")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{where}: field {field!r} is no Unicode text (half of a surrogate pair)")
    return text
