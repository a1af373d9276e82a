"""The laws of Muon head by head: a plain loop over the heads of each projection, in every layout."""

from typing import Any

import pytest
import torch
from torch import nn

from megaprec.comm.layout import Growth, Layout, Part, attach, attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.width import require_width_factors
from megaprec.precision.plan import plan
from tests.layouts import Result, Run, train_all
from tests.optim.plain_muon import Tensors, plain
from tests.ranks import run_ranks
from tests.refusals import raises

CLOSE = 1e-12
RULE = Muon(per_head=True)
SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 37}
GROUPED = {"family": "llama", **SIZES, "kv_heads": 2}
LATENT = {"kv_rank": 10, "rope_dim": 2, "nope_dim": 4, "value_dim": 6}
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6}
ATTENTION = {"query": 4, "key": 2, "value": 2}
# a model, and the heads that its projections have by the definition of its layers
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "grouped": (GROUPED, {f"attention.{kind}": heads for kind, heads in ATTENTION.items()}),
    "gated, with bias": (
        {**GROUPED, "attention_gate": True, "qkv_bias": True, "head_dim": 6},
        {f"attention.{kind}": heads for kind, heads in {**ATTENTION, "gate": 4}.items()},
    ),
    "experts": (
        {**GROUPED, "family": "mixtral", "experts": 4},
        {f"attention.{kind}": heads for kind, heads in ATTENTION.items()},
    ),
    "latents": (
        {"family": "deepseek_v3", **SIZES, "latent": {**LATENT, "query_rank": 8}},
        {"attention.query_up": 4, "attention.key_up": 4, "attention.value_up": 4},
    ),
    "queries without a latent": (
        {"family": "deepseek_v2", **SIZES, "latent": LATENT},
        {"attention.query": 4, "attention.key_up": 4, "attention.value_up": 4},
    ),
    "delta net": (
        {**GROUPED, "family": "qwen3", "delta_net": DELTA, "delta_layers": (0,)},
        {f"attention.{kind}": heads for kind, heads in ATTENTION.items()}
        | {f"delta_net.{kind}": 2 for kind in ("query", "key")}
        | {f"delta_net.{kind}": 4 for kind in ("value", "gate")},
    ),
    "Kimi Delta Attention": (
        {**GROUPED, "family": "qwen3", "delta_layers": (0,)}
        | {"delta_net": {**DELTA, "key_heads": 4, "gate_rank": 3}},
        {f"attention.{kind}": heads for kind, heads in ATTENTION.items()}
        | {f"delta_net.{kind}": 4 for kind in ("query", "key", "value", "gate_up", "decay_up")},
    ),
}
ZERO = {"ZeRO-1": {}, "ZeRO-2": {"shard_gradients": True}, "ZeRO-3": {"shard_weights": True}}


def heads_of(model: str, names: Tensors) -> dict[str, int]:
    """The heads of the weights of a model, by logical name."""
    by_ending = MODELS[model][1]
    heads: dict[str, int] = {}
    for ending, count in by_ending.items():
        matches = [name for name in names if name.endswith(f"{ending}.weight")]
        assert matches, ending
        heads |= dict.fromkeys(matches, count)
    return heads


def require_plain(model: str, run: Run, result: Result) -> None:
    """The weights are those of the plain loop with the gradients of the steps that were applied."""
    applied = [report.outcome == "applied" for report in result.reports]
    grads = [step for step, was_applied in zip(result.grads, applied, strict=True) if was_applied]
    heads = heads_of(model, result.before)
    expected = plain(result.before, grads, RULE, run.lr, heads=heads)
    for name, weight in expected.items():
        error = float((result.after[name] - weight).abs().max())
        assert error <= CLOSE, (model, name, error)


@pytest.mark.cases(0, 1, sample=1)
@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)],
    ids=str,
)
def test_each_head_is_updated_by_itself_in_every_layout(tp: int, pp: int, dp: int) -> None:
    """Grouped and gated attention, latents, delta nets; heads that tensor-parallel ranks share,
    replicas that cut a head in two."""
    runs = [Run(model, options={"rule": RULE}, clip=0.0) for model, _ in MODELS.values()]
    results = train_all(runs, tp, pp, dp)
    for name, run, result in zip(MODELS, runs, results, strict=True):
        assert all(report.outcome == "applied" for report in result.reports)
        require_plain(name, run, result)


@pytest.mark.cases(0)
def test_a_skipped_step_and_shards_of_gradients_and_weights_change_no_head() -> None:
    model = MODELS["grouped"][0]
    runs: list[Run] = []
    for options in ZERO.values():
        whole = {"rule": RULE, **options}
        run = Run(model, options=whole, clip=0.0, steps=4, plant=(1, 1, float("inf")))
        runs.append(run)
    for run, result in zip(runs, train_all(runs, 1, 1, 2), strict=True):
        outcomes = [report.outcome for report in result.reports]
        assert outcomes.count("applied") == 3, outcomes
        require_plain("grouped", run, result)


def test_a_head_with_small_gradients_moves_as_far_as_the_others() -> None:
    """What the option is for: as one matrix, a head whose gradients are far smaller than those of
    others has a smaller update."""

    def moves(per_head: bool) -> list[float]:
        net = nn.Module()
        weight = nn.Parameter(torch.zeros(4 * 8, 64, dtype=torch.float64))
        net.weight = attach(weight, Layout((Part("query.weight", (32, 64), heads=4),)))
        rule = Muon(per_head=per_head, by_adamw=())
        optimizer = ParallelAMPOptimizer([net], plan("fp64"), rule=rule, clip=0.0)
        draw = torch.Generator().manual_seed(0)
        gradient = torch.randn(32, 64, generator=draw, dtype=torch.float64)
        gradient[:8] /= 10_000
        weight.grad = gradient
        optimizer.step(1e-2)
        return [float(head.norm()) for head in weight.detach().split(8)]

    by_head = moves(True)
    assert max(by_head) < 1.1 * min(by_head)
    whole = moves(False)
    assert min(whole) == whole[0] < 0.7 * min(whole[1:])


# --- what is refused


def test_heads_that_do_not_divide_the_rows_are_refused_with_the_layout() -> None:
    layout = Layout((Part("query.weight", (32, 8), heads=5),))
    with pytest.raises(ValueError, match=r"query.weight: 32 rows .* 5 heads"):
        attach(nn.Parameter(torch.zeros(32, 8)), layout)


def without_heads(mesh: Any) -> str:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    attach_whole(net)
    rule = Muon(by_adamw=("0.weight",), per_head=True)
    with pytest.raises(UserError) as raised:
        ParallelAMPOptimizer([net], plan("fp32"), mesh, rule=rule, average=False)
    return raised.value.problems[0].code


@pytest.mark.cases(0)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}], ids=str)
def test_a_model_without_heads_is_refused_on_every_rank(axes: dict[str, int]) -> None:
    codes = run_ranks(without_heads, axes) if axes else [without_heads(None)]
    assert set(codes) == {"optimizer.muon_without_heads"}


def test_growth_by_width_is_refused_with_it() -> None:
    """Of a head's own rows it is not known how they grow."""
    query = Part("query.weight", (32, 64), growth=Growth(2.0, 2.0), heads=4)
    require_width_factors(Muon(), query)
    with raises("optimizer.mup_muon_per_head"):
        require_width_factors(RULE, query)
