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
from tools.verify.parity.certificate import PROVEN, WRONG, Compared, entry
from tools.verify.parity.compare import Difference, compare
from tools.verify.parity.layouts import Layout
from tools.verify.parity.noise import Noise
from tools.verify.parity.ranks import Run, corpus_of, run_and_gather
from tools.verify.parity.record import BorderTable, Plan, Record, Tensors
from tools.verify.parity.repeated_updates import updates
from tools.verify.parity.runs import EPSILON, alone, in_float64

Take = Callable[[Run], Record]


@dataclass(frozen=True)
class Replay:
    """Steps to take again. a, b: the runs, ready to be taken. plan: the steps. names: of both
    runs. folder: empty."""

    a: RunConfig
    b: RunConfig
    plan: Plan
    names: tuple[str, str]
    folder: Path

    def run(self, name: str, run_config: RunConfig, plan: Plan | None = None) -> Run:
        return Run(run_config, plan or self.plan, self.folder / name / "run")


def located_bits(replay: Replay, take: Take = run_and_gather) -> dict[str, Any]:
    """Return the entry of the first bit that differs between both runs, in their own precision."""
    # a step of one process tells in which order borders are passed
    one_step = replace(replay.plan, steps=1)
    order = take(replay.run("order", alone(replay.a), one_step))
    first_record = merge_ranks(take(replay.run("a", replay.a)), order)
    second_record = take(replay.run("b", replay.b))
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
    """Return the entry of the first run that differs from one process in float64, of B if neither
    does."""
    one_process = alone(in_float64(replay.a))
    reference = take(replay.run("truth", one_process))
    # the same from weights moved by rounding: how far float64 itself carries
    shaken_plan = replace(replay.plan, shaken=EPSILON["fp64"])
    noise = Noise(take(replay.run("shaken", one_process, shaken_plan)))
    start = Path(replay.plan.start) if replay.plan.start else None
    corpus = corpus_of(one_process)
    entries: list[dict[str, Any]] = []
    for name, run_config in zip(replay.names, (replay.a, replay.b), strict=True):
        run = replay.run(f"float64 {len(entries)}", in_float64(run_config))
        candidate = take(run)
        repeated = updates(one_process, corpus, candidate, start)
        norm_order = run_config.optimizer.norm
        differences = compare(candidate, reference, noise, norm_order, repeated)
        compared = f"{name} against one process"
        entries.append(_entry(run.config, differences, candidate, reference, compared))
    return min(entries, key=_entry_rank)


def _entry_rank(entry: Mapping[str, Any]) -> tuple[bool, int]:
    """Order entries: those with a difference first, by its step."""
    first_difference = entry.get("first", {})
    return entry["verdict"] != WRONG, first_difference.get("step", 0)


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
        Layout(compared, run_config.parallel),
        str(run_config.precision.compute),
        run_config,
        differences,
        candidate,
        reference_record,
    )
    fields = entry(comparison)
    first_difference = next((difference for difference in differences if difference.fails), None)
    if first_difference is not None:
        fields["first"] |= _locate_sample(first_difference, run_config, candidate, reference_record)
    return fields | {"compared": compared, "equal": fields["verdict"] == PROVEN}


def _locate_sample(
    first_difference: Difference, run_config: RunConfig, candidate: Record, reference_record: Record
) -> dict[str, Any]:
    """Return sample, replica and micro-batch of a difference between activations or their
    gradients."""
    if first_difference.quantity not in (FORWARD, BACKWARD):
        return {}
    border = (first_difference.quantity, first_difference.name)
    (reference,) = reference_record.borders[border]
    samples_per_replica = run_config.train.global_batch // run_config.parallel.data
    for values in candidate.borders[border]:
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
    step = difference.step - 1
    # a rank saw its part of the sequence; one process saw all of it
    columns = [reference.positions.index(position) for position in values.positions]
    for row, sample_id in enumerate(values.samples):
        if sample_id not in reference.samples:
            continue
        reference_row = reference.samples.index(sample_id)
        expected = reference.values[step, reference_row][columns]
        error = (values.values[step, row] - expected).norm()
        is_near = error <= difference.bound * expected.norm()
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
        if border in record.borders:
            borders[border] = [_merge_values(record.borders[border])]
    return replace(record, borders=borders, aliases=order.aliases)


def _merge_values(ranks: Sequence[BorderValues]) -> BorderValues:
    """Return the values of several ranks as those of one; where ranks saw the same, the first
    counts."""
    all_samples: set[int] = set()
    all_positions: set[int] = set()
    for border_values in ranks:
        all_samples.update(border_values.samples)
        all_positions.update(border_values.positions)
    samples = sorted(all_samples)
    positions = sorted(all_positions)
    shape = (len(ranks[0].values), len(samples), len(positions))
    merged = torch.full(shape, torch.nan, dtype=torch.float64)
    # backwards, so that the first rank's values are written last
    for border_values in reversed(ranks):
        rows = [samples.index(sample_id) for sample_id in border_values.samples]
        columns = [positions.index(position) for position in border_values.positions]
        merged[:, torch.tensor(rows)[:, None], torch.tensor(columns)] = border_values.values
    return BorderValues(ranks[0].rank, samples, positions, merged)


def require_comparable(a: RunConfig, b: RunConfig) -> None:
    """Raise UserError if the runs cannot be compared step by step."""
    ours = (a.train.global_batch, a.train.seq_length)
    theirs = (b.train.global_batch, b.train.seq_length)
    if ours != theirs:
        raise UserError.of("bisect.batches_differ", ours=ours, theirs=theirs)
