"""A plan counts the bytes of the device and of the host apart, and times their copies."""

import json
from pathlib import Path
from typing import Any

import pytest

from megaprec.errors import UserError
from tests.refusals import sentence
from tools.analysis.planning.device import target_of
from tools.analysis.planning.reached import HOST
from tools.cli import main
from tools.commands.plan import NOTHING_FITS
from tools.config.run_file import RunConfig, load_run

KEYS = (
    'model.preset="llama-3-8b"',
    'precision.compute="bf16"',
    "data.vocab_size=128256",
    "train.seq_length=4096",
    "train.micro_batch=1",
    "train.global_batch=32",
    "train.steps=10",
    "parallel.data=8",
    'parallel.recompute="full"',
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("\n".join(f"{key}" for key in KEYS))
    return path


def planned(capsys: pytest.CaptureFixture[str], file: Path, *keys: str) -> dict[str, Any]:
    assert main(["plan", str(file), *keys, "--gpu", "H100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


STATE = ("masters", "moments", "ema")


def test_a_run_with_split_masters_has_a_plan(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rank,) = planned(capsys, file, "precision.masters=split")["ranks"]
    (whole,) = planned(capsys, file)["ranks"]
    assert 2 * rank["masters"] == whole["masters"]
    assert rank["activations"] == whole["activations"]


@pytest.mark.parametrize("keys", [(), ("optimizer.ema=0.9", "precision.masters=split")])
def test_the_device_has_what_the_host_has_not(
    keys: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (without,) = planned(capsys, file, *keys)["ranks"]
    (with_host,) = planned(capsys, file, *keys, "optimizer.offload=host")["ranks"]
    assert with_host["host"] == sum(without[kind] for kind in STATE)
    assert all(with_host[kind] == 0 for kind in STATE) and without["host"] == 0
    moved = without["total"] - with_host["total"]
    # temporary numbers of an update are those of shorter tiles too
    assert moved >= with_host["host"] - with_host["staging"]
    assert 0 < with_host["staging"] < 0.02 * with_host["host"]


def test_the_copies_of_an_update_are_timed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, file, "optimizer.offload=host")
    (rank,) = plan["ranks"]
    seconds = rank["host"] / HOST["Hopper"] / 1e9
    assert plan["prediction"]["update"] == pytest.approx(seconds, rel=0.01)
    followed = planned(capsys, file, "optimizer.offload=host", "optimizer.ema=0.9")
    assert followed["prediction"]["update"] == pytest.approx(seconds * 20 / 12, rel=0.01)
    without = planned(capsys, file)
    assert without["prediction"]["update"] < seconds / 2
    main(["plan", str(file), "optimizer.offload=host", "--gpu", "H100"])
    said = " ".join(capsys.readouterr().out.split())
    assert "of host memory a rank" in said
    assert "masters and moments come from host memory at 50 GB/s" in said


def test_a_run_that_does_not_fit_is_told_of_host_memory(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where recomputation and ZeRO have nothing left to give."""
    alone = ["parallel.data=1", "precision.gradients=bf16", "train.global_batch=4"]
    assert main(["plan", str(file), *alone, "--gpu", "H100"]) == NOTHING_FITS
    assert "it fits with optimizer.offload=host" in capsys.readouterr().out


def test_a_plan_for_a_cpu_refuses_it() -> None:
    config: RunConfig = load_run(None, [*KEYS, "optimizer.offload=host", "train.device=cpu"])
    with pytest.raises(UserError, match=sentence("training.offload_on_cpu")):
        target_of(config)
    assert target_of(config, "H100").device == "cuda"
