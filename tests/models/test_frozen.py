"""Frozen parameters: any layout trains what is left as a plain model with requires_grad=False and
torch's AdamW do, in float64."""

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from parallel.activation_checkpoint import Recompute
from tests import oracle
from tests.layouts import Result, Run, batches, train
from tests.models.test_parity import CLOSE, MODELS, differing

# of which nothing is left in the first stage of two, or in the last layer
FROZEN: dict[str, tuple[str, ...]] = {
    "embedding": ("embedding.*",),
    "first layers": ("embedding.*", "positions.*", "layers.0.*", "layers.1.*"),
    "last layer": ("layers.3.*", "final_norm.*"),
    "norms and biases": ("*norm*", "*.bias"),
    "feed-forward": ("*.mlp.*",),
    "attention and head": ("*.attention.*", "head.*"),
}
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one process": ((1, 1, 1), {}),
    "one process, recomputed": ((1, 1, 1), {"recompute": Recompute(fraction=1.0)}),
    "tensor 2, cut sequence": ((2, 1, 1), {"sequence": True}),
    "pipeline 2": ((1, 2, 1), {}),
    "pipeline 2, zb-v": ((1, 2, 1), {"kind": "zb-v"}),
    "pipeline 2, zb-h1": ((1, 2, 1), {"kind": "zb-h1"}),
    "data 2": ((1, 1, 2), {}),
    "data 2, all hold all": ((1, 1, 2), {"zero_size": 1}),
    "data 2, ZeRO-2": ((1, 1, 2), {"options": {"shard_gradients": True}}),
    "data 2, overlap": ((1, 1, 2), {"options": {"overlap": True}}),
    "context 2": ((1, 1, 1, 2), {}),
    "canonical": ((2, 1, 1), {"shards": 2}),
    "tensor 2, pipeline 2, data 2": ((2, 2, 2), {"sequence": True}),
}
FAMILIES = {
    name: {**MODELS[name], "layers": 4}
    for name in ("llama", "gpt2", "gpt2 without biases", "deepseek_v3", "mixtral", "qwen3_next")
}
FAMILIES["mixtral"]["experts"] = 4  # which two ranks share evenly
FROZEN_EXPERTS = {"one expert": ("*.mlp.experts.1.*",), "routers": ("*.router.*",)}
EXPERT_LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "experts over 2": ((1, 1, 2), {"expert": 2}),
    "experts over 2, tensor 2": ((2, 1, 2), {"expert": 2, "sequence": True}),
    "experts over 2, ZeRO-2": ((1, 1, 2), {"expert": 2, "options": {"shard_gradients": True}}),
}


def is_frozen(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@cache
def initial(family: str) -> dict[str, Tensor]:
    """All weights of a model as they are drawn."""
    return train(Run(FAMILIES[family], steps=0)).before


def used(family: str, frozen: str) -> tuple[str, ...]:
    """The patterns that match anything in a family."""
    names = initial(family)
    return tuple(p for p in FROZEN[frozen] if any(fnmatchcase(name, p) for name in names))


@cache
def plain(family: str, frozen: str) -> list[dict[str, Any]]:
    run = Run(FAMILIES[family])
    patterns = {**FROZEN, **FROZEN_EXPERTS}[frozen]
    weights = initial(family)
    trained = {name: w for name, w in weights.items() if not is_frozen(name, patterns)}
    others = {name: w for name, w in weights.items() if is_frozen(name, patterns)}
    return oracle.train(run.config, trained, batches(run), run.lr, run.clip, others)


def require_plain(family: str, frozen: str, result: Result) -> None:
    expected = plain(family, frozen)
    names = expected[-1]["weights"].keys()
    assert result.before.keys() == names
    for report, grads, record in zip(result.reports, result.grads, expected, strict=True):
        assert report.outcome == "applied"
        assert report.loss == pytest.approx(record["loss"], rel=CLOSE)
        assert report.grad_norm == pytest.approx(record["norm"], rel=CLOSE)
        assert grads.keys() == names
        assert report.num_zeros == sum(int((g == 0).sum()) for g in grads.values())
        assert not differing(grads, record["grads"])
    assert not differing(result.after, expected[-1]["weights"])


@pytest.mark.cases(6, sample=8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_trains_as_in_a_plain_model(family: str, frozen: str, layout: str) -> None:
    patterns = used(family, frozen)
    if not patterns:
        return  # nothing of the family has such a name
    if layout == "context 2" and "delta_net" in FAMILIES[family]:
        return  # which has no such layout
    sizes, options = LAYOUTS[layout]
    run = Run(FAMILIES[family], frozen=patterns, **options)
    require_plain(family, frozen, train(run, *sizes))


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("frozen", FROZEN_EXPERTS)
def test_experts_over_ranks_train_as_in_a_plain_model(frozen: str, layout: str) -> None:
    sizes, options = EXPERT_LAYOUTS[layout]
    run = Run(FAMILIES["mixtral"], frozen=FROZEN_EXPERTS[frozen], **options)
    require_plain("mixtral", frozen, train(run, *sizes))
