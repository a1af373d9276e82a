"""How an engine chooses its passes and its links, and what it traces."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.diagnose.position import Phase, StepPosition
from models.engine import engine as engine_module
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from tests.layouts import Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.optim.test_locate import poison_backward


def ids(samples: int, length: int) -> Tensor:
    return torch.zeros(samples, length, dtype=torch.int64)


@pytest.mark.parametrize(("pieces", "length"), [(1, 8), (2, 4), (4, 2)])
def test_sequences_that_are_cut_are_as_many_more_samples_of_as_many_micro_batches(
    pieces: int, length: int
) -> None:
    run = Run(MODELS["gpt2"], length=8)
    engine = make_engine(None, run)
    microbatches = engine.schedule.microbatches
    samples = microbatches * run.micro_batch * pieces
    share = Share(ids(samples, length), ids(samples, length))
    passes = engine.passes_for(share)
    assert passes.schedule.microbatches == microbatches
    assert passes.micro_batch == run.micro_batch * pieces


def test_links_have_room_for_the_sends_of_the_busiest_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []

    def open_links(*given: object, sends: int, shared: object) -> None:
        opened.append(sends)

    monkeypatch.setattr(engine_module, "sends_under_way", lambda schedule: schedule)
    monkeypatch.setattr(engine_module.P2P, "open", open_links)
    context: Any = SimpleNamespace(
        sequence_ranks=1, cut_sequence=True, plan=SimpleNamespace(pipeline=torch.float32)
    )
    schedule = SimpleNamespace(rank_of_stage=(0,))
    stub: Any = SimpleNamespace(cp=Axis("cp"), pp=Axis("pp"), device="cpu", schedule=schedule)
    schedules: Any = [2, 7, 3]
    Engine._connect(stub, (8, 1, 4), context, schedules)
    assert opened == [7]


@pytest.mark.parametrize("traces", [True, False])
def test_skipped_steps_are_traced_if_that_is_asked_for(
    traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(EngineOptions):
        """Those of a run, and whether steps are traced."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options, trace=traces)

    monkeypatch.setattr("tests.layouts.EngineOptions", Asked)
    assert make_engine(None, Run(MODELS["gpt2"])).trace == traces


@pytest.mark.parametrize("traces", [True, False])
def test_a_rank_is_in_a_replay_only_while_a_step_is_replayed(
    traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(MODELS["gpt2"], compute="fp32", steps=1)
    engine = make_engine(None, run)
    engine.trace = traces
    position = engine.passes.position
    engine.optimizer.observers += [StepPosition(position)]
    position.enter(Phase.STEP, 1)
    entered: list[Phase] = []
    enter = position.enter

    def noted(phase: Phase, step: int | None = None) -> None:
        entered.append(phase)
        enter(phase, step)

    monkeypatch.setattr(position, "enter", noted)
    poison_backward(engine.stages[0], "0", 1)
    report = engine.step(share_of(None, batches(run)[0]), 1e-2, 0)
    assert report.overflowed
    assert entered == ([Phase.REPLAY, Phase.STEP] if traces else [])
