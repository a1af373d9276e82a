"""Modules of multi-token prediction train as a plain model with them does, in float64, in every
layout."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.precision.plan import plan
from models.attention.attention import Attention
from models.config import ModelConfig
from models.decoder.cutting import cuts
from models.decoder.mtp import PredictionModule
from models.estimate.flops import stage_costs, training_flops
from models.logical_shapes import logical_shapes
from models.parameter_counts import num_parameters
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests import oracle
from tests.layouts import (
    Recording,
    Result,
    Run,
    assemble,
    batches,
    fragments,
    make_engine,
    packings,
    share_of,
    train_all,
)
from tests.models.routers import require_routers
from tests.models.test_parity import zeros
from tests.refusals import raises, sentence

SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "ffn": 24,
    "vocab": 53,
    "max_positions": 16,
    "init_std": 0.1,
    "mtp_loss_weight": 0.7,
}
MODELS: dict[str, dict[str, Any]] = {
    "two modules": {"family": "llama", **SIZES, "kv_heads": 2, "mtp_layers": 2},
    "tied, capped and scaled": {
        "family": "gemma2",
        **SIZES,
        "kv_heads": 1,
        "window": 3,
        "mtp_layers": 2,
    },
    "latents and experts": {
        "family": "deepseek_v3",
        **SIZES,
        "latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "experts": 4,
        "dense_layers": [0],
        "shared_experts": 8,
        "router_aux_loss": 0.3,
        "init_std": 0.2,  # with smaller ones Adam magnifies rounding in gradients near zero
        "mtp_layers": 1,
    },
    "delta nets": {
        "family": "qwen3_next",
        **SIZES,
        "head_dim": 8,
        "rotary_fraction": 0.5,
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5},
        "delta_layers": [0, 2],
        "init_std": 0.2,
        "mtp_layers": 2,
    },
    "Kimi Delta Attention without positions": {
        "family": "kimi_linear",
        **SIZES,
        "latent": {"kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "delta_net": {
            "key_heads": 4,
            "value_heads": 4,
            "key_dim": 3,
            "value_dim": 5,
            "gate_rank": 2,
        },
        "delta_layers": [1, 2],
        "init_std": 0.2,
        "mtp_layers": 1,
    },
}
STEPS = 2
CLOSE = 1e-10  # relative to the largest element of a tensor


@cache
def alone(model: str) -> Result:
    """A run in one process, without ranks."""
    return trained_here(Run(MODELS[model], steps=STEPS))


def trained_here(run: Run) -> Result:
    engine = make_engine(None, run)
    optimizer = engine.optimizer
    assert isinstance(optimizer, Recording)
    before = assemble([fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])])
    shares = [
        share_of(None, batch, packing)
        for batch, packing in zip(batches(run), packings(run), strict=True)
    ]
    reports = [engine.step(share, run.lr, n) for n, share in enumerate(shares)]
    after = assemble([fragments(optimizer.all_buffers(), lambda buffer: buffer.saved()["weight"])])
    grads = [assemble([step]) for step in optimizer.seen]
    return Result(
        reports, grads, before, after, optimizer.scaler.state_dict(), optimizer.num_elements
    )


@cache
def plain(model: str) -> list[dict[str, Any]]:
    run = Run(MODELS[model], steps=STEPS)
    return oracle.train(run.config, alone(model).before, batches(run), run.lr, run.clip)


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Names of tensors that are not close, with their largest difference relative to the largest
    element."""
    apart = {
        name: ((ours[name] - t).abs().max() / t.abs().max()).item() for name, t in theirs.items()
    }
    return {name: by for name, by in apart.items() if not by <= CLOSE}


def require_plain(model: str, result: Result) -> None:
    """Losses, norms, gradients and weights of the plain model."""
    for report, grads, record in zip(result.reports, result.grads, plain(model), strict=True):
        assert report.loss == pytest.approx(record["loss"], rel=CLOSE)
        assert report.mtp_loss == pytest.approx(record["mtp_loss"], rel=CLOSE)
        assert report.grad_norm == pytest.approx(record["norm"], rel=CLOSE)
        require_routers(report, record)
        assert grads.keys() == record["grads"].keys()
        assert not (wrong := far(grads, record["grads"])), f"gradients differ: {wrong}"
        assert report.num_zeros == zeros(grads)
    after = plain(model)[-1]["weights"]
    assert not (wrong := far(result.after, after)), f"weights differ: {wrong}"


@pytest.mark.parametrize("model", MODELS)
def test_one_process_trains_the_plain_model(model: str) -> None:
    require_plain(model, alone(model))
    assert alone(model).num_elements == num_parameters(Run(MODELS[model]).config)
    assert sum(name.startswith("mtp.") for name in alone(model).after) > 10


LAYOUTS: dict[tuple[int, int, int], list[tuple[str, dict[str, Any]]]] = {  # tp, pp, dp
    (2, 2, 1): [
        ("two modules", {"sequence": True}),
        ("tied, capped and scaled", {"sequence": True, "recompute": Recompute(fraction=1.0)}),
        ("latents and experts", {}),
        (
            "latents and experts",
            {"sequence": True, "recompute": Recompute(("attention", "activation", "norm"))},
        ),
    ],
    (1, 2, 2): [
        ("two modules", {"zero_size": 2, "kind": "zb-h1"}),
        (
            "tied, capped and scaled",
            {"kind": "zb-h1", "options": {"overlap": True}, "zero_size": 2, "micro_batch": 1},
        ),
        ("latents and experts", {"expert": 2, "options": {"overlap": True}, "zero_size": 2}),
    ],
    (1, 3, 1): [
        ("two modules", {"kind": "1f1b", "micro_batch": 1}),
        ("tied, capped and scaled", {"kind": "gpipe"}),
        ("latents and experts", {"kind": "zb-h1", "micro_batch": 1}),
    ],
    (2, 1, 2): [
        ("two modules", {"sequence": True, "zero_size": 2, "options": {"overlap": True}}),
        ("latents and experts", {"sequence": True, "expert": 4, "expert_tensor": 1}),
        ("delta nets", {"sequence": True, "recompute": Recompute(fraction=1.0)}),
        ("Kimi Delta Attention without positions", {"sequence": True, "zero_size": 2}),
    ],
}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("layout", LAYOUTS, ids="tp{0[0]} pp{0[1]} dp{0[2]}".format)
def test_every_layout_trains_the_plain_model(layout: tuple[int, int, int]) -> None:
    runs = [Run(MODELS[model], steps=STEPS, **changes) for model, changes in LAYOUTS[layout]]
    for (model, _), result in zip(LAYOUTS[layout], train_all(runs, *layout), strict=True):
        require_plain(model, result)


def test_tensor_ranks_train_the_plain_model_with_the_sequence_whole_and_cut() -> None:
    run = Run(MODELS["two modules"], steps=STEPS)
    for result in train_all([run, replace(run, sequence=True)], tp=2):
        require_plain("two modules", result)


@pytest.mark.parametrize("model", ["two modules", "delta nets"])
def test_documents_predict_within_themselves(model: str) -> None:
    """Documents that are told apart have the losses and gradients that each has alone."""
    run = Run(MODELS[model], steps=1, length=16, borders=4, reset=True)
    result, ((tokens, targets, mask),), (packing,) = trained_here(run), batches(run), packings(run)
    assert mask is not None and packing.documents is not None
    w = {name: value.clone().requires_grad_() for name, value in result.before.items()}
    own = torch.zeros(())
    further = [torch.zeros(()), torch.zeros(())]
    counts = [0.0, 0.0]
    for row, documents in enumerate(packing.documents):
        for number in documents.unique():
            at = (documents == number).nonzero()[:, 0]
            some, wanted, counted = (x[row, at][None] for x in (tokens, targets, mask))
            read = oracle.hidden(run.config, w, some, [])
            made = oracle.of_head(run.config, w, read).transpose(1, 2)
            own = (
                own
                + (
                    torch.nn.functional.cross_entropy(made, wanted, reduction="none") * counted
                ).sum()
            )
            for k, each in enumerate(oracle.ahead(run.config, w, read, some, wanted, [])):
                further[k] = further[k] + (each * counted[:, k + 1 :]).sum()
                counts[k] += counted[:, k + 1 :].sum().item()
    ahead = (
        sum((total / count for total, count in zip(further, counts, strict=True)), torch.zeros(()))
        / 2
    )
    (own / mask.sum() + run.config.mtp_loss_weight * ahead).backward()
    assert result.reports[0].mtp_loss == pytest.approx(ahead.item(), rel=CLOSE)
    assert not (
        wrong := far(result.grads[0], {name: p.grad for name, p in w.items() if p.grad is not None})
    ), wrong


CUT: dict[tuple[int, int, int, int], list[Run]] = {  # tp, pp, dp, cp
    (1, 2, 1, 2): [
        Run(
            MODELS["two modules"],
            length=16,
            borders=3,
            reset=True,
            recompute=Recompute(fraction=1.0),
        ),
        Run(MODELS["latents and experts"], length=16, expert=2, ring=False),
        Run(MODELS["delta nets"], length=16, borders=3, reset=True),
        Run(
            MODELS["Kimi Delta Attention without positions"],
            length=16,
            recompute=Recompute(("attention",)),
        ),
    ],
    (2, 1, 1, 2): [Run(MODELS["two modules"], length=16, sequence=True, zero_size=2)],
    (1, 2, 1, 1): [
        Run(MODELS["two modules"] | {"layers": 4}, kind="interleaved", chunks=2),
        Run(
            MODELS["two modules"] | {"layers": 4},
            kind="zb-v",
            micro_batch=1,
            options={"overlap": True},
        ),
        Run(
            MODELS["tied, capped and scaled"] | {"layers": 4},
            kind="zb-v",
            micro_batch=1,
            options={"overlap": True},
        ),
        Run(
            MODELS["two modules"] | {"mtp_layers": 1, "dropout": 0.2},
            recompute=Recompute(fraction=1.0),
        ),
    ],
}


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("layout", CUT, ids="tp{0[0]} pp{0[1]} dp{0[2]} cp{0[3]}".format)
def test_further_layouts_train_what_one_process_trains(layout: tuple[int, int, int, int]) -> None:
    runs = [replace(run, steps=STEPS) for run in CUT[layout]]
    for run, result in zip(runs, train_all(runs, *layout), strict=True):
        one = trained_here(
            replace(
                run,
                kind="1f1b",
                chunks=0,
                expert=1,
                zero_size=0,
                sequence=False,
                recompute=Recompute(),
            )
        )
        assert [r.mtp_loss for r in result.reports] == pytest.approx(
            [r.mtp_loss for r in one.reports], rel=CLOSE
        )
        assert [r.loss for r in result.reports] == pytest.approx(
            [r.loss for r in one.reports], rel=CLOSE
        )
        assert not (wrong := far(result.after, one.after)), wrong


def test_what_a_model_with_modules_cannot_have_is_refused_by_name() -> None:
    hybrid = {"family": "nemotron_h", **SIZES, "layers": 2, "hybrid_pattern": "*-"}
    assert ModelConfig(**hybrid)
    with pytest.raises(ValueError, match=sentence("model.hybrid_mtp", mtp_layers=1, last="-")):
        ModelConfig(**hybrid, mtp_layers=1)
    for wrong, said in (
        (
            {"positions": "learned"},
            sentence("model.mtp_positions", mtp_layers=1, positions="learned"),
        ),
        (
            {"factory": "mine.py:build"},
            sentence("model.mtp_factory", mtp_layers=1, factory="mine.py:build"),
        ),
    ):
        with pytest.raises(ValueError, match=said):  # pydantic's, of the problems
            ModelConfig(**{"family": "llama", **SIZES, "mtp_layers": 1, **wrong})
    with raises("model.mtp_virtual_ranks", mtp_layers=2):
        make_engine(None, Run(MODELS["two modules"], shards=2))


def test_counts_and_tables_know_the_modules() -> None:
    for model in MODELS:
        config = Run(MODELS[model]).config
        shapes = {n: tuple(t.shape) for n, t in alone(model).after.items()}
        assert logical_shapes(config) == shapes
        stages = cuts(config, 2, 16)
        costs = stage_costs(config, stages, 16, 2)
        # a tied head is counted where it is
        table = config.vocab * config.hidden if config.tied else 0
        assert sum(cost.parameters for cost in costs) == num_parameters(config) + table
        assert 3 * sum(cost.forward for cost in costs) == 2 * 16 * training_flops(config, 16)
        assert config.mtp_flops(16) > config.mtp_layers * config.head_flops()


def test_modules_take_layers_off_the_last_stage() -> None:
    sizes = {**SIZES, "layers": 8, "family": "llama"}
    counts = [
        [len(cut.layers) for cut in cuts(ModelConfig(**sizes, mtp_layers=n), 2, 16)] for n in (0, 2)
    ]
    # each module is as much work as a layer, a head and a projection
    assert counts == [
        [4, 4],
        [6, 2],
    ]


def test_a_module_costs_a_layer_a_head_and_the_product_of_two_rows_side_by_side() -> None:
    """As many FLOPs as two for each element of these weights, and those of attention."""
    config = ModelConfig(family="llama", **SIZES, kv_heads=2, mtp_layers=2)
    side_by_side = 2 * config.hidden
    product = 2 * config.hidden * side_by_side
    of_one = config.layer_flops(16) + config.head_flops() + product
    assert config.mtp_flops(16) == 2 * of_one


@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_modules_layer_has_the_window_of_the_models_last_one(is_windowed: bool) -> None:
    layers = SIZES["layers"]
    windowed = layers - 1 if is_windowed else 0
    config = ModelConfig(family="llama", **SIZES, mtp_layers=1, window=4, window_layers=(windowed,))
    module = PredictionModule(config, Context(plan("fp32")), 0, Attention, recompute_layer=False)
    (attention,) = (each for each in module.modules() if isinstance(each, Attention))
    assert attention.config.window == (4 if is_windowed else 0)
