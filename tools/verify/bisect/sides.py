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

from megaprec.checkpoint.atomic import INDEX, checkpoints
from megaprec.checkpoint.reader import Store
from megaprec.errors import UserError
from megaprec.tokens.places import path_of
from tools.config.resolved_run import resolve_run
from tools.config.rules.derived import blend_phases
from tools.config.run_file import RunConfig, checkpoint_folder, run_file_in
from tools.journal.records import (
    DIGESTS,
    METRICS,
    odd_lines,
    read_branching,
    read_digests,
    read_lines,
    read_metrics,
)
from tools.saved.train_state import TrainState, read_progress
from tools.training.changed_keys import KEYS_WITHOUT_EFFECT, reorders_sums, same_rates
from tools.training.corpus import Corpus
from tools.training.data_identity import other_sets, other_weights
from tools.training.learning_rates import LearningRates
from tools.training.step_records import STEP_FIELDS
from tools.verify.prove.first_difference import Parting, by_step, first_parting
from tools.verify.prove.proof import is_canonical

TOLERANCE = 1e-3  # relative difference of a loss or norm that two layouts may have in one step
# Keys that decide how numbers are rounded and in which order they are added. So do those of the
# layout, unless both runs are canonical.
ROUNDING_KEYS = (
    "precision.*",
    "fp8.*",
    "train.numerics",
    "train.canonical_shards",
    "train.micro_batch",
    "train.threads",
    "train.compile",
)
SCHEDULE_KEYS = ("lr.*", "train.steps")
# Of KEYS_WITHOUT_EFFECT, which are those of a resume: numbers of a whole run depend on its first
# weights and its rates.
KEYS_OF_WHOLE_RUNS = ("train.init_from", *SCHEDULE_KEYS)


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
            return Side(path, resolve_run(path), None)
        run_file = run_file_in(folder)
        if run_file is None:
            raise UserError.of("bisect.not_a_run", path=path)
        return Side(path, resolve_run(run_file), folder)

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
        for file_name in (METRICS, DIGESTS):
            note = odd_lines(self.folder / file_name)
            if note:
                yield note
        path = self.folder / DIGESTS
        lines = read_lines(path)
        num_records = sum(line.record is not None for line in lines)
        num_others = num_records - len(read_digests(self.folder))
        if num_others:
            yield f"{path}: {num_others} of {len(lines)} lines are no digests: not used"

    @property
    def first_step(self) -> int:
        """The step after which the run begins: that at which it branched, 0 for another run."""
        branching = read_branching(self.folder) if self.folder else None
        return branching["step"] if branching else 0

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Return the checkpoints by step; of a branch that from which it began too, if it is still
        there."""
        if self.folder is None:
            return {}
        paths = checkpoints(checkpoint_folder(self.config.checkpoint.folder, self.folder))
        branching = read_branching(self.folder)
        origin = path_of(str(branching["checkpoint"])) if branching else None
        if origin and (origin / INDEX).is_file():
            paths.insert(0, origin)
        return {read_progress(Store(path)).step: path for path in paths}


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


def must_be_equal(first_run: RunConfig, second_run: RunConfig) -> bool:
    """Return True if every bit of the two runs must be equal: in one layout, or in any if both are
    canonical."""
    rounding_keys = [*ROUNDING_KEYS]
    if not (is_canonical(first_run) and is_canonical(second_run)):
        rounding_keys.append("parallel.*")
    for dotted_key, ours, theirs in _different_keys(first_run, second_run):
        # some keys of a table, such as parallel.zero, change no number
        has_effect = not _matches(dotted_key, KEYS_WITHOUT_EFFECT)
        has_effect = has_effect or reorders_sums(dotted_key, ours, theirs)
        if has_effect and _matches(dotted_key, rounding_keys):
            return False
    return True


def other_keys(first_run: RunConfig, second_run: RunConfig) -> list[str]:
    """Return a line for each key that differs and that numbers depend on, other than the layout.

    Of the data only the weights of a blend are compared here; `other_tokens` compares what the data
    sets hold. Left out are a vocabulary that one run takes from its data, and keys of the learning
    rate if both runs have the same rates in all steps.
    """
    ignored_keys = ["parallel.*"]
    for pattern in KEYS_WITHOUT_EFFECT:
        if pattern not in KEYS_OF_WHOLE_RUNS:
            ignored_keys.append(pattern)
    first_rates = LearningRates.of(first_run.lr, first_run.train)
    second_rates = LearningRates.of(second_run.lr, second_run.train)
    # before the first step: the rates of all steps are compared
    if same_rates(first_rates, second_rates, TrainState()):
        ignored_keys += SCHEDULE_KEYS
    lines: list[str] = []
    for dotted_key, first_value, second_value in _different_keys(first_run, second_run):
        # a vocabulary of 0 is that of the data
        is_vocab_of_data = dotted_key == "model.vocab" and "0" in (first_value, second_value)
        if not _matches(dotted_key, ignored_keys) and not is_vocab_of_data:
            lines.append(f"{dotted_key}: {first_value} | {second_value}")
    phases = [blend_phases(run.data) for run in (first_run, second_run)]
    lines += [difference.line for difference in other_weights(*phases, between=" | ")]
    return lines


def _matches(dotted_key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(dotted_key, pattern) for pattern in patterns)


def other_tokens(first_corpus: Corpus, second_corpus: Corpus) -> list[str]:
    """Return a line for each data set of other tokens, and one for another tokenizer."""
    first_data = first_corpus.identity
    second_data = second_corpus.identity
    if first_data is None or second_data is None:
        return []
    lines = [difference.line for difference in other_sets(first_data, second_data, " | ")]
    if first_data.tokenizer != second_data.tokenizer:
        names = f"{_tokenizer_name(first_corpus)} | {_tokenizer_name(second_corpus)}"
        lines.append(f"data.tokenizer: {names} (other contents)")
    return lines


def _tokenizer_name(corpus: Corpus) -> str:
    return str(corpus.tokenizer.path) if corpus.tokenizer else "none"


class _KeyDifference(NamedTuple):
    """A key whose values differ, as a run file writes them."""

    key: str
    ours: str
    theirs: str


def _different_keys(first_run: RunConfig, second_run: RunConfig) -> Iterator[_KeyDifference]:
    """Yield the keys of run files whose values differ."""
    for (table, first_table), (_, second_table) in zip(first_run, second_run, strict=True):
        for key_name, value in first_table:
            if value == getattr(second_table, key_name):
                continue
            dotted_key = f"{table}.{key_name}"
            ours = first_run.value(dotted_key)
            theirs = second_run.value(dotted_key)
            yield _KeyDifference(dotted_key, ours, theirs)


def compare_records(first_side: Side, second_side: Side, exact: bool) -> Records:
    """Return what both runs have recorded of the steps that both took, with the first difference.

    Where bits must be equal, digests and metrics are both compared, and the earlier difference
    counts: some steps may have no digests. Without a difference the result is that of the digests.
    """
    # metrics may have steps that were taken without digests
    metrics = _compare_metrics(first_side, second_side, exact)
    if not exact:
        return metrics
    common_steps = first_side.digests.keys() & second_side.digests.keys()
    if not common_steps:
        return metrics
    parting = _first_digest_parting(first_side, second_side)
    if metrics.parting and (parting is None or metrics.parting.step < parting.step):
        return metrics
    # steps that only the metrics can vouch for
    newest_digest = max(common_steps)
    metrics_steps = first_side.metrics.keys() & second_side.metrics.keys()
    num_beyond = sum(step > newest_digest for step in metrics_steps)
    return Records("digests", len(common_steps), parting, num_beyond)


def _compare_metrics(first_side: Side, second_side: Side, exact: bool) -> Records:
    """Return the first step whose outcome, loss, norm or loss scale differs in the runs'
    metrics."""
    first_metrics = first_side.metrics
    second_metrics = second_side.metrics
    common_steps = sorted(first_metrics.keys() & second_metrics.keys())
    if not common_steps:
        return Records("", 0, None)
    for step in common_steps:
        parting = _metrics_parting(step, first_metrics[step], second_metrics[step], exact)
        if parting:
            return Records("metrics", len(common_steps), parting)
    return Records("metrics", len(common_steps), None)


def _first_digest_parting(first_side: Side, second_side: Side) -> Parting | None:
    """Return the first difference between the states after steps, and between a loaded state and
    that of a step."""
    # read once: `digests` and `loaded` read the file on each access
    our_digests = first_side.digests
    their_digests = second_side.digests
    partings = [first_parting(our_digests, their_digests)]
    for loaded in (first_side.loaded, second_side.loaded):
        for digests in (our_digests, their_digests):
            partings.append(first_parting(loaded, digests, state_only=True))
    present = [parting for parting in partings if parting is not None]
    return min(present, key=lambda parting: (parting.step, parting.loaded), default=None)


def _metrics_parting(
    step: int, first_fields: Mapping[str, Any], second_fields: Mapping[str, Any], exact: bool
) -> Parting | None:
    """Return the first field of a step's metrics that differs, and how many others do; None if all
    of STEP_FIELDS agree."""
    tolerance = 0.0 if exact else TOLERANCE
    different_fields = [
        field_name
        for field_name in STEP_FIELDS
        if not _are_near(first_fields.get(field_name), second_fields.get(field_name), tolerance)
    ]
    if not different_fields:
        return None
    first = different_fields[0]
    values = (json.dumps(first_fields.get(first)), json.dumps(second_fields.get(first)))
    return Parting(step, first, len(different_fields) - 1, values)


def _are_near(first_value: Any, second_value: Any, tolerance: float) -> bool:
    """Return True if two finite numbers differ by at most the relative tolerance, or other values
    not at all."""
    are_numbers = isinstance(first_value, float) and isinstance(second_value, float)
    if are_numbers and math.isfinite(first_value) and math.isfinite(second_value):
        larger = max(abs(first_value), abs(second_value))
        return abs(first_value - second_value) <= tolerance * larger
    return repr(first_value) == repr(second_value)  # NaN equals NaN


@dataclass(frozen=True)
class Start:
    """The state from which steps are taken again. checkpoint: that of A, "" for initial weights.

    passed_over: a line for each newer checkpoint of that step which is not the same in both runs.
    """

    step: int
    checkpoint: str
    passed_over: list[str]


def common_start(first_side: Side, second_side: Side, before: int, exact: bool) -> Start:
    """Return the newest step before `before` of which both runs have a checkpoint, or the initial
    weights.

    exact: the checkpoints must hold the same bits.
    """
    first_checkpoints = first_side.checkpoints_by_step()
    second_checkpoints = second_side.checkpoints_by_step()
    passed_over: list[str] = []
    for step in sorted(first_checkpoints.keys() & second_checkpoints.keys(), reverse=True):
        if step >= before:
            continue
        start = Start(step, str(first_checkpoints[step]), passed_over)
        if not exact:
            return start
        different = other_tensors(Store(first_checkpoints[step]), Store(second_checkpoints[step]))
        if not different:
            return start
        first = different[0].replace("/", " ")
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        passed_over.append(f"the checkpoints of step {step} differ in {first}{more}")
    return Start(0, "", passed_over)


def other_tensors(first_store: Store, second_store: Store) -> list[str]:
    """Return the tensors, as kind/name, that two checkpoints do not both hold with the same
    bits."""
    first_tensors = first_store.index["tensors"]
    second_tensors = second_store.index["tensors"]
    # moments come before weights, as in `first_parting`: an update computes them first
    stored_names = sorted(
        {*first_tensors, *second_tensors},
        key=lambda stored_name: (stored_name.startswith("weight/"), stored_name),
    )
    different: list[str] = []
    for stored_name in stored_names:
        in_both = stored_name in first_tensors and stored_name in second_tensors
        if not in_both or not _same_bits(stored_name, first_store, second_store):
            different.append(stored_name)
    return different


def _same_bits(stored_name: str, first_store: Store, second_store: Store) -> bool:
    """Return True if a stored tensor has the same bits in both stores."""
    kind, tensor_name = stored_name.split("/", 1)
    first_values = first_store.read(kind, tensor_name)
    second_values = second_store.read(kind, tensor_name)
    if first_values.dtype != second_values.dtype or first_values.shape != second_values.shape:
        return False
    # as bytes: NaN equals NaN, and 0 is not -0
    return torch.equal(
        first_values.flatten().view(torch.uint8), second_values.flatten().view(torch.uint8)
    )
