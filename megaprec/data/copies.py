"""Copies of the small files of a data set at a URL: index, record, tokenizer and loss mask.

They are read on this machine, from the cache folder, where a copy stays while the file at the URL
is of the same version. `PREFIX.bin` has no copy (`ranges`).
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from megaprec.data.files import (
    cache_folder,
    discard,
    exclusive_lock,
    open_part,
    publish,
    with_suffix,
)
from megaprec.data.places import is_remote
from megaprec.data.ranges import RemoteFile, is_file_there
from megaprec.errors import UserError

PIECE = 16 << 20  # bytes of one request


def is_there(prefix: Path, suffix: str) -> bool:
    """Return True if `PREFIX` + `suffix` is a file. Raises UserError if a server does not say."""
    path = with_suffix(prefix, suffix)
    return is_file_there(path) if is_remote(path) else path.is_file()


def file_here(prefix: Path, suffix: str) -> Path:
    """Return the path of `PREFIX` + `suffix` on this machine: of a file at a URL that of its copy,
    which is made if it is missing or of another version; its own path if there is no such file."""
    path = with_suffix(prefix, suffix)
    if not is_remote(path) or not is_file_there(path):
        return path
    cache = cache_folder()
    if cache is None:
        raise UserError.of("data.url_without_cache", url=path)
    file = RemoteFile(path)
    folder = cache / "remote" / _digest(str(path))
    with exclusive_lock(folder / "lock", lambda: None):
        version = _digest(file.version)
        copy = folder / version / path.name
        is_copied = copy.is_file() and copy.stat().st_size == file.size
        if not is_copied or not file.has_version:
            _copy(file, copy)
            for old in _other_versions(folder, version):
                old.unlink(missing_ok=True)
    return copy


def _copy(file: RemoteFile, copy: Path) -> None:
    """Write the content of a remote file to `copy`, atomically."""
    part = open_part(copy)
    try:
        for start in range(0, file.size, PIECE):
            size = min(PIECE, file.size - start)
            part.write(file.read(start, size))
        publish(part, copy)
    except BaseException:
        discard(part)
        raise


def _other_versions(folder: Path, version: str) -> Iterator[Path]:
    """Yield the copies of other versions. Who has opened one goes on reading it."""
    for versioned in folder.iterdir():
        if versioned.is_dir() and versioned.name != version:
            yield from versioned.iterdir()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
