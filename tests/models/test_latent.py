"""Multi-head latent attention: what its sizes must be, its scale, and how often its ranks
communicate."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.plan import plan
from models.attention.latent_attention import LatentAttention
from models.config import ModelConfig
from models.estimate.storage import SimulatedAxis
from parallel.activation_checkpoint import Recompute
from parallel.context import Context
from tests.refusals import raises, sentence
from tools.config.run_file import load_run

LATENT = {"kv_rank": 8, "query_rank": 10, "rope_dim": 4, "nope_dim": 6, "value_dim": 5}
SIZES: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 4, "vocab": 11}


def model(latent: dict[str, Any] = LATENT, **others: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, "latent": latent, **others})


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kv_rank": 0}, {}, sentence("model.latent_key_unused", name="query_rank", value=10)),
    ({"rope_dim": 0}, {}, sentence("model.latent_key_missing", name="rope_dim")),
    ({"nope_dim": 0}, {}, sentence("model.latent_key_missing", name="nope_dim")),
    ({"value_dim": 0}, {}, sentence("model.latent_key_missing", name="value_dim")),
    ({"rope_dim": 5}, {}, sentence("model.latent_rope_dim", rope_dim=5)),
    ({}, {"kv_heads": 2}, sentence("model.latent_needs", key="kv_heads", value=2, required=4)),
    ({}, {"head_dim": 12}, sentence("model.latent_needs", key="head_dim", value=12, required=10)),
    ({}, {"qk_norm": True}, sentence("model.not_beside", key="qk_norm", other="latent")),
    (
        {},
        {"positions": "learned"},
        sentence("model.latent_needs", key="positions", required='"rope"'),
    ),
    (
        {},
        {"rotary_fraction": 0.5},
        sentence("model.latent_needs", key="rotary_fraction", required="1.0"),
    ),
    ({}, {"norm": "layer"}, sentence("model.latent_needs", key="norm", required='"rms"')),
    (
        {},
        {"norm_unit_offset": True},
        sentence("model.not_beside", key="norm_unit_offset", other="latent"),
    ),
    (
        {},
        {"attention_sinks": True},
        sentence("model.not_beside", key="attention_sinks", other="latent"),
    ),
]


@pytest.mark.parametrize(("latent", "others", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_sizes_that_do_not_fit_are_refused_by_name(
    latent: dict[str, Any], others: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        model({**LATENT, **latent}, **others)


def test_a_head_is_as_wide_as_its_query_and_the_key_of_yarn_scales_scores_too() -> None:
    """softmax_scale of DeepseekV2Attention (modeling_deepseek.py): head_dim ** -0.5, times mscale
    twice."""
    assert (model().head_dim, model().attention_scalar, model().rotary_dims) == (10, 10.0, 4)
    scaling = {
        "kind": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 8,
        "mscale_all_dim": 0.707,
    }
    mscale = 0.1 * 0.707 * math.log(40) + 1
    stretched = model(rope_scaling=scaling)
    assert stretched.attention_scalar**-0.5 == pytest.approx(10**-0.5 * mscale**2, rel=1e-14)
    plain = ModelConfig(**{**SIZES, "rope_scaling": scaling})
    assert plain.attention_scalar == plain.head_dim, "only latent attention does so"


class Counting(SimulatedAxis):
    """An axis that counts its collectives and the elements that they carry."""

    def __init__(self, size: int) -> None:
        super().__init__("tp", 0, size)
        object.__setattr__(self, "calls", Counter[str]())

    def start_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.calls[f"gather {tensor.shape[-1]}"] += 1  # type: ignore[attr-defined]
        return super().start_gather(tensor)

    def start_scatter_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.calls[f"scatter {tensor.shape[-1]}"] += 1  # type: ignore[attr-defined]
        return super().start_scatter_sum(tensor)


def test_one_collective_of_the_shared_features_leads_in_and_one_of_hidden_leads_out() -> None:
    """Under sequence parallelism, and the same in the other direction on the way back."""
    tp = Counting(2)
    config = model()
    layer = LatentAttention(config, Context(plan("fp32"), tp, sequence=True), "layers.0.attention")
    x = torch.randn(3, 1, 16, requires_grad=True)
    tables = torch.ones(6, 1, 1, 2), torch.zeros(6, 1, 1, 2)
    y = layer(x, tables, None)
    assert tp.calls == {"gather 22": 1, "scatter 16": 1}  # type: ignore[attr-defined]
    tp.calls.clear()  # type: ignore[attr-defined]
    y.sum().backward()
    assert tp.calls == {"gather 16": 1, "scatter 22": 1}  # type: ignore[attr-defined]


def test_projections_are_not_recomputed_with_scales_of_another_moment(tmp_path: Any) -> None:
    recipe = FP8Recipe(history="te")
    context = Context(
        plan("bf16", fp8=recipe), fp8=FP8State(recipe, 1), recompute=Recompute(("attention",))
    )
    with raises("model.latent_recompute"):
        LatentAttention(model(), context, "layers.0.attention")
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nlayers = 1\nhidden = 16\nheads = 4\nlatent = {kv_rank = 8, rope_dim = 4, "
        "nope_dim = 6, value_dim = 5}"
        '\n[data]\nsource = "x"\n[precision]\ncompute = "bf16"\n[fp8]\nkind = '
        '"delayed"\nhistory = "te"\n[parallel]\n'
        f'recompute = "selective"\n[train]\nfolder = "{tmp_path}/run"\n'
    )
    with raises("config.history_latent"):
        load_run(file)
