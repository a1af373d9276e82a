"""The shadow of a step in FP8 changes nothing of the training, is the same in every layout, and
shows what is wrong."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.fp8 import linear
from megaprec.fp8.matmul import multiply
from megaprec.fp8.quantize import Codes
from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import Backend
from megaprec.precision.plan import LossScaling
from models.decoder.stages import Stage
from models.engine.engine import Engine
from models.engine.fp8_shadow import Shadow, run_shadow
from tests.fp8.test_training import EXPERTS, fp8, run
from tests.fp8.test_weights import kept, require_same, state_of
from tests.layouts import SAMPLES, Run, batches, make_engine, share_of
from tests.ranks import run_ranks
from tests.refusals import sentence
from tests.runs import checkpoint, steps, tensors, train, train_on, write_run
from tools.analysis.plots.shadow_plot import PICTURE, lowest_cosines, plot_shadow
from tools.config.tables.precision_settings import FP8
from tools.console.json_output import to_json
from tools.journal.records import read_events
from tools.journal.shadow_records import SHADOW, alarms, shadow_event

DROPOUT = {**run().model, "dropout": 0.2}


def trained(
    engine: Engine, one: Run, shadows: bool, mesh: DeviceMesh | None = None
) -> list[Shadow]:
    found = []
    for n, batch in enumerate(batches(one)):
        share = share_of(mesh, batch)
        if shadows:
            found.append(run_shadow(engine.passes, share, n))
        engine.step(share, one.lr, n)
    return found


def fp8_state(engine: Engine) -> dict[str, Tensor]:
    state = engine.fp8
    return {"scale": state.bank.scale, "history": state.bank.history, "now": state.bank.step_amax}


def require_shadows_change_nothing(one: Run, mesh: DeviceMesh | None = None) -> None:
    with_them = make_engine(mesh, one)
    without = make_engine(mesh, one)
    trained(with_them, one, shadows=True, mesh=mesh)
    trained(without, one, shadows=False, mesh=mesh)
    require_same(state_of(with_them), state_of(without))
    require_same(fp8_state(with_them), fp8_state(without))
    assert with_them.fp8.rolls == without.fp8.rolls
    assert with_them.optimizer.saved_numbers() == without.optimizer.saved_numbers()


def require_on_ranks(mesh: DeviceMesh | None, runs: list[Run]) -> None:
    for one in runs:
        require_shadows_change_nothing(one, mesh)


def cases() -> list[Run]:
    return [
        run(fp8(), "bf16", model=DROPOUT, steps=2),
        kept("delayed", steps=2, options={"overlap": True}),
        run(fp8(), "fp16", kind="zb-h1", steps=2, scaling=LossScaling("constant", initial=1024.0)),
    ]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_training_is_bit_for_bit_the_same_with_and_without_a_shadow(axes: dict[str, int]) -> None:
    run_ranks(
        require_on_ranks, axes, runs=[one for one in cases() if "pp" in axes or one.kind == "1f1b"]
    )


def test_a_shadow_that_records_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FP8State._entered
    monkeypatch.setattr(
        FP8State, "_entered", lambda self, enabled, records: inner(self, enabled, True)
    )
    with pytest.raises(AssertionError):
        require_shadows_change_nothing(cases()[0])


def shadows_rank(mesh: DeviceMesh | None, runs: list[Run]) -> list[Shadow]:
    return [trained(make_engine(mesh, one), one, shadows=True, mesh=mesh)[-1] for one in runs]


@pytest.mark.slow
def test_a_shadow_is_the_same_in_every_layout() -> None:
    """Of a first step, for weights differ after it, with scales that are powers of two, which
    forgive last bits. dp ranks have half of the samples each, whose largest magnitudes are their
    own."""
    one = run(fp8("current", power_2_scales=True), micro_batch=SAMPLES, steps=1, model=DROPOUT)
    (alone,) = shadows_rank(None, [one])
    assert 0 < abs(alone.gap) < 0.01 and 0.9 < alone.worst[1] < 0.9999
    for axes in ({"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 2}):
        ours = replace(one, micro_batch=SAMPLES // axes.get("dp", 1))
        ranks = [rank[0] for rank in run_ranks(shadows_rank, axes, runs=[ours])]
        assert all(str(rank) == str(ranks[0]) for rank in ranks), "every rank has the same"
        there = ranks[0]
        assert there.wide_loss == pytest.approx(alone.wide_loss, rel=1e-6)
        assert there.loss == pytest.approx(alone.loss, rel=1e-4 if "dp" in axes else 1e-5)
        assert (
            there.cosines.keys() == alone.cosines.keys()
            and there.saturated.keys() == alone.saturated.keys()
        )
        for name, cosine in there.cosines.items():
            assert cosine == pytest.approx(
                alone.cosines[name], abs=0.01 if "dp" in axes else 1e-3
            ), name
        for name, part in there.underflowed.items():
            assert part == pytest.approx(
                alone.underflowed[name], abs=0.02 if "dp" in axes else 2e-3
            ), name


def test_without_fp8_the_two_are_one() -> None:
    """Where all layers stay wide, or amaxes are only recorded, nothing is left to compare."""
    calibrating = shadows_rank(None, [run(fp8(calibrate=9), steps=2)])[0]
    assert calibrating.gap == 0 and list(calibrating.cosines.values()) == pytest.approx(
        [1.0] * 14, abs=1e-12
    )
    assert set(calibrating.saturated.values()) == {0.0}
    wide = shadows_rank(None, [run(fp8(wide=("*",)), steps=1)])[0]
    assert wide.gap == 0 and not wide.cosines and math.isnan(wide.worst[1])


def test_the_cosine_is_that_of_gradients_made_by_autograd() -> None:
    """An oracle without micro-batches, buffers and shadows: each model's own gradients, by
    torch."""
    one = run(
        fp8("current"), micro_batch=SAMPLES, steps=1, model=DROPOUT | {"dropout": 0.0}, masked=False
    )
    found = shadows_rank(None, [one])[0]
    gradients = []
    for enabled in (False, True):
        engine = make_engine(None, one)
        tokens, targets, _ = batches(one)[0]
        with engine.fp8.autocast(enabled):
            stage: Stage = engine.stages[0]
            loss = stage.losses(stage(tokens.t().contiguous()), targets.t().contiguous()).mean()
            loss.backward()
        weight: Any = stage.layers["1"].get_submodule("mlp.down").weight
        gradients.append(weight.main_grad.clone().flatten())
    cosine = torch.cosine_similarity(gradients[0].double(), gradients[1].double(), dim=0).item()
    assert found.cosines["layers.1.mlp.down.weight"] == pytest.approx(cosine, abs=1e-9)


def test_what_casts_lose_is_counted_by_product_and_role() -> None:
    """Scales a thousand times too high saturate, a million times too low they underflow."""
    one = run(fp8(), steps=2)
    for factor, kind in ((1e3, "saturated"), (1e-7, "underflowed")):
        engine = make_engine(None, one)
        trained(engine, one, shadows=False)
        engine.fp8.roll()
        name = "layers.0.mlp.down.weight"
        engine.fp8.scale(name, "input").mul_(factor)
        lost = getattr(run_shadow(engine.passes, share_of(None, batches(one)[0]), 2), kind)
        others = [part for tensor, part in lost.items() if tensor != f"{name}.input"]
        assert lost[f"{name}.input"] > 0.5 > max(others)


@pytest.mark.slow
def test_weights_that_are_kept_in_codes_are_counted_like_casts() -> None:
    """Both ways of keeping them lose the same numbers; without FP8 one has the codes' weights, the
    other FP32's."""
    ours, theirs = (
        shadows_rank(None, [kept("delayed", "fp32", codes=codes)])[0] for codes in (True, False)
    )
    assert replace(ours, wide_loss=0, cosines={}) == replace(theirs, wide_loss=0, cosines={})
    assert ours.wide_loss != theirs.wide_loss
    assert any(part > 0 for name, part in ours.saturated.items() if name.endswith(".weight.weight"))
    (dp, *_) = run_ranks(shadows_rank, {"dp": 2}, runs=[kept("delayed", "fp32", steps=1)])
    alone = shadows_rank(None, [kept("delayed", "fp32", steps=1)])[0]
    weights = [name for name in alone.underflowed if name.endswith(".weight.weight")]
    assert {n: dp[0].underflowed[n] for n in weights} == {n: alone.underflowed[n] for n in weights}


def test_experts_have_shadows_too() -> None:
    found = shadows_rank(None, [run(fp8(), model=EXPERTS, steps=2)])[0]
    assert "layers.1.mlp.experts.3.down.weight" in found.cosines


# Alarms

BAND = FP8(kind="delayed", shadow_every=1)


def shadow(loss: float = 2.0, wide_loss: float = 2.0, **cosines: float) -> Shadow:
    return Shadow(loss, wide_loss, cosines, {}, {})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (shadow(2.019, a=0.95), []),
        (shadow(2.021, a=0.95), ["loss gap +1.05% is beyond fp8.shadow_loss_gap = 0.01"]),
        (shadow(1.97), ["loss gap -1.50% is beyond fp8.shadow_loss_gap = 0.01"]),
        (shadow(math.nan, a=math.nan), ["loss gap +inf% is beyond fp8.shadow_loss_gap = 0.01"]),
        (shadow(math.nan, math.nan, a=math.nan), []),
        (
            shadow(a=0.8, b=0.7, c=0.99),
            ["cosine 0.700 of b and 1 more is below fp8.shadow_cosine = 0.9"],
        ),
    ],
)
def test_what_lies_outside_of_the_band_alarms(found: Shadow, said: list[str]) -> None:
    assert alarms(found, BAND) == said


def products_with_noise() -> None:
    """A kernel that is wrong where nothing else would tell: on the way back."""

    def wrong(
        a: Codes, b: Codes, out: torch.dtype, fast: bool = False, backend: Backend = "torch"
    ) -> Tensor:
        made = multiply(a, b, out, fast, backend)
        return made if fast else made + torch.randn_like(made) * made.std()

    linear.multiply = wrong


def test_a_wrong_product_alarms() -> None:
    inner = linear.multiply
    products_with_noise()
    try:
        found = shadows_rank(None, [run(fp8("current"), steps=1)])[0]
    finally:
        linear.multiply = inner
    assert any("cosine" in said for said in alarms(found, BAND))


# Through the command

KEYS = ("fp8.kind=delayed", "fp8.pad=true", "precision.compute=bf16", "log.progress=false")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("shadow"))


@pytest.mark.slow
def test_a_run_logs_draws_and_alarms_and_ends_in_the_same_checkpoint(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    plain = tmp_path / "plain"
    watch = ("fp8.shadow_every=2", "fp8.shadow_cosine=0.9999", "log.plot=true", "log.every=9")
    assert train(file, *KEYS, *watch, f"train.folder={folder}") == 0
    said = capsys.readouterr().out
    assert train(file, *KEYS, f"train.folder={plain}") == 0
    require_same(tensors(checkpoint(folder, 6)), tensors(checkpoint(plain, 6)))
    found = read_events(folder, SHADOW)
    assert [event["step"] for event in found] == [2, 4, 6]
    assert len(found[0]["cosines"]) == 14 and len(found[0]["saturated"]) == 24
    assert said.count("FP8 ALARM: cosine 0.9") == 3 and (folder / PICTURE).is_file()
    assert [step["step"] for step in steps(folder) if "shadow_loss_gap" in step] == [2, 4, 6]
    assert read_events(folder) == [], "explain-overflow sees no step that was skipped"


@pytest.mark.slow
def test_ranks_of_all_axes_make_a_shadow_together(file: Path, tmp_path: Path) -> None:
    layout = {"tensor": 2, "pipeline": 2, "data": 2}
    folder = f"train.folder={tmp_path / 'watched'}"
    plain = f"train.folder={tmp_path / 'plain'}"
    ours = train_on(file, *KEYS, "fp8.shadow_every=3", folder, **layout)
    require_same(
        tensors(checkpoint(ours, 6)),
        tensors(checkpoint(train_on(file, *KEYS, plain, **layout), 6)),
    )
    assert [event["step"] for event in read_events(ours, SHADOW)] == [3, 6]


@pytest.mark.slow
def test_a_shadow_that_is_not_finite_is_written_as_strict_json_and_drawn(tmp_path: Path) -> None:
    event = shadow_event(
        Shadow(math.nan, 2.0, {"layers.0.a.weight": math.nan}, {"x.input": 0.1}, {"x.input": 0}),
        3,
        BAND,
    )
    line = to_json(event)
    assert json.loads(line, parse_constant=lambda word: pytest.fail(word))["cosines"] == {
        "layers.0.a.weight": "nan"
    }
    (tmp_path / "events.jsonl").write_text(line + "\n")
    assert read_events(tmp_path, SHADOW)[0]["loss_gap"] == math.inf
    assert plot_shadow(tmp_path, FP8()) == tmp_path / PICTURE


def test_the_lowest_cosine_of_a_layer_is_not_lost_beside_a_gradient_that_is_zero() -> None:
    cosines = {"layers.0.a": 0.5, "layers.0.b": "nan", "layers.0.c": 0.9, "layers.1.a": "nan"}
    by_layer = lowest_cosines({"cosines": cosines})
    assert by_layer[0] == 0.5 and math.isnan(by_layer[1])


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["fp8.shadow_every=5"], sentence("config.shadow_without_fp8", shadow_every=5)),
        (
            ["fp8.kind=current", "fp8.shadow_every=-1"],
            re.escape("fp8.shadow_every = -1 (command line): must be"),
        ),
        (
            ["fp8.kind=current", "fp8.shadow_cosine=2.0"],
            re.escape("fp8.shadow_cosine = 2.0 (command line): must be"),
        ),
    ],
)
def test_bad_keys_are_one_line(
    keys: list[str], line: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(file, *keys, f"train.folder={tmp_path / 'run'}") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(line, said)
