"""A model that trains in FP8 has one scale for each tensor in every layout, and trains as on one
process.

In FP32 a layout changes a sum by its last bit, which FP8 rounds away again: gradients are equal to
1e-7. Only a number that lies just where the rounding turns moves by a whole step of FP8. So in a
first step two layouts may differ by a tenth of the error that FP8 itself makes, which is measured
against the model without FP8; most differ by a millionth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.atomic import checkpoint_path
from megaprec.checkpoint.save_load import load, save
from megaprec.fp8 import linear
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import EIGHT_BIT_KINDS, FP8Recipe, Kind
from megaprec.precision.plan import LossScaling
from models.engine.engine import Engine
from parallel.activation_checkpoint import KEEP, Recompute
from tests.dialects.test_modes import distance
from tests.layouts import SAMPLES, Result, Run, batches, make_engine, share_of, train, train_all
from tests.parallel.pipeline.test_schedules_train import require_same_bits
from tests.ranks import run_ranks

MODEL: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 128,
    "vocab": 101,
    "max_positions": 16,
}
EXPERTS = {**MODEL, "family": "mixtral", "experts": 4, "ffn": 64}
ODD = {**MODEL, "hidden": 40, "heads": 4}  # which kernels fill up to 48
LAYOUTS = [{"tp": 2}, {"tp": 4}, {"dp": 2}, {"tp": 2, "pp": 2}]
Scales = dict[str, Tensor]


def fp8(kind: Kind = "delayed", **fields: Any) -> FP8Recipe:
    return FP8Recipe(kind, **{"history_length": 4, **fields})


def run(recipe: FP8Recipe | None = None, compute: str = "fp32", **others: Any) -> Run:
    return Run(others.pop("model", MODEL), compute, changes={"fp8": recipe}, **others)


@dataclass(frozen=True)
class Kept:
    """Of one rank after a run: what its FP8State holds, by name."""

    scale: Scales
    history: Scales


def kept(state: FP8State) -> Kept:
    state.roll()
    names = state.names
    return Kept(
        {name: state.bank.scale[i].clone() for i, name in enumerate(names)},
        {name: state.bank.history[:, i].clone() for i, name in enumerate(names)},
    )


def states_rank(mesh: DeviceMesh | None, runs: Sequence[Run]) -> list[Kept]:
    """What each run's ranks hold at its end."""
    found = []
    for one in runs:
        if one.before is not None:
            one.before()
        engine = make_engine(mesh, one)
        for n, batch in enumerate(batches(one)):
            engine.step(share_of(mesh, batch), one.lr, n)
        found.append(kept(engine.fp8))
    return found


def states(runs: Sequence[Run], **axes: int) -> list[list[Kept]]:
    """By run, then by rank."""
    ranks = run_ranks(states_rank, axes, runs=runs)
    return [list(of_run) for of_run in zip(*ranks, strict=True)]


@cache
def alone(one: Run) -> Kept:
    return states_rank(None, [one])[0]


FIRST = run(fp8(), steps=1)
POWERS = run(fp8(power_2_scales=True), steps=3)


def require_one_scale(axes: dict[str, int], powers: Run = POWERS, first: Run = FIRST) -> None:
    """Every rank that has a tensor has the scale of one process, bit for bit: after three steps
    with powers of two, which forgive the last bits of sums over ranks, and after one step of all
    whose amax is no such sum's."""
    ours = states([powers, first], **axes)
    for of_run, whole in zip(
        ours, (alone(replace(powers, before=None)), alone(replace(first, before=None))), strict=True
    ):
        names = set().union(*(rank.scale for rank in of_run))
        assert names == whole.scale.keys()
        for rank in of_run:
            for name, scale in rank.scale.items():
                torch.testing.assert_close(scale, whole.scale[name], rtol=1e-6, atol=0)
    for rank in ours[0]:
        assert all(
            torch.equal(scale, alone(replace(powers, before=None)).scale[name])
            for name, scale in rank.scale.items()
        )
    for rank in ours[1]:
        whole = alone(replace(first, before=None))
        same = [
            name
            for name in rank.scale
            if name.endswith(".weight.weight") or name == "layers.0.attention.query.weight.input"
        ]
        assert same
        assert all(torch.equal(rank.scale[name], whole.scale[name]) for name in same)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_forward_scales_are_bitwise_those_of_one_process_in_every_layout(
    axes: dict[str, int],
) -> None:
    require_one_scale(axes)


@pytest.mark.slow
def test_a_cut_sequence_and_the_size_of_micro_batches_change_no_scale() -> None:
    ((cut, *_),) = states([replace(POWERS, sequence=True)], tp=2)
    larger = alone(replace(POWERS, micro_batch=SAMPLES // 2))
    whole = alone(POWERS)
    for name, scale in whole.scale.items():
        assert torch.equal(cut.scale[name], scale) and torch.equal(larger.scale[name], scale), name


def test_scales_are_of_all_roles_and_no_longer_one() -> None:
    scale = alone(run(fp8(), steps=1)).scale
    assert len(scale) == 3 * 4 * MODEL["layers"]
    assert all(value != 1 and value.isfinite() for value in scale.values())


@cache
def whole(one: Run) -> Result:
    return train(one)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_layout_trains_as_one_process_does(axes: dict[str, int]) -> None:
    """Rows and blocks that are cut over tp have scales of their own: there, and after a first step
    in which a rounding turned, two layouts differ by at most the errors of both."""
    runs = [run(fp8(kind, pad=True), steps=2, micro_batch=4) for kind in EIGHT_BIT_KINDS]
    runs += [
        run(fp8(), steps=2, micro_batch=4, sequence=True),
        run(fp8(), steps=2, micro_batch=4, model=EXPERTS),
    ]
    runs += [run(fp8("current", pad=True), model=ODD, steps=2, micro_batch=4)]
    for one, result in zip(runs, train_all(runs, **axes), strict=True):
        reference = whole(replace(one, changes={}, sequence=False))
        single = whole(replace(one, sequence=False))
        error = [distance(a, b) for a, b in zip(single.grads, reference.grads, strict=True)]
        assert all(e > 0.01 for e in error), "the products are not in FP8"
        first, second = (distance(a, b) for a, b in zip(result.grads, single.grads, strict=True))
        cut = one.changes["fp8"].kind in ("rowwise", "blockwise")
        assert first <= (2 if cut else 0.1) * error[0] and second <= 2 * error[1]


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_ranks_cast_the_parts_of_a_tensor_by_one_scale(sequence: bool) -> None:
    """Of current scaling, which agrees on the largest element before it casts."""
    one = run(fp8("current", pad=True), steps=1, micro_batch=8, sequence=sequence)
    single = whole(replace(one, sequence=False))
    error = distance(single.grads[0], whole(replace(one, changes={}, sequence=False)).grads[0])
    difference = distance(train(one, tp=2).grads[0], single.grads[0])
    assert difference < 0.1 * error


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["delayed", "mx"])
def test_schedules_agree_bit_for_bit(kind: Kind) -> None:
    runs = [
        run(fp8(kind), "bf16", kind=k, micro_batch=1, steps=1) for k in ("1f1b", "zb-h1", "zb-h2")
    ]
    one = train(runs[0])
    for other, result in zip(runs, train_all(runs, pp=2), strict=True):
        require_same_bits(result, one, other.kind)


@pytest.mark.slow
def test_second_steps_of_schedules_use_the_same_scales() -> None:
    runs = [run(fp8(), "bf16", kind=k, micro_batch=1, steps=3, clip=0.0) for k in ("1f1b", "zb-h1")]
    ours, theirs = train_all(runs, pp=2)
    for grads, expected in zip(ours.grads, theirs.grads, strict=True):
        assert all(torch.equal(values, expected[name]) for name, values in grads.items())


def engine_of(one: Run) -> Engine:
    engine = make_engine(None, one)
    for n, batch in enumerate(batches(one)):
        engine.step(share_of(None, batch), one.lr, n)
    return engine


def held(state: FP8State) -> list[Tensor]:
    return [
        values.clone() for values in (state.bank.scale, state.bank.history, state.bank.step_amax)
    ]


def require_taken_up(folder: Path, engine: Engine) -> None:
    other = make_engine(None, run(fp8()))
    load(checkpoint_path(folder, 1), other.optimizer, other.fp8)
    assert other.fp8.rolls == engine.fp8.rolls
    for ours, theirs in zip(held(other.fp8), held(engine.fp8), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_brings_back_scales_and_histories(tmp_path: Path) -> None:
    engine = engine_of(run(fp8()))
    save(tmp_path, 1, engine.optimizer, {}, fp8=engine.fp8)
    require_taken_up(tmp_path, engine)


def require_evaluation_leaves_the_state() -> None:
    one = run(fp8())
    engine = engine_of(one)
    before = held(engine.fp8)
    rolls = engine.fp8.rolls
    louder = batches(one)[0]
    for parameter in engine.stages[0].parameters():
        parameter.data *= 2
    engine.evaluate(share_of(None, louder))
    assert engine.fp8.rolls == rolls
    assert all(torch.equal(a, b) for a, b in zip(held(engine.fp8), before, strict=True))


def test_an_evaluation_neither_records_nor_rolls() -> None:
    require_evaluation_leaves_the_state()


@pytest.mark.parametrize("recompute", [KEEP, Recompute(fraction=1.0)], ids=["kept", "recomputed"])
def test_a_weight_is_cast_once_a_step_whatever_the_number_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch, recompute: Recompute
) -> None:
    roles: list[str] = []
    inner = linear.quantize_both

    def noted(x: Tensor, recipe: FP8Recipe, role: Any, **options: Any) -> Any:
        roles.append(role)
        return inner(x, recipe, role, **options)

    monkeypatch.setattr(linear, "quantize_both", noted)
    one = run(fp8("current"), micro_batch=1, steps=2, recompute=recompute)
    engine = engine_of(one)
    weights = len(engine.fp8.weight_names)
    assert roles.count("weight") == weights * one.steps
    assert roles.count("gradient") == weights * one.steps * SAMPLES


def test_a_skipped_step_that_is_run_again_leaves_the_state_and_rolls_like_any_other() -> None:
    """The step overflows in half precision; looking for where makes the same gradients with the
    same scales."""
    one = run(fp8(), "fp16", scaling=LossScaling("constant", initial=2.0**60), steps=1)
    traced = make_engine(None, one)
    plain = make_engine(None, one)
    plain.trace = False
    batch = batches(one)[0]
    for engine in (traced, plain):
        assert engine.step(share_of(None, batch), 1e-2, 0).outcome == "skipped_overflow"
    for ours, theirs in zip(held(traced.fp8), held(plain.fp8), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    scale = traced.fp8.bank.scale.clone()
    traced.step(share_of(None, batch), 1e-2, 1)
    moved = {
        name for i, name in enumerate(traced.fp8.names) if traced.fp8.bank.scale[i] != scale[i]
    }
    assert {name for name in traced.fp8.names if not name.endswith("gradient")} <= moved
    assert traced.fp8.bank.scale.isfinite().all()


def test_ranks_that_do_not_reduce_have_scales_of_their_own_samples() -> None:
    recipe = fp8(reduce_amax=False)
    (ranks,) = states([run(recipe, steps=1)], dp=2, tp=2)
    same = {
        name: torch.equal(scale, ranks[2].scale[name]) for name, scale in ranks[0].scale.items()
    }
    for name, scale in ranks[0].scale.items():
        assert torch.equal(scale, ranks[1].scale[name]), "tp ranks hold parts of one tensor"
        assert same[name] or not name.endswith("weight.weight"), name
    others = [same[name] for name in same if not name.endswith("weight.weight")]
    assert sum(others) <= len(others) // 4, (
        "the largest value of an input may be that of a token that both have"
    )


def test_the_first_steps_calibrate_in_the_compute_dtype() -> None:
    wide = whole(run(steps=3))
    calibrated = whole(run(fp8(calibrate=2), steps=3))
    for step in range(2):
        assert distance(calibrated.grads[step], wide.grads[step]) == 0
    assert distance(calibrated.grads[2], wide.grads[2]) > 0
    history = alone(run(fp8(calibrate=2), steps=2)).history
    assert all(
        values.tolist()[:2] == [0, 0] and (values[2:] > 0).all() for values in history.values()
    )


def test_experts_without_tokens_keep_their_scales() -> None:
    """With one sample of one token each step, most experts are idle."""
    engine = make_engine(
        None, run(fp8(), model={**EXPERTS, "experts": 16, "experts_per_token": 1}, steps=1)
    )
    share = share_of(None, batches(run())[0])
    share.tokens.fill_(5)
    engine.step(share, 1e-2, 0)
    scale = kept(engine.fp8).scale
    of_expert = [
        torch.stack(
            [
                scale[f"layers.0.mlp.experts.{n}.gate.weight.{role}"]
                for role in ("input", "weight", "gradient")
            ]
        )
        for n in range(16)
    ]
    moved = [bool((values[[0, 2]] != 1).all()) for values in of_expert]
    assert 0 < sum(moved) < 16
    assert all(m or (values[[0, 2]] == 1).all() for m, values in zip(moved, of_expert, strict=True))


@pytest.mark.parametrize("margin", [0, 1])
def test_a_margin_leaves_room(margin: int) -> None:
    require_margin(margin)


def require_margin(margin: int) -> None:
    (ours,) = states_rank(None, [run(fp8(margin=margin), steps=1)])
    for name, scale in ours.scale.items():
        largest = 57344 if name.endswith("gradient") else 448
        torch.testing.assert_close(
            scale * ours.history[name][-1] * 2**margin, torch.tensor(float(largest))
        )
