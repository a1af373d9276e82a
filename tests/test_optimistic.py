"""The laws of the optimistic step: it trains what an agreed step trains, bit for bit, and no stage waits for others."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.events import StepReport
from megaprec.optimistic import OptimisticOptimizer, Settled
from megaprec.optimizer import ParallelAMPOptimizer
from megaprec.plan import LossScaling, plan
from megaprec.rules import rule
from models.engine import Engine, Share
from models.optimistic import OptimisticEngine
from parallel.schedule import schedule
from tests.layouts import LENGTH, SAMPLES, Run, batches, share_of
from tests.ranks import run_ranks

INF, NAN = float("inf"), float("nan")
MODEL = {"family": "llama", "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 37}
DROPPING = {**MODEL, "dropout": 0.1, "attention_dropout": 0.1}
SEARCHING = LossScaling("dynamic", 2.0**12, hysteresis=1, growth_interval=2)
CLIPPED = 1e4  # far above the norm at which these runs clip
Plan = Mapping[int, tuple[int, float]]  # by step: a rank and what one of its gradients is to be


class Before(ParallelAMPOptimizer):
    """Plants gradients, in units of the loss scale, just before they are looked at."""

    def __init__(self, *args: Any, planted: Plan, **options: Any) -> None:
        super().__init__(*args, **options)
        self.planted, self.count = planted, 0

    def _own_numbers(self, loss: Tensor | None) -> Tensor:
        rank, value = self.planted.get(self.count, (0, 0.0))
        if value and rank % self.world.size == self.world.rank:
            filled = [values for values in self._counted if len(values)]
            filled[self.count % len(filled)][-1] = value * self.scale
        self.count += 1
        return super()._own_numbers(loss)


class After(Before, OptimisticOptimizer):
    """Remembers which guesses stood. always: guesses although the last guess was wrong."""

    def __init__(self, *args: Any, always: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.always, self.stood = always, []

    def take(self, lr: float, loss: Tensor | None = None) -> StepReport | None:
        self._guesses |= self.always
        return super().take(lr, loss)

    def settle(self) -> Settled | None:
        settled = super().settle()
        self.stood += [] if settled is None else [settled.stands]
        return settled


@dataclass(frozen=True)
class Case:
    """What is trained: bad gradients at the first, a middle and the last step, on several ranks, and clipped ones."""

    run: Run
    planted: Plan = field(default_factory=dict)
    rule: str = "adamw"
    always: bool = False


SPOILED = {0: (3, INF), 3: (0, CLIPPED), 6: (1, NAN), 7: (2, -INF), 9: (3, INF)}
CASES = {
    "fp16": Case(Run(DROPPING, "fp16", SEARCHING, steps=10), SPOILED),
    "wrong in a row": Case(Run(DROPPING, "fp16", SEARCHING, steps=10, zero_size=1), SPOILED, always=True),
    "split": Case(
        Run({**DROPPING, "tied": True}, "bf16", steps=5, changes={"masters": "split", "moments": "bf16"}),
        {1: (1, NAN), 2: (2, CLIPPED), 4: (0, CLIPPED)},
        always=True,
    ),
    "stochastic": Case(
        Run(DROPPING, "bf16", steps=4, changes={"rounding": "stochastic"}, options={"norm": INF, "overlap": True}),
        {1: (1, CLIPPED), 3: (0, INF)},
    ),
    "other rule": Case(Run(MODEL, "fp32", steps=5), {0: (1, CLIPPED), 2: (0, NAN), 4: (3, CLIPPED)}, "NAdam", True),
    "fp64": Case(Run(MODEL, steps=4, micro_batch=4), {1: (0, CLIPPED), 3: (1, INF)}, "sgd"),
    "ignored": Case(
        Run(MODEL, "fp32", steps=3, changes={"on_nonfinite": "ignore"}), {1: (0, CLIPPED), 2: (1, INF)}, always=True
    ),
}


def make(mesh: DeviceMesh, case: Case, kind: str, after: bool) -> Engine:
    run, pp, dp = case.run, mesh["pp"].size(), mesh["dp"].size()
    options = {"clip": 1e2, "zero_size": run.zero_size, "planted": case.planted, **run.options}

    def make_optimizer(*args: Any) -> ParallelAMPOptimizer:
        chosen = rule(case.rule)
        return (
            After(*args, rule=chosen, always=case.always, **options) if after else Before(*args, rule=chosen, **options)
        )

    return (OptimisticEngine if after else Engine)(
        run.config,
        plan(run.compute, run.scaling, **run.changes),
        mesh,
        schedule(kind, pp, SAMPLES // run.micro_batch // dp),
        micro_batch=run.micro_batch,
        seq_length=LENGTH,
        seed=3,
        make_optimizer=make_optimizer,
    )


def state(engine: Engine) -> tuple[str, list[Tensor]]:
    """All that a step may change. Tensors as bytes, for NaN is not itself."""
    optimizer = engine.optimizer
    held = [
        kept
        for b in optimizer.all_buffers()
        for kept in (b.weights, b.grads, b.masters, b.remainder, *b.state.values())
        if kept is not None
    ]
    return str(optimizer.numbers()), [kept.detach().clone().view(torch.uint8) for kept in held]


def require_equal(ours: tuple[str, list[Tensor]], theirs: tuple[str, list[Tensor]], when: str) -> None:
    assert ours[0] == theirs[0], when
    differing = [n for n, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)) if not torch.equal(a, b)]
    assert not differing, f"{when}: tensors {differing} differ"


def require_same(mesh: DeviceMesh, names: list[str], kind: str, bug: Callable[[], None] | None = None) -> None:
    """Trains each case both ways; looks at the state in the middle of the run and at its end."""
    agreed = [agree_first(mesh, CASES[name], kind) for name in names]
    if bug is not None:
        bug()
    for name, (reports, states) in zip(names, agreed, strict=True):
        case = CASES[name]
        engine = make(mesh, case, kind, after=True)
        known: list[StepReport | None] = []
        middle, last = case.run.steps // 2, case.run.steps - 1
        for number, share in enumerate(shares(mesh, case)):
            known += [engine.accumulate(share, number), engine.update(case.run.lr)]
            if number in (middle, last):
                known.append(engine.settle())
                require_equal(state(engine), states[number], f"{name}, step {number}")
        for number, (ours, theirs) in enumerate(zip(filter(None, known), reports, strict=True)):
            assert str(ours) == str(theirs), f"{name}, step {number}"
        assert isinstance(engine.optimizer, After)
        assert {True, False} == set(engine.optimizer.stood), f"{name}: {engine.optimizer.stood}"


def shares(mesh: DeviceMesh, case: Case) -> Iterator[Share]:
    return (share_of(mesh, batch) for batch in batches(case.run))


def agree_first(mesh: DeviceMesh, case: Case, kind: str) -> tuple[list[StepReport], list[tuple[str, list[Tensor]]]]:
    engine, reports, states = make(mesh, case, kind, after=False), [], []
    for number, share in enumerate(shares(mesh, case)):
        reports.append(engine.step(share, case.run.lr, number))
        states.append(state(engine))
    outcomes = {report.outcome for report in reports}
    assert len(outcomes) == 2, outcomes
    assert any(report.grad_norm > 1e3 for report in reports if report.outcome == "applied"), "nothing is clipped"
    return reports, states


LAYOUTS: list[tuple[dict[str, int], str, list[str]]] = [
    ({"pp": 2}, "1f1b", [*CASES]),
    ({"pp": 2}, "gpipe", ["wrong in a row"]),
    ({"pp": 2, "dp": 2}, "1f1b", ["fp16", "wrong in a row", "split", "other rule"]),
    ({"pp": 2, "tp": 2}, "1f1b", ["fp16", "stochastic"]),
    ({"pp": 4}, "1f1b", ["fp16", "wrong in a row", "split"]),
    ({"pp": 4}, "gpipe", ["fp16"]),
    ({"pp": 2}, "zb-h2", ["fp16", "split"]),
    ({"pp": 2}, "zb-v", ["wrong in a row"]),
    ({"pp": 2, "dp": 2}, "gpipe", ["stochastic"]),
    ({"dp": 2}, "1f1b", ["fp64"]),
]


@pytest.mark.parametrize(("axes", "kind", "names"), LAYOUTS, ids=lambda x: "".join(map(str, x)) if x else "")
def test_what_is_guessed_and_taken_back_trains_what_is_agreed_on_first(
    axes: dict[str, int], kind: str, names: list[str]
) -> None:
    run_ranks(require_same, axes, names=names, kind=kind)
