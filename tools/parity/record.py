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

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import layout_of, parameters_of
from megaprec.data.blend import Blend
from megaprec.data.samples import Batch, Samples
from megaprec.diagnose.position import Position
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.observer import StepObserver
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.step_report import report_fields
from models.stages import Stage
from tools.config.run_file import RunConfig
from tools.parity.borders import Borders, Size
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


class Recorder(StepObserver):
    """Notes the gradients of each update, and plants what is to be planted."""

    def __init__(self, what: Plan) -> None:
        self.what = what
        self.taken = 0
        self.seen: list[tuple[Fragment, Tensor]] = []

    def gradients_ready(self, buffers: Sequence[Buffer], scale: Tensor) -> None:
        """Plants an infinity, if this is the step."""
        for buffer in buffers if self.taken == self.what.planted else ():
            _plant(buffer, self.what.into)

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, found: Tensor) -> None:
        """Notes what the update is going to be made of."""
        if not found:
            kind = f"gradient/{self.taken}"
            self.seen += fragments(
                buffers, kind, lambda buffer: buffer.own(buffer.grads).double() / scale.double()
            )
        self.taken += 1


def _plant(buffer: Buffer, into: str) -> None:
    """Makes the last element of a logical tensor infinite, if it lies in this rank's slice."""
    for piece in buffer.pieces:
        last = piece.stop - 1
        if (
            piece.part.name == into
            and piece.part.shard == piece.part.shards - 1
            and buffer.first <= last < buffer.last
        ):
            buffer.grads[last] = torch.inf


class Listening(Samples):
    """Notes which samples are asked for; leaves some targets out of the loss, if asked to, by
    sample and place."""

    def __init__(self, inner: Samples | Blend, masked: bool) -> None:
        self.inner = inner
        self.masked = masked
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, position: int, count: int) -> Batch:
        batch = self.inner.batch(position, count)
        self.asked.append(batch.ids.tolist())
        if not self.masked:
            return batch
        places = batch.ids[:, None] * 5 + torch.arange(batch.tokens.shape[1])
        # more in some samples than in others
        drawn = (places * 2654435761 % 4294967296) % (3 + batch.ids[:, None] % 5)
        counted = (drawn > 0).float()
        return replace(batch, mask=counted if batch.mask is None else counted * batch.mask)


class Watched(Trainer):
    """The trainer, listened to."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, mesh: DeviceMesh, what: Plan, position: Position
    ) -> None:
        self.samples = Listening(corpus.train, what.small)
        self.recorder = Recorder(what)
        start = Path(what.start) if what.start else None
        corpus = replace(corpus, train=self.samples)
        super().__init__(config, corpus, mesh, start, observers=[self.recorder], position=position)


def record(
    config: RunConfig,
    corpus: Corpus,
    mesh: DeviceMesh,
    what: Plan,
    folder: Path,
    trail: Trail | None = None,
) -> None:
    """Takes the steps and leaves this rank's files in `folder`, which is there. trail: told where
    the rank is."""
    trail = trail or Trail()
    trainer = Watched(config, corpus, mesh, what, trail.position)
    optimizer = trainer.engine.optimizer
    found = list(
        fragments(optimizer.all_buffers(), "before/weight", lambda buffer: buffer.saved()["weight"])
    )
    if what.shaken:
        _shake(optimizer, what.shaken, what.draw)
    train = config.train
    stages = list(trainer.engine.stages.values())
    size = Size(
        train.seq_length, train.global_batch, corpus.model.hidden, what.steps, trainer.progress.step
    )
    borders = Borders(
        stages, size, optimizer.tp, trainer.engine.cp, optimizer.world.rank, trail.modules
    )
    steps = []
    for number in range(what.steps):
        ((report, _),) = trainer.step()
        offenders = sorted({o.name for o in report.offenders})
        steps.append(
            {
                **report_fields(report),
                "offenders": offenders,
                "scaler": optimizer.numbers()["scaler"],
            }
        )
        if number in (0, what.steps - 1) or what.states or (what.small and report.changed):
            found += _state(optimizer, number)
    found += trainer.recorder.seen
    notes = list(borders.notes())
    said = {
        "place": [optimizer.pp.rank, trainer.dp.rank, optimizer.tp.rank],
        "steps": steps,
        "samples": trainer.samples.asked,
        "names": list(_names(stages)),
        "fragments": [asdict(fragment) for fragment, _ in found],
        "borders": [[*where, some.samples, some.positions] for where, some in notes],
        "passed": borders.passed,
    }
    rank = optimizer.world.rank
    tensors = {str(n): values.contiguous() for n, (_, values) in enumerate(found)}
    if notes:
        seen = torch.cat([some.values.flatten() for _, some in notes])
    else:
        seen = torch.zeros(0, dtype=torch.float64)
    save_file({**tensors, "borders": seen}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")


@torch.no_grad()
def _shake(optimizer: ParallelAMPOptimizer, part: float, draw: int) -> None:
    """Multiplies weights that are their own masters, as in float64, by 1 + `part` or 1 - `part`
    each."""
    for buffer in optimizer.all_buffers():
        signs = (
            torch.randint(
                0, 2, (buffer.size,), generator=torch.Generator().manual_seed(draw)
            ).double()
            * 2
            - 1
        )
        buffer.weights.mul_(1 + part * signs)


def _state(optimizer: ParallelAMPOptimizer, step: int) -> Iterator[tuple[Fragment, Tensor]]:
    """Masters and averages after a step."""
    buffers = optimizer.all_buffers()
    for kind in dict.fromkeys(kind for buffer in buffers for kind in buffer.saved_names):
        having = [buffer for buffer in buffers if kind in buffer.saved_names]
        yield from fragments(
            having, f"after/{step}/{kind}", lambda buffer, kind=kind: buffer.saved()[kind]
        )


def _names(stages: Sequence[Stage]) -> Iterator[str]:
    """Logical tensors of this rank in the model's order."""
    for parameter in parameters_of(stages):
        yield from (part.name for part in layout_of(parameter).parts)


def fragments(
    buffers: Sequence[Buffer], kind: str, values: Callable[[Buffer], Tensor]
) -> Iterator[tuple[Fragment, Tensor]]:
    """Yield copies of the parts of logical tensors that this rank's shards hold."""
    for buffer in buffers:
        own = values(buffer)
        for owned in buffer.owned_pieces():
            part = owned.piece.part
            offset = tuple(part.start if d == part.dim else 0 for d in range(len(part.shape)))
            place = Fragment(
                kind,
                part.name,
                part.shape,
                offset,
                part.local,
                owned.in_part.start,
                part.shards > 1,
            )
            yield place, own[owned.in_shard].clone()
