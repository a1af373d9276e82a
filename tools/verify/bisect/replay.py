"""Taking the steps around a difference again, from one state, with everything recorded between
modules.

Where bits must be equal, both runs are taken again in their own precision and compared with each
other, bit by bit. Otherwise both are taken again in float64 and each is compared with one process,
as `megaprec parity` does: in float64 a fault is far larger than rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from tools.config.run_file import RunConfig
from tools.verify.parity.borders import BACKWARD, FORWARD, BorderValues
from tools.verify.parity.certificate import NOT_TRIED, PROVEN, WRONG, Compared, entry
from tools.verify.parity.compare import Difference, compare
from tools.verify.parity.layouts import ComparedLayout
from tools.verify.parity.noise import Noise
from tools.verify.parity.ranks import RecordedRun, corpus_of, run_and_gather
from tools.verify.parity.record import BorderTable, Plan, Record, Tensors
from tools.verify.parity.repeated_updates import updates
from tools.verify.parity.runs import EPSILON, alone, in_float64

Take = Callable[[RecordedRun], Record]


@dataclass(frozen=True)
class Replay:
    """Steps to take again. a, b: the runs, ready to be taken. plan: the steps. names: of both runs,
    as the user gave them. folder: empty."""

    a: RunConfig
    b: RunConfig
    plan: Plan
    names: tuple[str, str]
    folder: Path

    def recorded_run(
        self, name: str, run_config: RunConfig, plan: Plan | None = None
    ) -> RecordedRun:
        """Return a run that is to be taken. plan: that of the replay if none is given."""
        # a launch keeps files beside the folder of its run: NAME is for this run alone
        return RecordedRun(run_config, plan or self.plan, self.folder / name / "run")


def located_bits(replay: Replay, take: Take = run_and_gather) -> dict[str, Any]:
    """Take both runs again in their own precision and compare them bit by bit.

    Return the certificate's entry, which names the first difference if there is one.
    take: carries out a run and returns its record.
    """
    # A rank of a pipeline passes the borders of its own stages only. Their order over the whole
    # model is that of one process, of which one step is enough.
    one_step = replace(replay.plan, steps=1)
    order_run = replay.recorded_run("order", alone(replay.a), one_step)
    order = take(order_run)
    first_run = replay.recorded_run("a", replay.a)
    # `compare` takes a reference of one process
    first_record = merge_ranks(take(first_run), order)
    second_run = replay.recorded_run("b", replay.b)
    second_record = take(second_run)
    # the states of one run are what the other's updates must give
    states: dict[str, Tensors] = {}
    for kind, tensors in first_record.tensors.items():
        if kind.startswith("after/"):
            states[kind] = tensors
    noise = Noise(exact=True)
    norm_order = replay.b.optimizer.norm
    differences = compare(second_record, first_record, noise, norm_order, states)
    compared = f"{replay.names[1]} against {replay.names[0]}"
    return _entry(replay.b, differences, second_record, first_record, compared)


def located_in_float64(replay: Replay, take: Take = run_and_gather) -> dict[str, Any]:
    """Take both runs again in float64 and compare each with one process in float64.

    Return the certificate's entry of the run that differs; if both do, of the one whose first
    difference is in the earlier step.
    take: carries out a run and returns its record.
    """
    one_process = alone(in_float64(replay.a))
    reference_run = replay.recorded_run("reference", one_process)
    reference = take(reference_run)
    # The same from weights that are moved by about one rounding: as far as its results are from the
    # reference, float64 cannot tell.
    shaken_plan = replace(replay.plan, shaken=EPSILON["fp64"])
    shaken_run = replay.recorded_run("shaken", one_process, shaken_plan)
    noise = Noise(perturbed_run=take(shaken_run))
    start = Path(replay.plan.start) if replay.plan.start else None
    corpus = corpus_of(one_process)
    entries: list[dict[str, Any]] = []
    for name, run_config in zip(replay.names, (replay.a, replay.b), strict=True):
        run = replay.recorded_run(f"float64 {len(entries)}", in_float64(run_config))
        candidate = take(run)
        # from the candidate's own gradients: Adam makes a full step of what is only rounding
        repeated = updates(one_process, corpus, candidate, start)
        norm_order = run_config.optimizer.norm
        differences = compare(candidate, reference, noise, norm_order, repeated)
        compared = f"{name} against one process"
        entries.append(_entry(run.config, differences, candidate, reference, compared))
    return decisive_entry(entries)


def decisive_entry(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry that decides for all: that of the earliest difference, without one an entry
    that was not tried, otherwise the first."""
    # runs agree only if each of them is proven
    verdict_order = (WRONG, NOT_TRIED, PROVEN)

    def by_verdict_and_step(entry: Mapping[str, Any]) -> tuple[int, int]:
        first_difference = entry.get("first", {})
        return verdict_order.index(entry["verdict"]), first_difference.get("step", 0)

    return min(entries, key=by_verdict_and_step)


def _entry(
    run_config: RunConfig,
    differences: Sequence[Difference],
    candidate: Record,
    reference_record: Record,
    compared: str,
) -> dict[str, Any]:
    """Return the certificate's entry of a comparison, with the sample and micro-batch of its first
    difference."""
    comparison = Compared(
        layout=ComparedLayout(compared, run_config.parallel),
        precision=str(run_config.precision.compute),
        run=run_config,
        differences=differences,
        ours=candidate,
        theirs=reference_record,
    )
    fields = entry(comparison)
    failed = [difference for difference in differences if difference.fails]
    if failed:
        location = _locate_sample(failed[0], run_config, candidate, reference_record)
        fields["first"] |= location
    fields["compared"] = compared
    fields["equal"] = fields["verdict"] == PROVEN
    return fields


def _locate_sample(
    first_difference: Difference, run_config: RunConfig, candidate: Record, reference_record: Record
) -> dict[str, Any]:
    """Return sample, replica and micro-batch of a difference between activations or their
    gradients; {} for other quantities, which belong to no sample."""
    if first_difference.quantity not in (FORWARD, BACKWARD):
        return {}
    border = (first_difference.quantity, first_difference.name)
    step = first_difference.step - 1  # differences count steps from 1, values from 0
    # the reference is one process, or was merged as if it were
    (reference,) = reference_record.borders_at(border, step)
    # a replica takes consecutive samples of the batch, and a micro-batch consecutive ones of these
    samples_per_replica = run_config.train.global_batch // run_config.parallel.data
    for values in candidate.borders_at(border, step):
        if values.rank not in first_difference.ranks:
            continue
        sample_id = _differing_sample(first_difference, values, reference)
        if sample_id is None:
            continue
        replica, sample_in_replica = divmod(sample_id, samples_per_replica)
        microbatch = sample_in_replica // run_config.train.micro_batch
        return {"sample": sample_id, "replica": replica, "microbatch": microbatch}
    return {}


def _differing_sample(
    difference: Difference, values: BorderValues, reference: BorderValues
) -> int | None:
    """Return the first sample whose values on this rank are not those of the reference."""
    # a rank saw its part of the sequence; one process saw all of it
    columns = [reference.positions.index(position) for position in values.positions]
    for row, sample_id in enumerate(values.samples):
        if sample_id not in reference.samples:
            continue
        reference_row = reference.samples.index(sample_id)
        expected = reference.values[reference_row][columns]
        error = (values.values[row] - expected).norm()
        allowed_error = difference.bound * expected.norm()
        is_near = error <= allowed_error
        if not is_near:  # NaN is not near
            return sample_id
    return None


def merge_ranks(record: Record, order: Record) -> Record:
    """Return the record with the values of all ranks at each border put together, as if one process
    had seen them.

    order: a record of one process, whose borders are in order.
    """
    borders: BorderTable = {}
    for border in order.borders:
        by_step: dict[int, list[BorderValues]] = {}
        for values in record.borders.get(border, []):
            by_step.setdefault(values.step, []).append(values)
        if by_step:
            borders[border] = [_merge_values(of_step) for of_step in by_step.values()]
    # In one process the output of a stage is the very input of the next: aliases are its too.
    return replace(record, borders=borders, aliases=order.aliases)


def _merge_values(values_of_ranks: Sequence[BorderValues]) -> BorderValues:
    """Return the values of several ranks in one step as those of one; where ranks saw the same, the
    first counts."""
    all_samples: set[int] = set()
    all_positions: set[int] = set()
    for border_values in values_of_ranks:
        all_samples.update(border_values.samples)
        all_positions.update(border_values.positions)
    samples = sorted(all_samples)
    positions = sorted(all_positions)
    first_rank = values_of_ranks[0]
    shape = (len(samples), len(positions))
    merged = torch.full(shape, torch.nan, dtype=torch.float64)
    # backwards, so that the first rank's values are written last
    for border_values in reversed(values_of_ranks):
        rows = [samples.index(sample_id) for sample_id in border_values.samples]
        columns = [positions.index(position) for position in border_values.positions]
        row_indices = torch.tensor(rows)[:, None]  # a column: both together index a block
        column_indices = torch.tensor(columns)
        merged[row_indices, column_indices] = border_values.values
    return BorderValues(first_rank.rank, first_rank.step, samples, positions, merged)


def require_comparable(a: RunConfig, b: RunConfig) -> None:
    """Raise UserError if the runs cannot be compared step by step."""
    ours = (_batch_of(a), _length_of(a))
    theirs = (_batch_of(b), _length_of(b))
    if ours != theirs:
        raise UserError.of("bisect.batches_differ", ours=ours, theirs=theirs)


def _length_of(run_config: RunConfig) -> int | list[list[int]]:
    """Return the length of the sequences of a run, or its changes."""
    changes = run_config.train.seq_schedule
    if not changes:
        return run_config.train.seq_length
    return [[*change] for change in changes]


def _batch_of(run_config: RunConfig) -> int | list[list[int]]:
    """Return the global batch of a run, or its changes."""
    changes = run_config.train.batch_schedule
    if not changes:
        return run_config.train.global_batch
    return [[*change] for change in changes]
