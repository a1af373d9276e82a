"""Integrity check of checkpoint files: each file is hashed once, by one rank, and the result is
shared by all ranks.

A weight with a flipped bit is still a valid number, so only a digest detects it. The files are
distributed over the ranks, which must see the same filesystem, so the check takes the time of
reading the checkpoint once in parallel.
"""

from collections.abc import Iterable
from heapq import heapreplace
from pathlib import Path

import torch

from megaprec.checkpoint.atomic import remedy
from megaprec.checkpoint.digests import file_digest
from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis
from megaprec.durable import PlaceError
from megaprec.errors import UserError


def require_intact(
    store: Store,
    files: Iterable[str],
    world: Axis | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Raise UserError, on every rank, if one of `files` has changed since it was saved.

    Collective over `world`, if passed. Files without a digest, as saved by earlier versions, are
    not checked.
    """
    world = world or Axis("world")
    sizes: dict[str, int] = store.index["files"]
    # largest first, as `_assign_files` needs them
    names = sorted(store.digests.keys() & set(files), key=lambda name: (-sizes[name], name))
    if not names:
        return
    # one flag a file: the maximum over ranks tells all of them what each has found
    flags = torch.zeros(len(names), device=device)
    owners = _assign_files([sizes[name] for name in names], world.size)
    for number, (name, owner) in enumerate(zip(names, owners, strict=True)):
        if owner != world.rank:
            continue
        if not _is_intact(store.file(name), store.digests[name]):
            flags[number] = 1
    world.max_(flags)
    damaged = [names[number] for number in flags.nonzero().flatten().tolist()]
    if damaged:
        raise UserError.of(
            "checkpoint.digest_differs_newest",
            path=store.path,
            wrong=", ".join(damaged),
            verb="is" if len(damaged) == 1 else "are",
            remedy=remedy(store.path),
        )


def _assign_files(sizes: list[int], ranks: int) -> list[int]:
    """Return the rank that hashes each file. Greedy: each file goes to the rank with the fewest
    bytes so far.

    sizes: bytes of each file, largest first.
    """
    loads = [(0, rank) for rank in range(ranks)]  # a heap of (bytes so far, rank)
    owners: list[int] = []
    for size in sizes:
        load, rank = loads[0]
        heapreplace(loads, (load + size, rank))
        owners.append(rank)
    return owners


def _is_intact(file: Path, digest: str) -> bool:
    """Return True if a file has this SHA-256. Raises UserError if its server does not send it."""
    try:
        return file_digest(file) == digest
    except PlaceError as error:
        raise UserError.of(
            "checkpoint.url_failed", url=error.filename, reason=error.reason
        ) from error
    except OSError:  # a file that a bad disk cannot read is damaged
        return False
