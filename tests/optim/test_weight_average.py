"""The moving average of the weights: the plain formula over each applied step, in any layout."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.reader import Store
from megaprec.checkpoint.save_load import load, load_weights, save
from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.state.weight_average import averaged_tiles, run_length
from megaprec.precision.plan import plan
from tests.logical import (
    INF,
    SHAPES,
    Case,
    Tensors,
    differing,
    give,
    held,
    make_optimizer,
    results,
    train,
)
from tests.optim.test_beside_torch import LR, STEPS, WRAPPINGS, batch, loss_of, make_model, whole
from tests.other_systems import slow
from tests.ranks import run_ranks
from tests.refusals import raises

DECAY = 0.75
EMA = {"ema": DECAY}
EXACT = Case("fp64", steps=5, bad=(2,), options=EMA)
SHARDINGS: list[dict[str, Any]] = [
    {"zero_size": 1},
    {"zero_size": 0},
    {"shard_gradients": True},
    {"overlap": True, "bucket": 64},
]
PLANS: dict[str, Case] = {
    "fp32": Case("fp32", options=EMA),
    "bf16": Case("bf16", options=EMA),
    "fp16": Case("fp16", options=EMA, bad=(1,), fine=8),
    "split masters": Case("bf16", {"masters": "split"}, EMA),
    "no masters": Case("bf16", {"masters": "none"}, EMA),
    "stochastic": Case("bf16", {"rounding": "stochastic"}, EMA),
    "narrow checkpoint": Case("bf16", {"masters_in_checkpoint": False}, EMA),
    "muon": Case("bf16", options=EMA, rule=("muon", {"by_adamw": ["embedding.*"]})),
    "sgd": Case("fp32", options=EMA, rule=("sgd", {})),
    "a rule of torch": Case("fp32", options=EMA, rule=("RAdam", {})),
}
FEW = ("fp32", "split masters", "no masters", "stochastic")
LAYOUTS = [
    ({"dp": 2}, FEW),
    *slow(({"pp": 2, "tp": 2}, PLANS), ({"tp": 2}, PLANS), ({"dp": 4}, PLANS)),
]


def follow(averages: dict[str, np.ndarray], tensors: Tensors) -> None:
    """Move plain averages by the formula, in float64."""
    for name in averages:
        weights = tensors[f"weight/{name}"].double().numpy()
        averages[name] = DECAY * averages[name] + (1 - DECAY) * weights


def plain_averages(case: Case) -> dict[str, np.ndarray]:
    """The averages that a loop over the whole weights of one process has."""
    optimizer = make_optimizer(None, replace(case, options={}))
    first = optimizer.state_dict()["tensors"]
    averages = {name: first[f"weight/{name}"].double().numpy() for name in SHAPES}
    applied = 0
    for step in range(case.steps):
        give(optimizer, step, case.fine)
        if step in case.bad:
            optimizer.all_buffers()[0].grads[0] = INF
        if optimizer.step(case.lr).outcome == "applied":
            follow(averages, optimizer.state_dict()["tensors"])
            applied += 1
    assert applied == case.steps - len(case.bad)
    return averages


def require_close(ours: Tensors, theirs: dict[str, np.ndarray], tolerance: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys() == SHAPES.keys()
    for name, average in theirs.items():
        np.testing.assert_allclose(ours[name].double().numpy(), average, tolerance, tolerance)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return dict(zip(PLANS, results([*PLANS.values()], {}), strict=True))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("axes", "names"), LAYOUTS, ids=str)
def test_the_average_is_that_of_a_plain_loop_in_every_layout_and_sharding(
    axes: dict[str, int], names: Sequence[str], alone: dict[str, Any], tmp_path: Path
) -> None:
    """To 1e-12 in FP64, also over a restart; and with equal bits in every precision."""
    exact = [replace(EXACT, options={**EMA, **sharding}) for sharding in SHARDINGS]
    exact.append(replace(EXACT, restart=3))
    exact.append(replace(EXACT, restart=3, folder=tmp_path))
    found = results([*exact, *(PLANS[name] for name in names)], axes)
    expected = plain_averages(EXACT)
    for one in found[: len(exact)]:
        require_close(one.kinds["ema"], expected)
    for name, one in zip(names, found[len(exact) :], strict=True):
        assert differing(one, alone[name]) == [], name
        assert {values.dtype for values in one.kinds["ema"].values()} == {torch.float32}


@pytest.mark.parametrize("name", PLANS)
def test_an_average_follows_the_masters_and_changes_no_other_bit(
    name: str, alone: dict[str, Any]
) -> None:
    case = PLANS[name]
    ours = alone[name]
    (without,) = results([replace(case, options={})], {})
    assert without.kinds.keys() == ours.kinds.keys() - {"ema"}
    for kind, tensors in without.kinds.items():
        for tensor, values in tensors.items():
            assert torch.equal(values, ours.kinds[kind][tensor]), (kind, tensor)
    # narrow weights are saved rounded, and their averages are of the masters
    tolerance = 4e-3 if name == "narrow checkpoint" else 1e-6
    require_close(ours.kinds["ema"], plain_averages(case), tolerance)


def saved_half(mesh: DeviceMesh | None, folder: Path) -> Tensors:
    """Three steps of a rank, and a checkpoint; the average that the ranks have."""
    optimizer, _ = train(mesh, replace(EXACT, steps=3))
    save(folder, 3, optimizer, {})
    return optimizer.state_dict()["tensors"]


def resumed_half(mesh: DeviceMesh | None, folder: Path) -> tuple[Any, Tensors, Tensors]:
    """The other steps of a rank: what it loaded and what it holds after them."""
    optimizer = make_optimizer(mesh, replace(EXACT, options={**EMA, "shard_gradients": True}))
    load(folder, optimizer)
    loaded = optimizer.state_dict()["tensors"]
    for step in range(3, EXACT.steps):
        give(optimizer, step)
        optimizer.step(EXACT.lr)
    return held(optimizer), loaded, optimizer.state_dict()["tensors"]


@pytest.mark.slow
def test_an_average_is_resumed_in_another_layout_bit_for_bit(tmp_path: Path) -> None:
    saved, *_ = run_ranks(saved_half, {"pp": 2, "tp": 2}, folder=tmp_path)
    path = tmp_path / "step_00000003"
    store = Store(path)
    for name in SHAPES:
        assert torch.equal(store.read("ema", name), saved[f"ema/{name}"])
    _, loaded, ended = run_ranks(resumed_half, {"dp": 2}, folder=path)[0]
    assert all(torch.equal(values, loaded[key]) for key, values in saved.items())
    whole_run, _ = train(None, EXACT)
    expected = whole_run.state_dict()["tensors"]
    assert all(torch.equal(values, ended[key]) for key, values in expected.items())


def swapped(mesh: DeviceMesh | None, cases: Sequence[Case]) -> list[str]:
    """What is not as it must be inside and after `averaged_weights`, in a word."""
    wrong: list[str] = []
    for case in cases:
        with_swap = make_optimizer(mesh, case)
        without = make_optimizer(mesh, case)
        for step in range(4):
            for optimizer in (with_swap, without):
                give(optimizer, step, case.fine)
                optimizer.step(case.lr)
            tensors = with_swap.state_dict()["tensors"]
            before = bits_of(with_swap)
            with with_swap.averaged_weights():
                for buffer in with_swap.all_buffers():
                    for piece in buffer.pieces:
                        held_values = buffer.weights[piece.start : piece.stop]
                        average = piece.part.take(tensors[f"ema/{piece.part.name}"])
                        rounded = average.to(buffer.weights.dtype).reshape(-1)
                        if not torch.equal(held_values, rounded):
                            wrong.append(f"{case}: {piece.part.name} is not its average")
            if not all(map(torch.equal, before, bits_of(with_swap))):
                wrong.append(f"{case}: bits after it")
        if not all(map(torch.equal, bits_of(with_swap), bits_of(without))):
            wrong.append(f"{case}: it changes later steps")
    return wrong


def bits_of(optimizer: ParallelAMPOptimizer) -> list[Tensor]:
    optimizer.wait()
    tensors: list[Tensor] = []
    for buffer in optimizer.all_buffers():
        tensors += [buffer.weights, *buffer.saved().values()]
        tensors += [] if buffer.remainder is None else [buffer.remainder]
    return [values.clone() for values in tensors]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("axes", "names"), LAYOUTS, ids=str)
def test_averaged_weights_are_the_rounded_average_and_come_back_bit_for_bit(
    axes: dict[str, int], names: Sequence[str]
) -> None:
    cases = [PLANS[name] for name in names]
    cases += [replace(PLANS["bf16"], options={**EMA, **sharding}) for sharding in SHARDINGS]
    assert run_ranks(swapped, axes, cases=cases)[0] == []


def divide_by_zero(optimizer: ParallelAMPOptimizer) -> float:
    with optimizer.averaged_weights():
        return 1 / 0


def test_the_weights_come_back_after_an_error_too() -> None:
    optimizer, _ = train(None, PLANS["bf16"])
    before = bits_of(optimizer)
    with pytest.raises(ZeroDivisionError):
        divide_by_zero(optimizer)
    assert all(map(torch.equal, before, bits_of(optimizer)))
    give(optimizer, 0)
    assert optimizer.step(1e-2).outcome == "applied"


def wrapped_loops(mesh: DeviceMesh) -> list[str]:
    """Own loops in torch's wrappers: the model has the average, and then its weights again."""
    wrong: list[str] = []
    for name, wrap in WRAPPINGS.items():
        part, model, made = wrap(make_model(), "fp32")
        averages = [values.double() for values in whole(model)]
        fits_mesh = None if name == "fsdp2" else mesh
        average = True if name in ("plain", "ddp_around") else None
        optimizer = ParallelAMPOptimizer(
            [part], made, fits_mesh, average=average, lr=LR, weight_decay=0.0, ema=DECAY
        )
        for step in range(STEPS):
            loss_of(model, batch(step, mesh.get_local_rank("dp"))).backward()
            optimizer.step()
            weights = whole(model)
            averages = [
                DECAY * average + (1 - DECAY) * values
                for average, values in zip(averages, weights, strict=True)
            ]
            with optimizer.averaged_weights():
                inside = whole(model)
            for ours, theirs in zip(inside, averages, strict=True):
                if not torch.allclose(ours.double(), theirs, 1e-6, 1e-7):
                    wrong.append(f"{name}: another average")
            if not all(map(torch.equal, weights, whole(model))):
                wrong.append(f"{name}: other weights afterwards")
    return wrong


@pytest.mark.slow
def test_own_loops_have_averages_plain_in_ddp_and_in_fully_shard() -> None:
    assert run_ranks(wrapped_loops, {"dp": 2}) == [[], []]


def test_a_device_that_updates_in_skipped_steps_too_leaves_the_average_as_it_was() -> None:
    """A GPU, whose host does not know the decision yet."""
    optimizer, _ = train(None, replace(PLANS["split masters"], steps=1))
    for buffer in optimizer.all_buffers():
        assert buffer.ema is not None
        buffer.ema[::3] = -0.0
        before = buffer.ema.clone()
        for averaged in averaged_tiles(buffer):
            averaged.move(DECAY, torch.ones(()))
        assert torch.equal(buffer.ema.view(torch.int32), before.view(torch.int32))
        for averaged in averaged_tiles(buffer):
            averaged.move(DECAY, torch.zeros(()))
        assert not torch.equal(buffer.ema, before)


def small(**options: Any) -> tuple[nn.Module, ParallelAMPOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    attach_whole(model)
    return model, ParallelAMPOptimizer([model], plan("fp32"), lr=0.1, **options)


def take_step(model: nn.Module, optimizer: ParallelAMPOptimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_weight_that_does_not_change_is_its_own_average_to_the_last_bit() -> None:
    """Two rounded factors of a weight, that do not sum to 1, would change it."""
    model, optimizer = small(ema=0.9999, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(50):
        take_step(model, optimizer)
    with optimizer.averaged_weights():
        assert all(map(torch.equal, before, model.parameters()))


def test_a_gpu_averages_64_times_as_many_elements_at_a_time_as_a_core_has_cache_for() -> None:
    assert (run_length("cpu"), run_length("cuda")) == (1 << 18, 1 << 24)


def test_a_frozen_parameter_needs_no_average() -> None:
    model, _ = small()
    torch.manual_seed(0)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=0.1, ema=DECAY)
    frozen = model[0].weight.clone()  # type: ignore[index]
    take_step(model, optimizer)
    assert "ema/0.weight" not in optimizer.state_dict()["tensors"]
    with optimizer.averaged_weights():
        assert torch.equal(frozen, model[0].weight)  # type: ignore[index]


def test_weights_that_a_loop_has_written_before_the_first_step_begin_the_average() -> None:
    model, optimizer = small(ema=DECAY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    take_step(model, optimizer)
    tensors = optimizer.state_dict()["tensors"]
    for name, parameter in model.named_parameters():
        expected = 2.0 + (1 - DECAY) * (parameter.detach() - 2.0)
        torch.testing.assert_close(tensors[f"ema/{name}"], expected)


def test_before_the_first_step_the_average_is_the_weights() -> None:
    net = nn.Linear(4, 4)
    attach_whole(net)
    own = net.weight.detach().clone()
    optimizer = ParallelAMPOptimizer([net], plan("fp32"), ema=0.9)
    with optimizer.averaged_weights():
        assert torch.equal(net.weight, own)


def test_what_would_take_the_average_for_the_weights_is_refused(tmp_path: Path) -> None:
    model, optimizer = small(ema=DECAY)
    take_step(model, optimizer)
    path = save(tmp_path, 1, optimizer, {})
    state = optimizer.state_dict()
    with optimizer.averaged_weights():
        model(torch.ones(2, 3)).sum().backward()
        for action in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: save(tmp_path, 2, optimizer, {}),
            lambda: load(path, optimizer),
            lambda: load_weights(Store(path), optimizer),
            lambda: optimizer.averaged_weights().__enter__(),
        ):
            with raises("optimizer.averaged_weights_held"):
                action()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("step")] == [path.name]
    _, without = small()
    with raises("optimizer.no_ema"), without.averaged_weights():
        pass


@pytest.mark.parametrize("ema", [1.0, -0.1, float("nan"), True, "0.9", None])
def test_a_decay_that_is_none_is_refused(ema: Any) -> None:
    with raises("optimizer.ema_range", ema=ema):
        small(ema=ema)


def test_a_checkpoint_without_an_average_is_refused_unless_one_may_begin(tmp_path: Path) -> None:
    model, without = small()
    take_step(model, without)
    path = save(tmp_path, 1, without, {})
    model, optimizer = small(ema=DECAY)
    take_step(model, optimizer)
    before = bits_of(optimizer)
    with raises("checkpoint.ema_missing", path=path):
        load(path, optimizer)
    with raises("optimizer.state_of_other_model"):
        optimizer.load_state_dict(without.state_dict())
    assert all(map(torch.equal, before, bits_of(optimizer)))
    load(path, optimizer, begin_ema=True)
    tensors = optimizer.state_dict()["tensors"]
    for name in ("0.weight", "1.bias"):
        assert torch.equal(tensors[f"ema/{name}"], tensors[f"weight/{name}"])


def test_an_average_that_is_given_up_is_told(tmp_path: Path) -> None:
    model, optimizer = small(ema=DECAY)
    take_step(model, optimizer)
    path = save(tmp_path, 1, optimizer, {})
    _, without = small()
    with pytest.warns(UserWarning, match="average of the weights"):
        load(path, without)
    with warnings.catch_warnings(action="error"):
        load(path, optimizer)
