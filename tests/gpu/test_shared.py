"""Ranks that share one GPU train in float64 what one process trains on a CPU, in every layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.gpu.shared_gpu import share_device
from tests.layouts import Fragment, Run, Trained, assemble, train_rank
from tests.ranks import run_ranks

MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 256,
    "vocab": 500,
}
EXPERTS = {**MODEL, "family": "mixtral", "experts": 8, "vocab": 256}
TIED = {**MODEL, "tied": True}


def run(model: dict[str, Any] = MODEL, **others: Any) -> Run:
    settings = {"clip": 0.5, "steps": 2, "micro_batch": 1, "length": 64, "masked": False, **others}
    return Run(model, "fp64", **settings)


OVERLAP = {"overlap": True, "bucket": 50_000}
LAYOUTS: dict[str, tuple[dict[str, int], Run]] = {
    "tensor 2": ({"tp": 2}, run()),
    "tensor 2, sequence": ({"tp": 2}, run(sequence=True)),
    "tensor 4, sequence": ({"tp": 4}, run({**MODEL, "kv_heads": 4}, sequence=True)),
    "pipeline 2": ({"pp": 2}, run()),
    "pipeline 2, interleaved": ({"pp": 2}, run(kind="interleaved", chunks=2)),
    "pipeline 2, zb-h1": ({"pp": 2}, run(kind="zb-h1")),
    "pipeline 2, zb-v": ({"pp": 2}, run(kind="zb-v")),
    "pipeline 4, tied": ({"pp": 4}, run(TIED)),
    "data 2, overlap": ({"dp": 2}, run(options=OVERLAP)),
    "data 4, ZeRO": ({"dp": 4}, run(zero_size=4)),
    "context 2, ring": ({"cp": 2}, run()),
    "context 2, gather": ({"cp": 2}, run(ring=False)),
    "experts 2": ({"dp": 2}, run(EXPERTS, expert=2)),
    "tensor 2 x pipeline 2, tied": ({"tp": 2, "pp": 2}, run(TIED, sequence=True)),
    "tensor 2 x pipeline 2 x data 2": ({"tp": 2, "pp": 2, "dp": 2}, run(sequence=True)),
}
# on a CPU these try the test itself; `make test TEST_ARGS="-m slow"` tries the others
FAST_ON_CPU = ("tensor 2, sequence", "data 2, overlap")


def moved(part: Fragment) -> Fragment:
    return replace(part, values=part.values.cpu())


def train_shared(mesh: DeviceMesh, device: str, one: Run) -> Trained:
    trained = train_rank(share_device(mesh, device), [one])[0]
    return replace(
        trained,
        grads=[[moved(part) for part in parts] for parts in trained.grads],
        before=[moved(part) for part in trained.before],
        after=[moved(part) for part in trained.after],
    )


def train_alone(mesh: DeviceMesh, one: Run) -> Trained:
    plain = replace(
        one, sequence=False, kind="1f1b", chunks=0, zero_size=0, expert=1, options={}, ring=True
    )
    return train_rank(mesh, [plain])[0]


def cases() -> list[Any]:
    on_cpu = []
    for name in LAYOUTS:
        marks = [] if name in FAST_ON_CPU else [pytest.mark.slow]
        on_cpu.append(pytest.param("cpu", name, marks=marks))
    on_gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in LAYOUTS]
    return [*on_cpu, *on_gpu]


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize(("device", "name"), cases())
def test_ranks_on_one_device_train_what_one_process_trains(device: str, name: str) -> None:
    axes, one = LAYOUTS[name]
    (alone,) = run_ranks(train_alone, {}, one=one)
    ranks = run_ranks(train_shared, axes, device=device, one=one)
    for trained in ranks:
        for ours, expected in zip(trained.reports, alone.reports, strict=True):
            assert ours.loss == pytest.approx(expected.loss, rel=1e-10)
            assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-9)
    weights = assemble([trained.after for trained in ranks])
    expected_weights = assemble([alone.after])
    assert weights.keys() == expected_weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[key], rtol=1e-8, atol=1e-11)
