"""The checkpoints that a save removes: only older ones that saves into the same folder have made.

Each save adds a line to a hidden file of the folder, with its step, the digest of its
checkpoint.json and the losses of an evaluation after that step, if there was one. A checkpoint
without such a line was put there by somebody: copied as the beginning of a branch, restored from a
backup, saved by an earlier version. It is never removed, and neither is one that is a link: its
files lie where other programs may need them. Nor is anything else with the name of a checkpoint
overwritten: it gets another name.
"""

import json
import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megaprec.checkpoint.atomic import (
    INDEX,
    checkpoint_path,
    free_path,
    hide,
    remove_leftovers,
    step_of,
    whole_checkpoints,
)
from megaprec.checkpoint.digests import INDEX_DIGEST
from megaprec.checkpoint.object_store import (
    append_object_line,
    is_object,
    pieces_of,
    read_file,
    size_of_object,
)
from megaprec.durable import append_line, file_error, reading
from megaprec.errors import UserError
from megaprec.parsing import MOST_BYTES, parse_json
from megaprec.tokens.places import is_remote

RECORD = ".saved.jsonl"  # hidden file of the folder, a line for each save
LOSSES = "losses"  # key of a line, for those of an evaluation by name
ALL = "all"
Weights = Mapping[str, float]  # of evaluations, by name
NO_WEIGHTS: Weights = MappingProxyType({})
Identity = tuple[int, str]  # of a save: its step, and the digest at the end of checkpoint.json
TAIL = 200  # bytes at the end of checkpoint.json, which hold its own digest
SEAL = re.compile(rf'"{INDEX_DIGEST}": "([0-9a-f]{{64}})"\n}}$')


@dataclass(frozen=True)
class Keep:
    """The checkpoints that a save does not remove.

    newest: how many of the newest that saves have made; None: all.
    every: also those of each multiple of this step; 0: of none.
    best: also the one that has the lowest mean of the losses of these evaluations, by name, each
        with its weight; empty: none.
    """

    newest: int | None
    every: int = 0
    best: Weights = field(default_factory=dict)

    @classmethod
    def of(cls, keep: int | str, every: int = 0, best: Weights = NO_WEIGHTS) -> "Keep":
        """Return the rule of the key or argument `keep`, a number or "all"."""
        newest = None if isinstance(keep, str) else keep
        return cls(newest, every, best)

    def expired(self, steps: Sequence[int], later: int = 0) -> list[int]:
        """Return the steps whose checkpoints this rule does not keep.

        steps: of all checkpoints that saves have made, ascending.
        later: how many more saves there will have been by then.
        The best checkpoint is not looked at here.
        """
        if self.newest is None:
            return []
        # each later save makes one that is newer
        num_newest = max(0, self.newest - later)
        num_older = max(0, len(steps) - num_newest)
        # those of `every` count among the newest too
        older = steps[:num_older]
        if not self.every:
            return list(older)
        return [step for step in older if step % self.every]


USUAL = Keep(2)  # a second one, should the newest be damaged


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest loss, or mean of losses, of those that saves have made."""

    path: Path
    loss: float


def record_save(folder: Path, step: int, index: bytes, losses: Mapping[str, float]) -> list[str]:
    """Record that a save makes the checkpoint of `step`.

    index: the bytes of its checkpoint.json.
    losses: of the evaluation after this step, by name.
    Returns a warning if the folder's record cannot be written.
    """
    record: dict[str, Any] = {"step": step, INDEX_DIGEST: _sealed_digest(index[-TAIL:])}
    # JSON has neither infinity nor NaN, and neither is a lowest loss
    finite_losses = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    if finite_losses:
        record[LOSSES] = finite_losses
    try:
        if is_remote(folder):
            append_object_line(folder / RECORD, json.dumps(record), MOST_BYTES)
        else:
            append_line(folder / RECORD, json.dumps(record))
    except OSError as error:
        name = checkpoint_path(folder, step).name
        return [
            f"{file_error(error)}; {name} is saved, but without its line there no save removes the "
            "checkpoint"
        ]
    return []


def made_here(folder: Path) -> list[Path]:
    """Return the whole checkpoints in `folder` that saves into it have made and that are no links,
    oldest first.

    Raises UserError if the folder cannot be listed.
    """
    records = _read_records(folder)
    return [path for path in whole_checkpoints(folder) if _is_recorded(path, records)]


def best_made_here(folder: Path, evaluations: Weights) -> Best | None:
    """Return the checkpoint in `folder` with the lowest weighted mean of the losses of some
    evaluations, the oldest of equal ones; None if none that is there was evaluated so.

    Raises UserError if the folder cannot be listed.
    """
    records = _read_records(folder)
    best: Best | None = None
    for path in whole_checkpoints(folder):
        if not _is_recorded(path, records):
            continue
        loss = _mean_loss(records[_identity(path)], evaluations)
        if loss is not None and (best is None or loss < best.loss):
            best = Best(path, loss)
    return best


def _mean_loss(losses: Mapping[str, float], evaluations: Weights) -> float | None:
    """Return the weighted mean of the losses of some evaluations; None if one is missing."""
    if not evaluations or not evaluations.keys() <= losses.keys():
        return None
    total = math.fsum(weight * losses[name] for name, weight in evaluations.items())
    return total / math.fsum(evaluations.values())


def describe_evaluations(evaluations: Weights) -> str:
    """Return in words which loss decides what the best checkpoint is: its name, or "mean of 2 a, 1
    b and 1 c"."""
    if len(evaluations) == 1:
        (name,) = evaluations
        return name
    *weighted_names, last = [f"{weight:g} {name}" for name, weight in evaluations.items()]
    return f"mean of {', '.join(weighted_names)} and {last}"


def remove_expired(folder: Path, keep: Keep, new: Path) -> list[str]:
    """Remove the checkpoints that `keep` lets go, but never `new` nor the best, and all leftovers.

    Returns a warning for each that cannot be removed.
    """
    if keep.newest is None:
        return remove_leftovers(folder)
    try:
        by_step = {step_of(path): path for path in made_here(folder)}
        best = best_made_here(folder, keep.best) if keep.best else None
    except UserError as error:
        # which checkpoints may go is not known; leftovers may
        return [*error.problems, *remove_leftovers(folder)]
    # after a run went back to an earlier step, the newest save has not the highest step
    lasting = {new} if best is None else {new, best.path}
    warnings: list[str] = []
    for step in keep.expired([*by_step]):
        if by_step[step] not in lasting:
            warnings += hide(by_step[step])
    return [*warnings, *remove_leftovers(folder)]


def make_way(folder: Path, step: int) -> list[str]:
    """Rename what has the name of the checkpoint of `step` but was not made by a save, or is
    damaged. At a URL, where nothing is renamed, `begin` has refused it.

    Returns a warning with the new name. Raises OSError.
    """
    if is_remote(folder):
        return []
    path = checkpoint_path(folder, step)
    if not os.path.lexists(path) or path in made_here(folder):
        return []
    if path in whole_checkpoints(folder):
        suffix = "other"
        why = "no save into this folder made it"
    else:
        suffix = "damaged"
        why = "it was damaged"
    new_path = free_path(path, f"{path.name}.{suffix}")
    path.rename(new_path)
    return [f"{path} was in the way of a save and is {new_path.name} now: {why}"]


def _is_recorded(path: Path, records: Collection[Identity]) -> bool:
    """Return True if a checkpoint is no link and one of the recorded saves."""
    is_link = not is_remote(path) and path.is_symlink()
    return not is_link and _identity(path) in records


def _identity(path: Path) -> Identity:
    return step_of(path), _stored_digest_of_index(path / INDEX)


def damage_of_record(folder: Path) -> tuple[str, list[int]]:
    """Return the reason why the record of saves in `folder` cannot be read, "" if it can, and the
    numbers, counted from 1, of its lines that are damaged."""
    try:
        lines = _record_lines(folder)
    except OSError as error:
        return file_error(error), []
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and _parse_save(line) is None:
            damaged.append(number)
    return "", damaged


def _read_records(folder: Path) -> dict[Identity, dict[str, float]]:
    """Return the losses of each save that is recorded; a line that is damaged is as none."""
    records: dict[Identity, dict[str, float]] = {}
    with suppress(OSError):
        for line in _record_lines(folder):
            save = _parse_save(line)
            if save is not None:
                identity, losses = save
                records[identity] = losses
    return records


def _record_lines(folder: Path) -> list[bytes]:
    """Return the lines of the folder's record; none if there is no record. Raises OSError."""
    path = folder / RECORD
    if is_remote(folder):
        return read_file(path).split(b"\n") if is_object(path) else []
    try:
        return read_file(path).split(b"\n")
    except FileNotFoundError:
        return []


def _parse_save(line: bytes) -> tuple[Identity, dict[str, float]] | None:
    """Return the identity of the save that a line records, and its losses; None if the line is
    damaged."""
    try:
        record = parse_json(line)
    except ValueError:  # not UTF-8 is a ValueError too
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    digest = record.get(INDEX_DIGEST)
    losses = record.get(LOSSES, {})
    # not isinstance: true is no number
    if type(step) is not int or not isinstance(digest, str) or not isinstance(losses, dict):
        return None
    if not all(_is_loss(loss) for loss in losses.values()):
        return None
    return (step, digest), {name: float(loss) for name, loss in losses.items()}


def _is_loss(value: Any) -> bool:
    # an integer may be too large for a float
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _stored_digest_of_index(index: Path) -> str:
    """Return the digest at the end of a checkpoint.json; empty if there is none, as in one of an
    earlier version."""
    try:
        # the end only: an index of a large model has megabytes
        if is_remote(index):
            size = size_of_object(index)
            return _sealed_digest(b"".join(pieces_of(index, max(0, size - TAIL), size)))
        with reading(index) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            return _sealed_digest(file.read())
    except OSError:
        return ""


def _sealed_digest(end: bytes) -> str:
    """Return the digest at the end of a checkpoint.json, whose last bytes these are; empty if there
    is none."""
    seal = SEAL.search(end.decode(errors="replace"))
    return seal[1] if seal else ""
