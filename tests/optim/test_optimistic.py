"""The laws of the optimistic step: it trains what an agreed step trains, bit for bit, and no stage
waits for others."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim import post_validation
from megaprec.optim.flat_buffer import Buffer
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.post_validation import PostValidationOptimizer, SettledStep
from megaprec.optim.rule_by_name import rule
from megaprec.optim.step_report import StepReport
from megaprec.optim.torch_rule import Torch
from megaprec.optim.update_tile import Tile
from megaprec.precision.plan import LossScaling, plan
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from models.engine.post_validation import PostValidation
from parallel.pipeline.builders import schedule
from parallel.pipeline.executor import Executor
from parallel.pipeline.instructions import Instruction
from parallel.pipeline.p2p import P2P
from tests.layouts import LENGTH, SAMPLES, Run, batches, share_of
from tests.other_systems import slow
from tests.ranks import run_ranks
from tests.runs import write_run
from tools.config.run_file import load_run

INF = float("inf")
NAN = float("nan")
MODEL = {
    "family": "llama",
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 24,
    "vocab": 37,
}
DROPPING = {**MODEL, "dropout": 0.1, "attention_dropout": 0.1}
SEARCHING = LossScaling("dynamic", 2.0**12, hysteresis=1, growth_interval=2)
CLIPPED = 1e4  # far above the norm at which these runs clip
Plan = Mapping[int, tuple[int, float]]  # by step: a rank and what one of its gradients is to be


class Before(ParallelAMPOptimizer):
    """Plants gradients, in units of the loss scale, just before they are looked at."""

    def __init__(self, *args: Any, planted: Plan, **options: Any) -> None:
        super().__init__(*args, **options)
        self.planted = planted
        self.count = 0

    def _local_numbers(
        self, loss: Tensor | None, counted_tokens: Tensor | float | None = None
    ) -> Tensor:
        rank, value = self.planted.get(self.count, (0, 0.0))
        if value and rank % self.world.size == self.world.rank:
            filled = [values for values in self._counted_grads if len(values)]
            filled[self.count % len(filled)][-1] = value * self.scale
        self.count += 1
        return super()._local_numbers(loss, counted_tokens)


class After(Before, PostValidationOptimizer):
    """Remembers which guesses stood. always: guesses although the last guess was wrong."""

    def __init__(self, *args: Any, always: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.always = always
        self.stood = []

    def take(
        self, lr: float, loss: Tensor | None = None, counted_tokens: Tensor | None = None
    ) -> StepReport | None:
        self._guesses |= self.always
        return super().take(lr, loss, counted_tokens)

    def settle(self) -> SettledStep | None:
        settled = super().settle()
        self.stood += [] if settled is None else [settled.stands]
        return settled


@dataclass(frozen=True)
class Case:
    """What is trained: bad gradients at the first, a middle and the last step, on several ranks,
    and clipped ones."""

    run: Run
    planted: Plan = field(default_factory=dict)
    rule: str = "adamw"
    always: bool = False


SPOILED = {0: (3, INF), 3: (0, CLIPPED), 6: (1, NAN), 7: (2, -INF), 9: (3, INF)}
CASES = {
    "fp16": Case(Run(DROPPING, "fp16", SEARCHING, steps=10), SPOILED),
    "wrong in a row": Case(
        Run(DROPPING, "fp16", SEARCHING, steps=10, zero_size=1), SPOILED, always=True
    ),
    "split": Case(
        Run(
            {**DROPPING, "tied": True},
            "bf16",
            steps=5,
            changes={"masters": "split", "moments": "bf16"},
        ),
        {1: (1, NAN), 2: (2, CLIPPED), 4: (0, CLIPPED)},
        always=True,
    ),
    "stochastic": Case(
        Run(
            DROPPING,
            "bf16",
            steps=4,
            changes={"rounding": "stochastic"},
            options={"norm": INF, "overlap": True},
        ),
        {1: (1, CLIPPED), 3: (0, INF)},
    ),
    "other rule": Case(
        Run(MODEL, "fp32", steps=5), {0: (1, CLIPPED), 2: (0, NAN), 4: (3, CLIPPED)}, "NAdam", True
    ),
    "muon": Case(
        Run(MODEL, "bf16", steps=5, changes={"moments": "bf16"}),
        {0: (1, CLIPPED), 2: (0, NAN), 4: (3, CLIPPED)},
        "muon",
        True,
    ),
    "fp64": Case(Run(MODEL, steps=4, micro_batch=4), {1: (0, CLIPPED), 3: (1, INF)}, "sgd"),
    "canonical": Case(
        Run(DROPPING, "fp16", SEARCHING, steps=10, options={"canonical": True, "norm": 3.0}),
        SPOILED,
        always=True,
    ),
    "ignored": Case(
        Run(MODEL, "fp32", steps=3, changes={"on_nonfinite": "ignore"}),
        {1: (0, CLIPPED), 2: (1, INF)},
        always=True,
    ),
}


def make(mesh: DeviceMesh, case: Case, kind: str, after: bool) -> Engine:
    run = case.run
    pp = mesh["pp"].size()
    dp = mesh["dp"].size()
    options: dict[str, Any] = {
        "kind": After if after else Before,
        "rule": rule(case.rule),
        "clip": 1e2,
        "zero_size": run.zero_size,
        "planted": case.planted,
        **run.options,
    }
    if after:
        options["always"] = case.always

    return Engine.build(
        run.config,
        plan(run.compute, run.scaling, **run.changes),
        mesh,
        schedule(kind, pp, SAMPLES // run.micro_batch // dp),
        EngineOptions(micro_batch=run.micro_batch, seq_length=LENGTH, seed=3),
        **options,
    )


def state(engine: Engine) -> tuple[str, list[Tensor]]:
    """All that a step may change. Tensors as bytes, for NaN is not itself."""
    optimizer = engine.optimizer
    optimizer.wait()
    held = [kept for buffer in optimizer.all_buffers() for kept in kept_by(buffer)]
    return str(optimizer.numbers()), [kept.detach().clone().view(torch.uint8) for kept in held]


def kept_by(buffer: Buffer) -> list[Tensor]:
    kept = (buffer.weights, buffer.masters, buffer.remainder, *buffer.state.values())
    return [values for values in kept if values is not None]


def require_equal(
    ours: tuple[str, list[Tensor]], theirs: tuple[str, list[Tensor]], when: str
) -> None:
    assert ours[0] == theirs[0], when
    differing = [
        n for n, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)) if not torch.equal(a, b)
    ]
    assert not differing, f"{when}: tensors {differing} differ"


def require_same(
    mesh: DeviceMesh, names: list[str], kind: str, bug: Callable[[], None] | None = None
) -> None:
    """Trains each case both ways; looks at the state in the middle of the run and at its end."""
    agreed = [agree_first(mesh, CASES[name], kind) for name in names]
    if bug is not None:
        bug()
    for name, (reports, states) in zip(names, agreed, strict=True):
        case = CASES[name]
        engine = make(mesh, case, kind, after=True)
        steps = PostValidation(engine)
        known: list[StepReport | None] = []
        middle = case.run.steps // 2
        last = case.run.steps - 1
        for number, share in enumerate(shares(mesh, case)):
            known += [steps.accumulate(share, number), steps.update(case.run.lr)]
            if number in (middle, last):
                known.append(steps.settle())
                require_equal(state(engine), states[number], f"{name}, step {number}")
        for number, (ours, theirs) in enumerate(zip(filter(None, known), reports, strict=True)):
            assert str(ours) == str(theirs), f"{name}, step {number}"
        assert isinstance(engine.optimizer, After)
        assert {True, False} == set(engine.optimizer.stood), f"{name}: {engine.optimizer.stood}"


def shares(mesh: DeviceMesh, case: Case) -> Iterator[Share]:
    return (share_of(mesh, batch) for batch in batches(case.run))


def agree_first(
    mesh: DeviceMesh, case: Case, kind: str
) -> tuple[list[StepReport], list[tuple[str, list[Tensor]]]]:
    engine = make(mesh, case, kind, after=False)
    reports = []
    states = []
    for number, share in enumerate(shares(mesh, case)):
        reports.append(engine.step(share, case.run.lr, number))
        states.append(state(engine))
    outcomes = {report.outcome for report in reports}
    assert len(outcomes) == 2, outcomes
    assert any(report.grad_norm > 1e3 for report in reports if report.outcome == "applied"), (
        "nothing is clipped"
    )
    return reports, states


Layouts = list[tuple[dict[str, int], str, list[str]]]
LAYOUTS: Layouts = [
    ({"pp": 2}, "1f1b", [*CASES]),
    ({"pp": 4}, "gpipe", ["fp16"]),
    ({"pp": 2}, "zb-v", ["wrong in a row"]),
    ({"pp": 2, "tp": 2}, "1f1b", ["stochastic"]),
    ({"pp": 2, "dp": 2}, "gpipe", ["stochastic"]),
    ({"dp": 2}, "1f1b", ["fp64"]),
]
MORE: Layouts = [
    ({"pp": 2}, "gpipe", ["wrong in a row"]),
    (
        {"pp": 2, "dp": 2},
        "1f1b",
        ["fp16", "wrong in a row", "split", "other rule", "canonical", "muon"],
    ),
    ({"pp": 2, "tp": 2}, "1f1b", ["fp16"]),
    ({"pp": 4}, "1f1b", ["fp16", "wrong in a row", "split"]),
    ({"pp": 2}, "zb-h2", ["fp16", "split"]),
]


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    ("axes", "kind", "names"),
    [*LAYOUTS, *slow(*MORE)],
    ids=lambda x: "".join(map(str, x)) if x else "",
)
def test_what_is_guessed_and_taken_back_trains_what_is_agreed_on_first(
    axes: dict[str, int], kind: str, names: list[str]
) -> None:
    run_ranks(require_same, axes, names=names, kind=kind)


# --- the tests are tested


def averages_are_forgotten() -> None:
    inner = Tile.changed
    Tile.changed = lambda self: inner(self)[:-1]


def the_step_count_is_forgotten() -> None:
    PostValidationOptimizer._counters = lambda self: [*self.scaler.tensors()]


def the_scaler_is_forgotten() -> None:
    PostValidationOptimizer._counters = lambda self: [self.steps]


def scalars_of_the_rule_are_forgotten() -> None:
    Torch.load_scalars = lambda self, scalars: None


def gradients_are_spent() -> None:
    """A guess is made with the gradients themselves, which torch's kernel unscales where they
    are."""
    post_validation.replace = lambda block, **changes: block  # type: ignore[assignment]


def weights_of_others_are_kept() -> None:
    """A step that is skipped after all collects nothing."""
    inner = PostValidationOptimizer._go_back

    def go_back(self: PostValidationOptimizer, guessed: Any) -> None:
        collect = Buffer.start_collect
        Buffer.start_collect = lambda self: lambda: None
        inner(self, guessed)
        Buffer.start_collect = collect

    PostValidationOptimizer._go_back = go_back


def stale_messages_are_read() -> None:
    """Those which should be dropped are taken for those that come after them."""
    late: list[Instruction] = []
    receive = P2P.receive
    abandon = Executor.abandon

    def receive_first(self: P2P, i: Instruction) -> Tensor:
        first = receive(self, i)
        if i in late:
            late.remove(i)
            receive(self, i)
        return first

    def abandon_nothing(self: Executor, unread: Sequence[Instruction]) -> None:
        late.extend(unread)
        abandon(self, ())

    Executor.abandon = abandon_nothing
    P2P.receive = receive_first


def the_warmup_is_not_made_again() -> None:
    inner = After.settle

    def settle(self: After) -> SettledStep | None:
        settled = inner(self)
        return settled and replace(settled, stands=True)

    After.settle = settle


BUGS: list[tuple[Callable[[], None], dict[str, int], str, str]] = [
    (averages_are_forgotten, {"pp": 2}, "wrong in a row", "AssertionError"),
    (the_step_count_is_forgotten, {"pp": 2}, "wrong in a row", "AssertionError"),
    (the_scaler_is_forgotten, {"pp": 2}, "wrong in a row", "AssertionError"),
    (scalars_of_the_rule_are_forgotten, {"pp": 2}, "other rule", "AssertionError"),
    (gradients_are_spent, {"pp": 2}, "wrong in a row", "AssertionError"),
    (weights_of_others_are_kept, {"pp": 2, "dp": 2}, "fp16", "AssertionError"),
    (stale_messages_are_read, {"pp": 2}, "wrong in a row", "AssertionError"),
    (the_warmup_is_not_made_again, {"pp": 2}, "wrong in a row", "modified by an inplace operation"),
]


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize(
    ("bug", "axes", "name", "says"), BUGS, ids=lambda x: getattr(x, "__name__", "")
)
def test_it_is_noticed_if(
    bug: Callable[[], None], axes: dict[str, int], name: str, says: str
) -> None:
    with pytest.raises(pytest.fail.Exception) as raised:
        run_ranks(require_same, axes, names=[name], kind="1f1b", bug=bug)
    assert says in str(raised.value), "it failed for another reason"


# --- nobody waits


class Patient(PostValidationOptimizer):
    """Its last stage does not come to an agreement before the first one has begun the next step."""

    folder: Path

    def _local_numbers(
        self, loss: Tensor | None, counted_tokens: Tensor | float | None = None
    ) -> Tensor:
        numbers = super()._local_numbers(loss, counted_tokens)
        begun = self.folder / str(int(self.steps) + 1)
        deadline = time.monotonic() + 300
        while (
            self.pp.rank == self.pp.size - 1 and int(self.steps) < STEPS - 1 and not begun.exists()
        ):
            assert time.monotonic() < deadline, "the first stage waits for the last one"
            time.sleep(0.01)
        return numbers


STEPS = 3


def go_ahead(mesh: DeviceMesh, folder: Path) -> list[str]:
    Patient.folder = folder
    run = Run(MODEL, "fp32", steps=STEPS)
    kind = schedule("1f1b", 2, SAMPLES // run.micro_batch)
    engine = Engine.build(
        run.config,
        plan("fp32"),
        mesh,
        kind,
        EngineOptions(micro_batch=run.micro_batch, seq_length=LENGTH),
        kind=Patient,
        clip=0.0,
    )
    steps = PostValidation(engine)
    stage = next(iter(engine.stages.values()))
    known = []
    for number, batch in enumerate(batches(run)):
        stage.register_forward_pre_hook(
            lambda module, args, number=number: (folder / str(number)).touch()
        )
        known += [steps.accumulate(share_of(mesh, batch), number), steps.update(1e-2)]
    known.append(steps.settle())
    return [report.outcome for report in known if report is not None]


def test_a_stage_begins_the_next_step_while_another_has_not_come_to_the_end_of_this_one(
    tmp_path: Path,
) -> None:
    assert run_ranks(go_ahead, {"pp": 2}, folder=tmp_path) == [["applied"] * STEPS] * 2


# --- what is refused


def come_apart(mesh: DeviceMesh) -> None:
    """A rank comes with another scale; while a step is not settled, nothing that needs it may be
    done."""
    engine = make(
        mesh,
        case := Case(Run(MODEL, "fp16", LossScaling("dynamic", 2.0**8), steps=2)),
        "1f1b",
        after=True,
    )
    steps, (first, second) = PostValidation(engine), shares(mesh, case)
    steps.accumulate(first, 0)
    steps.update(1e-2)
    for wrong in (
        lambda: engine.evaluate(first),
        lambda: steps.update(1e-2),
        engine.optimizer.state_dict,
    ):
        with pytest.raises(RuntimeError, match="not settled"):
            wrong()
    steps.settle()
    expected = [
        kept.clone() for buffer in engine.optimizer.all_buffers() for kept in kept_by(buffer)
    ]
    steps.accumulate(second, 1)
    engine.optimizer.scaler.tensors()[0].mul_(1 + mesh.get_rank())
    steps.update(1e-2)
    with pytest.raises(RuntimeError, match="disagree about the loss scaler"):
        steps.settle()
    held = [kept for buffer in engine.optimizer.all_buffers() for kept in kept_by(buffer)]
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True)), (
        "a refused step changed something"
    )


def test_what_needs_a_settled_step_says_so_and_ranks_that_disagree_stop() -> None:
    run_ranks(come_apart, {"pp": 2})


def test_a_plan_that_raises_is_refused(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    attach_whole(layer)
    with pytest.raises(UserError, match=r'too late for precision\.on_nonfinite = "raise"'):
        PostValidationOptimizer([layer], plan("fp32", on_nonfinite="raise"))
    with pytest.raises(UserError, match=r'too late for precision\.on_nonfinite = "raise"'):
        load_run(
            write_run(tmp_path), ["optimizer.validation=after", "precision.on_nonfinite=raise"]
        )
