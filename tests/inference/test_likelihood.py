"""Likelihoods of given tokens: those of the whole logits, in every layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.stages import Stage
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.relay import Relay
from parallel.pipeline.kinds import schedule
from tests.ranks import run_ranks
from tests.runs import checkpoint, train, write_run
from tools.inference.likelihood import likelihoods
from tools.inference.load import load_model
from tools.inference.windows import Window


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_run(tmp_path_factory.mktemp("runs"))
    assert train(file, "train.steps=3", "lr.peak=3e-2") == 0
    return checkpoint(file.parent / "run", 3)


def samples(stage: Stage) -> list[Window]:
    """Samples of several lengths; the targets of every second are the likeliest tokens."""
    dice = np.random.default_rng(0)
    made = []
    for n, (length, first) in enumerate(((3, 0), (16, 9), (1, 0), (11, 10), (16, 0), (7, 3))):
        ids = dice.integers(330, size=length + 1)
        tokens = ids[:-1]
        targets = ids[1:]
        if n % 2:
            targets = stage(torch.from_numpy(tokens)[:, None])[:, 0].argmax(-1).numpy()
        made.append(Window(tokens, targets, first))
    return made


def on_rank(mesh: DeviceMesh, folder: Path, asked: list[Window]) -> list[tuple[float, bool]]:
    return likelihoods(
        Relay.over(mesh, load_model(folder, Stage, "fp64", mesh=mesh).stage), asked, lambda _: None
    )


def test_likelihoods_are_those_of_the_whole_logits_in_every_layout(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.inference.likelihood.LOGITS", 330 * 30)  # several batches
    stage = load_model(trained, Stage, "fp64").stage
    with torch.no_grad():
        asked = samples(stage)
        expected = []
        for one in asked:
            said = stage(torch.from_numpy(one.tokens)[:, None])[:, 0].log_softmax(-1)
            counted = range(one.first, len(one.tokens))
            chosen = all(int(said[n].argmax()) == one.targets[n] for n in counted)
            expected.append((sum(said[n, one.targets[n]].item() for n in counted), chosen))
    assert {chosen for _, chosen in expected} == {True, False}
    for layout in ({}, {"pp": 2, "tp": 2}, {"dp": 2}):
        for found in run_ranks(on_rank, layout, folder=trained, asked=asked):
            assert [chosen for _, chosen in found] == [chosen for _, chosen in expected]
            assert [log for log, _ in found] == pytest.approx(
                [log for log, _ in expected], rel=1e-12
            )


SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "ffn": 24,
    "vocab": 330,
    "max_positions": 16,
    "init_std": 0.1,
}
EXPERTS = ModelConfig(family="mixtral", experts=4, experts_per_token=2, **SIZES)
SPREAD: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"expert": 2}),
    ({"dp": 4, "tp": 2}, {"expert": 4, "expert_tensor": 1}),
    ({"pp": 2, "dp": 2}, {"expert": 2}),
]


def with_experts_on_rank(
    mesh: DeviceMesh | None, asked: list[Window], numbers: list[int], experts: dict[str, Any]
) -> list[list[tuple[float, bool]]]:
    """The likelihoods of the first samples, of each number of them."""
    pp = 1 if mesh is None else mesh["pp"].size()
    made = schedule("1f1b", pp, 1)
    engine = Engine.build(
        EXPERTS,
        plan("fp64"),
        mesh,
        made,
        EngineOptions(micro_batch=1, seq_length=16, seed=3, **experts),
    )
    world = engine.optimizer.world
    relay = Relay(engine.stages, made.rank_of_stage, engine.pp, engine.dp, world, engine.device)
    return [likelihoods(relay, asked[:number], lambda _: None) for number in numbers]


@pytest.mark.cases(0, slow=1)
@pytest.mark.parametrize(("layout", "experts"), SPREAD)
def test_replicas_that_share_experts_have_the_likelihoods_of_one_process_whatever_the_number_of_batches(
    layout: dict[str, int], experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.inference.likelihood.LOGITS", 330)  # each sample alone
    dice = np.random.default_rng(0)
    ids = (dice.integers(330, size=length + 1) for length in (3, 16, 1, 11, 16, 7))
    asked = [Window(one[:-1], one[1:], 0) for one in ids]
    numbers = [1, 5, 6, 3]
    expected = with_experts_on_rank(None, asked, numbers, {})
    for found in run_ranks(
        with_experts_on_rank, layout, asked=asked, numbers=numbers, experts=experts
    ):
        for ours, right in zip(found, expected, strict=True):
            assert [log for log, _ in ours] == pytest.approx([log for log, _ in right], rel=1e-12)
            assert [chosen for _, chosen in ours] == [chosen for _, chosen in right]
