"""Any layout trains the same model: against a plain single-process model and torch's own AdamW, in
float64."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.layouts import COVERING, LAYOUTS, Result, Run, batches, train_all
from tests.models.routers import require_routers
from tests.other_systems import slow

SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 1,
    "ffn": 24,
    "vocab": 101,
    "max_positions": 10,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **SIZES},
    "llama tied biased": {"family": "llama", "tied": True, "bias": True, **SIZES},
    "gpt2": {"family": "gpt2", **SIZES},
    "gpt2 without biases": {"family": "gpt2", **SIZES, "bias": False, "norm_bias": False},
    "olmo2 of LayerNorms without biases": {
        "family": "olmo2",
        **SIZES,
        "norm": "layer",
        "norm_bias": False,
        "init_std": 0.1,
    },
    "gpt2 untied kv2": {"family": "gpt2", "tied": False, **SIZES, "kv_heads": 2},
    "gpt_neox qk_norm window": {
        "family": "gpt_neox",
        **SIZES,
        "head_dim": 6,
        "rotary_fraction": 0.7,
        "qk_norm": True,
        "window": 3,
        "init_std": 0.1,  # with smaller weights the norms of queries and keys magnify rounding
    },
    "olmo3 kv2": {"family": "olmo3", **SIZES, "kv_heads": 2, "window": 3, "window_layers": [0, 1]},
    "gemma3": {
        "family": "gemma3",
        **SIZES,
        "window": 3,
        "window_layers": [0, 2],
        "window_rope_base": 50.0,
        "attention_scalar": 7.0,
        "init_std": 0.1,  # as above, and so do those after the branches
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        **SIZES,
        "kv_heads": 4,
        "latent": {"query_rank": 9, "kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "window": 3,
        "bias": True,
        "init_std": 0.2,  # with smaller ones Adam magnifies rounding in gradients near zero
    },
    "deepseek_v2": {
        "family": "deepseek_v2",
        **SIZES,
        "kv_heads": 4,
        "latent": {"kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 9},
        "init_std": 0.1,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        **SIZES,
        "window": 3,
        "window_layers": [0, 2],
        "experts": 5,
        "experts_per_token": 2,
        "swiglu_limit": 0.05,
        "init_std": 0.1,
    },
    "nemotron_h with experts": {
        "family": "nemotron_h",
        **SIZES,
        "layers": 4,
        "hybrid_pattern": "ME*-",
        "mamba": {"heads": 4, "head_dim": 6, "state_dim": 5, "groups": 2},
        "experts": 4,
        "experts_per_token": 2,
        "shared_experts": 16,
        "dense_ffn": 32,
        "router_z_loss": 0.1,
        "init_std": 0.2,
    },
    "nemotron_h": {
        "family": "nemotron_h",
        **SIZES,
        "mamba": {"heads": 8, "head_dim": 3, "state_dim": 5, "groups": 4},
        "hybrid_pattern": "M*-",
        "init_std": 0.1,
    },
    "qwen3_next": {
        "family": "qwen3_next",
        **SIZES,
        "head_dim": 8,
        "rotary_fraction": 0.5,
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_dim": 3, "value_dim": 5},
        "delta_layers": [0, 2],
        "experts": 4,
        "shared_experts": 8,
        "shared_gate": True,
        "router_aux_loss": 0.5,
        "init_std": 0.1,
    },
    "kimi_linear": {
        "family": "kimi_linear",
        **SIZES,
        "kv_heads": SIZES["heads"],
        "latent": {"kv_rank": 7, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
        "delta_net": {
            "key_heads": 4,
            "value_heads": 4,
            "key_dim": 3,
            "value_dim": 5,
            "gate_rank": 2,
        },
        "delta_layers": [0, 2],
        "experts": 4,
        "shared_experts": 8,
        "router_aux_loss": 0.5,
        # Scores by a sigmoid magnify rounding by ten in a step of Adam.
        "router": {"score": "softmax"},
        "init_std": 0.1,
    },
    "mixtral": {
        "family": "mixtral",
        **SIZES,
        "experts": 5,
        "router_aux_loss": 0.5,
        "router_z_loss": 0.1,
        "z_loss": 0.03,
    },
    "glm4_moe": {
        "family": "glm4_moe",
        **SIZES,
        "experts": 8,
        "dense_layers": [1],
        "dense_ffn": 40,
        "shared_experts": 8,
        "shared_gate": True,
        "router": {"score": "sigmoid", "scale": 2.5, "correction": True}
        | {"groups": 4, "groups_per_token": 2},
        "router_correction_speed": 0.03,
        "router_aux_loss": 0.5,
        "init_std": 0.1,
    },
}
CLOSE = 1e-12  # relative to the largest element


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Names of tensors that are not close, with the median ratio of their elements: 2, 0.5 or 1.414
    tell their cause.

    Softmax does not see a bias of the keys, so its gradient is rounding noise; it is measured by
    the whole model.
    """
    largest = max(t.abs().max() for t in theirs.values())
    scale = {
        name: largest if name.endswith("key.bias") else t.abs().max() for name, t in theirs.items()
    }
    far = [
        name
        for name, t in theirs.items()
        if not (ours[name] - t).abs().max() <= CLOSE * scale[name]
    ]
    return {name: (ours[name] / theirs[name]).nanmedian().item() for name in far}


def zeros(grads: dict[str, Tensor]) -> int:
    """Elements that are zero for a reason; a noisy gradient may hit zero by chance, and counts are
    no gradients."""
    return sum(
        int((g == 0).sum())
        for name, g in grads.items()
        if not name.endswith(("key.bias", ".correction"))
    )


def approx_or_none(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=CLOSE)


def noise_zeros(grads: dict[str, Tensor]) -> int:
    return sum(int((g == 0).sum()) for name, g in grads.items() if name.endswith("key.bias"))


@cache
def trained(models: tuple[str, ...], layout: tuple[int, ...], sequence: bool) -> dict[str, Result]:
    """Each model in this layout, all in one start of the ranks."""
    runs = [Run(MODELS[model], sequence=sequence) for model in models]
    return dict(zip(models, train_all(runs, *layout), strict=True))


@cache
def alone(model: str) -> Result:
    return trained((model,), COVERING[0], False)[model]


@cache
def plain(model: str) -> list[dict[str, Any]]:
    run = Run(MODELS[model])
    return oracle.train(run.config, alone(model).before, batches(run), run.lr, run.clip)


# A sequence is cut over tp.
CUT = [
    *dict.fromkeys((layout, layout[0] > 1 and cut) for layout in LAYOUTS for cut in (False, True))
]


@pytest.mark.cases(3, sample=2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("layout", "sequence"),
    [
        *(case for case in CUT if case[0] in COVERING),
        *slow(CUT[-1]),  # all axes at once
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in CUT[:-1]
            if case[0] not in COVERING
        ),
    ],
    ids=lambda x: (
        ("whole sequence", "cut sequence")[x]
        if isinstance(x, bool)
        else "tp{} pp{} dp{}".format(*x)
    ),
)
def test_every_layout_trains_the_plain_model(
    model: str, layout: tuple[int, int, int], sequence: bool, alike: list[dict[str, Any]]
) -> None:
    models = tuple(
        case["model"] for case in alike if (case["layout"], case["sequence"]) == (layout, sequence)
    )
    require_plain_model(model, trained(models, layout, sequence)[model])


def require_plain_model(model: str, result: Result) -> None:
    expected = plain(model)
    assert result.before.keys() == alone(model).before.keys()
    for name, weight in alone(model).before.items():
        assert torch.equal(result.before[name], weight), f"{name} starts differently"
    for report, grads, record in zip(result.reports, result.grads, expected, strict=True):
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(record["loss"], rel=CLOSE)
        assert report.grad_norm == pytest.approx(record["norm"], rel=CLOSE)
        require_routers(report, record)
        assert report.z_loss == approx_or_none(record["z_loss"])
        assert report.num_zeros == zeros(grads) + noise_zeros(grads)
        assert zeros(grads) == zeros(record["grads"])
        assert not (wrong := differing(grads, record["grads"])), (
            f"gradients differ, by these ratios: {wrong}"
        )
    assert not (wrong := differing(result.after, expected[-1]["weights"])), (
        f"weights differ, by these ratios: {wrong}"
    )
    assert result.reports[0].grad_norm > Run(MODELS[model]).clip, (
        "nothing was clipped, so clipping was not tested"
    )
    assert result.reports[0].num_zeros > 0 or model in ("llama tied biased", "gemma3"), (
        "there was nothing to count"
    )
