"""A step in which no token counts changes nothing, in every layout; where none counts, nothing is
added."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import attach_whole
from megaprec.optim.decision.step_report import StepReport
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import LossScaling, plan
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.pipeline.kinds import schedule
from tests import oracle
from tests.families import put
from tests.ranks import run_ranks

LENGTH = 16
SAMPLES = 8
VOCAB = 31
MODEL = ModelConfig(
    layers=2,
    hidden=16,
    heads=4,
    ffn=24,
    vocab=VOCAB,
    max_positions=32,
    init_std=0.3,
    experts=4,
    mtp_layers=1,
)
PLAIN = ModelConfig(
    layers=2, hidden=16, heads=4, ffn=24, vocab=VOCAB, max_positions=32, init_std=0.3
)
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2},
    "data": {"dp": 2},
    "context": {"cp": 2},
}
RATE = 1e-2


def ids() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, VOCAB, (2, SAMPLES, LENGTH), generator=dice)
    return tokens, targets


def engine_of(
    mesh: DeviceMesh | None, config: ModelConfig, dp: int, pp: int, canonical: int = 0, **more: Any
) -> Engine:
    scaled = plan("fp32", scaling=LossScaling("dynamic", initial=2.0**8, growth_interval=3))
    microbatches = SAMPLES // dp // 2
    options = EngineOptions(2, LENGTH, seed=5, canonical_shards=canonical)
    return Engine.build(config, scaled, mesh, schedule("1f1b", pp, microbatches), options, **more)


def share_of(engine: Engine, mask: Tensor) -> Share:
    tokens, targets = ids()
    rows = SAMPLES // engine.dp.size
    first = engine.dp.rank * rows
    own = slice(first, first + rows)
    return Share(tokens[own], targets[own], mask[own], first=first)


def with_an_empty_step(
    mesh: DeviceMesh | None, canonical: int
) -> tuple[list[StepReport], list[bool], list[str]]:
    """Reports of three steps, of which nothing counts in the second; whether it changed nothing;
    differing tensors."""
    dp, pp = (1, 1) if mesh is None else (mesh["dp"].size(), mesh["pp"].size())
    every = torch.ones(SAMPLES, LENGTH)
    none = torch.zeros(SAMPLES, LENGTH)
    config = PLAIN if canonical else MODEL
    one = engine_of(mesh, config, dp, pp, canonical)
    reports = [one.step(share_of(one, every), RATE, 0)]
    before = one.optimizer.state_dict()
    reports.append(one.step(share_of(one, none), RATE, 1))
    after = one.optimizer.state_dict()
    reports.append(one.step(share_of(one, every), RATE, 2))
    kept = [torch.equal(after["tensors"][name], value) for name, value in before["tensors"].items()]
    kept += [before["steps"] == after["steps"], before["scaler"] == after["scaler"]]
    without = engine_of(mesh, config, dp, pp, canonical)
    for number in (0, 2):
        without.step(share_of(without, every), RATE, number)
    theirs = without.optimizer.state_dict()
    ours = one.optimizer.state_dict()
    differ = [
        name
        for name, value in theirs["tensors"].items()
        if not torch.equal(ours["tensors"][name], value)
    ]
    return reports, kept, differ


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    ("layout", "canonical"), [*((layout, 0) for layout in LAYOUTS), ("data", 2)]
)
def test_a_step_in_which_no_token_counts_changes_nothing(layout: str, canonical: int) -> None:
    for reports, kept, differ in run_ranks(
        with_an_empty_step, LAYOUTS[layout], canonical=canonical
    ):
        assert [report.outcome for report in reports] == ["applied", "skipped_no_tokens", "applied"]
        assert math.isnan(reports[1].loss)
        assert not reports[1].changed
        assert all(kept)
        assert differ == []


MASKS = {
    "one micro-batch alone counts": (torch.arange(SAMPLES) == 1)[:, None]
    .expand(SAMPLES, LENGTH)
    .float(),
    "one token alone counts": torch.zeros(SAMPLES, LENGTH).index_put(
        (torch.tensor(5), torch.tensor(2)), torch.ones(())
    ),
    "weights whose sum is less than one": torch.full((SAMPLES, LENGTH), 2.0**-9),
}


def losses(mesh: DeviceMesh | None, w: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
    """For each mask the loss of a step, its gradient norm, and the loss of an evaluation."""
    dp, pp = (1, 1) if mesh is None else (mesh["dp"].size(), mesh["pp"].size())
    found = {}
    for name, mask in MASKS.items():
        one = Engine.build(
            PLAIN,
            plan("fp64"),
            mesh,
            schedule("1f1b", pp, SAMPLES // dp // 2),
            EngineOptions(micro_batch=2, seq_length=LENGTH),
        )
        for stage in one.stages.values():
            put(stage, w)
        evaluated = one.evaluate(share_of(one, mask))
        report = one.step(share_of(one, mask), 0.0, 0)
        found[name] = (report.loss, report.grad_norm, evaluated)
    return found


def weights() -> dict[str, Tensor]:
    one = Engine.build(
        PLAIN,
        plan("fp64"),
        None,
        schedule("1f1b", 1, 1),
        EngineOptions(micro_batch=2, seq_length=LENGTH),
    )
    tensors = one.optimizer.state_dict()["tensors"]
    return {
        name.removeprefix("weight/"): v.double()
        for name, v in tensors.items()
        if name.startswith("weight/")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_what_counts_wherever_that_is(layout: str) -> None:
    tokens, targets = ids()
    expected = {}
    for name, mask in MASKS.items():
        w = {key: value.clone().requires_grad_() for key, value in weights().items()}
        logits = oracle.logits(PLAIN, w, tokens)
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        loss = (each * mask.double()).sum() / mask.double().sum()
        loss.backward()
        norm = math.sqrt(
            sum(float(v.grad.square().sum()) for v in w.values() if v.grad is not None)
        )
        expected[name] = (loss.item(), norm, loss.item())
    for found in run_ranks(losses, LAYOUTS[layout], w=weights()):
        for name, numbers in expected.items():
            assert found[name] == pytest.approx(numbers, rel=1e-12), name


def test_a_loop_of_ones_own_can_say_that_nothing_counts() -> None:
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 3)
    attach_whole(net)
    scaled = plan("fp32", scaling=LossScaling("dynamic", initial=2.0**8, growth_interval=1))
    optimizer = ParallelAMPOptimizer([net], scaled, weight_decay=0.5)
    outcomes = []
    for counted in (12.0, 0, torch.tensor(0.0), 12):
        before = optimizer.state_dict()
        loss = net(torch.ones(2, 4)).square().mean() * (0.0 if float(counted) == 0 else 1.0)
        (loss * optimizer.scale).backward()
        report = optimizer.step(lr=1e-2, loss=loss.detach(), counted_tokens=counted)
        after = optimizer.state_dict()
        same = all(
            torch.equal(after["tensors"][name], value) for name, value in before["tensors"].items()
        )
        outcomes.append(
            (
                report.outcome,
                same,
                before["scaler"] == after["scaler"],
                after["steps"] - before["steps"],
            )
        )
    applied = ("applied", False, False, 1)
    skipped = ("skipped_no_tokens", True, True, 0)
    assert outcomes == [applied, skipped, skipped, applied]
