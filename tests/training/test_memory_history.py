"""A rank that runs out of a GPU's memory says what held it. torch's snapshot is pretended here."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.plan import plan
from tests.runs import train, write_run
from tools.training import memory_history
from tools.training.memory_history import (
    NO_PLACE,
    kinds_of,
    memory_table,
    ran_out_of_memory,
)

GIB = 1 << 30
CPU = torch.device("cpu")


def block(gib: float, *places: str, state: str = "active_allocated") -> dict[str, Any]:
    frames = []
    for place in places:
        filename, line, name = place.split(":")
        frames.append({"filename": filename, "line": int(line), "name": name})
    return {"size": int(gib * GIB), "state": state, "frames": frames}


def segment(total: float, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    return {"device": device, "total_size": int(total * GIB), "blocks": blocks}


MLP = ("/x/torch/nn/linear.py:1:linear", "/home/me/models/feed_forward/mlp.py:7:forward")
HEAD = ("/home/me/models/decoder/stages.py:9:_logits", "/home/me/a/b/c.py:2:run")
SNAPSHOT = {
    "segments": [
        segment(4, [block(1, *MLP), block(0.5, *MLP), block(2.5, state="inactive")]),
        segment(8, [block(6, *HEAD), block(0.25, state="active_awaiting_free")]),
        segment(90, [block(90, *HEAD)], device=1),
    ]
}


def table(
    snapshot: Mapping[str, Any] = SNAPSHOT, kinds: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    return memory_table(snapshot, CPU, kinds).splitlines()


def test_the_memory_of_a_device_is_added_up_by_the_lines_that_allocated_it() -> None:
    in_use, _, _, _, *rows = table()
    assert in_use == "7.75 GiB in use, 4.25 GiB held by torch and free"
    assert [row.split(maxsplit=3) for row in rows] == [
        ["6.00", "GiB", "1", "models/decoder/stages.py:9 _logits < a/b/c.py:2 run"],
        ["1.50", "GiB", "2", "models/feed_forward/mlp.py:7 forward"],
        ["256", "MiB", "1", NO_PLACE],
    ]


def test_a_table_is_bounded_and_its_last_row_has_the_rest() -> None:
    blocks = [block(1 + n, f"/a/b/c.py:{n}:f") for n in range(memory_history.ROWS + 3)]
    rows = table({"segments": [segment(2000, blocks)]})[4:]
    assert len(rows) == memory_history.ROWS + 1
    assert rows[-1].split() == ["6.00", "GiB", "3", "3", "other", "places"]


def test_the_state_of_training_is_named_by_kind() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=0.1)
    kinds = kinds_of(optimizer)
    # two moments of FP32; masters in FP32 are the weights
    assert kinds == {"weights": 256, "gradients": 256, "moments": 512}
    said = table(kinds=kinds)[1]
    assert said.endswith(": weights 256 B, gradients 256 B, moments 512 B")


@pytest.mark.parametrize("is_cause", [True, False])
def test_an_error_that_hides_the_end_of_memory_is_recognized(is_cause: bool) -> None:
    memory = torch.OutOfMemoryError("CUDA out of memory")
    other = RuntimeError("F0.0 failed")
    other.__cause__ = memory if is_cause else KeyError("x")
    assert ran_out_of_memory(other) is is_cause
    assert ran_out_of_memory(memory)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyError("x")])
def test_a_rank_writes_what_held_its_memory_only_if_that_ran_out(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(memory_history, "record_memory_history", switched.append)
    monkeypatch.setattr(memory_history, "memory_snapshot", lambda: SNAPSHOT)
    model = torch.nn.Linear(8, 8, bias=False)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=0.1)
    with (
        pytest.raises(type(error)),
        memory_history.memory_history(3, optimizer, tmp_path),
    ):
        raise error
    assert switched == [True, False]
    file = tmp_path / "memory" / "rank_3.txt"
    assert file.is_file() is isinstance(error, torch.OutOfMemoryError)
    if file.is_file():
        assert file.read_text().startswith("7.75 GiB in use")
        assert f"rank 3 ran out of GPU memory: what held it is in {file}" in " ".join(
            capsys.readouterr().out.split()
        )


def test_on_a_cpu_a_start_says_that_the_key_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path)
    assert train(file, "log.memory_history=true", "train.steps=1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "log.memory_history = true has no effect on a CPU" in said
    assert not (tmp_path / "run" / "memory").exists()


def test_a_folder_that_is_gone_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_history, "record_memory_history", lambda on: None)
    monkeypatch.setattr(memory_history, "memory_snapshot", lambda: SNAPSHOT)
    model = torch.nn.Linear(8, 8, bias=False)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=0.1)
    gone = tmp_path / "gone"
    with (
        pytest.raises(torch.OutOfMemoryError),
        memory_history.memory_history(3, optimizer, gone),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "rank 3 ran out of GPU memory, and could not write what held it" in " ".join(
        capsys.readouterr().out.split()
    )
