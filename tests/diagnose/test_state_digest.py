"""The digests of a state are the same in every layout that holds it, and another state has
others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import load, save
from megaprec.diagnose.state_digest import Digests, StateDigest, fold_digests
from megaprec.optim.optimizer import ParallelAMPOptimizer
from tests.layouts import LAYOUTS, Run, batches, make_engine, share_of
from tests.models.test_parity import MODELS
from tests.ranks import run_ranks

RUNS = {
    "llama": Run(MODELS["llama"], "fp32", steps=2),
    "gpt2, tied": Run(MODELS["gpt2"], "bf16", steps=2),
    "mixtral": Run(MODELS["mixtral"], "bf16", steps=2, changes={"masters": "split"}),
}
ALONE, *OTHERS = LAYOUTS
# the first has copies over tp, over dp, and shards
MANY = sorted(OTHERS, key=lambda layout: layout != (2, 1, 2))


def made(optimizer: ParallelAMPOptimizer) -> Digests:
    return StateDigest(optimizer).make()


def trained(run: Run, folder: Path) -> Digests:
    """The digests of a run on one process, which is saved."""
    engine = make_engine(None, run)
    for step, batch in enumerate(batches(run)):
        engine.step(share_of(None, batch), run.lr, step)
    save(folder, run.steps, engine.optimizer, {})
    return made(engine.optimizer)


def loaded(mesh: DeviceMesh, folder: Path) -> dict[str, list[Digests]]:
    """The digests of each saved run, without and with ZeRO-1, on one rank."""
    found: dict[str, list[Digests]] = {}
    for name, run in RUNS.items():
        for zero_size in (0, mesh["dp"].size()):
            optimizer = make_engine(mesh, replace(run, zero_size=zero_size)).optimizer
            load(folder / name / "step_00000002", optimizer)
            found.setdefault(name, []).append(made(optimizer))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Digests]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, {name: trained(run, folder / name) for name, run in RUNS.items()}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", MANY)
def test_one_checkpoint_has_the_same_digests_in_every_layout(
    layout: tuple[int, int, int], saved: tuple[Path, dict[str, Digests]]
) -> None:
    folder, alone = saved
    tp, pp, dp = layout
    for rank in run_ranks(loaded, {"pp": pp, "dp": dp, "tp": tp}, folder=folder):
        for name, several in rank.items():
            assert all(one == alone[name] for one in several), name


def test_every_weight_and_moment_has_a_digest(saved: tuple[Path, dict[str, Digests]]) -> None:
    for name, found in saved[1].items():
        assert sorted(found) == ["exp_avg", "exp_avg_sq", "weight"], name
        names = {"embedding.weight", "layers.1.attention.key.weight"}
        assert all(names <= tensors.keys() == found["weight"].keys() for tensors in found.values())
        assert len({one for tensors in found.values() for one in tensors.values()}) > 2 * len(
            found["weight"]
        )


def change(what: str, optimizer: ParallelAMPOptimizer) -> tuple[str, ...]:
    """Change the state; returns "kind/name" of what is another."""
    buffer = next(
        b for b in optimizer.all_buffers() if len({p.part.shape for p in b.pieces}) < len(b.pieces)
    )
    shapes: dict[tuple[int, ...], Any] = {}
    one, other = next(
        (p, shapes[p.part.shape])
        for p in buffer.pieces
        if p.part.shape in shapes or shapes.update({p.part.shape: p})
    )
    moment = buffer.state["exp_avg"]
    if what == "lowest bit":
        moment[one.start].view(torch.int32).bitwise_xor_(1)
        return (f"exp_avg/{one.part.name}",)
    if what == "sign":
        moment[one.start] *= -1
        return (f"exp_avg/{one.part.name}",)
    if what == "tensors swapped":
        first = moment[one.start : one.stop].clone()
        second = moment[other.start : other.stop].clone()
        moment[one.start : one.stop], moment[other.start : other.stop] = second, first
        return f"exp_avg/{one.part.name}", f"exp_avg/{other.part.name}"
    if what == "moments swapped":
        first, second = (
            buffer.state[kind][one.start].clone() for kind in ("exp_avg", "exp_avg_sq")
        )
        buffer.state["exp_avg"][one.start], buffer.state["exp_avg_sq"][one.start] = second, first
        return f"exp_avg/{one.part.name}", f"exp_avg_sq/{one.part.name}"
    assert buffer.masters is not None
    buffer.masters[one.start] += buffer.masters[one.start] * 2.0**-22
    return (f"weight/{one.part.name}",)


@pytest.mark.parametrize(
    "what", ["lowest bit", "sign", "tensors swapped", "moments swapped", "master"]
)
def test_what_changes_is_named_and_nothing_else(what: str) -> None:
    run = RUNS["gpt2, tied"]
    engine = make_engine(None, run)
    engine.step(share_of(None, batches(run)[0]), run.lr, 0)
    before = made(engine.optimizer)
    changed = change(what, engine.optimizer)
    after = made(engine.optimizer)
    apart = [
        f"{kind}/{name}"
        for kind in before
        for name in before[kind]
        if before[kind][name] != after[kind][name]
    ]
    assert sorted(apart) == sorted(changed)
    assert fold_digests(before) != fold_digests(after)
