"""The world, the mesh, the context and the modules that a loop of one's own gives: used, or refused
by name."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec import Axis, UserError, plan
from parallel import Context, Recompute, make_mesh, parallelize, vocab_parallel_loss, world
from tests.ranks import run_ranks
from tests.refusals import raises, said_of, sentence, shows


def joined() -> None:
    with world():
        pass


def of_ranks(mesh: DeviceMesh) -> dict[str, str]:
    sizes: list[dict[str, Any]] = [
        {"dp": 2.0},
        {"dp": "2"},
        {"tp": -2, "dp": -1},
        {"dp": 0},
        {"tp": True, "dp": 2},
    ]
    said = {str(size): said_of(lambda size=size: make_mesh(**size)) for size in sizes}
    devices: list[Any] = ["gpu", "cuda:0", "cpu:0", torch.device("cpu"), None]
    said |= {
        str(device): said_of(lambda device=device: make_mesh(dp=2, device=device))
        for device in devices
    }
    return said | {
        "again": said_of(joined),
        "three": said_of(lambda: make_mesh(dp=3)),
        "": said_of(lambda: make_mesh(dp=2)),
    }


def test_degrees_and_devices_that_are_none_are_refused_on_every_rank() -> None:
    first, second = run_ranks(of_ranks, {"dp": 2})
    assert first == second
    assert not first.pop("")
    assert shows(first.pop("again"), "parallel.joined_already", backend="gloo")
    assert shows(first.pop("three"), "parallel.ranks_do_not_fit", world=2, dp=3, needed=3)
    for given, said in first.items():
        code = "parallel.degree" if given.startswith("{") else "parallel.device_type"
        assert shows(said, code), given


def test_an_error_after_a_world_that_was_left_is_told_as_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):
        joined()
        assert sys.excepthook is sys.__excepthook__


def test_a_world_is_needed_and_joined_for_a_device_that_is_known() -> None:
    assert not dist.is_initialized()
    with raises("parallel.no_world"):
        make_mesh()
    for device in ("gpu", "cuda:0", torch.device("cuda")):
        wrong: Any = device
        with raises("parallel.device_type"), world(wrong):
            pass
    with raises("parallel.minutes", minutes=0), world(minutes=0):
        pass


@pytest.mark.parametrize(("local", "devices"), [("0", 0), ("3", 2)])
def test_a_world_of_gpus_needs_one_for_each_local_rank(
    local: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    with (
        pytest.raises(UserError, match=sentence("parallel.no_device_for_rank", count=devices)),
        world("cuda"),
    ):
        pass
    described = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "x",
    }
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    with raises("parallel.launcher_number", name="LOCAL_RANK"), world("cuda"):
        pass


def test_ranks_that_cannot_know_their_own_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with (
        raises("parallel.local_rank_missing", count=2),
        world("cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value", "code", "field"),
    [
        ("plan", "bf16", "precision.not_a_plan", "plan"),
        ("plan", None, "precision.not_a_plan", "plan"),
        ("tp", "tp", "parallel.not_an_axis", "axis"),
        ("tp", 2, "parallel.not_an_axis", "axis"),
        ("sequence", "no", "parallel.not_a_truth_value", "value"),
        ("async_tensor", "no", "parallel.not_a_truth_value", "value"),
        ("seed", "x", "parallel.seed", "seed"),
        ("blank", 1, "parallel.not_a_truth_value", "value"),
        ("recompute", True, "parallel.recompute", "recompute"),
        ("recompute", Recompute("all"), "parallel.recompute", "recompute"),  # type: ignore[arg-type]
        ("recompute", Recompute(fraction=2.0), "parallel.recompute", "recompute"),
        ("recompute", Recompute(layers=-1), "parallel.recompute", "recompute"),
    ],
)
def test_a_setting_of_a_context_of_another_kind_is_refused_by_name(
    name: str, value: Any, code: str, field: str
) -> None:
    named = {} if field == name else {"name": name}
    with raises(code, **named, **{field: value}):
        Context(**{"plan": plan("fp32"), name: value})


def test_a_context_fuses_no_transfers_where_the_sequence_is_whole() -> None:
    with raises("parallel.async_tensor_sequence"):
        Context(plan("bf16"), async_tensor=True)


def test_what_parallelize_cannot_take_is_refused_by_name() -> None:
    context = Context(plan("fp32"))
    model = nn.Sequential(nn.Linear(2, 2))
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("not_a_module", ([model], context, {})),
        ("not_a_context", (model, plan("fp32"), {})),
        ("not_styles", (model, context, None)),
        ("not_styles", (model, context, [("0", "column")])),
        ("prefix_not_text", (model, context, {"0": "column"}, None)),
    ]
    for code, arguments in cases:
        with raises(f"parallel.{code}"):
            parallelize(*arguments)
    for empty in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with raises("parallel.no_values_yet", name="0.weight"):
            parallelize(nn.Sequential(empty), context, {"0": "column"})
    head: Any = nn.Linear(2, 2)
    with raises("parallel.head_not_parallel", kind="Linear"):
        vocab_parallel_loss(head)


def test_an_axis_of_another_name_is_refused_and_not_one_of_a_single_rank() -> None:
    """All ranks would be number 0 of it, and read the same samples."""
    for name in ("data", "x"):
        with raises("comm.axis_unknown", axes="pp, dp, cp, tp"):
            Axis.of(None, name)
    assert Axis.of(None, "dp").size == 1
