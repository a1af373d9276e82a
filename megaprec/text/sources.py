"""Text sources: the standard library, files of many forms, folders, patterns of file names.

A source is a stream of pieces `(document, text)`; consecutive pieces of one document have the same
name. Large files come in pieces of about a million characters, cut at line ends, so that no file
need fit into memory.

What may be given, and which documents it has, is the table of docs/data.md; the forms of files are
`FORMS` of `readers`, by their endings in any case. The order of documents is that of paths, of the
files and folders of a list as they are given; a file that was read before is left out. `left_out`
has the files of a folder that are not read. The standard library comes in an order that is
scattered but always the same, so that any beginning is varied.

Plain text is not changed, line ends included. A folder called `python` is given as `./python`.
"""

import hashlib
import json
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from megaprec.errors import Problem, UserError
from megaprec.text.confined import Helpers
from megaprec.text.forms import UTF8, form
from megaprec.text.packed_files import PACKED
from megaprec.text.pieces import MarkedPiece, OnFault, Piece
from megaprec.text.readers import (
    FOLDER_ENDINGS,
    FORMS,
    TextOptions,
    check_readable,
    encoding_problem,
    marked_pieces,
    reader_versions,
)
from megaprec.text.text_files import is_hidden, left_out_words, text_files
from megaprec.tokens.places import (
    STANDARD_LIBRARY,
    file_system,
    is_remote,
    is_url,
    naming_url,
    size_of,
)
from megaprec.tokens.ranges import version_of
from megaprec.url_secrets import masked

SHOWN = 20  # lines about bad files and rows
# a line about a row
ROW = re.compile(r"(?P<file>.*?):\d+: (?P<reason>.*)", re.DOTALL)
SEARCH_SECONDS = 60.0  # in which bad files and rows are searched for, once there is one
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class TextSource:
    """A text source that can be read any number of times; iterating it yields its pieces.

    name: the name that the user gave.
    files: the files to read, in this order, below `root`.
    left_out: number of files of a folder that are not read, by the reason; empty ones, which give
        no text, are among `files` too.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    options: TextOptions = field(default_factory=TextOptions)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces, as `reading` does."""
        return self.reading(lambda problem: None)

    def reading(self, on_skip: Callable[[Problem], None]) -> Iterator[Piece]:
        """Yield the pieces, as `marked` does, without their marks."""
        for document, text, _ in self.marked(on_skip):
            yield document, text

    def marked(self, on_skip: Callable[[Problem], None]) -> Iterator[MarkedPiece]:
        """Yield the pieces with the marks of what counts in the loss.

        on_skip: called with each bad file or row that is left out, of which there are at most
            `options.skip_bad`.
        Raises UserError that names all bad files and rows of the source, the first of many, if
        there are more.
        """
        num_skipped = 0

        def skip_or_raise(error: UserError) -> None:
            nonlocal num_skipped
            num_skipped += 1
            if num_skipped > self.options.skip_bad:
                raise error
            for problem in error.problems:
                on_skip(problem)

        try:
            yield from self._read(skip_or_raise)
        except UserError as error:
            raise self._all_faults(error) from error

    def _read(self, on_fault: OnFault) -> Iterator[MarkedPiece]:
        """Yield the pieces.

        on_fault: called with the error of each document that is none and of each file that ends
            early.
        Raises the error where `on_fault` does.
        """
        remaining = self.options.max_chars
        with Helpers() as helpers:
            for file in self.files:
                document = self._document(file)
                try:
                    for piece in marked_pieces(file, document, self.options, helpers, on_fault):
                        # the last piece may be cut, but no conversation
                        is_cut = piece.marks is None and remaining is not None
                        yield piece._replace(text=piece.text[:remaining]) if is_cut else piece
                        if remaining is not None:
                            remaining -= len(piece.text)
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
                key = (row["file"], row["reason"]) if row else (problem, "")
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
        if self.options.skip_bad:
            problems.append(
                Problem.of("data.skip_bad_exceeded", name=self.name, most=self.options.skip_bad)
            )
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

        It is `options.max_chars` if a file is packed or a table, whose sizes do not tell.
        """
        for file in self.files:
            is_packed = file.suffix.lower() in PACKED
            if is_packed or form(file) in FORMS:
                return self.options.max_chars
        size = self.total_bytes()
        return size if self.options.max_chars is None else min(size, self.options.max_chars)

    def identity(self) -> dict[str, str | int | None]:
        """Return the identity of this text for the build record; it changes when a file's name,
        size or time does, or an option or a version of a reader that may change what is read."""
        digest = hashlib.sha256()
        for file in self.files:
            name = os.fsencode(self._document(file))  # a name need not be UTF-8
            if is_remote(file):
                version = version_of(file)
            else:
                state = file.stat()
                # The time of the last change is set by the system: a program that writes other
                # content of the same size can set back the time of modification only.
                times = f"{state.st_mtime_ns}\0{state.st_ctime_ns}"
                version = f"{state.st_size}\0{times}"
            digest.update(name + f"\0{version}\n".encode())
        identity: dict[str, str | int | None] = {
            "name": masked(self.name),
            "text_field": self.options.field,
            "max_chars": self.options.max_chars,
            "files": len(self.files),
            "files_sha256": digest.hexdigest(),
            "readers": reader_versions(self.files, self.options.chats is not None),
        }
        if self.options.chats:
            identity["chats_sha256"] = self.options.chats.digest
        if self.options.encoding != UTF8:
            identity["encoding"] = self.options.encoding
        if self.options.skip_bad and self.name != STANDARD_LIBRARY:
            identity["skip_bad"] = True  # how many may be left out changes no byte
        return identity

    def is_still(self, identity: object) -> bool:
        """Return True if the text has this identity now, and can be read."""
        for file in self.files[:1]:
            if is_remote(file):
                # what an earlier listing told may be old
                file_system(file).invalidate_cache()
        try:
            return self.identity() == identity
        except (OSError, UserError):
            return False

    def total_bytes(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(map(size_of, self.files))

    def _document(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


class TextDigest:
    """SHA-256 of the documents of a text and of what counts in them, whatever their names are and
    in which pieces they come.

    chars: number of characters that were read.
    """

    def __init__(self) -> None:
        self.chars = 0
        self._hash = hashlib.sha256()

    def reading(self, pieces: Iterable[MarkedPiece]) -> Iterator[MarkedPiece]:
        """Yield the pieces of a text, and add them to the digest."""
        document: str | None = None
        for piece in pieces:
            if piece.document != document:
                self._hash.update(b"\xff")  # no byte of UTF-8
                document = piece.document
            if piece.marks:
                marks = [piece.marks.rendered, *piece.marks.answers]
                self._hash.update(b"\xfe" + json.dumps(marks).encode())
            self._hash.update(piece.text.encode(errors="surrogatepass"))
            self.chars += len(piece.text)
            yield piece

    def hexdigest(self) -> str:
        """Return the digest of what was read."""
        return self._hash.hexdigest()


def has_digest(
    source: TextSource,
    digest: str,
    chars: int,
) -> bool:
    """Return True if the text of a source can be read and has this digest.

    chars: its length; no more is read.
    """
    actual = TextDigest()
    try:
        for _ in actual.reading(source.marked(lambda problem: None)):
            if actual.chars > chars:
                return False
    except UserError:
        return False
    return actual.chars == chars and actual.hexdigest() == digest


def open_source(name: str | Sequence[str], options: TextOptions | None = None) -> TextSource:
    """Return the source `name` (see the module's table).

    Raises UserError if it does not exist or has no text.
    """
    options = options or TextOptions()
    _check_options(options)
    names = [name] if isinstance(name, str) else name
    if [*names] == [STANDARD_LIBRARY]:
        return _standard_library(options.max_chars)
    if STANDARD_LIBRARY in names and not Path(STANDARD_LIBRARY).exists():
        raise UserError.of("data.library_in_list", names=", ".join(names))
    shown_name = ", ".join(names)
    with naming_url(shown_name) if any(map(is_url, names)) else nullcontext():
        found = text_files(names, options)
    if not found.files:
        reasons = ""
        if found.left_out:
            reasons = f" ({', '.join(left_out_words(found.left_out))} left out)"
        raise UserError.of(
            "data.folder_without_text",
            name=shown_name,
            suffixes=", ".join(FOLDER_ENDINGS),
            reasons=reasons,
        )
    if not any(map(size_of, found.files)):
        raise UserError.of("data.source_empty", name=shown_name)
    check_readable(found.files)
    return TextSource(shown_name, found.root, found.files, options, found.left_out)


def _check_options(options: TextOptions) -> None:
    """Raise UserError for options with which no text can be read."""
    if options.max_chars is not None and options.max_chars < 1:
        raise UserError.of("data.max_chars_zero", max_chars=options.max_chars)
    if why := encoding_problem(options.encoding):
        raise UserError.of("data.encoding_unknown", encoding=options.encoding, why=why)


def _with_others(problem: Problem, others: int) -> Problem:
    """Return the problem of a bad row, with the number of other rows of its file that have the same
    fault."""
    return problem.within(after=f"; so {others:,} more in this file") if others else problem


def _standard_library(max_chars: int | None) -> TextSource:
    """Return the source of Python's own library, a file for each document, in a scattered order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root).as_posix(): file for file in _library_files(root)}
    if not files:
        raise UserError.of("data.no_standard_library", root=root)
    # by digest, so that any beginning has varied modules, and the same on every machine
    scattered = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    return TextSource(
        STANDARD_LIBRARY,
        root,
        tuple(files[name] for name in scattered),
        # the user can mend no file of Python's own
        TextOptions(max_chars=max_chars, skip_bad=len(files)),
    )


def _library_files(root: Path) -> Iterator[Path]:
    """Yield the sources below `root`.

    Installed packages, which may be large, are not even listed.
    """
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if name not in NOT_LIBRARY]
        subfolders[:] = [name for name in kept if not is_hidden(name)]
        for name in names:
            file = Path(folder, name)
            if name.endswith(".py") and not is_hidden(name) and file.is_file():
                yield file
