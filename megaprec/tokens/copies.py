"""Copies of the small files of a data set at a URL: index, record, tokenizer and loss mask.

They are read on this machine, from the cache folder, where a copy stays while the file at the URL
is of the same version. The digest of a copy lies beside it; one that has other bytes is fetched
again. `PREFIX.bin` has no copy (`ranges`).
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from megaprec.errors import UserError
from megaprec.parsing import parse_json, read_regular
from megaprec.tokens.files import (
    cache_folder,
    discard,
    exclusive_lock,
    file_digest,
    open_part,
    publish,
    with_suffix,
    write_whole,
)
from megaprec.tokens.places import is_remote, name_in_url
from megaprec.tokens.ranges import RemoteFile, is_file_there

PIECE = 16 << 20  # bytes of one request
RECORD = ".copy"  # ending of the file beside a copy that has its digest


def is_there(prefix: Path, suffix: str) -> bool:
    """Return True if `PREFIX` + `suffix` is a file. Raises UserError if a server does not say."""
    path = with_suffix(prefix, suffix)
    return is_file_there(path) if is_remote(path) else path.is_file()


def file_here(prefix: Path, suffix: str, again: bool = False) -> Path:
    """Return the path at which `PREFIX` + `suffix` can be read on this machine.

    For a file at a URL that is the path of a copy, which is made if it is missing, damaged or of
    another version, and each time if the server tells no version. If there is no such file at the
    URL, its URL itself is returned.
    again: read the copy to check it even if its size and times are those of its last check.
    """
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
        copy = folder / version / name_in_url(path)
        if not file.has_version or not _is_intact(copy, again):
            _copy(file, copy)
            for old in _other_versions(folder, version):
                old.unlink(missing_ok=True)
    return copy


def _copy(file: RemoteFile, copy: Path) -> None:
    """Write the content of a remote file to `copy`, atomically, and its digest beside it."""
    digest = hashlib.sha256()
    part = open_part(copy)
    if file.size > shutil.disk_usage(copy.parent).free:
        discard(part)
        raise UserError.of(
            "data.url_copy_too_large", url=file.path, size=file.size, folder=copy.parent
        )
    try:
        for start in range(0, file.size, PIECE):
            size = min(PIECE, file.size - start)
            content = file.read(start, size)
            digest.update(content)
            part.write(content)
        publish(part, copy)
    except BaseException:
        discard(part)
        raise
    _record(copy, digest.hexdigest())


def _record(copy: Path, digest: str) -> None:
    """Keep the digest of a copy that has just been checked."""
    content = json.dumps({"sha256": digest, "state": _state_of(copy)})
    write_whole(with_suffix(copy, RECORD), content.encode())


def _is_intact(copy: Path, again: bool) -> bool:
    """Return True if a copy has the bytes that were fetched. It is read if it has another size or
    other times than at its last check, or `again`."""
    try:
        record = dict(parse_json(read_regular(with_suffix(copy, RECORD))))
        if record["state"] == _state_of(copy) and not again:
            return True
        is_same = file_digest(copy) == record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if is_same:
        _record(copy, record["sha256"])
    return is_same


def _state_of(copy: Path) -> list[int]:
    """Return the size and times of a file, which change when it is written to."""
    status = copy.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _other_versions(folder: Path, version: str) -> Iterator[Path]:
    """Yield the copies of other versions. Who has opened one goes on reading it."""
    for versioned in folder.iterdir():
        if versioned.is_dir() and versioned.name != version:
            yield from versioned.iterdir()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
