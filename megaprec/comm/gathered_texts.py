"""All-gather of texts and JSON values, for values that do not fit into tensors of a known shape.

Most ranks say the same as another rank: the replicas of a stage, or all ranks that have nothing to
say. Each rank first announces the length and the digest of its text, and each text is then sent by
one rank only. Memory is therefore that of the different texts, however many ranks there are.
"""

import json
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch

from megaprec.comm.axis import Axis

_ROUND = 1 << 24  # bytes of text that one collective transfers
_WORDS = 3  # int64 of an announcement: the length and a digest of 128 bits


def gather_entries(
    local_entries: dict[str, Any],
    world: Axis,
    device: torch.device,
) -> dict[str, Any]:
    """All-gather the entries of every rank and return them merged in rank order, later ranks
    winning. Collective."""
    merged: dict[str, Any] = {}
    for text in gather_texts(json.dumps(local_entries).encode(), world, device):
        merged |= json.loads(text)
    return merged


def gather_texts(
    local_text: bytes,
    world: Axis,
    device: torch.device,
) -> list[bytes]:
    """Return the different texts of all ranks, each once, in the order of the last rank that has
    it. Collective."""
    lengths = _sender_lengths(local_text, world, device)
    # by sending rank: the position at which its text ends, if all texts are joined
    ends = dict(zip(lengths, accumulate(lengths.values()), strict=True))
    joined = bytearray(sum(lengths.values()))
    if world.rank in lengths:
        end = ends[world.rank]
        joined[end - len(local_text) : end] = local_text
    # Every byte is zero on all ranks but the one that sends it, so a sum joins the texts.
    for start in range(0, len(joined), _ROUND):
        # a view of `joined`, which takes in what the other ranks send
        chunk = torch.frombuffer(joined, dtype=torch.uint8)[start : start + _ROUND]
        on_device = chunk.to(device, copy=True)
        chunk.copy_(world.sum_(on_device))
    texts: list[bytes] = []
    for rank, length in lengths.items():
        end = ends[rank]
        texts.append(bytes(joined[end - length : end]))
    return texts


def _sender_lengths(
    local_text: bytes,
    world: Axis,
    device: torch.device,
) -> dict[int, int]:
    """Return which ranks send a text, in rank order, and its length in bytes: of all ranks with
    the same text the last one sends it. Collective."""
    local_announcement = _announcement(local_text).to(device)
    announcements = world.gather(local_announcement).cpu().numpy().tobytes()
    size = 8 * _WORDS
    last_ranks: dict[bytes, int] = {}
    for rank in range(world.size):
        announcement = announcements[rank * size : (rank + 1) * size]
        last_ranks[announcement] = rank
    lengths: dict[int, int] = {}
    for announcement, rank in last_ranks.items():
        # the length comes first in an announcement
        lengths[rank] = int.from_bytes(announcement[:8], "little")
    return dict(sorted(lengths.items()))


def _announcement(text: bytes) -> torch.Tensor:
    """Return the length and the digest of a text as int64 [_WORDS]."""
    digest = blake2b(text, digest_size=8 * (_WORDS - 1)).digest()
    packed = bytearray(len(text).to_bytes(8, "little") + digest)
    return torch.frombuffer(packed, dtype=torch.int64)
