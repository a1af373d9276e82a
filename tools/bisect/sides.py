"""The two runs that ought to agree: their run files, their records, and the first step in which the
records differ.

Where both computed in one way, every bit must be equal: in one layout, or in any if both are
canonical. Otherwise only the loss and the norm are compared, to TOLERANCE: what rounding does to
them grows with the steps, and only a replay can tell it from a fault.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megaprec.checkpoint.atomic import checkpoints, latest
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from tools.config.run_file import RunConfig, load_run
from tools.convert.train_state import TrainState, read_progress
from tools.journal.records import (
    DIGESTS,
    METRICS,
    odd_lines,
    read_digests,
    read_lines,
    read_metrics,
)
from tools.prove.parting import Parting, by_step, first_parting
from tools.prove.proof import is_canonical
from tools.training.changed_keys import KEYS_WITHOUT_EFFECT, Rates, same_rates
from tools.training.corpus import Corpus
from tools.training.data_identity import other_sets
from tools.training.state_digests import STEP_FIELDS

TOLERANCE = 1e-3  # relative difference of a loss or norm that two layouts may have in one step
# keys with which the same numbers are rounded or added otherwise; a layout's come on top in "fast"
ROUNDING = (
    "precision.*", "fp8.*", "train.numerics", "train.canonical_shards", "train.micro_batch", "train.threads",
    "train.compile", "optimizer.native",
)  # fmt: skip
SCHEDULE = ("lr.*", "train.steps")
# of FREELY: no number of a resume depends on them as such, but of a run
ACTING = (
    "train.init_from",
    *SCHEDULE,
)


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
        file = next(
            (
                folder / name
                for name in ("run.toml", "run.resolved.toml")
                if (folder / name).is_file()
            ),
            None,
        )
        if file is None:
            raise UserError(f"{path} has no run.toml: give the folder of a run, or a run file")
        return Side(path, load_run(file), folder)

    @property
    def digests(self) -> dict[int, Mapping[str, Any]]:
        return by_step(read_digests(self.folder)) if self.folder else {}

    @property
    def loaded(self) -> dict[int, Mapping[str, Any]]:
        """Return the digests of states that the run has loaded to go on, by step."""
        if self.folder:
            return by_step(read_digests(self.folder), loaded=True)
        return {}

    @property
    def metrics(self) -> dict[int, Mapping[str, Any]]:
        if self.folder:
            return {record["step"]: record for record in read_metrics(self.folder)}
        return {}

    def odd_records(self) -> Iterator[str]:
        """Yield a note for each file of records with lines that cannot be compared."""
        if self.folder is None:
            return
        yield from filter(None, (odd_lines(self.folder / name) for name in (METRICS, DIGESTS)))
        lines = read_lines(self.folder / DIGESTS)
        used = read_digests(self.folder)
        if others := sum(line.record is not None for line in lines) - len(used):
            yield f"{self.folder / DIGESTS}: {others} of {len(lines)} lines are no digests: not used"

    def checkpoint_steps(self) -> dict[int, Path]:
        """Return the checkpoints by step."""
        if self.folder is None or latest(self.folder / "checkpoints") is None:
            return {}
        return {
            read_progress(Store(path)).step: path
            for path in checkpoints(self.folder / "checkpoints")
        }


@dataclass(frozen=True)
class Records:
    """The comparison of two runs' records. by: "digests" or "metrics", "" if they have no step in
    common.

    steps: number of compared steps. parting: the first difference. beyond: steps without a digest
    after the newest one, of which losses, norms and scales were compared.
    """

    by: str
    steps: int
    parting: Parting | None
    beyond: int = 0


def must_be_equal(a: RunConfig, b: RunConfig) -> bool:
    """Return True if every bit of the two runs must be equal: in one layout, or in any if both are
    canonical."""
    both = is_canonical(a) and is_canonical(b)
    rounding = (*ROUNDING, *(() if both else ("parallel.*",)))
    return not any(
        _like(key, rounding) and not _like(key, KEYS_WITHOUT_EFFECT) for key, *_ in _keys(a, b)
    )


def other_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Return a line for each key that differs and that numbers depend on, other than the layout.

    Keys of the data are left out, for its tokens count (`other_tokens`), and so are a vocabulary
    that is theirs and keys of the learning rate that give the same rates.
    """
    free = ["parallel.*", *(key for key in KEYS_WITHOUT_EFFECT if key not in ACTING)]
    if same_rates(Rates.of(a.lr, a.train), Rates.of(b.lr, b.train), TrainState()):
        free += SCHEDULE
    found = [line for line in _keys(a, b) if not _like(line[0], free)]
    return [
        f"{key}: {one} | {other}"
        for key, one, other in found
        if key != "model.vocab" or "0" not in (one, other)
    ]


def _like(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def other_tokens(a: Corpus, b: Corpus) -> list[str]:
    """Return a line for each data set of other tokens, and one for another tokenizer."""
    if a.identity is None or b.identity is None:
        return []
    if len(a.identity.sets) != len(b.identity.sets):
        return [f"data.blend: {len(a.identity.sets)} data sets | {len(b.identity.sets)}"]
    lines = [found.line for found in other_sets(a.identity, b.identity, " | ")]
    if a.identity.tokenizer != b.identity.tokenizer:
        names = (str(one.tokenizer.path) if one.tokenizer else "none" for one in (a, b))
        lines.append(f"data.tokenizer: {' | '.join(names)} (other contents)")
    return lines


def _keys(a: RunConfig, b: RunConfig) -> Iterator[tuple[str, str, str]]:
    for (table, one), (_, other) in zip(a, b, strict=True):
        for name, value in one:
            if value != getattr(other, name):
                yield f"{table}.{name}", a.value(f"{table}.{name}"), b.value(f"{table}.{name}")


def compare_records(a: Side, b: Side, exact: bool) -> Records:
    """Compare what both runs have recorded of the steps that both took.

    Where bits must be equal, that is the digests of both and the metrics: there may be none of some
    steps, and the earlier difference tells more. by: of which the first difference is; digests if
    there is none.
    """
    metrics = _by_metrics(a, b, exact)
    if not exact or not (common := a.digests.keys() & b.digests.keys()):
        return metrics
    found = _first(a, b)
    later = metrics.parting
    if later and (found is None or later.step < found.step):
        return metrics
    beyond = sum(step > max(common) for step in a.metrics.keys() & b.metrics.keys())
    return Records("digests", len(common), found, beyond)


def _by_metrics(a: Side, b: Side, exact: bool) -> Records:
    """Compare outcome, loss, norm and loss scale of each step that both runs have recorded."""
    ours = a.metrics
    theirs = b.metrics
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Records("", 0, None)
    found = (_of_step(step, ours[step], theirs[step], exact) for step in common)
    return Records("metrics", len(common), next((parting for parting in found if parting), None))


def _first(a: Side, b: Side) -> Parting | None:
    """Return the first difference between the states after steps, and between a loaded state and
    that of a step."""
    found = [first_parting(a.digests, b.digests)]
    found += [
        first_parting(one.loaded, other, state_only=True)
        for one in (a, b)
        for other in (a.digests, b.digests)
    ]
    return min(
        (parting for parting in found if parting), key=lambda p: (p.step, p.loaded), default=None
    )


def _of_step(
    step: int, one: Mapping[str, Any], other: Mapping[str, Any], exact: bool
) -> Parting | None:
    apart = [
        key
        for key in STEP_FIELDS
        if not _near(one.get(key), other.get(key), 0.0 if exact else TOLERANCE)
    ]
    if not apart:
        return None
    return Parting(
        step,
        apart[0],
        len(apart) - 1,
        (json.dumps(one.get(apart[0])), json.dumps(other.get(apart[0]))),
    )


def _near(one: Any, other: Any, tolerance: float) -> bool:
    if (
        not isinstance(one, float)
        or not isinstance(other, float)
        or not (math.isfinite(one) and math.isfinite(other))
    ):
        return repr(one) == repr(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


@dataclass(frozen=True)
class Start:
    """The state from which steps are taken again. checkpoint: that of A, "" for initial weights.

    passed_over: a line for each newer checkpoint of that step which is not the same in both runs.
    """

    step: int
    checkpoint: str
    passed_over: list[str]


def common_start(a: Side, b: Side, before: int, exact: bool) -> Start:
    """Return the newest step before `before` of which both runs have a checkpoint, or the initial
    weights.

    exact: the checkpoints must hold the same bits.
    """
    ours = a.checkpoint_steps()
    theirs = b.checkpoint_steps()
    passed_over: list[str] = []
    for step in sorted(
        (step for step in ours.keys() & theirs.keys() if step < before), reverse=True
    ):
        apart = other_tensors(Store(ours[step]), Store(theirs[step])) if exact else []
        if not apart:
            return Start(step, str(ours[step]), passed_over)
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        passed_over.append(
            f"the checkpoints of step {step} differ in {apart[0].replace('/', ' ')}{more}"
        )
    return Start(0, "", passed_over)


def other_tensors(a: Store, b: Store) -> list[str]:
    """Return the tensors, as kind/name, that two checkpoints do not both hold with the same
    bits."""
    ours = a.index["tensors"]
    theirs = b.index["tensors"]
    keys = sorted({*ours, *theirs}, key=lambda key: (key.startswith("weight/"), key))
    return [
        key for key in keys if key not in ours or key not in theirs or not _same_bits(key, a, b)
    ]


def _same_bits(key: str, a: Store, b: Store) -> bool:
    one, other = (store.read(*key.split("/", 1)) for store in (a, b))
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
