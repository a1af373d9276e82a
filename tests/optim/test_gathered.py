"""The laws of a state in logical tensors: whole on every rank, of any layout, into any layout, or
not at all."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.errors import Problem, UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tests.layouts import Fragment, assemble
from tests.logical import SHAPES, Case, give, held, make_optimizer, results, train
from tests.ranks import run_ranks
from tests.refusals import raises

CASES = {
    "fp32": Case("fp32"),
    "split": Case("bf16", {"masters": "split"}),
    "all bf16": Case("bf16", {"masters": "none", "rounding": "stochastic", "moments": "bf16"}),
    "muon": Case("bf16", {"masters": "split"}, rule=("muon", {})),
    "nadam": Case("bf16", {"keep_fp32": ("norm.*",)}, rule=("NAdam", {})),
}
CHAIN: list[dict[str, int]] = [{}, {"pp": 2, "tp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2}]
State = dict[str, Any]


def go_on(
    mesh: DeviceMesh | None, states: list[State], step: int
) -> list[tuple[State, dict[str, list[Fragment]]]]:
    """One step more for each case; the state then, and what this rank holds."""
    found = []
    for case, state in zip(CASES.values(), states, strict=True):
        optimizer = make_optimizer(mesh, case)
        for buffer in optimizer.all_buffers():
            for values in (buffer.weights, *buffer.saved().values()):
                values.mul_(3)
        optimizer.load_state_dict(state)
        give(optimizer, step)
        optimizer.step(case.lr)
        found.append((optimizer.state_dict(), held(optimizer)))
    return found


def require_equal(state: State, other: State) -> None:
    assert {key: value for key, value in state.items() if key != "tensors"} == {
        key: value for key, value in other.items() if key != "tensors"
    }
    assert state["tensors"].keys() == other["tensors"].keys()
    assert all(
        torch.equal(values, other["tensors"][key]) for key, values in state["tensors"].items()
    )
    assert all(
        values.dtype == other["tensors"][key].dtype for key, values in state["tensors"].items()
    )


@pytest.mark.slow
def test_a_state_goes_from_any_layout_into_any_other() -> None:
    """A run that changes its layout before every step ends with what one process holds: bit for
    bit."""
    states = [train(None, replace(case, steps=1))[0].state_dict() for case in CASES.values()]
    held_by_layers: list[dict[str, Tensor]] = []
    for number, axes in enumerate(CHAIN):
        ranks = run_ranks(go_on, axes, states=states, step=number + 1)
        for answers in zip(*ranks, strict=True):
            for state, _ in answers:
                require_equal(state, answers[0][0])
        states = [state for state, _ in ranks[0]]
        held_by_layers = [
            assemble([rank[n][1]["held"] for rank in ranks]) for n in range(len(CASES))
        ]
    expected = results([replace(case, steps=len(CHAIN) + 1) for case in CASES.values()], {})
    for name, state, layers, result in zip(CASES, states, held_by_layers, expected, strict=True):
        tensors: dict[str, Tensor] = state["tensors"]
        assert tensors.keys() == {
            f"{kind}/{n}" for kind, some in result.kinds.items() if kind != "held" for n in some
        }
        for key, values in tensors.items():
            kind, logical = key.split("/")
            assert values.device.type == "cpu" and values.shape == SHAPES[logical]
            assert torch.equal(values, result.kinds[kind][logical]), f"{name}: {key}"
        assert all(torch.equal(layers[n], values) for n, values in result.kinds["held"].items()), (
            name
        )


def lose(key: str) -> Callable[[State], object]:
    return lambda state: state["tensors"].pop(key)


def reshape(state: State) -> None:
    state["tensors"]["exp_avg/head.bias"] = torch.zeros(6)


def add(state: State) -> None:
    state["tensors"]["weight/other"] = torch.zeros(2)


def add_many(state: State) -> None:
    for n in range(9):
        state["tensors"][f"weight/other{n}"] = torch.zeros(2)


def of_sgd(state: State) -> None:
    """Two averages that are not there, and one that nobody knows."""
    for name in SHAPES:
        state["tensors"][f"momentum_buffer/{name}"] = state["tensors"].pop(f"exp_avg/{name}")
        del state["tensors"][f"exp_avg_sq/{name}"]


def no_numbers(state: State) -> None:
    del state["steps"]


def no_tensors(state: State) -> None:
    del state["tensors"]


DAMAGES: list[tuple[Callable[[State], object], str, str]] = [
    (
        lose("weight/query.weight"),
        Problem.of(
            "optimizer.state_shape",
            key="weight/query.weight",
            shape=[8, 6],
            saved_shape="not",
        ),
        "first",
    ),
    (
        reshape,
        Problem.of("optimizer.state_shape", key="exp_avg/head.bias", shape=[5], saved_shape=[6]),
        "last",
    ),
    (add, Problem.of("optimizer.state_not_in_model", key="weight/other"), "both"),
    (add_many, Problem.of("optimizer.state_not_in_model", key="weight/other0"), "both"),
    (of_sgd, "momentum_buffer/", ""),
]


def snapshot(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    optimizer.wait()
    tensors = [optimizer.applied_steps, *optimizer.scaler.tensors()]
    tensors += [
        t for buffer in optimizer.all_buffers() for t in (buffer.weights, *buffer.saved().values())
    ]
    return [tensor.clone() for tensor in tensors]


def refuse(mesh: DeviceMesh) -> list[list[str]]:
    case = Case("bf16")
    optimizer, _ = train(mesh, replace(case, steps=2))
    said = []
    for damage, _, _ in DAMAGES:
        state = optimizer.state_dict()
        before = snapshot(optimizer)
        damage(state)
        with pytest.raises(UserError) as raised:
            optimizer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(snapshot(optimizer), before, strict=True)), (
            "something was loaded"
        )
        said.append(str(raised.value).splitlines())
    return said


def test_a_state_of_another_model_is_refused_on_every_rank_and_nothing_changes() -> None:
    first, last = run_ranks(refuse, {"pp": 2})
    for n, (_, message, who) in enumerate(DAMAGES):
        for said, stage in ((first[n], "first"), (last[n], "last")):
            assert said[0] == Problem.of("optimizer.state_of_other_model")
            assert len(said) <= 6
            if who in (stage, "both"):
                assert message in said
            elif who:
                assert said[1:] == [Problem.of("optimizer.state_elsewhere")]


@pytest.mark.parametrize("damage", [no_numbers, no_tensors])
def test_what_is_no_state_is_refused_and_nothing_changes(damage: Callable[[State], object]) -> None:
    optimizer, _ = train(None, Case("bf16", steps=2))
    state = optimizer.state_dict()
    before = snapshot(optimizer)
    for values in state["tensors"].values():
        values.add_(1)
    damage(state)
    with raises("optimizer.state_incomplete", missing_keys=re.compile("steps|tensors")):
        optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(optimizer), before, strict=True)), (
        "something was loaded"
    )


def one_rank_differs(mesh: DeviceMesh) -> str:
    optimizer, _ = train(mesh, Case("fp32", steps=1))
    state = optimizer.state_dict()
    if optimizer.world.rank == 1:
        del state["tensors"]["weight/scale"]
    with pytest.raises(UserError) as raised:
        optimizer.load_state_dict(state)
    return str(raised.value)


def test_a_state_that_only_one_rank_cannot_take_is_taken_by_none() -> None:
    for said in run_ranks(one_rank_differs, {"dp": 2}):
        assert said.startswith(f"{Problem.of('optimizer.state_of_other_model')}\n")


def test_moments_can_be_narrowed_and_widened_on_the_way() -> None:
    """A BF16 average comes back as it is; an FP32 one is rounded to the nearest."""
    wide = Case("bf16", steps=3)
    narrow = Case("bf16", {"moments": "bf16"}, steps=3)
    for source, target in ((wide, narrow), (narrow, wide)):
        state = train(None, source)[0].state_dict()
        optimizer = make_optimizer(None, target)
        optimizer.load_state_dict(state)
        for key, values in optimizer.state_dict()["tensors"].items():
            assert torch.equal(values, state["tensors"][key].to(values.dtype)), key
