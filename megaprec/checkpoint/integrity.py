"""Whether a checkpoint's files are still what was saved: each is read once, by one rank, and all ranks agree.

A flipped bit is a valid weight; nothing but the digest tells. The files are dealt out over the ranks, which must see
the same filesystem, so that a check takes the time of reading the checkpoint once, with all machines at it.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaprec.checkpoint.atomic import remedy, sync
from megaprec.checkpoint.digests import file_digest, tensors_digest
from megaprec.checkpoint.reader import Store
from megaprec.comm.axis import Axis
from megaprec.errors import UserError


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> str:
    """Writes a safetensors file; returns its SHA-256 when it is on the disk."""
    save_file(tensors, file, metadata={"format": "pt"})
    digest = tensors_digest(file, tensors)
    sync(file)
    return digest


def require_intact(
    store: Store, files: Iterable[str], world: Axis | None = None, device: torch.device | str = "cpu"
) -> None:
    """Raises UserError, on every rank, if one of `files` is not what was saved.

    Collective over `world`, if it is given. Files of an earlier version, which recorded no digest, are taken as they
    are.
    """
    world = world or Axis("world")
    names = sorted(store.digests.keys() & set(files), key=lambda name: (-store.index["files"][name], name))
    if not names:
        return
    damaged = torch.zeros(len(names), device=device)
    for number, owner in enumerate(_dealt([store.index["files"][name] for name in names], world.size)):
        if owner == world.rank and not _is_intact(store.file(names[number]), store.digests[names[number]]):
            damaged[number] = 1
    world.max_(damaged)
    if wrong := [name for name, bad in zip(names, damaged.tolist(), strict=True) if bad]:
        are = f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'}"
        raise UserError(f"{store.path} is damaged: {are} not what was saved (SHA-256 differs): {remedy(store.path)}")


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """Whose each file is, given their sizes in bytes, largest first: the rank's that has least to read so far."""
    loads, owners = [0] * ranks, list[int]()
    for size in sizes:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size
    return owners


def _is_intact(file: Path, digest: str) -> bool:
    try:
        return file_digest(file) == digest
    except OSError:  # of a bad disk: what cannot be read is damaged
        return False
