"""Slurm's template under a real Slurm of two nodes, each a played host of this machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaprec.checkpoint.atomic import latest
from tests.project.slurm import Cluster, cluster, wait_for
from tests.project.test_examples import EXAMPLES, SMALL, assert_trained
from tests.project.test_readme import ROOT, blocks
from tests.runs import checkpoint
from tools.journal.records import read_metrics

ONE_EACH = ["--cpus-per-task=1", "--gpus-per-node=1"]
ENDLESS = ["train.steps=1000000", "checkpoint.every=5", "parallel.timeout=10"]


@pytest.fixture
def slurm(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """A cluster whose hosts share the folder of a run file and of an environment that has megaprec.

    Its controller is on the second host, unless the test says the first."""
    home = tmp_path / "home"
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").write_text(f"export PYTHONPATH={ROOT}\n")
    (home / "run.toml").write_text(blocks("toml"))
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", home, getattr(request, "param", 1)) as made:
        yield made


def submit(slurm: Cluster, *more: str) -> str:
    """Submit the template, one rank a node; return the number of the job."""
    words = ["sbatch", "--parsable", *ONE_EACH, str(EXAMPLES / "slurm.sbatch"), "run.toml"]
    return slurm.ask(*words, *SMALL, *more).strip()


def state(slurm: Cluster, job: str) -> dict[str, str]:
    """What Slurm says of a job, {} if it has forgotten it."""
    told = slurm.ask("scontrol", "--oneliner", "show", "job", job)
    return dict(word.split("=", 1) for word in told.split() if "=" in word)


def queued_again(slurm: Cluster, job: str) -> bool:
    told = state(slurm, job)
    return told["JobState"] == "PENDING" and told["Restarts"] == "1"


def log(slurm: Cluster, job: str) -> str:
    return (slurm.home / f"megaprec-{job}.log").read_text()


@pytest.mark.slow
def test_a_job_trains_on_two_nodes(slurm: Cluster) -> None:
    job = submit(slurm)
    wait_for(
        lambda: state(slurm, job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), slurm
    )
    assert state(slurm, job)["JobState"] == "COMPLETED", log(slurm, job)
    assert_trained(slurm.home / "runs" / "mine", log(slurm, job))


@pytest.mark.slow
def test_tasks_of_srun_train_one_model(slurm: Cluster) -> None:
    said = slurm.ask(
        "srun", "--nodes=2", "--ntasks-per-node=1", "megaprec", "train", "run.toml", *SMALL
    )
    assert_trained(slurm.home / "runs" / "mine", said)


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_its_last_step_and_is_queued_again(slurm: Cluster) -> None:
    """The signal is the one that the template's --signal asks for."""
    job = submit(slurm, *ENDLESS, "checkpoint.every=1000000")
    folder = slurm.home / "runs" / "mine"
    wait_for(lambda: len(read_metrics(folder)) > 2, slurm)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: queued_again(slurm, job), slurm)
    last = len(read_metrics(folder))
    assert f"stopped by SIGTERM after step {last}, state saved" in log(slurm, job)
    assert latest(folder / "checkpoints") == checkpoint(folder, last)


@pytest.mark.campaign  # a minute of waiting for what is lost
def test_a_job_that_has_lost_its_first_node_is_queued_again_on_both(slurm: Cluster) -> None:
    job = submit(slurm, *ENDLESS)
    wait_for(lambda: len(read_metrics(slurm.home / "runs" / "mine")) > 6, slurm)
    slurm.lose_node()
    wait_for(lambda: queued_again(slurm, job), slurm)
    wait_for(lambda: "node=2" in state(slurm, job)["TRES"], slurm)


@pytest.mark.campaign
@pytest.mark.parametrize("slurm", [0], indirect=True, ids=[""])
def test_a_job_that_has_lost_another_node_goes_on_without_it(slurm: Cluster) -> None:
    job = submit(slurm, *ENDLESS)
    folder = slurm.home / "runs" / "mine"
    wait_for(lambda: len(read_metrics(folder)) > 6, slurm)
    slurm.lose_node()
    wait_for(
        lambda: (
            "2 ranks -> tensor 1 x pipeline 1 x data 1 = 1 rank: training goes on"
            in log(slurm, job)
        ),
        slurm,
    )
    before = len(read_metrics(folder))
    wait_for(lambda: len(read_metrics(folder)) > before + 3, slurm)
