"""The two runs that ought to agree: their run files, their records, and the first step in which the records differ.

Where both ran in one layout, or both are canonical, every bit must be equal. Otherwise only the loss and the norm are
compared, to TOLERANCE: what rounding does to them grows with the steps, and only a replay can tell it from a fault.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megaprec.checkpoint.atomic import checkpoints, latest
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from tools.config.run_file import RunConfig, load_run
from tools.convert.train_state import read_progress
from tools.journal.records import DIGESTS, METRICS, odd_lines, read_digests, read_lines, read_metrics
from tools.prove.parting import Parting, by_step, first_parting
from tools.prove.proof import is_canonical
from tools.training.changed_keys import FREELY
from tools.training.state_digests import OF_STEP

TOLERANCE = 1e-3  # relative difference of a loss or norm that two layouts may have in one step
SHAPE = ("tensor", "pipeline", "data", "sequence", "schedule", "schedule_file", "chunks", "cuts")  # of [parallel]


@dataclass(frozen=True)
class Side:
    """One of the two runs. folder: of a run directory, None for a run file."""

    name: str
    config: RunConfig
    folder: Path | None

    @staticmethod
    def opened(path: str) -> "Side":
        """Open a run directory or a run file. Raises UserError."""
        folder = Path(path)
        if not folder.is_dir():
            return Side(path, load_run(path), None)
        file = next((folder / name for name in ("run.toml", "run.resolved.toml") if (folder / name).is_file()), None)
        if file is None:
            raise UserError(f"{path} has no run.toml: give the folder of a run, or a run file")
        return Side(path, load_run(file), folder)

    @property
    def digests(self) -> dict[int, Mapping[str, Any]]:
        return by_step(read_digests(self.folder)) if self.folder else {}

    @property
    def metrics(self) -> dict[int, Mapping[str, Any]]:
        return {record["step"]: record for record in read_metrics(self.folder)} if self.folder else {}

    def odd_records(self) -> Iterator[str]:
        """Yield a note for each file of records with lines that cannot be compared."""
        if self.folder is None:
            return
        yield from filter(None, (odd_lines(self.folder / name) for name in (METRICS, DIGESTS)))
        lines, used = read_lines(self.folder / DIGESTS), read_digests(self.folder)
        if others := sum(line.record is not None for line in lines) - len(used):
            yield f"{self.folder / DIGESTS}: {others} of {len(lines)} lines are no digests: not used"

    def checkpoint_steps(self) -> dict[int, Path]:
        """Return the checkpoints by step."""
        if self.folder is None or latest(self.folder / "checkpoints") is None:
            return {}
        return {read_progress(Store(path)).step: path for path in checkpoints(self.folder / "checkpoints")}


@dataclass(frozen=True)
class Records:
    """The comparison of two runs' records. by: "digests" or "metrics", "" if they have no step in common.

    steps: number of compared steps. parting: the first difference.
    """

    by: str
    steps: int
    parting: Parting | None


def must_be_equal(a: RunConfig, b: RunConfig) -> bool:
    """Return True if every bit of the two runs must be equal: in one layout, or in any if both are canonical."""
    if is_canonical(a) and is_canonical(b):
        return True
    return a.precision == b.precision and all(getattr(a.parallel, key) == getattr(b.parallel, key) for key in SHAPE)


def other_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Return a line for each key that differs and that numbers depend on, other than the layout."""
    return [f"{key}: {one} | {other}" for key, one, other in _keys(a, b) if not _free(key)]


def _free(key: str) -> bool:
    if key.startswith("lr.") or key == "train.steps":
        return False
    return key.startswith("parallel.") or any(fnmatchcase(key, pattern) for pattern in FREELY)


def _keys(a: RunConfig, b: RunConfig) -> Iterator[tuple[str, str, str]]:
    for (table, one), (_, other) in zip(a, b, strict=True):
        for name, value in one:
            if value != getattr(other, name):
                yield f"{table}.{name}", a.value(f"{table}.{name}"), b.value(f"{table}.{name}")


def compare_records(a: Side, b: Side, exact: bool) -> Records:
    """Compare what both runs have recorded, by digests if both have them and their bits must be equal."""
    ours, theirs = a.digests, b.digests
    if exact and (common := ours.keys() & theirs.keys()):
        return Records("digests", len(common), first_parting(ours, theirs))
    ours, theirs = a.metrics, b.metrics
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Records("", 0, None)
    found = (_of_step(step, ours[step], theirs[step], exact) for step in common)
    return Records("metrics", len(common), next((parting for parting in found if parting), None))


def _of_step(step: int, one: Mapping[str, Any], other: Mapping[str, Any], exact: bool) -> Parting | None:
    apart = [key for key in OF_STEP if not _near(one.get(key), other.get(key), 0.0 if exact else TOLERANCE)]
    if not apart:
        return None
    return Parting(step, apart[0], len(apart) - 1, (json.dumps(one.get(apart[0])), json.dumps(other.get(apart[0]))))


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, float) or not isinstance(other, float) or not (math.isfinite(one) and math.isfinite(other)):
        return repr(one) == repr(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def common_checkpoint(a: Side, b: Side, before: int) -> tuple[int, str]:
    """Return the newest step before `before` of which both runs have a checkpoint, and that of A; (0, "") if none."""
    ours, theirs = b.checkpoint_steps(), a.checkpoint_steps()
    step = max((step for step in ours.keys() & theirs.keys() if step < before), default=0)
    return (step, str(theirs[step])) if step else (0, "")
