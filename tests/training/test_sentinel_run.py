"""A run that the sentinel stops: exit code 3, an event with the host, nothing lost; and runs that
it leaves alone."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import latest
from models.feed_forward.mlp import MLP
from tests.flips import flip_, flipped
from tests.project.test_glossary import explained
from tests.ranks import run_ranks
from tests.refusals import shows
from tests.runs import steps, tensors, train, train_on, write_run
from tools.config.run_file import load_run
from tools.journal.records import read_events, read_metrics
from tools.training.corpus import open_corpus
from tools.training.ends import FaultyHardware
from tools.training.trainer import Trainer

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("sentinel"))


def folder(tmp_path: Path) -> str:
    return f"train.folder={tmp_path / 'run'}"


def without_checks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "sentinel"} for line in lines]


@pytest.fixture
def flip_in_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Flips a bit of what a feed-forward returns, in its n-th call that computes numbers.

    The line about memory lets a model of no numbers run, unless another test has asked for the same
    one before.
    """

    def plant(n: int) -> None:
        forward = MLP.forward
        calls = iter(range(1, 1_000_000))

        def faulty(self: MLP, x: torch.Tensor) -> torch.Tensor:
            made = forward(self, x)
            # tensors without storage have classes of their own
            hit = type(made) is torch.Tensor and next(calls) == n
            return made + (flipped(made, 20) - made.detach()) if hit else made

        monkeypatch.setattr(MLP, "forward", faulty)

    return plant


@pytest.mark.slow
def test_a_wrong_activation_ends_the_run_with_its_state_saved_and_the_same_command_goes_on(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flip_in_call: Callable[[int], None],
) -> None:
    plain = train_on(file, f"train.folder={tmp_path / 'plain'}")
    # 4 micro-batches of 2 layers a step; before steps 2 and 4 the first one once more: the next
    # call is step 4's own
    flip_in_call(8 + 10 + 8 + 2 + 1)
    assert train(file, "train.sentinel=2", folder(tmp_path)) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("stopped in step 4, which was taken back: rank 0 on host ")
    assert (
        "computed the output of layers.0.mlp wrongly in the forward pass, and right when "
        "computed again"
    ) in said
    assert said.endswith(
        "newest checkpoint: step 3; the last clean check was of step 2; start again without "
        f"host {HOST}"
    )
    (event,) = read_events(tmp_path / "run", "silent_fault")
    assert (event["step"], event["checked_step"], event["saved"], event["last_clean"]) == (
        3,
        4,
        3,
        2,
    )
    assert (event["hosts"], event["ranks"], event["transient"]) == ([HOST], [0], True)
    assert sorted(event) == sorted(explained("silent_fault"))  # in the glossary
    assert train(file, "train.sentinel=2", folder(tmp_path)) == 0
    assert without_checks(steps(tmp_path / "run")) == steps(plain)
    # the record of a bad host outlives a resume
    assert read_events(tmp_path / "run", "silent_fault") == [event]
    ours, theirs = (
        tensors(newest)
        for at in (tmp_path / "run", plain)
        if (newest := latest(at / "checkpoints"))
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def corrupted(
    mesh: DeviceMesh, file: Path, overrides: list[str], rank: int, step: int
) -> tuple[str, tuple[str, ...]]:
    """The body of ranks: trains with a bit of a weight flipped on a rank before a step; returns how
    the run ended."""
    config = load_run(file, overrides)
    trainer = Trainer(config, open_corpus(config), mesh)
    taken = iter(range(1, 100))
    take = trainer.step

    def faulty() -> Any:
        if next(taken) == step and trainer.rank == rank:
            flip_(trainer.engine.optimizer.all_buffers()[0].parameters[0].data, 5)
        return take()

    trainer.step = faulty
    with pytest.raises(FaultyHardware) as ended:
        trainer.run()
    return str(ended.value), ended.value.hosts


@pytest.mark.slow
def test_weights_that_differ_are_never_saved_and_three_replicas_name_the_rank(
    file: Path, tmp_path: Path
) -> None:
    keys = [
        "parallel.data=3",
        "train.global_batch=6",
        "train.micro_batch=1",
        "train.sentinel=2",
        folder(tmp_path),
    ]
    ends = run_ranks(corrupted, {"dp": 3}, file=file, overrides=keys, rank=2, step=4)
    assert ends == [ends[0]] * 3
    said, hosts = ends[0]
    assert said.startswith(
        f"stopped in step 4, which was taken back: rank 2 on host {HOST} holds wrong bits of "
        "weight "
    )
    assert "newest checkpoint: step 3;" in said
    assert hosts == (HOST,)
    (event,) = read_events(tmp_path / "run", "silent_fault")
    assert (event["kind"], event["ranks"], event["certain"], event["sound"]) == (
        "weights",
        [2],
        True,
        False,
    )
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name.endswith("3")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ({"data": 2}, ["parallel.overlap=true", "train.global_batch=4"]),
        ({"pipeline": 2}, []),
    ],
)
def test_a_checked_run_is_bit_for_bit_the_run_without_checks(
    layout: dict[str, int], keys: list[str], file: Path, tmp_path: Path
) -> None:
    runs = [
        train_on(file, *keys, f"train.sentinel={n}", f"train.folder={tmp_path / str(n)}", **layout)
        for n in (0, 2)
    ]
    plain, checked = (steps(run) for run in runs)
    assert without_checks(checked) == plain
    assert [line.get("sentinel") for line in read_metrics(runs[1])] == [None, "clean"] * 3
    assert not read_events(runs[1], "silent_fault")
    states = [tensors(newest) for run in runs if (newest := latest(run / "checkpoints"))]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_scales_that_change_with_each_micro_batch_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train(
            file, "train.sentinel=2", "fp8.kind=delayed", "fp8.history=te", "precision.compute=bf16"
        )
        == 2
    )
    assert shows(capsys.readouterr().err, "config.history_sentinel", sentinel=2)
