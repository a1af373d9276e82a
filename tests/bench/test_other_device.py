"""Measurements of training steps on a device that takes no tensors of the CPU in its messages
(`tests.pretend`)."""

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import pretend
from tests.bench.test_bench import STEPS, TINY
from tests.ranks import run_ranks
from tools.bench import __main__ as bench
from tools.bench.train import Products, measure, run_of


def measured(mesh: DeviceMesh, key: str) -> str:
    """What the measurement prints of steps on the device."""
    pretend.install()
    args = bench.parser().parse_args([*TINY, key, *STEPS, "--limit"])
    with redirect_stdout(StringIO()) as said, sdpa_kernel(SDPBackend.MATH):
        measure(args, run_of(args), pretend.join(mesh))
    return said.getvalue()


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_steps_of_several_ranks_and_their_limit_are_measured_on_a_device(axis: str) -> None:
    names = {"tp": "tensor", "dp": "data", "pp": "pipeline"}
    first, second = run_ranks(measured, {axis: 2}, key=f"parallel.{names[axis]}=2")
    assert not second
    record: dict[str, Any] = json.loads(first.splitlines()[-1])
    assert len(record["peak_rss_mb"]) == 2
    assert record["tokens_per_s"] > 0 and record["limit_tokens_per_s"] > 0


def test_the_time_of_a_product_ends_when_the_device_has_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's host goes on as soon as it has queued a product."""
    events: list[str] = []
    monkeypatch.setattr("tools.bench.train.synchronize", lambda device: events.append("wait"))

    def clock() -> float:
        events.append("clock")
        return 0.0

    products = Products(torch.device("cuda"))
    products._time_call(lambda: events.append("product"), clock)
    looks = [number for number, event in enumerate(events) if event == "clock"]
    assert [events[look - 1] for look in looks] == ["wait", "wait"]


def test_a_measurement_on_a_gpu_changes_nothing_but_the_work_of_an_ordinary_run() -> None:
    """One thread, which suits steps on a CPU, would draw the weights for half a minute."""
    args = bench.parser().parse_args(["train", "--device=cuda"])
    config = run_of(args)
    plain = run_of(bench.parser().parse_args(["train"]))
    assert config.train.threads == 0 and plain.train.threads == 1
    assert config.train.compile == "auto"
