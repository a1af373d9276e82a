"""The record of a run in one layout: losses, gradients and weights by logical name.

The trainer itself takes the steps, with the engine, the optimizer and the data order that training
has; the optimizer only notes what each update is made from. In one step an infinity is planted in
one gradient element, the same logical one in every layout, so that a skipped step is part of what
is compared.

A rank writes what its own slices hold, copies included, to files of its own; nothing here
communicates. `gather` reads the files of all ranks and puts the slices together.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of, parameters_of
from megaprec.diagnose.position import Position
from megaprec.durable import put_text
from megaprec.optim.decision.step_report import SKIPPED, StepObserver, report_fields
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.tokens.blend import Blend
from megaprec.tokens.samples import Batch, Samples
from models.decoder.stages import Stage
from tools.config.run_file import RunConfig
from tools.training.corpus import Corpus
from tools.training.trainer import Trainer
from tools.verify.parity.borders import (
    BACKWARD,
    FORWARD,
    Border,
    BorderRecorder,
    BorderValues,
    RunSize,
    StepSize,
)
from tools.verify.parity.fragments import Fragment, assemble, take_fragments
from tools.verify.parity.hang_watch import Trail

Tensors = dict[str, Tensor]  # float64, by logical name
BorderTable = dict[Border, list[BorderValues]]  # the values of each rank in each step
RankReport = dict[str, Any]  # a rank's JSON file
FRAGMENT_FIELDS = ("name", "shape", "offset", "local", "first", "cut")  # of the JSON file


@dataclass(frozen=True)
class Plan:
    """The work of a recorded run besides training. steps: the number of steps to take.

    small: some targets are left out of the loss, and what the optimizer keeps is recorded after
        each step that changed it; otherwise none is, and the latter after the first step and the
        last.
    planted: the step (from 0) whose gradient of the tensor `into` gets an infinity; -1 for none.
    shaken: by how much of itself each initial weight is moved, up or down, to see the effect of
        rounding.
    draw: which of the weights move up, as the seed of a random choice.
    start: the checkpoint to begin with; "" for initial weights.
    states: record what the optimizer keeps after each step.
    """

    steps: int
    small: bool = True
    planted: int = -1
    into: str = ""
    shaken: float = 0.0
    draw: int = 0
    start: str = ""
    states: bool = False


class GradientRecorder(StepObserver):
    """Observer that notes the gradients of each update, and plants what is to be planted.

    num_steps: steps that the optimizer has taken. gradients: of each applied step, from 0.
    """

    def __init__(self, record_plan: Plan) -> None:
        self.plan = record_plan
        self.num_steps = 0
        self.gradients: dict[int, list[Fragment]] = {}

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Plant an infinity, if this is the step."""
        if self.num_steps != self.plan.planted:
            return
        for flat_buffer in buffers:
            _plant_infinity(flat_buffer, self.plan.into)

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        """Note what the update is going to be made of."""
        if not skip:

            def unscaled(flat_buffer: Buffer) -> Tensor:
                # the optimizer's gradients are those of the scaled loss
                scaled = flat_buffer.local_grads
                return scaled.double() / scale.double()

            self.gradients[self.num_steps] = list(take_fragments(buffers, unscaled))
        self.num_steps += 1


def _plant_infinity(flat_buffer: Buffer, name: str) -> None:
    """Make the last element of a logical tensor infinite, if it lies in this rank's slice."""
    for buffer_piece in flat_buffer.pieces:
        last = buffer_piece.stop - 1
        # of a tensor that is cut, the last rank's slice has it
        has_last_element = buffer_piece.part.shard == buffer_piece.part.shards - 1
        is_local = flat_buffer.start <= last < flat_buffer.stop
        if buffer_piece.part.name == name and has_last_element and is_local:
            flat_buffer.local_grads[last - flat_buffer.start] = torch.inf


class RecordedSamples(Samples):
    """Notes which samples are asked for; leaves some targets out of the loss, if `masked`, by
    sample and position."""

    def __init__(self, samples: Samples | Blend, masked: bool) -> None:
        self.samples = samples
        self.masked = masked
        self.ids: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, position: int, count: int) -> Batch:
        """Return the samples, note their ids, and leave some targets out if the case is masked."""
        sample_batch = self.samples.batch(position, count)
        self.ids.append(sample_batch.ids.tolist())
        if not self.masked:
            return sample_batch
        # The mask depends on the sample's id and the target's position alone, so it is the same in
        # every layout. A multiplicative hash (Knuth) spreads the numbers.
        numbers = sample_batch.ids[:, None] * 5 + torch.arange(sample_batch.tokens.shape[1])
        hashes = numbers * 2654435761 % 4294967296
        # one target in 3 to 7 is left out, more in some samples than in others
        one_in = 3 + sample_batch.ids[:, None] % 5
        mask = (hashes % one_in > 0).float()
        if sample_batch.mask is not None:
            mask = mask * sample_batch.mask
        return replace(sample_batch, mask=mask)


class RecordedTrainer(Trainer):
    """The trainer, with its samples and gradients recorded."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        mesh: DeviceMesh,
        record_plan: Plan,
        position: Position,
    ) -> None:
        self.samples = RecordedSamples(corpus.train, record_plan.small)
        self.recorder = GradientRecorder(record_plan)
        start = Path(record_plan.start) if record_plan.start else None
        corpus = replace(corpus, train=self.samples)
        super().__init__(config, corpus, mesh, start, observers=[self.recorder], position=position)


def record(
    config: RunConfig,
    corpus: Corpus,
    mesh: DeviceMesh,
    record_plan: Plan,
    folder: Path,
    trail: Trail | None = None,
) -> None:
    """Take the steps and leave this rank's files in `folder`, which exists.

    trail: told where the rank is.
    """
    trail = trail or Trail()
    # that of `megaprec train`: what is compared is what is trained
    trainer = RecordedTrainer(config, corpus, mesh, record_plan, trail.position)
    optimizer = trainer.engine.optimizer
    stages = list(trainer.engine.stages.values())
    # before the weights are shaken: initial weights are compared bit by bit
    recorded = {"before/weight": _saved_fragments(optimizer, "weight")}
    if record_plan.shaken:
        _shake_weights(optimizer, record_plan.shaken, record_plan.draw)
    size = RunSize(
        steps=list(_step_sizes(config, trainer.progress.samples, record_plan.steps)),
        hidden=corpus.model.hidden,
        first=trainer.progress.step,
    )
    borders = BorderRecorder(
        stages,
        size,
        optimizer.tp,
        trainer.engine.cp,
        optimizer.world.rank,
        active_modules=trail.modules,
    )
    steps: list[dict[str, Any]] = []
    for step_number in range(record_plan.steps):
        step_report, _ = trainer.step()
        fields: dict[str, Any] = dict(report_fields(step_report))
        fields["offenders"] = sorted({offender.name for offender in step_report.offenders})
        fields["scaler"] = optimizer.saved_numbers()["scaler"]
        steps.append(fields)
        is_first_or_last = step_number in (0, record_plan.steps - 1)
        is_small_update = record_plan.small and step_report.changed
        if is_first_or_last or record_plan.states or is_small_update:
            for state_kind in _saved_kinds(optimizer):
                fragments = _saved_fragments(optimizer, state_kind)
                recorded[f"after/{step_number}/{state_kind}"] = fragments
    for step_number, gradients in trainer.recorder.gradients.items():
        recorded[f"gradient/{step_number}"] = gradients

    border_entries: list[list[Any]] = []
    values_of_borders: list[BorderValues] = []
    for border_key, values in borders.border_values():
        border_entries.append([*border_key, values.step, values.samples, values.positions])
        values_of_borders.append(values)
    rank_report = {
        "place": [optimizer.pp.rank, trainer.dp.rank, optimizer.tp.rank],
        "steps": steps,
        "samples": trainer.samples.ids,
        "names": list(_logical_names(stages)),
        "borders": border_entries,
        "passed": borders.passed,
    }
    flat_borders = _flatten_borders(values_of_borders)
    _write_files(folder, optimizer.world.rank, rank_report, recorded, flat_borders)


def _step_sizes(config: RunConfig, consumed: int, steps: int) -> Iterator[StepSize]:
    """Yield the sizes of the steps that follow on `consumed` samples."""
    for _ in range(steps):
        batch = config.batches.at(consumed)
        sequences = batch * config.lengths.pieces_at(consumed)
        yield StepSize(sequences, config.lengths.at(consumed))
        consumed += batch


def _write_files(
    folder: Path,
    rank: int,
    rank_report: RankReport,
    recorded: Mapping[str, Sequence[Fragment]],
    flat_borders: Tensor,
) -> None:
    """Write the tensors of a rank to RANK.safetensors, and everything else to RANK.json."""
    entries: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {"borders": flat_borders}
    for kind, fragments in recorded.items():
        for fragment in fragments:
            entry_number = str(len(entries))
            tensors[entry_number] = fragment.values.contiguous()
            fields = {name: getattr(fragment, name) for name in FRAGMENT_FIELDS}
            entries.append({"kind": kind, **fields})
    save_file(tensors, folder / f"{rank}.safetensors")
    # last, for a run is done when this file is there
    text = json.dumps({**rank_report, "fragments": entries})
    put_text(folder / f"{rank}.json", text)


def _flatten_borders(borders: Sequence[BorderValues]) -> Tensor:
    """Return the values of all borders end to end, float64."""
    if not borders:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([border.values.flatten() for border in borders])


@torch.no_grad()
def _shake_weights(optimizer: ParallelAMPOptimizer, fraction: float, draw: int) -> None:
    """Multiply weights that are their own masters, as in float64, by 1 + `fraction` or
    1 - `fraction` each."""
    with optimizer.whole_weights():
        for flat_buffer in optimizer.all_buffers():
            generator = torch.Generator().manual_seed(draw)
            zeros_and_ones = torch.randint(0, 2, (flat_buffer.size,), generator=generator)
            signs = zeros_and_ones.double() * 2 - 1
            flat_buffer.weights.mul_(1 + fraction * signs)


def _saved_kinds(optimizer: ParallelAMPOptimizer) -> list[str]:
    """Return "weight", the names of the optimizer's moments, and "ema" if weights are averaged."""
    kinds: dict[str, None] = {}  # in order, each once
    for flat_buffer in optimizer.all_buffers():
        kinds |= dict.fromkeys(flat_buffer.saved_names)
    return list(kinds)


def _saved_fragments(optimizer: ParallelAMPOptimizer, state_kind: str) -> list[Fragment]:
    """Return this rank's part of the tensors of a kind (`_saved_kinds`); "weight" are masters."""
    buffers = buffers_saving(optimizer, state_kind)
    return list(take_fragments(buffers, lambda flat_buffer: flat_buffer.saved()[state_kind]))


def buffers_saving(optimizer: ParallelAMPOptimizer, state_kind: str) -> list[Buffer]:
    """Return the buffers that save a tensor of this kind (`_saved_kinds`)."""
    return [
        flat_buffer
        for flat_buffer in optimizer.all_buffers()
        if state_kind in flat_buffer.saved_names
    ]


def _logical_names(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the logical tensors of this rank in the model's order."""
    for parameter in parameters_of(stages):
        yield from (part.name for part in layout_of(parameter).parts)


@dataclass(frozen=True)
class Record:
    """The record of one layout. steps: a report per step. samples: ids of each step's batch,
    replica after replica.

    names: logical tensors in the model's order. tensors: by kind, then by name; an element that no
        rank holds is NaN.
    copy_conflicts: (kind, name) of tensors of which two ranks hold the same element with different
        bits.
    tp_sliced: tensors of which tp ranks hold different slices.
    rank_conflicts: (step from 1, quantity) of numbers and samples on which ranks disagree.
    borders: values of each rank in each step at each border, by (kind, border).
    aliases: by border, the earlier border at which the same tensor was seen.
    """

    steps: list[dict[str, Any]]
    samples: list[list[int]]
    names: list[str]
    tensors: dict[str, Tensors]
    copy_conflicts: list[tuple[str, str]] = field(default_factory=list)
    tp_sliced: frozenset[str] = frozenset()
    rank_conflicts: list[tuple[int, str]] = field(default_factory=list)
    borders: BorderTable = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def borders_at(self, border: Border, step: int) -> list[BorderValues]:
        """Return the values of each rank at a border in a step, from 0."""
        return [values for values in self.borders.get(border, []) if values.step == step]

    @property
    def applied(self) -> list[int]:
        """Numbers of the steps, from 0, that changed the weights."""
        return [number for number, step in enumerate(self.steps) if step["outcome"] not in SKIPPED]


def gather(folder: Path) -> Record:
    """Return what `record` has written to `folder` on all ranks."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    reports: list[RankReport] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    all_values = [load_file(path.with_suffix(".safetensors")) for path in paths]

    # files are sorted by rank: where ranks disagree, the first one counts
    by_kind: dict[str, list[Fragment]] = {}
    names: dict[str, None] = {}  # in order, each once
    aliases: dict[str, str] = {}
    for rank_report, rank_values in zip(reports, all_values, strict=True):
        for state_kind, fragment in _read_fragments(rank_report, rank_values):
            by_kind.setdefault(state_kind, []).append(fragment)
        names |= dict.fromkeys(rank_report["names"])
        aliases |= {border: first for border, first in rank_report["passed"].items() if first}

    tensors: dict[str, Tensors] = {}
    copy_conflicts: list[tuple[str, str]] = []
    tp_sliced: set[str] = set()
    for state_kind, fragments in by_kind.items():
        assembled = assemble(fragments)
        tensors[state_kind] = assembled.tensors
        copy_conflicts += [(state_kind, name) for name in assembled.conflicts]
        tp_sliced |= {fragment.name for fragment in fragments if fragment.cut}
    return Record(
        steps=reports[0]["steps"],
        samples=_order_batches(reports),
        names=list(names),
        tensors=tensors,
        copy_conflicts=copy_conflicts,
        tp_sliced=frozenset(tp_sliced),
        rank_conflicts=_find_rank_conflicts(reports),
        borders=_read_borders(reports, all_values),
        aliases=aliases,
    )


def _read_fragments(
    rank_report: RankReport, rank_values: Tensors
) -> Iterator[tuple[str, Fragment]]:
    """Yield the fragments of a rank in float64, with their kinds."""
    for entry_number, fragment_entry in enumerate(rank_report["fragments"]):
        yield (
            fragment_entry["kind"],
            Fragment(
                name=fragment_entry["name"],
                shape=tuple(fragment_entry["shape"]),
                offset=tuple(fragment_entry["offset"]),
                local=tuple(fragment_entry["local"]),
                first=fragment_entry["first"],
                values=rank_values[str(entry_number)].double(),
                cut=fragment_entry["cut"],
            ),
        )


def _read_borders(reports: Sequence[RankReport], rank_values: Sequence[Tensors]) -> BorderTable:
    """Return the values of each rank in the order in which borders were passed, shared by all
    borders of one tensor."""
    table: BorderTable = {}
    for rank, (rank_report, tensors) in enumerate(zip(reports, rank_values, strict=True)):
        # a rank saves the values of all its borders end to end, in the order of its list
        flat = tensors["borders"]
        start = 0
        recorded: BorderTable = {}
        for kind, border, step, samples, positions in rank_report["borders"]:
            shape = (len(samples), len(positions))
            stop = start + math.prod(shape)
            numbers = flat[start:stop].view(shape)
            values = BorderValues(rank, step, samples, positions, numbers)
            recorded.setdefault((kind, border), []).append(values)
            start = stop
        for border_key, border_values in _order_borders(recorded, rank_report["passed"]):
            table.setdefault(border_key, []).extend(border_values)
    return table


def _order_borders(
    recorded: BorderTable, passed: Mapping[str, str]
) -> Iterator[tuple[Border, list[BorderValues]]]:
    """Yield forward values in the order of borders, then backward ones in the order of gradients.

    Values are recorded once for each tensor, and yielded for each border that it passes.
    """
    for border, first in passed.items():
        border_key = (FORWARD, first or border)
        if border_key in recorded:
            yield (FORWARD, border), recorded[border_key]
    for (kind, border), rank_values in recorded.items():
        if kind != BACKWARD:
            continue
        # gradients arrive in the order of the backward pass, which is that of `recorded`
        yield (BACKWARD, border), rank_values
        for alias, first in passed.items():
            if first == border:
                yield (BACKWARD, alias), rank_values


def _replica_of(rank_report: RankReport) -> int:
    """Return the dp rank: a report's "place" is (pp, dp, tp)."""
    _, dp_rank, _ = rank_report["place"]
    return dp_rank


def _order_batches(reports: Sequence[RankReport]) -> list[list[int]]:
    """Return the sample ids of each step in the order of the replicas."""
    replicas = {_replica_of(rank_report): rank_report["samples"] for rank_report in reports}
    batches: list[list[int]] = [[] for _ in reports[0]["samples"]]
    for _, steps in sorted(replicas.items()):
        for sample_batch, ids in zip(batches, steps, strict=False):
            sample_batch += ids
    return batches


def _find_rank_conflicts(reports: Sequence[RankReport]) -> list[tuple[int, str]]:
    """Return (step, quantity) of numbers and samples on which ranks disagree, though all must
    agree."""
    conflicts: list[tuple[int, str]] = []
    step_reports = zip(*(rank_report["steps"] for rank_report in reports), strict=True)
    for step_number, steps in enumerate(step_reports, 1):
        for field_name, value in steps[0].items():
            # compared as text, in which NaN equals NaN
            if any(str(step[field_name]) != str(value) for step in steps):
                conflicts.append((step_number, field_name))
    # the ranks of one replica take the same samples
    samples_of_replicas: dict[int, Any] = {}
    for rank_report in reports:
        replica = _replica_of(rank_report)
        first_samples = samples_of_replicas.setdefault(replica, rank_report["samples"])
        if rank_report["samples"] != first_samples:
            return [(1, "samples of one replica"), *conflicts]
    return conflicts
