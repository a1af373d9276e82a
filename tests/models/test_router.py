"""Routers: the choice that published models make, and a correction that follows the loads of the
whole batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import load, save
from megaprec.comm.main_grad import forget_gradient
from megaprec.errors import UserError
from megaprec.optim.rules.load_balance import corrections
from megaprec.precision.plan import LossScaling
from models.config import ModelConfig
from models.decoder.cutting import best_cut
from models.feed_forward import router
from models.feed_forward.router import choose_experts, expert_weights
from models.parameter_counts import layer_parameters
from models.presets import PRESETS, preset
from models.router_settings import RouterSettings
from parallel.activation_checkpoint import Recompute
from tests import oracle
from tests.layouts import Result, Run, batches, fragments, make_engine, share_of, train, train_all
from tests.models.test_moe import layer, some
from tests.models.test_parity import MODELS, differing
from tests.ranks import run_ranks
from tests.refusals import sentence

GLM = Run(MODELS["glm4_moe"])
SPEED = GLM.config.router_correction_speed
GROUPS = {"groups": 3, "groups_per_token": 2}
SETTINGS: list[dict[str, Any]] = [
    {"score": "sigmoid"},
    {"score": "sigmoid", "correction": True, "scale": 0.3},
    {"score": "softmax", **GROUPS, "group_best": 1},
    {"score": "sigmoid", **GROUPS, "correction": True},
    {"score": "softmax", "correction": True, "groups": 3, "groups_per_token": 3},
]


@pytest.mark.parametrize("router", SETTINGS, ids=str)
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_tokens_go_where_the_settings_say_and_through_shared_experts(
    router: dict[str, Any], norm_topk: bool, gate: bool
) -> None:
    experts, weights = layer(
        experts=6, router=router, norm_topk=norm_topk, shared_experts=10, shared_gate=gate
    )
    if "mlp.router.correction" in weights:
        weights["mlp.router.correction"].copy_(some(6))
    x = some(7, 3, 8)
    expected = oracle.experts(experts.config, weights, "mlp", x, [])
    torch.testing.assert_close(experts(x, None), expected, rtol=1e-13, atol=1e-13)


def test_a_correction_changes_who_is_chosen_and_no_weight() -> None:
    settings = RouterSettings(score="sigmoid", correction=True)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]])
    chosen = choose_experts(settings, scores, torch.tensor([0.0, 0.0, 1.0, 0.0]), 2)
    assert chosen.tolist() == [[2, 0]]
    assert (
        expert_weights(settings, scores, chosen, normalize=False).tolist()
        == scores[:, [2, 0]].tolist()
    )


def test_the_sum_of_scores_has_a_floor_that_only_a_sigmoid_needs() -> None:
    """DeepSeek-V3's 1e-20, added to the sum."""
    chosen = torch.tensor([[0, 1]])
    tiny = torch.tensor([[2e-20, 1e-20]], dtype=torch.float64)
    weights = {
        score: expert_weights(RouterSettings(score=score), tiny, chosen, normalize=True)
        for score in ("sigmoid", "softmax")
    }
    torch.testing.assert_close(weights["sigmoid"], tiny / 4e-20)
    torch.testing.assert_close(weights["softmax"], tiny / 3e-20)


def test_the_sum_of_the_two_best_and_the_best_alone_choose_other_groups() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6]])
    for best, expected in ((1, 0), (2, 2)):
        settings = RouterSettings(score="softmax", groups=2, groups_per_token=1, group_best=best)
        assert min(choose_experts(settings, scores, None, 2)[0].tolist()) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router": {"score": "sigmoid", "groups": 3}}, sentence("model.router_groups", groups=3, experts=8)),
        ({"router": {"score": "sigmoid", "groups": 2, "groups_per_token": 3}}, sentence("model.router_groups_per_token", chosen_groups=3)),
        ({"router": {"score": "sigmoid", "groups": 8, "group_best": 1}}, sentence("model.router_few_experts", per_token=2, eligible=1)),
        ({"router": {"score": "sigmoid", "groups": 4, "group_best": 3}}, sentence("model.router_group_best", group_best=3, group_size=2)),
        ({"shared_experts": 0}, sentence("model.shared_gate_unused")),
        ({"dense_layers": [1, 0]}, sentence("model.layer_numbers", key="dense_layers", value="[1, 0]", last=2)),
        ({"dense_layers": [3]}, sentence("model.layer_numbers", key="dense_layers", value="[3]", last=2)),
        ({"dense_layers": [0, 1, 2]}, sentence("model.all_layers_dense")),
        ({"dense_layers": [], "dense_ffn": 40}, sentence("model.dense_ffn_unused")),
        ({"experts": 0}, sentence("model.no_experts_beside")),
        ({"experts": 0, "dense_layers": [], "dense_ffn": 24}, sentence("model.no_experts_beside", key="shared_experts", value=8)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(**{**GLM.model, **changes})


def test_a_router_without_experts_is_refused() -> None:
    with pytest.raises((UserError, ValueError), match=sentence("model.router_without_experts")):
        ModelConfig(layers=1, hidden=8, heads=2, router=RouterSettings(score="sigmoid"))


def test_corrections_point_to_the_mean_exactly() -> None:
    assert corrections(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 0, -1]
    assert corrections(torch.tensor([16777213.0, 16777214.0, 16777215.0])).tolist() == [1, 0, -1]
    assert corrections(torch.tensor([0.0, 1.0, 1.0])).tolist() == [1, -1, -1]


def moved(result: Result) -> dict[str, list[Tensor]]:
    """Corrections before and after, by name."""
    names = [name for name in result.before if name.endswith(".correction")]
    return {name: [result.before[name], result.after[name]] for name in names}


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize(
    "run",
    [
        replace(GLM, compute="bf16"),
        replace(
            GLM, compute="bf16", changes={"masters": "bf16", "gradients": "bf16", "reduce": "bf16"}
        ),
        replace(
            GLM,
            compute="fp16",
            scaling=LossScaling("constant", 2.0**10),
            recompute=Recompute(fraction=1.0),
        ),
        replace(GLM, micro_batch=8, compute="fp32"),
    ],
    ids=["bf16", "bf16 alone", "fp16 recomputed", "one micro-batch"],
)
def test_corrections_move_by_their_speed_against_the_loads_in_every_precision(run: Run) -> None:
    result = train(run)
    tokens = 8 * 8 * GLM.config.experts_per_token
    for name, (before, after) in moved(result).items():
        assert (before.dtype, float(before.abs().sum())) == (torch.float32, 0.0)
        expected = torch.zeros(8)
        for grads in result.grads:
            counts = grads[name]
            assert counts.sum() == tokens, "each choice of the global batch is counted once"
            expected = expected + torch.sign(counts.mean() - counts) * SPEED
        assert torch.equal(after, expected)
        assert after.any()


def test_a_skipped_step_moves_no_correction() -> None:
    run = replace(GLM, compute="fp16", scaling=LossScaling("dynamic", 2.0**40), steps=2)
    result = train(run)
    assert {report.outcome for report in result.reports} == {"skipped_overflow"}
    assert all(torch.equal(before, after) for before, after in moved(result).values())


@pytest.mark.slow
def test_norm_and_zeros_do_not_see_the_counts() -> None:
    counted = train(replace(GLM, steps=1))
    calm = train(
        Run({**GLM.model, "router": {**GLM.model["router"], "correction": False}}, steps=1)
    )
    assert counted.reports[0].grad_norm == calm.reports[0].grad_norm
    assert counted.reports[0].num_zeros == calm.reports[0].num_zeros
    assert counted.num_elements - calm.num_elements == 2 * 8


def test_uneven_layers_are_cut_so_that_the_busiest_stage_is_least_busy() -> None:
    assert best_cut([1, 3, 3, 3], range(2)) == [2, 2]
    assert best_cut([1, 1, 1, 3, 3], range(2), last_extra=1) == [4, 1]
    assert best_cut([5, 1, 1, 1], range(2), first_extra=1) == [1, 3]
    for name in ("glm-4.5", "glm-4.5-air"):
        model = preset(name)
        assert model.over_layers(lambda kind: layer_parameters(kind), [0]) < layer_parameters(model)
        assert PRESETS[name]["dense_layers"] == model.dense_layers


CANONICAL = {
    **GLM.model,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 32,
    "dense_ffn": 64,
    "shared_experts": 16,
}


@pytest.mark.slow
def test_canonical_numerics_have_the_same_bits_in_every_layout() -> None:
    run = Run(CANONICAL, compute="bf16", shards=4, clip=0.0)
    one = train(run)
    for layout in ((2, 1, 2), (1, 2, 2)):
        (other,) = train_all([run], *layout)
        assert [r.loss for r in one.reports] == [r.loss for r in other.reports]
        assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)


def saving(mesh: DeviceMesh | None, run: Run, folder: Path, load_first: bool) -> Any:
    """Two steps that are saved, or a third after loading."""
    engine = make_engine(mesh, run)
    taken = batches(run)[2:] if load_first else batches(run)[:2]
    if load_first:
        load(folder / "step-00000002", engine.optimizer)
    for n, batch in enumerate(taken):
        engine.step(share_of(mesh, batch), run.lr, n)
    engine.optimizer.wait()
    if not load_first:
        return str(save(folder, 2, engine.optimizer, {}))
    return fragments(engine.optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])


@pytest.mark.slow
def test_corrections_are_resumed_in_another_layout(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = Path(
        run_ranks(saving, {"pp": 2, "dp": 2, "tp": 1}, run=GLM, folder=tmp_path, load_first=False)[
            0
        ]
    )
    path.rename(tmp_path / "step-00000002") if path.name != "step-00000002" else None
    resumed = {fragment.name: fragment.values for fragment in saving(None, GLM, tmp_path, True)}
    whole = train(GLM).after
    again = {name: resumed[name].view(whole[name].shape) for name in whole}
    assert not differing(again, whole)
    assert all(
        torch.equal(again[name], whole[name]) for name in whole if name.endswith(".correction")
    )


def the_counts_are_of_a_micro_batch() -> None:
    inner = router.WithLoads.backward

    def last(ctx: Any, grad: Tensor) -> Any:
        forget_gradient(ctx.correction)
        return inner(ctx, grad)

    router.WithLoads.backward = staticmethod(last)


def the_correction_enters_the_weights() -> None:
    inner = router.expert_weights
    router.expert_weights = lambda settings, scores, chosen, normalize: inner(
        settings, scores + 0.01, chosen, normalize
    )


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize(
    "bug", [the_counts_are_of_a_micro_batch, the_correction_enters_the_weights]
)
def test_the_law_of_layouts_finds(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(GLM, steps=2)
    expected: Any = oracle.train(run.config, train(run).before, batches(run), run.lr, run.clip)
    monkeypatch.setattr(router, "expert_weights", router.expert_weights)
    monkeypatch.setattr(router.WithLoads, "backward", router.WithLoads.backward)
    good = train(run)
    assert not differing(good.grads[0], expected[0]["grads"])
    bad = train(replace(run, before=bug))
    assert differing(bad.grads[0], expected[0]["grads"])


def reported_and_real_corrections(
    mesh: DeviceMesh | None, run: Run
) -> list[tuple[tuple[float, float] | None, tuple[float, float]]]:
    """Of each layer on this rank, the lowest and highest correction that a step reports, and those
    that its router has in that step."""
    engine = make_engine(mesh, run)
    routers = [
        one
        for stage in engine.stages.values()
        for one in stage.modules()
        if isinstance(one, router.Router) and one.correction is not None
    ]
    found = []
    for number, batch in enumerate(batches(run)[:2]):
        engine.optimizer.wait()
        real = [one.correction.detach().aminmax() for one in routers if one.correction is not None]
        real_numbers = [(float(low), float(high)) for low, high in real]
        report = engine.step(share_of(mesh, batch), run.lr, number)
        reported = [one.corrections for one in report.routers]
        found += zip(reported, real_numbers, strict=True)
    return found


@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=str)
def test_reported_corrections_are_those_of_the_routers_in_any_layout(axes: dict[str, int]) -> None:
    run = replace(GLM, compute="fp32")
    ranks = run_ranks(reported_and_real_corrections, axes, run=run) if axes else [
        reported_and_real_corrections(None, run)
    ]  # fmt: skip
    for found in ranks:
        assert any(high > 0 for _, (_, high) in found)
        for reported, real in found:
            assert reported == real
