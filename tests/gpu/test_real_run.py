"""A run of the command on a GPU is the run of a CPU, goes on after a stop as if there had been
none, and takes the memory that its plan says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import steps, train, write_run
from tools.bench import __main__ as bench

DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# several buckets, and a model whose products are no toys
KEYS = [
    "model.hidden=128",
    "model.ffn=256",
    "model.dropout=0.0",
    "precision.compute=bf16",
    "parallel.bucket=20000",
    "train.steps=10",
]


def run(folder: Path, device: str, name: str, *keys: str) -> list[dict[str, Any]]:
    file = folder / "my.toml"
    if not file.exists():
        write_run(folder)
    where = [f"train.folder={folder / name}", f"train.device={device}"]
    assert train(file, *KEYS, *where, *keys) == 0
    return steps(folder / name)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_in_bf16_learns_what_it_learns_on_a_cpu(device: str, tmp_path: Path) -> None:
    ours = run(tmp_path, device, "here")
    expected = run(tmp_path, "cpu", "cpu")
    for one, other in zip(ours, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_run_goes_on_after_a_stop_bit_for_bit(device: str, tmp_path: Path) -> None:
    key = "train.deterministic=true"
    whole = run(tmp_path, device, "whole", key)
    run(tmp_path, device, "stopped", key, "train.steps=4")
    resumed = run(tmp_path, device, "stopped", key)
    assert [step["loss"] for step in resumed] == [step["loss"] for step in whole]
    assert [step["grad_norm"] for step in resumed] == [step["grad_norm"] for step in whole]


@pytest.mark.gpu
@pytest.mark.parametrize("compile_mode", ["off", "block"])
def test_the_memory_of_a_step_is_what_the_plan_says(
    compile_mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        "model.layers=4",
        "model.hidden=2048",
        "model.heads=16",
        "model.kv_heads=4",
        "model.ffn=7168",
        "model.vocab=32768",
        "train.seq_length=4096",
        "train.micro_batch=1",
        "train.global_batch=2",
        f"train.compile={compile_mode}",
    ]
    assert bench.main(["train", "--device", "cuda", "--steps", "2", *keys]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    # compiled regions keep what modules keep
    assert record["peak_gib"] == pytest.approx(record["planned_gib"], rel=0.03)
