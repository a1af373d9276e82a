"""Taking the steps around a difference again, from one state, with everything recorded between
modules.

Where bits must be equal, both runs are taken again in their own precision and compared with each
other, bit by bit. Otherwise both are taken again in float64 and each is compared with one process,
as `megaprec parity` does: in float64 a fault is far larger than rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megaprec.errors import UserError
from tools.config.run_file import RunConfig
from tools.parity.again import updates
from tools.parity.borders import BACKWARD, FORWARD, Notes
from tools.parity.certificate import PROVEN, WRONG, Compared, entry
from tools.parity.compare import Difference, compare
from tools.parity.gather import Borders, Record, gather
from tools.parity.layouts import Layout
from tools.parity.noise import Noise
from tools.parity.ranks import Run, corpus_of, run_alone, run_together
from tools.parity.record import Plan
from tools.parity.runs import EPSILON, alone, in_float64

Take = Callable[[Run], Record]


class NotTaken(Exception):
    """A replay that did not finish; the text says why."""


@dataclass(frozen=True)
class Replay:
    """Steps to take again. a, b: the runs, ready to be taken. plan: the steps. names: of both runs.
    folder: empty."""

    a: RunConfig
    b: RunConfig
    plan: Plan
    names: tuple[str, str]
    folder: Path

    def run(self, name: str, config: RunConfig, plan: Plan | None = None) -> Run:
        return Run(config, plan or self.plan, self.folder / name / "run")


def taken(run: Run) -> Record:
    """Take a run in processes of its own and return its record. Raises NotTaken."""
    if run.config.world_size == 1:
        return run_alone(run)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    (failure,) = run_together([run], run.folder.parent)
    if failure is not None:
        raise NotTaken("; ".join([failure.why, *failure.where]))
    return gather(run.folder)


def located_bits(replay: Replay, take: Take = taken) -> dict[str, Any]:
    """Return the entry of the first bit that differs between both runs, in their own precision."""
    order = take(replay.run("order", alone(replay.a), replace(replay.plan, steps=1)))
    theirs = as_one(take(replay.run("a", replay.a)), order)
    ours = take(replay.run("b", replay.b))
    after = {kind: tensors for kind, tensors in theirs.tensors.items() if kind.startswith("after/")}
    found = compare(ours, theirs, Noise(exact=True), replay.b.optimizer.norm, after)
    return _entry(
        replay, replay.b, found, ours, theirs, f"{replay.names[1]} against {replay.names[0]}"
    )


def located_in_float64(replay: Replay, take: Take = taken) -> dict[str, Any]:
    """Return the entry of the first run that differs from one process in float64, of B if neither
    does."""
    exact = alone(in_float64(replay.a))
    truth = take(replay.run("truth", exact))
    noise = Noise(take(replay.run("shaken", exact, replace(replay.plan, shaken=EPSILON["fp64"]))))
    entries: list[dict[str, Any]] = []
    for name, config in zip(replay.names, (replay.a, replay.b), strict=True):
        run = replay.run(f"float64 {len(entries)}", in_float64(config))
        ours = take(run)
        start = Path(replay.plan.start) if replay.plan.start else None
        again = updates(exact, corpus_of(exact), ours, start)
        found = compare(ours, truth, noise, config.optimizer.norm, again)
        entries.append(
            _entry(replay, run.config, found, ours, truth, f"{name} against one process")
        )
    return min(
        entries, key=lambda one: (one["verdict"] != WRONG, one.get("first", {}).get("step", 0))
    )


def _entry(
    replay: Replay,
    config: RunConfig,
    found: Sequence[Difference],
    ours: Record,
    theirs: Record,
    compared: str,
) -> dict[str, Any]:
    """Return the certificate's entry of a comparison, with the sample and micro-batch of its first
    difference."""
    layout = Layout(compared, config.parallel)
    made = entry(Compared(layout, str(config.precision.compute), config, found, ours, theirs))
    first = next((d for d in found if d.fails), None)
    if first is not None:
        made["first"] |= _samples(first, config, ours, theirs)
    return made | {"compared": compared, "equal": made["verdict"] == PROVEN}


def _samples(first: Difference, config: RunConfig, ours: Record, theirs: Record) -> dict[str, Any]:
    """Return sample, replica and micro-batch of a difference between activations or their
    gradients."""
    if first.quantity not in (FORWARD, BACKWARD):
        return {}
    (whole,) = theirs.borders[first.quantity, first.name]
    step = first.step - 1
    own = config.train.global_batch // config.parallel.data
    for notes in ours.borders[first.quantity, first.name]:
        for row, sample in enumerate(notes.samples):
            if notes.rank not in first.ranks or sample not in whole.samples:
                continue
            columns = [whole.positions.index(place) for place in notes.positions]
            seen = notes.values[step, row]
            wanted = whole.values[step, whole.samples.index(sample)][columns]
            if not (seen - wanted).norm() <= first.bound * wanted.norm():
                number = sample % own // config.train.micro_batch
                return {"sample": sample, "replica": sample // own, "microbatch": number}
    return {}


def as_one(record: Record, order: Record) -> Record:
    """Return the record with the values of all ranks at each border put together, as if one process
    had seen them.

    order: a record of one process, whose borders are in order.
    """
    together: Borders = {
        where: [_merged(record.borders[where])]
        for where in order.borders
        if where in record.borders
    }
    return replace(record, borders=together, same=order.same)


def _merged(several: Sequence[Notes]) -> Notes:
    """Return the values of several ranks as those of one; where ranks saw the same, the first
    counts."""
    samples = sorted({sample for notes in several for sample in notes.samples})
    positions = sorted({place for notes in several for place in notes.positions})
    whole = torch.full(
        (len(several[0].values), len(samples), len(positions)), torch.nan, dtype=torch.float64
    )
    for notes in reversed(several):
        rows = torch.tensor([samples.index(sample) for sample in notes.samples])
        columns = torch.tensor([positions.index(place) for place in notes.positions])
        whole[:, rows[:, None], columns] = notes.values
    return Notes(several[0].rank, samples, positions, whole)


def require_comparable(a: RunConfig, b: RunConfig) -> None:
    """Raise UserError if the runs cannot be compared step by step."""
    sizes = [(c.train.global_batch, c.train.seq_length) for c in (a, b)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"train.global_batch and train.seq_length differ, {sizes[0]} and {sizes[1]}: a "
            "step of one run is not a "
            "step of the other"
        )
