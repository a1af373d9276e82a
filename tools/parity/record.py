"""The record of a run in one layout: losses, gradients and weights by logical name, written by
every rank.

The trainer itself takes the steps, with the engine, the optimizer and the data order that training
has; the optimizer only notes what each update is made from. In one step an infinity is planted in
one gradient element, the same logical one in every layout, so that a skipped step is part of what
is compared.

A rank writes what its own slices hold, copies included, to files of its own; nothing here
communicates. `gather.py` puts the slices together.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of, parameters_of
from megaprec.data.blend import Blend
from megaprec.data.samples import Batch, Samples
from megaprec.diagnose.position import Position
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import StepObserver, report_fields
from models.stages import Stage
from tools.config.run_file import RunConfig
from tools.parity.borders import BorderRecorder, BorderValues, RunSize
from tools.parity.progress import Trail
from tools.training.corpus import Corpus
from tools.training.trainer import Trainer


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


@dataclass(frozen=True)
class Fragment:
    """Elements [first, first + count) of the flattened slice `local` at `offset` of a logical
    tensor.

    kind: "before/weight", "gradient/STEP" or "after/STEP/KIND". cut: whether tp ranks hold
        different slices.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: int
    cut: bool


class GradientRecorder(StepObserver):
    """Notes the gradients of each update, and plants what is to be planted."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.num_steps = 0  # that the optimizer has taken
        self.gradients: list[tuple[Fragment, Tensor]] = []

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Plant an infinity, if this is the step."""
        if self.num_steps != self.plan.planted:
            return
        for buffer in buffers:
            _plant_infinity(buffer, self.plan.into)

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, found: Tensor) -> None:
        """Note what the update is going to be made of."""
        if not found:
            kind = f"gradient/{self.num_steps}"
            self.gradients += fragments(
                buffers, kind, lambda buffer: buffer.own(buffer.grads).double() / scale.double()
            )
        self.num_steps += 1


def _plant_infinity(buffer: Buffer, name: str) -> None:
    """Make the last element of a logical tensor infinite, if it lies in this rank's slice."""
    for piece in buffer.pieces:
        last = piece.stop - 1
        has_last_element = piece.part.shard == piece.part.shards - 1
        is_local = buffer.first <= last < buffer.last
        if piece.part.name == name and has_last_element and is_local:
            buffer.grads[last] = torch.inf


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
        batch = self.samples.batch(position, count)
        self.ids.append(batch.ids.tolist())
        if not self.masked:
            return batch
        # The mask depends on the sample's id and the target's position alone, so it is the same in
        # every layout. A multiplicative hash (Knuth) spreads the numbers.
        numbers = batch.ids[:, None] * 5 + torch.arange(batch.tokens.shape[1])
        hashes = numbers * 2654435761 % 4294967296
        # one target in 3 to 7 is left out, more in some samples than in others
        mask = (hashes % (3 + batch.ids[:, None] % 5) > 0).float()
        return replace(batch, mask=mask if batch.mask is None else mask * batch.mask)


class RecordedTrainer(Trainer):
    """The trainer, with its samples and gradients recorded."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, mesh: DeviceMesh, plan: Plan, position: Position
    ) -> None:
        self.samples = RecordedSamples(corpus.train, plan.small)
        self.recorder = GradientRecorder(plan)
        start = Path(plan.start) if plan.start else None
        corpus = replace(corpus, train=self.samples)
        super().__init__(config, corpus, mesh, start, observers=[self.recorder], position=position)


def record(
    config: RunConfig,
    corpus: Corpus,
    mesh: DeviceMesh,
    plan: Plan,
    folder: Path,
    trail: Trail | None = None,
) -> None:
    """Take the steps and leave this rank's files in `folder`, which exists. trail: told where the
    rank is."""
    trail = trail or Trail()
    trainer = RecordedTrainer(config, corpus, mesh, plan, trail.position)
    optimizer = trainer.engine.optimizer
    rank = optimizer.world.rank
    # before the weights are shaken: initial weights are compared bit by bit
    recorded = list(
        fragments(optimizer.all_buffers(), "before/weight", lambda buffer: buffer.saved()["weight"])
    )
    if plan.shaken:
        _shake_weights(optimizer, plan.shaken, plan.draw)
    stages = list(trainer.engine.stages.values())
    size = RunSize(
        length=config.train.seq_length,
        batch=config.train.global_batch,
        hidden=corpus.model.hidden,
        steps=plan.steps,
        first=trainer.progress.step,
    )
    borders = BorderRecorder(
        stages, size, optimizer.tp, trainer.engine.cp, rank, active_modules=trail.modules
    )
    steps: list[dict[str, Any]] = []
    for number in range(plan.steps):
        report, _ = trainer.step()
        fields: dict[str, Any] = dict(report_fields(report))
        fields["offenders"] = sorted({offender.name for offender in report.offenders})
        fields["scaler"] = optimizer.numbers()["scaler"]
        steps.append(fields)
        is_end = number in (0, plan.steps - 1)
        if is_end or plan.states or (plan.small and report.changed):
            recorded += _state_fragments(optimizer, number)
    recorded += trainer.recorder.gradients

    place = [optimizer.pp.rank, trainer.dp.rank, optimizer.tp.rank]
    border_values = list(borders.border_values())
    rank_report = {
        "place": place,
        "steps": steps,
        "samples": trainer.samples.ids,
        "names": list(_logical_names(stages)),
        "fragments": [asdict(fragment) for fragment, _ in recorded],
        "borders": [[*key, values.samples, values.positions] for key, values in border_values],
        "passed": borders.passed,
    }
    tensors = {str(i): values.contiguous() for i, (_, values) in enumerate(recorded)}
    tensors["borders"] = _flatten_borders([values for _, values in border_values])
    save_file(tensors, folder / f"{rank}.safetensors")
    # last, for a run is done when this file is there
    (folder / f"{rank}.json").write_text(json.dumps(rank_report), encoding="utf-8")


def _flatten_borders(borders: Sequence[BorderValues]) -> Tensor:
    """Return the values of all borders end to end, float64."""
    if not borders:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([border.values.flatten() for border in borders])


@torch.no_grad()
def _shake_weights(optimizer: ParallelAMPOptimizer, fraction: float, draw: int) -> None:
    """Multiply weights that are their own masters, as in float64, by 1 + `fraction` or
    1 - `fraction` each."""
    for buffer in optimizer.all_buffers():
        generator = torch.Generator().manual_seed(draw)
        bits = torch.randint(0, 2, (buffer.size,), generator=generator)
        signs = bits.double() * 2 - 1
        buffer.weights.mul_(1 + fraction * signs)


def _state_fragments(
    optimizer: ParallelAMPOptimizer, step: int
) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield masters and averages after a step (from 0)."""
    buffers = optimizer.all_buffers()
    kinds: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        for kind in buffer.saved_names:
            kinds.setdefault(kind, []).append(buffer)
    for kind, having in kinds.items():
        yield from fragments(
            having, f"after/{step}/{kind}", lambda buffer, kind=kind: buffer.saved()[kind]
        )


def _logical_names(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the logical tensors of this rank in the model's order."""
    for parameter in parameters_of(stages):
        yield from (part.name for part in layout_of(parameter).parts)


def fragments(
    buffers: Sequence[Buffer], kind: str, values: Callable[[Buffer], Tensor]
) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield copies of the parts of logical tensors that this rank's shards hold."""
    for buffer in buffers:
        local_values = values(buffer)
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            offset = tuple(part.start if dim == part.dim else 0 for dim in range(len(part.shape)))
            fragment = Fragment(
                kind,
                part.name,
                part.shape,
                offset,
                part.local,
                first=owned.in_part.start,
                cut=part.shards > 1,
            )
            yield fragment, local_values[owned.in_shard].clone()
