"""Regions: what lies between two products of a layer, traced as two whole graphs, has every bit of
its modules."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.precision.plan import plan
from models.attention.attention import Attention
from models.attention.regions import HeadRule, NormRule, add_norm, split_heads
from models.config import ModelConfig
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from models.engine.passes import Share
from parallel.activation_checkpoint import Recompute
from parallel.leaves import PLAIN, LeafCall, Leaves, call_of
from parallel.pipeline.kinds import schedule
from parallel.regions import compiled_region, trial_difference_of_region
from tests.families import CASES, config_of

FAST = ("llama", "gpt2", "qwen3", "gemma3")
RULE = NormRule(1e-5, torch.float32, torch.bfloat16)


class Graphs(Mapping[LeafCall, Any]):
    """The traced passes of every region, run operator by operator; leaves have none."""

    def __init__(self) -> None:
        self.made: dict[LeafCall, Any] = {}

    def __contains__(self, call: object) -> bool:
        return isinstance(call, LeafCall) and call.region

    def __getitem__(self, call: LeafCall) -> Any:
        if call not in self.made:
            with torch.random.fork_rng():
                self.made[call] = compiled_region(call, lambda graph, examples: graph)
        return self.made[call]

    def __iter__(self) -> Iterator[LeafCall]:
        return iter(self.made)

    def __len__(self) -> int:
        return 1


def trained(
    config: ModelConfig, leaves: Leaves, precision: str = "bf16", **more: Any
) -> list[Tensor]:
    """The losses, gradient norms and weights of two steps."""
    engine = Engine.build(
        config,
        plan(precision),
        None,
        schedule("1f1b", 1, 2),
        EngineOptions(micro_batch=2, seq_length=12, leaves=leaves, **more),
    )
    ids = torch.randint(0, config.vocab, (4, 13), generator=torch.Generator().manual_seed(0))
    reports = [engine.step(Share(ids[:, :-1], ids[:, 1:]), 1e-2, n) for n in range(2)]
    seen = [
        torch.tensor([report.loss, report.grad_norm], dtype=torch.float64) for report in reports
    ]
    return [*seen, *(p.detach() for stage in engine.stages.values() for p in stage.parameters())]


def by_region() -> tuple[Leaves, Graphs]:
    graphs = Graphs()
    return Leaves(graphs, by_region=True), graphs


@pytest.mark.cases(0, sample=2)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_model_computed_by_regions_trains_the_same_to_the_bit(name: str) -> None:
    config, (leaves, graphs) = config_of(CASES[name]), by_region()
    ours = trained(config, leaves)
    plain = trained(config, PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    used = {call.name for call in graphs.made}
    assert used == expected(config)


@pytest.mark.parametrize("name", FAST)
def test_heads_in_the_order_of_a_gpus_attention_train_the_same_to_the_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "_reads_by_head", lambda self, projected: False)
    config, (leaves, graphs) = config_of(CASES[name]), by_region()
    ours = trained(config, leaves)
    plain = trained(config, PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    rules = [call.arguments[-1] for call in graphs.made if call.name == "split heads"]
    assert rules and not any(rule.by_head for rule in rules)


def test_layer_norms_without_biases_train_the_same_to_the_bit_by_regions() -> None:
    config = config_of(CASES["gpt2"]).model_copy(update={"norm_bias": False})
    leaves, graphs = by_region()
    ours = trained(config, leaves)
    plain = trained(config, PLAIN)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert {call.name for call in graphs.made} == expected(config)


def expected(config: ModelConfig) -> set[str]:
    names = set()
    norms_all_heads = config.qk_norm and config.qk_norm_over == "all"
    makes_values = config.value_norm or config.global_key_as_value
    alone = config.latent or norms_all_heads or makes_values
    if not (alone or config.rope_scaling.query_beta):
        names.add("split heads")
    # of a layer's two branches, where it has two
    has_two_branches = not config.hybrid_pattern
    if config.norm_at != "after" and not config.parallel_residual and has_two_branches:
        names.add("add norm")
    return names


@pytest.mark.parametrize(
    "recompute",
    [Recompute(fraction=1.0), Recompute(("attention", "norm")), Recompute(("activation",))],
)
def test_regions_are_recomputed_to_the_bit(recompute: Recompute) -> None:
    config, (leaves, graphs) = config_of(CASES["llama"]), by_region()
    ours, plain = (trained(config, each, recompute=recompute) for each in (leaves, PLAIN))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert ("add norm" in {call.name for call in graphs.made}) == ("norm" not in recompute.modules)


def test_a_region_keeps_no_more_than_its_modules() -> None:
    x, branch = (torch.randn(16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    passes = compiled_region(
        call_of(add_norm, (x, branch, torch.ones(64), None, RULE)), lambda graph, _: graph
    )
    pool = ["x", "branch", "weight", "total", "normal", "1 / root mean square"]
    assert [pool[n] for n in passes.needed] == ["total", "1 / root mean square", "weight"]
    y = torch.randn(16, 2, 96, dtype=torch.bfloat16)
    table = torch.randn(16, 1, 1, 8)
    rule = HeadRule((64, 16, 16), 16, torch.bfloat16)
    passes = compiled_region(
        call_of(split_heads, (y, table, table, None, None, rule)), lambda graph, _: graph
    )
    assert [("y", "cosine", "sine")[n] for n in passes.needed] == ["cosine", "sine"]


def test_a_module_whose_result_a_hook_awaits_is_called_itself() -> None:
    config = config_of(CASES["llama"])
    seen = []
    engine = Engine.build(
        config,
        plan("fp32"),
        None,
        schedule("1f1b", 1, 1),
        EngineOptions(micro_batch=2, seq_length=12, leaves=by_region()[0]),
    )
    engine.stages[0].get_submodule("layers.1.mlp_norm").register_forward_hook(
        lambda *_: seen.append(1)
    )
    ids = torch.zeros(2, 13, dtype=torch.int64)
    engine.step(Share(ids[:, :-1], ids[:, 1:]), 1e-2, 0)
    assert seen == [1]


@pytest.mark.parametrize("wrong", ["results", "gradients"])
def test_passes_that_compute_something_else_are_found_on_trial(wrong: str) -> None:
    x, branch = (torch.randn(16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    call = call_of(add_norm, (x, branch, torch.ones(64), None, RULE), region=True)
    passes = compiled_region(call, lambda graph, _: graph)
    assert trial_difference_of_region(call, passes) == ""

    def off(*inputs: Tensor) -> tuple[Tensor, ...]:
        factor = 2.0 if wrong == "results" else 1.0
        scaled = [x * 2 if wrong == "gradients" and x.requires_grad else x for x in inputs]
        values = passes(*inputs)
        through = passes(*scaled)
        return tuple(
            v.detach() * factor + (t - t.detach()) for v, t in zip(values, through, strict=True)
        )

    assert trial_difference_of_region(call, off)
