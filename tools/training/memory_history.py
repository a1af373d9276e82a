"""`log.memory_history`: what held the memory of a GPU when a rank ran out of it.

While steps are taken torch remembers the Python stack of each allocation. Its own dump of them is a
pickle, which is neither written nor read here. If a rank runs out of memory, its live allocations
are summed by the place in the code that made them, in a table in RUN/memory.

A backward pass runs torch's own operators without Python: what only these allocate has no place.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megaprec.durable import file_error, put_text
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.torch_private import memory_snapshot, record_memory_history
from tools.console.units import counted, size
from tools.console.wrapped import say

FOLDER = "memory"
ROWS = 40  # places that are named; the others are one row
CALLERS = 4  # lines of a place: the one that allocates, and those that called it
NO_PLACE = "no Python: a backward pass, or before the first step"
OF_TORCH = "/torch/"  # in the path of a file of torch
SHOWN_FOLDERS = 3  # of the path of a file, counted from its end


class _Held(NamedTuple):
    """Live allocations of one place, in bytes, and their number."""

    amount: int
    blocks: int


@contextmanager
def memory_history(rank: int, optimizer: ParallelAMPOptimizer, folder: Path) -> Iterator[None]:
    """Within the context torch remembers allocations; if this rank's GPU runs out of memory, what
    held it is written to the run's folder.

    folder: of the run.
    """
    record_memory_history(True)
    try:
        yield
    except Exception as error:
        if ran_out_of_memory(error):
            text = memory_table(memory_snapshot(), optimizer.device, kinds_of(optimizer))
            say(f"memory     rank {rank} ran out of GPU memory{_written(text, rank, folder)}")
        raise
    finally:
        record_memory_history(False)


def _written(text: str, rank: int, folder: Path) -> str:
    """Write a table to the folder of a run; return where it is, or why it is nowhere, in words."""
    file = folder / FOLDER / f"rank_{rank}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        put_text(file, text)
    except OSError as error:
        return f", and could not write what held it: {file_error(error)}"
    return f": what held it is in {file}"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one that it was raised from, is that a GPU has no memory left."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def kinds_of(optimizer: ParallelAMPOptimizer) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on the device, by kind."""
    kinds = defaultdict[str, int](int)
    for buffer in optimizer.all_buffers():
        in_host_memory = buffer.host_bytes() > 0
        for kind, amount in buffer.bytes_by_kind().items():
            if not in_host_memory or kind in ("weights", "gradients"):
                kinds[kind] += amount
    return {kind: amount for kind, amount in kinds.items() if amount}


def memory_table(
    snapshot: Mapping[str, Any], device: torch.device, kinds: Mapping[str, int]
) -> str:
    """Return what holds the memory of a device, as text with a row for each place in the code.

    snapshot: as torch takes it: segments, each with its blocks. kinds: bytes of weights, gradients
    and optimizer state, which are part of it.
    """
    number = device.index or 0
    segments = [segment for segment in snapshot["segments"] if segment["device"] == number]
    reserved = sum(segment["total_size"] for segment in segments)
    held_by_place = _held_by_place(segments)
    in_use = sum(held.amount for held in held_by_place.values())
    lines = [
        f"{size(in_use)} in use, {size(reserved - in_use)} held by torch and free",
        "of the memory in use, the state of training: "
        + ", ".join(f"{kind} {size(amount)}" for kind, amount in kinds.items()),
        "",
        f"{'in use':>10} {'blocks':>8}  allocated at < called from",
    ]
    places = sorted(held_by_place, key=lambda place: held_by_place[place].amount, reverse=True)
    lines += [_row(place, held_by_place[place]) for place in places[:ROWS]]
    others = [held_by_place[place] for place in places[ROWS:]]
    if others:
        amount = sum(held.amount for held in others)
        blocks = sum(held.blocks for held in others)
        lines.append(_row(counted(len(others), "other place"), _Held(amount, blocks)))
    return "\n".join(lines) + "\n"


def _held_by_place(segments: Sequence[Mapping[str, Any]]) -> dict[str, _Held]:
    """Return the live allocations in segments by their place."""
    held: dict[str, _Held] = {}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                continue
            place = _place(block.get("frames") or ())
            before = held.get(place, _Held(0, 0))
            held[place] = _Held(before.amount + block["size"], before.blocks + 1)
    return held


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return where the stack of an allocation is outside of torch, the innermost line first."""
    lines: list[str] = []
    for frame in frames:
        if OF_TORCH not in frame["filename"]:
            file = "/".join(Path(frame["filename"]).parts[-SHOWN_FOLDERS:])
            lines.append(f"{file}:{frame['line']} {frame['name']}")
    return " < ".join(lines[:CALLERS]) or NO_PLACE


def _row(place: str, held: _Held) -> str:
    return f"{size(held.amount):>10} {held.blocks:>8,}  {place}"
