"""Integrity check of checkpoint files: each file is hashed once, by one rank, and the result is
shared by all ranks.

A weight with a flipped bit is still a valid number, so only a digest detects it. The files are
distributed over the ranks, which must see the same filesystem, so the check takes the time of
reading the checkpoint once in parallel.
"""

import os
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

# what is found of a file; the worst that a rank has found holds
INTACT = 0
DAMAGED = 1
FORBIDDEN = 2


def require_intact(
    store: Store,
    files: Iterable[str],
    world: Axis | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Raise UserError, on every rank, if one of `files` has changed since it was saved, or may not
    be read.

    Collective over `world`, if passed. Files without a digest, as saved by earlier versions, are
    not checked.
    """
    world = world or Axis("world")
    sizes: dict[str, int] = store.index["files"]
    # largest first, as `_assign_files` needs them
    names = sorted(store.digests.keys() & set(files), key=lambda name: (-sizes[name], name))
    if not names:
        return
    # The state of each file. Only one rank looks at it, and INTACT is the lowest: the maximum over
    # ranks tells all of them what that rank has found.
    states = torch.full((len(names),), float(INTACT), device=device)
    hashing_ranks = _assign_files([sizes[name] for name in names], world.size)
    for number, (name, rank) in enumerate(zip(names, hashing_ranks, strict=True)):
        if rank == world.rank:
            states[number] = _state_of(store.file(name), store.digests[name])
    world.max_(states)
    state_of_file = dict(zip(names, states.tolist(), strict=True))
    forbidden = [name for name, state in state_of_file.items() if state == FORBIDDEN]
    damaged = [name for name, state in state_of_file.items() if state == DAMAGED]
    if forbidden:
        raise UserError.of(
            "checkpoint.forbidden", path=store.path, files=", ".join(forbidden), user=os.getuid()
        )
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


def _state_of(file: Path, digest: str) -> int:
    """Return INTACT if a file has this SHA-256, else DAMAGED, or FORBIDDEN if this user may not
    read it. Raises UserError if its server does not send it."""
    try:
        return INTACT if file_digest(file) == digest else DAMAGED
    except PlaceError as error:
        raise UserError.of(
            "checkpoint.url_failed", url=error.filename, reason=error.reason
        ) from error
    except PermissionError:
        return FORBIDDEN
    except OSError:  # a file that a bad disk cannot read is damaged
        return DAMAGED
