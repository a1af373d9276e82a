"""Texts are scored and continued on another device as on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaprec.comm.axis import device_of
from megaprec.errors import Problem
from models.decoder.kv_cache import CachedStage
from models.decoder.stages import Stage
from models.engine.relay import Relay
from tests import pretend
from tests.ranks import run_ranks
from tests.runs import checkpoint, train, write_run
from tools.cli import main
from tools.inference.evaluation import score
from tools.inference.generation import Generation
from tools.inference.likelihood import likelihoods
from tools.inference.load import load_model
from tools.inference.sampling import Sampling
from tools.inference.windows import TokenizedDocument, windows

DOCUMENTS = [
    TokenizedDocument(np.random.default_rng(size).integers(330, size=size), size)
    for size in (3, 20, 1, 16)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = write_run(tmp_path_factory.mktemp("runs"))
    assert train(file, "train.steps=3", "lr.peak=3e-2") == 0
    return checkpoint(file.parent / "run", 3)


def said_and_scored(mesh: DeviceMesh, folder: Path) -> tuple[object, ...]:
    device = device_of(mesh)
    model = load_model(folder, Stage, "fp64", mesh=mesh, device=device)
    relay = Relay.over(mesh, model.stage)
    nats = score(relay, DOCUMENTS, 0, 12, 5, lambda _: None).nats
    cut = [*windows(DOCUMENTS[1].ids, 0, 12, 5, DOCUMENTS[1].counted)]
    asked = likelihoods(relay, cut, lambda _: None)
    text = ""
    if mesh.size() == 1:
        whole = load_model(folder, CachedStage, device=device)
        for sampling in (Sampling(temperature=0), Sampling()):
            text += "".join(Generation(whole, "the", 8, sampling))
    return nats, [number for number, _ in asked], text


def require_the_same(mesh: DeviceMesh, folder: Path) -> None:
    pretend.install()
    with sdpa_kernel(SDPBackend.MATH):
        expected = said_and_scored(mesh, folder)
        there = pretend.join(mesh)
        assert device_of(there) != torch.device("cpu")
        found = said_and_scored(there, folder)
    for ours, other in zip(found, expected, strict=True):
        assert ours == (other if isinstance(other, str) else pytest.approx(other, rel=1e-9))


@pytest.mark.cases(2)
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"dp": 2}, {"pp": 2}], ids=str)
def test_texts_are_scored_and_continued_on_a_device_as_on_the_cpu(
    axes: dict[str, int], trained: Path
) -> None:
    run_ranks(require_the_same, axes, folder=trained)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        (["generate", "--prompt", "a"], 1),
        (["evaluate", "--data", "x.txt"], 1),
        (["evaluate", "--data", "x.txt", "--tensor", "2"], 2),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    command: list[str], ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "nowhere", *command[1:], "--device", "cuda"]) == 2
    expected = Problem.of("command.option_device", devices=torch.cuda.device_count(), ranks=ranks)
    assert capsys.readouterr().err.splitlines() == [expected]
