"""A model that is nothing but logical tensors, whose gradients are given: exactly the same in every
layout.

Gradients are multiples of a power of two, cut into shares at random over all who hold a share of
them, so that their sums are exact in whichever order they are taken. What comes out then depends on
the optimizer alone, and two layouts must agree to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import load, save
from megaprec.comm.axis import Axis
from megaprec.comm.layout import Layout, Part, attach
from megaprec.comm.main_grad import begin_cleared
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.rules.update_rules import UpdateRule
from megaprec.precision.plan import plan
from tests.layouts import Fragment, assemble, fragments
from tests.ranks import run_ranks

INF = float("inf")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """A parameter. parts: name, shape, dim that is cut over tp, most slices. stages: of two; both
    if it is tied."""

    parts: tuple[tuple[str, tuple[int, ...], int | None, int | None], ...]
    stages: tuple[int, ...]
    partial: bool = False


MODEL = (  # so long that half of a buffer ends in the middle of a parameter
    Kind((("embedding.weight", (23, 6), 0, None),), (0, 1)),
    Kind(
        (
            ("query.weight", (8, 6), 0, None),
            ("key.weight", (4, 6), 0, 1),
            ("value.weight", (4, 6), 0, 1),
        ),
        (0,),
        True,
    ),
    Kind((("output.weight", (6, 8), 1, None),), (0,)),
    Kind((("output.bias", (6,), None, None),), (0,)),
    Kind((("norm.weight", (330,), None, None),), (1,), True),
    Kind((("head.bias", (5,), 0, None),), (1,)),
    Kind((("scale", (), None, None),), (1,)),
)
# of what is cut into heads; elsewhere 1
HEADS = {"query.weight": 4, "key.weight": 2, "value.weight": 2}
SHAPES = {name: shape for kind in MODEL for name, shape, _, _ in kind.parts}
LAYOUTS = [{"dp": 2}, {"tp": 2}, {"pp": 2}]


@dataclass(frozen=True)
class Case:
    """What is trained and how, apart from the layout. bad: steps in which an element is inf.

    restart: step before which the state is carried over into a new optimizer, through `folder` if
        there is one.
    fine: how many values of gradients there are in [0, 1); few are exact in half precision.
    """

    compute: str = "fp32"
    plan: dict[str, Any] = field(default_factory=dict, hash=False)
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    rule: tuple[str, dict[str, Any]] = ("adamw", {})
    clip: float = 0.0
    steps: int = 4
    lr: float = 1e-2
    bad: tuple[int, ...] = ()
    restart: int | None = None
    folder: Path | None = None
    fine: int = 1024

    def make_rule(self) -> UpdateRule:
        return rule(*self.rule)


@dataclass
class Result:
    """reports, and by kind the logical tensors: "weight" (masters), "held" (what layers see) and
    the averages."""

    reports: list[StepReport]
    kinds: dict[str, Tensors]
    numbers: dict[str, Any]
    bytes_per_parameter: float

    @property
    def weights(self) -> Tensors:
        return self.kinds["weight"]


def _random(*names: object) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(repr(names).encode()))


def initial(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPES[name], generator=_random(name)).to(dtype)


def gradient(name: str, step: int, fine: int = 1024) -> Tensor:
    """The whole gradient of a logical tensor: float64 in [-1, 1]; about a tenth of it is zero."""
    random = _random(name, step)
    values = torch.randint(-fine, fine + 1, SHAPES[name], generator=random).double() / fine
    return values * (torch.rand(SHAPES[name], generator=random) > 0.1)


def share(name: str, step: int, fine: int, index: int, count: int) -> Tensor:
    """The part of `gradient` that one of `count` holders has: they add up to it exactly."""
    others = [
        torch.randint(-fine, fine + 1, SHAPES[name], generator=_random(name, step, n)).double()
        / fine
        for n in range(1, count)
    ]
    if index == 0:
        return gradient(name, step, fine) - sum(others)
    return others[index - 1]


def make_part(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """This rank's parameters of MODEL."""
    pp = Axis.of(mesh, "pp")
    tp = Axis.of(mesh, "tp")
    module = nn.ParameterDict()
    for kind in MODEL:
        stages = tuple(dict.fromkeys(min(stage, pp.size - 1) for stage in kind.stages))
        if pp.rank not in stages:
            continue
        parts = tuple(
            Part.cut(name, shape, dim, tp, most and min(most, tp.size), HEADS.get(name, 1))
            for name, shape, dim, most in kind.parts
        )
        rows = [initial(part.name, dtype) for part in parts]
        if parts[0].shape:
            rows = [
                _padded(part.take(whole), part.padded)
                for part, whole in zip(parts, rows, strict=True)
            ]
        values = torch.cat(rows) if parts[0].shape else rows[0]
        layout = Layout(parts, kind.partial, stages if len(stages) > 1 else ())
        module[parts[0].name.replace(".", "_")] = attach(nn.Parameter(values), layout)
    return module


def _padded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    padded = values.new_zeros(shape)
    padded[tuple(map(slice, values.shape))] = values
    return padded


def give(optimizer: ParallelAMPOptimizer, step: int, fine: int = 1024) -> None:
    """Adds this rank's shares of the gradients of a step, times the loss scale."""
    dp = optimizer.dp
    pp = optimizer.pp
    for parameter in (p for buffer in optimizer.all_buffers() for p in buffer.parameters):
        layout: Layout = parameter.megaprec_layout  # type: ignore[attr-defined]
        stages = layout.tied or (pp.rank,)
        for part, first, last in layout.spans():
            copies, copy = (part.copies, part.copy) if layout.partial else (1, 0)
            index = dp.rank + dp.size * (stages.index(pp.rank) + len(stages) * copy)
            mine = (
                share(part.name, step, fine, index, dp.size * len(stages) * copies)
                * optimizer.scale
            )
            begin_cleared(parameter).view(-1)[first:last].add_(part.take(mine).reshape(-1))


def make_optimizer(mesh: DeviceMesh | None, case: Case) -> ParallelAMPOptimizer:
    made = plan(case.compute, **case.plan)
    dtype = torch.float64 if case.compute == "fp64" else torch.float32
    options = {"average": False, "clip": case.clip, "rule": case.make_rule(), **case.options}
    return ParallelAMPOptimizer([make_part(mesh, dtype)], made, mesh, **options)


def train(mesh: DeviceMesh | None, case: Case) -> tuple[ParallelAMPOptimizer, list[StepReport]]:
    optimizer = make_optimizer(mesh, case)
    reports = []
    for step in range(case.steps):
        if step == case.restart:
            optimizer = _restarted(optimizer, mesh, case)
        give(optimizer, step, case.fine)
        if optimizer.canonical:
            optimizer.end_microbatch(0, 1)
        if step in case.bad and optimizer.world.rank == optimizer.world.size - 1:
            optimizer.all_buffers()[0].grads[0] = INF
        reports.append(optimizer.step(case.lr))
    return optimizer, reports


def _restarted(
    old: ParallelAMPOptimizer, mesh: DeviceMesh | None, case: Case
) -> ParallelAMPOptimizer:
    new = make_optimizer(mesh, case)
    for buffer in new.all_buffers():
        for values in (buffer.own_weights, *buffer.saved().values()):
            values.mul_(3)
    if case.folder is None:
        new.load_state_dict(old.state_dict())
    else:
        load(save(case.folder, 1, old, {}), new)
    return new


def held(optimizer: ParallelAMPOptimizer) -> dict[str, list[Fragment]]:
    """By kind, what this rank's own slices hold."""
    buffers = optimizer.all_buffers()
    having = {
        kind: [b for b in buffers if kind in b.saved_names]
        for b in buffers
        for kind in b.saved_names
    }
    found = {
        kind: fragments(some, lambda buffer, kind=kind: buffer.saved()[kind])
        for kind, some in having.items()
    }
    return found | {"held": fragments(optimizer.all_buffers(), lambda buffer: buffer.own_weights)}


def train_cases(
    mesh: DeviceMesh | None, cases: Sequence[Case], before: Callable[[], None] | None = None
) -> list[Any]:
    """The body each rank runs."""
    if before is not None:
        before()
    answers = []
    for case in cases:
        optimizer, reports = train(mesh, case)
        answers.append(
            (reports, held(optimizer), optimizer.saved_numbers(), optimizer.bytes_per_parameter)
        )
    return answers


def results(
    cases: Sequence[Case], axes: dict[str, int], before: Callable[[], None] | None = None
) -> list[Result]:
    """Each case trained in one layout. Reports and numbers are the same on every rank."""
    if axes:
        ranks = run_ranks(train_cases, axes, cases=cases, before=before)
    else:
        ranks = [train_cases(None, cases, before)]
    found = []
    for answers in zip(*ranks, strict=True):
        reports, _, numbers, size = answers[0]
        assert all(str(answer[0]) == str(reports) for answer in answers), (
            "ranks report different steps"
        )
        assert all(answer[2] == numbers for answer in answers), "ranks hold different numbers"
        names = dict.fromkeys(kind for answer in answers for kind in answer[1])
        kinds = {kind: assemble([answer[1].get(kind, []) for answer in answers]) for kind in names}
        found.append(Result(reports, kinds, numbers, size))
    return found


def differing(ours: Result, theirs: Result) -> list[str]:
    """What is not equal to the last bit, by kind and name."""
    assert ours.kinds.keys() == theirs.kinds.keys()
    wrong = []
    for kind, tensors in theirs.kinds.items():
        assert tensors.keys() == ours.kinds[kind].keys()
        assert kind not in ("weight", "held") or tensors.keys() == SHAPES.keys()
        wrong += [
            f"{kind}/{n}"
            for n, values in tensors.items()
            if not torch.equal(values, ours.kinds[kind][n])
        ]
    return wrong
