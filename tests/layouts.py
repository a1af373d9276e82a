"""Trains a small model in some layout and puts what the ranks hold together again, by logical
name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.optim.decision.step_limits import NO_LIMITS, StepLimits
from megaprec.optim.decision.step_report import StepObserver, StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.flat_buffer import Buffer
from megaprec.precision.plan import LossScaling, plan
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.activation_checkpoint import KEEP, Recompute
from parallel.pipeline.kinds import schedule
from parallel.pipeline.schedules import Schedule
from tests.ranks import run_ranks
from tools.verify.parity.fragments import Fragment, take_fragments
from tools.verify.parity.fragments import assemble as assemble_fragments

# tp, pp, dp
LAYOUTS = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
]
# any two axes have any two of their sizes together
COVERING = [
    (1, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
]
SAMPLES = 8
LENGTH = 8
torch.set_num_threads(1)  # more of them gain nothing in models this small


@dataclass(frozen=True)
class Run:
    """What is trained and how, apart from the layout."""

    model: dict[str, Any] = field(hash=False)
    compute: str = "fp64"
    scaling: LossScaling | None = None
    sequence: bool = False
    async_tensor: bool = False
    shards: int = 0  # virtual ranks of canonical numerics
    zero_size: int = 0
    expert: int = 1
    expert_tensor: int = 0
    changes: dict[str, Any] = field(default_factory=dict, hash=False)  # to the plan
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of the optimizer
    masked: bool = True
    steps: int = 3
    lr: float = 1e-2
    clip: float = 0.5
    kind: str = "1f1b"
    chunks: int = 0
    own: str = ""  # the text of a schedule in place of kind and chunks
    micro_batch: int = 2
    samples: int = SAMPLES
    recompute: Recompute = KEEP
    plant: tuple[int, int, float] | None = (
        None  # rank, step, value put into one of its gradient elements
    )
    before: Callable[[], None] | None = (
        None  # called on every rank before it trains; a function of a module
    )
    length: int = LENGTH
    borders: int = 0  # documents of each sample, if it has several
    reset: bool = False  # positions restart with each document
    ring: bool = True
    frozen: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**self.model)


@dataclass
class Result:
    """Of one training run: per step the report and logical gradients; logical weights before and
    after.

    A skipped step has no gradients: what stands in the place of one may differ from rank to rank.
    """

    reports: list[StepReport]
    grads: list[dict[str, Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    scaler: dict[str, float]
    num_elements: int


class Gradients(StepObserver):
    """Remembers the gradients that each update is made from."""

    def __init__(self) -> None:
        self.seen: list[list[Fragment]] = []

    def decided(self, buffers: Sequence[Buffer], scale: Tensor, skip: Tensor) -> None:
        self.seen.append(fragments(buffers, lambda buffer: buffer.local_grads))


class Recording(ParallelAMPOptimizer):
    """Remembers the gradients that each update is made from, and can plant a bad one."""

    def __init__(self, *args: Any, plant: tuple[int, int, float] | None, **options: Any) -> None:
        gradients = Gradients()
        super().__init__(*args, observers=[gradients], **options)
        self.seen = gradients.seen
        self.plant = plant
        self.count = 0

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        lr: float,
        loss: Tensor | None = None,
        counted_tokens: Tensor | float | None = None,
        further: Tensor | None = None,
        limits: StepLimits = NO_LIMITS,
    ) -> StepReport:
        if self.plant is not None and self.plant[:2] == (self.world.rank, self.count):
            counted = [values for values in self._counted_grads if len(values)]
            counted[self.count % len(counted)][-1] = self.plant[2]
        self.count += 1
        return super().step(lr, loss, counted_tokens, further, limits)


def fragments(buffers: Sequence[Buffer], values: Callable[[Buffer], Tensor]) -> list[Fragment]:
    """What this rank's own slices hold of each logical tensor, copies included."""
    return list(take_fragments(buffers, values))


def assemble(ranks: Sequence[Sequence[Fragment]]) -> dict[str, Tensor]:
    """Whole logical tensors. Where several ranks hold an element they must hold the same bits."""
    assembled = assemble_fragments(fragment for rank in ranks for fragment in rank)
    assert not assembled.conflicts, f"copies of {', '.join(assembled.conflicts)} differ"
    return assembled.tensors


def batches(run: Run) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """tokens, targets, mask, each [samples, length]: one batch a step; some ids never occur."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(run.steps):
        ids = torch.randint(
            0, run.config.vocab * 3 // 4, (run.samples, run.length + 1), generator=generator
        )
        if run.masked:
            mask = (torch.rand(run.samples, run.length, generator=generator) < 0.8).double()
        else:
            mask = None
        made.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask))
    return made


def packings(run: Run) -> list[Packing]:
    """The documents of each batch, with borders at random places."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(run.steps):
        begins = torch.zeros(run.samples, run.length, dtype=torch.int64)
        for sample in begins:
            sample[torch.randperm(run.length, generator=generator)[: run.borders - 1]] = 1
        places = torch.arange(run.length).expand(run.samples, -1)
        positions = places - (places * begins).cummax(1).values if run.reset else None
        found.append(Packing(begins.cumsum(1), positions) if run.borders else UNPACKED)
    return found


def share_of(
    mesh: DeviceMesh | None,
    batch: tuple[Tensor, Tensor, Tensor | None],
    packing: Packing = UNPACKED,
) -> Share:
    dp, size = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh["dp"].size())
    n = len(batch[0]) // size
    tokens, targets, mask = (None if x is None else x[dp * n : (dp + 1) * n] for x in batch)
    assert tokens is not None and targets is not None
    return Share(
        tokens, targets, mask, first=dp * n, packing=packing.rows(slice(dp * n, (dp + 1) * n))
    )


def make_engine(mesh: DeviceMesh | None, run: Run) -> Engine:
    pp, dp = (1 if mesh is None else mesh[axis].size() for axis in ("pp", "dp"))
    microbatches = run.samples // run.micro_batch // dp
    return Engine.build(
        run.config,
        plan(run.compute, run.scaling, **run.changes),
        mesh,
        Schedule.parse(run.own) if run.own else schedule(run.kind, pp, microbatches, run.chunks),
        EngineOptions(
            micro_batch=run.micro_batch,
            seq_length=run.length,
            sequence=run.sequence,
            async_tensor=run.async_tensor,
            canonical_shards=run.shards,
            seed=3,
            recompute=run.recompute,
            expert=run.expert,
            expert_tensor=run.expert_tensor,
            ring=run.ring,
            frozen=run.frozen,
        ),
        kind=Recording,
        clip=run.clip,
        zero_size=run.zero_size,
        plant=run.plant,
        **run.options,
    )


@dataclass(frozen=True)
class Trained:
    """What one rank saw of a run."""

    reports: list[StepReport]
    grads: list[list[Fragment]]
    before: list[Fragment]
    after: list[Fragment]
    scaler: dict[str, float]
    num_elements: int


def train_rank(mesh: DeviceMesh, runs: Sequence[Run]) -> list[Trained]:
    """The body each rank runs."""
    return [_train_one(mesh, run) for run in runs]


def _train_one(mesh: DeviceMesh, run: Run) -> Trained:
    if run.before is not None:
        run.before()
    engine = make_engine(mesh, run)
    optimizer = engine.optimizer
    assert isinstance(optimizer, Recording)
    before = fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    shares = [
        share_of(mesh, batch, packing)
        for batch, packing in zip(batches(run), packings(run), strict=True)
    ]
    reports = [engine.step(share, run.lr, n) for n, share in enumerate(shares)]
    optimizer.wait()
    after = fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])
    return Trained(
        reports,
        optimizer.seen,
        before,
        after,
        optimizer.scaler.state_dict(),
        optimizer.num_elements,
    )


def train(run: Run, tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1) -> Result:
    """Trains on tp * pp * dp * cp ranks. Reports and scaler must be the same on every rank."""
    return train_all([run], tp, pp, dp, cp)[0]


def train_all(
    runs: Sequence[Run], tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1
) -> list[Result]:
    """Several runs one after the other, for the price of one start."""
    ranks = run_ranks(train_rank, {"pp": pp, "dp": dp, "cp": cp, "tp": tp}, runs=runs)
    return [_together([rank[n] for rank in ranks]) for n in range(len(runs))]


def _together(ranks: Sequence[Trained]) -> Result:
    first = ranks[0]
    # as text: NaN is NaN
    assert all(str(r.reports) == str(first.reports) for r in ranks), "ranks report different steps"
    assert all(r.scaler == first.scaler for r in ranks), "ranks hold different scalers"
    applied = [report.outcome == "applied" for report in first.reports]
    grads = [
        assemble([r.grads[step] for r in ranks]) if good else {}
        for step, good in enumerate(applied)
    ]
    before = assemble([r.before for r in ranks])
    after = assemble([r.after for r in ranks])
    return Result(first.reports, grads, before, after, first.scaler, first.num_elements)
