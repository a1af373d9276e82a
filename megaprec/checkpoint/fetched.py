"""Copies of the small files of a checkpoint at a URL: those of its tokenizer, which libraries open.

They lie together, as in the checkpoint, in the cache folder of the user: a run that begins with
them finds them again.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from megaprec.checkpoint.object_store import pieces_of
from megaprec.durable import PlaceError, file_error, make_folder
from megaprec.errors import UserError
from megaprec.tokens.files import cache_folder, discard, exclusive_lock, open_part, publish

MOST_FETCHED = 1 << 30  # bytes of all of them
LOCK = ".lock"


def fetched(url: Path, sizes: Mapping[str, int], digests: Mapping[str, str]) -> Path:
    """Return a folder of this machine with copies of files of a checkpoint. Raises UserError.

    sizes, digests: by the names of files, which are in the folder itself.
    """
    cache = cache_folder()
    if cache is None:
        raise UserError.of("data.url_without_cache", url=url)
    if sum(sizes.values()) > MOST_FETCHED:
        reason = f"its files beside tensors have more than {MOST_FETCHED:,} bytes"
        raise UserError.of("checkpoint.url_failed", url=url, reason=reason)
    # a folder for each version of these files
    facts = [str(url)]
    facts += [f"{name} {sizes[name]} {digests.get(name)}" for name in sorted(sizes)]
    version = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    folder = cache / "checkpoints" / version
    try:
        make_folder(folder)
        with exclusive_lock(folder / LOCK, lambda: None):
            for name, size in sizes.items():
                # `require_intact` compares the digest
                if not _has_size(folder / name, size):
                    _fetch(url / name, folder / name, size)
    except PlaceError as error:
        raise UserError.of(
            "checkpoint.url_failed", url=error.filename, reason=error.reason
        ) from error
    except OSError as error:
        raise UserError.of("checkpoint.url_failed", url=url, reason=file_error(error)) from error
    return folder


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _fetch(url: Path, file: Path, size: int) -> None:
    """Copy an object of `size` bytes to `file`, whole or not at all. Raises OSError."""
    part = open_part(file)
    try:
        for piece in pieces_of(url, 0, size):
            part.write(piece)
        publish(part, file)
    except BaseException:
        discard(part)
        raise
