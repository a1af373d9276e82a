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
from typing import Any, NamedTuple

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
from tools.prove.first_difference import Parting, by_step, first_parting
from tools.prove.proof import is_canonical
from tools.training.changed_keys import KEYS_WITHOUT_EFFECT, Rates, same_rates
from tools.training.corpus import Corpus
from tools.training.data_identity import other_sets
from tools.training.state_digests import STEP_FIELDS

TOLERANCE = 1e-3  # relative difference of a loss or norm that two layouts may have in one step
# keys with which the same numbers are rounded or added otherwise; a layout's come on top in "fast"
ROUNDING = (
    "precision.*",
    "fp8.*",
    "train.numerics",
    "train.canonical_shards",
    "train.micro_batch",
    "train.threads",
    "train.compile",
    "optimizer.native",
)
SCHEDULE = ("lr.*", "train.steps")
# of FREELY: no number of a resume depends on them as such, but of a run
ACTING = ("train.init_from", *SCHEDULE)


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
        for name in ("run.toml", "run.resolved.toml"):
            if (folder / name).is_file():
                return Side(path, load_run(folder / name), folder)
        raise UserError.of("bisect.not_a_run", path=path)

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
        for name in (METRICS, DIGESTS):
            note = odd_lines(self.folder / name)
            if note:
                yield note
        path = self.folder / DIGESTS
        lines = read_lines(path)
        num_records = sum(line.record is not None for line in lines)
        num_others = num_records - len(read_digests(self.folder))
        if num_others:
            yield f"{path}: {num_others} of {len(lines)} lines are no digests: not used"

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
    rounding: list[str] = [*ROUNDING]
    if not (is_canonical(a) and is_canonical(b)):
        rounding.append("parallel.*")
    keys = [difference.key for difference in _different_keys(a, b)]
    return not any(
        _matches(key, rounding) and not _matches(key, KEYS_WITHOUT_EFFECT) for key in keys
    )


def other_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Return a line for each key that differs and that numbers depend on, other than the layout.

    Keys of the data are left out, for its tokens count (`other_tokens`), and so are a vocabulary
    that is theirs and keys of the learning rate that give the same rates.
    """
    free = ["parallel.*", *(key for key in KEYS_WITHOUT_EFFECT if key not in ACTING)]
    if same_rates(Rates.of(a.lr, a.train), Rates.of(b.lr, b.train), TrainState()):
        free += SCHEDULE
    lines: list[str] = []
    for key, ours, theirs in _different_keys(a, b):
        is_vocab_of_data = key == "model.vocab" and "0" in (ours, theirs)
        if not _matches(key, free) and not is_vocab_of_data:
            lines.append(f"{key}: {ours} | {theirs}")
    return lines


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def other_tokens(a: Corpus, b: Corpus) -> list[str]:
    """Return a line for each data set of other tokens, and one for another tokenizer."""
    if a.identity is None or b.identity is None:
        return []
    if len(a.identity.sets) != len(b.identity.sets):
        return [f"data.blend: {len(a.identity.sets)} data sets | {len(b.identity.sets)}"]
    lines = [difference.line for difference in other_sets(a.identity, b.identity, " | ")]
    if a.identity.tokenizer != b.identity.tokenizer:
        names = f"{_tokenizer_name(a)} | {_tokenizer_name(b)}"
        lines.append(f"data.tokenizer: {names} (other contents)")
    return lines


def _tokenizer_name(corpus: Corpus) -> str:
    return str(corpus.tokenizer.path) if corpus.tokenizer else "none"


class _KeyDifference(NamedTuple):
    """A key whose values differ, as a run file writes them."""

    key: str
    ours: str
    theirs: str


def _different_keys(a: RunConfig, b: RunConfig) -> Iterator[_KeyDifference]:
    for (table, ours), (_, theirs) in zip(a, b, strict=True):
        for name, value in ours:
            if value != getattr(theirs, name):
                key = f"{table}.{name}"
                yield _KeyDifference(key, a.value(key), b.value(key))


def compare_records(a: Side, b: Side, exact: bool) -> Records:
    """Compare what both runs have recorded of the steps that both took.

    Where bits must be equal, that is the digests of both and the metrics: there may be none of some
    steps, and the earlier difference tells more. by: of which the first difference is; digests if
    there is none.
    """
    metrics = _compare_metrics(a, b, exact)
    if not exact:
        return metrics
    common = a.digests.keys() & b.digests.keys()
    if not common:
        return metrics
    parting = _first_digest_parting(a, b)
    if metrics.parting and (parting is None or metrics.parting.step < parting.step):
        return metrics
    beyond = sum(step > max(common) for step in a.metrics.keys() & b.metrics.keys())
    return Records("digests", len(common), parting, beyond)


def _compare_metrics(a: Side, b: Side, exact: bool) -> Records:
    """Compare outcome, loss, norm and loss scale of each step that both runs have recorded."""
    ours = a.metrics
    theirs = b.metrics
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Records("", 0, None)
    for step in common:
        parting = _metrics_parting(step, ours[step], theirs[step], exact)
        if parting:
            return Records("metrics", len(common), parting)
    return Records("metrics", len(common), None)


def _first_digest_parting(a: Side, b: Side) -> Parting | None:
    """Return the first difference between the states after steps, and between a loaded state and
    that of a step."""
    # a side reads its file on each access
    our_digests = a.digests
    their_digests = b.digests
    partings = [first_parting(our_digests, their_digests)]
    for loaded in (a.loaded, b.loaded):
        for digests in (our_digests, their_digests):
            partings.append(first_parting(loaded, digests, state_only=True))
    present = [parting for parting in partings if parting is not None]
    return min(present, key=lambda parting: (parting.step, parting.loaded), default=None)


def _metrics_parting(
    step: int, ours: Mapping[str, Any], theirs: Mapping[str, Any], exact: bool
) -> Parting | None:
    tolerance = 0.0 if exact else TOLERANCE
    keys = [key for key in STEP_FIELDS if not _are_near(ours.get(key), theirs.get(key), tolerance)]
    if not keys:
        return None
    first = keys[0]
    values = (json.dumps(ours.get(first)), json.dumps(theirs.get(first)))
    return Parting(step, first, len(keys) - 1, values)


def _are_near(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Return True if two finite numbers differ by at most the relative tolerance, or other values
    not at all."""
    are_numbers = isinstance(ours, float) and isinstance(theirs, float)
    if are_numbers and math.isfinite(ours) and math.isfinite(theirs):
        return abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs))
    return repr(ours) == repr(theirs)  # NaN equals NaN


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
    for step in sorted(ours.keys() & theirs.keys(), reverse=True):
        if step >= before:
            continue
        different = other_tensors(Store(ours[step]), Store(theirs[step])) if exact else []
        if not different:
            return Start(step, str(ours[step]), passed_over)
        first = different[0].replace("/", " ")
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        passed_over.append(f"the checkpoints of step {step} differ in {first}{more}")
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
    kind, name = key.split("/", 1)
    ours = a.read(kind, name)
    theirs = b.read(kind, name)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    # as bytes: NaN equals NaN, and 0 is not -0
    return torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))
