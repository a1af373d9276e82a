"""The laws of muP: training is that of the published rules, written with multipliers in the forward
pass, in every layout; and at the base width it is training without muP, bit for bit."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megaprec.comm.layout import Growth, Layout, Part, attach, layout_of
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.param_groups import Group, factors
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.precision.plan import plan
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from parallel.context import Context
from tests import oracle
from tests.layouts import Result, Run, batches, train_all
from tests.models.test_mtp import trained_here
from tests.models.test_parity import differing
from tests.refusals import raises, shows

SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "ffn": 24,
    "vocab": 53,
    "max_positions": 10,
    "init_std": 0.2,
    "mup_base_hidden": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **SIZES, "kv_heads": 2},
    # growth 2 from a head of half the width, whose factor of scores is not the usual one
    "qwen2 wide heads": {
        "family": "qwen2",
        **SIZES,
        "mup_base_hidden": 8,
        "mup_base_head_dim": 2,
    },
    "gpt2 tied": {"family": "gpt2", **SIZES},
    # tied, with norms of 1 + weight, and embeddings that are multiplied by the root of hidden
    "gemma3": {"family": "gemma3", **SIZES, "attention_scalar": 7.0},
    # a growth that is no power of two
    "mtp": {
        "family": "llama",
        **SIZES,
        "hidden": 12,
        "heads": 6,
        "mtp_layers": 1,
    },
    "glm4_moe": {
        "family": "glm4_moe",
        **SIZES,
        "experts": 4,
        "dense_layers": [0],
        "dense_ffn": 32,
        "shared_experts": 8,
        "shared_gate": True,
        "router_aux_loss": 0.5,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        **SIZES,
        "latent": {"query_rank": 8, "kv_rank": 12, "rope_dim": 4, "nope_dim": 3, "value_dim": 5},
    },
}
STEPS = 3
READOUTS = ("head.weight", "router.weight", "shared_gate.weight")


def growth(config: ModelConfig) -> float:
    return config.hidden / config.mup_base_hidden


def multiplier(config: ModelConfig, name: str) -> float:
    """What the published rules multiply a tensor by behind its use, which is part of our values.

    A tied head, the final norm and Gemma's embedding are `used` in another way.
    """
    if name.endswith(READOUTS):
        return 1 / growth(config)
    is_gemma = config.family == "gemma3"
    if name == "embedding.weight" and is_gemma:
        return growth(config) ** -0.5
    if name.startswith("final_norm.") and config.tied:
        return growth(config) ** (-0.5 if is_gemma else -1)
    return 1.0


def to_published(config: ModelConfig, ours: Mapping[str, Tensor]) -> oracle.Weights:
    """Our weights as those of the published form."""
    theirs: oracle.Weights = {}
    for name, values in ours.items():
        offset = 1.0 if config.norm_unit_offset and name == "final_norm.weight" else 0.0
        theirs[name] = (values + offset) / multiplier(config, name) - offset
    return theirs


def used(config: ModelConfig, w: Mapping[str, Tensor]) -> oracle.Weights:
    """The values that a plain model without a tied head computes with: multipliers are applied."""
    values = dict(w)
    for name, weight in w.items():
        if name.endswith(READOUTS):
            values[name] = weight / growth(config)
    if config.tied:
        values["head.weight"] = w["embedding.weight"] / growth(config)
    if config.family == "gemma3":
        # the embedding's factor is that of the base model at all widths
        base_scale = config.mup_base_hidden**0.5
        values["embedding.weight"] = w["embedding.weight"] * (base_scale / config.embedding_scale)
    return values


def plain_training(run: Run, before: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Training by table 8 of "Tensor Programs V", with torch's AdamW: one record for each step."""
    config = run.config
    m = growth(config)
    w = {name: values.clone().requires_grad_() for name, values in before.items()}
    untied = config.model_copy(update={"tied": False})
    trained = [name for name in w if not name.endswith(".correction")]
    groups = []
    for name in trained:
        is_matrix = w[name].dim() >= 2
        is_hidden = is_matrix and not name.endswith((*READOUTS, "embedding.weight"))
        is_hidden &= name != "positions.weight"
        rate = run.lr / m if is_hidden else run.lr
        # rate times decay is the same for all
        decay = 0.1 * run.lr / rate if is_matrix else 0.0
        groups.append({"params": [w[name]], "lr": rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8 / m, foreach=False)
    records = []
    for tokens, targets, mask in batches(run):
        for parameter in w.values():
            parameter.grad = None
        losses = oracle.mean_loss(untied, used(config, w), tokens, targets, mask)
        (losses[0] + losses[1] + config.mtp_loss_weight * losses[2]).backward()
        norm = torch.nn.utils.clip_grad_norm_([w[name] for name in trained], run.clip)
        optimizer.step()
        balance(config, w)
        weights = {name: values.detach().clone() for name, values in w.items()}
        records.append({"loss": losses[0].item(), "norm": norm.item(), "weights": weights})
    return records


def balance(config: ModelConfig, w: oracle.Weights) -> None:
    for name, values in w.items():
        if name.endswith(".correction"):
            counts = values.grad
            assert counts is not None
            values.data += config.router_correction_speed * (counts.mean() - counts).sign()


def run_of(model: str, **changes: Any) -> Run:
    return Run(MODELS[model], steps=STEPS, clip=0.05, **changes)


@cache
def alone(model: str) -> Result:
    return trained_here(run_of(model))


@cache
def expected(model: str) -> list[dict[str, Any]]:
    run = run_of(model)
    return plain_training(run, to_published(run.config, alone(model).before))


def require_published(model: str, result: Result) -> None:
    config = run_of(model).config
    for report, record in zip(result.reports, expected(model), strict=True):
        assert report.loss == pytest.approx(record["loss"], rel=1e-10)
        assert report.grad_norm == pytest.approx(record["norm"], rel=1e-10)
    assert result.reports[0].grad_norm > run_of(model).clip, "nothing was clipped"
    after = to_published(config, result.after)
    assert not (wrong := differing(after, expected(model)[-1]["weights"])), wrong


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_the_published_rules(model: str) -> None:
    require_published(model, alone(model))


LAYOUTS: dict[tuple[int, int, int, int], list[tuple[str, dict[str, Any]]]] = {  # tp, pp, dp, cp
    (2, 2, 1, 1): [
        ("llama", {"sequence": True}),
        ("gpt2 tied", {}),
        ("gemma3", {"sequence": True}),
        ("mtp", {}),
        ("deepseek_v3", {"sequence": True}),
    ],
    (1, 1, 2, 2): [("llama", {"zero_size": 4}), ("glm4_moe", {"expert": 2})],
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS, ids="tp{0[0]} pp{0[1]} dp{0[2]} cp{0[3]}".format)
def test_every_layout_trains_by_them(layout: tuple[int, int, int, int]) -> None:
    runs = [run_of(model, **changes) for model, changes in LAYOUTS[layout]]
    for (model, _), result in zip(LAYOUTS[layout], train_all(runs, *layout), strict=True):
        require_published(model, result)


def test_canonical_bits_are_those_of_one_process() -> None:
    run = Run(MODELS["gpt2 tied"], compute="fp32", shards=2, steps=2)
    (cut,) = train_all([run], 2)
    whole = trained_here(run)
    assert all(torch.equal(cut.after[name], weight) for name, weight in whole.after.items())


@pytest.mark.parametrize("model", ["llama", "gemma3", "glm4_moe"])
def test_at_the_base_width_all_bits_are_those_without_mup(model: str) -> None:
    sizes = MODELS[model]
    with_mup = Run({**sizes, "mup_base_hidden": 16, "mup_base_head_dim": 0}, compute="bf16")
    without = Run({**sizes, "mup_base_hidden": 0, "mup_base_head_dim": 0}, compute="bf16")
    first = trained_here(with_mup)
    second = trained_here(without)
    assert str(first.reports) == str(second.reports)
    assert first.after.keys() == second.after.keys()
    assert all(torch.equal(first.after[name], weight) for name, weight in second.after.items())


def stage_of(model: Mapping[str, Any]) -> Stage:
    config = ModelConfig(**model)
    whole = Cut(0, range(config.layers), first=True, last=True)
    return Stage(config, Context(plan("fp32"), seed=3), whole)


def standard_deviations(model: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for parameter in stage_of(model).parameters():
        layout = layout_of(parameter)
        for part, start, stop in layout.spans():
            found[part.name] = parameter.flatten()[start:stop].std().item()
    return found


def test_initial_weights_have_the_published_deviations() -> None:
    """Of the base model for what is looked up, by the root of the growth for hidden matrices, by
    the growth for what makes logits."""
    wide = {**MODELS["glm4_moe"], "hidden": 256, "ffn": 256, "heads": 8, "mup_base_hidden": 16}
    wide |= {"dense_ffn": 256, "shared_experts": 64}
    found = standard_deviations(wide)
    without = standard_deviations({**wide, "mup_base_hidden": 0})
    factors_found = {name: found[name] / std for name, std in without.items() if std > 0}
    for name, factor in factors_found.items():
        if name == "embedding.weight":
            assert factor == 1
        elif name.endswith(READOUTS):
            assert factor == pytest.approx(1 / 16, rel=1e-5)
        else:
            assert factor == pytest.approx(1 / 4, rel=1e-5), name
    assert len(factors_found) > 20


def test_groups_of_the_user_multiply_the_factors_of_mup() -> None:
    part = Part("layers.0.mlp.up.weight", (64, 32), growth=Growth(4.0, 4.0))
    assert factors(part, ()) == (0.25, 4.0)
    assert factors(part, (Group("*.up.*", lr=0.5, weight_decay=0.1),)) == (0.125, 0.4)
    assert factors(part, (Group("*.up.*", weight_decay=0.0),)) == (0.25, 0.0)


@pytest.mark.parametrize("scale", ["moonshot", "keller-jordan"])
@pytest.mark.parametrize(
    ("shape", "grown", "spectral"),
    [
        ((24, 16), Growth(4.0, 4.0), 1.0),
        ((16, 24), Growth(4.0, 4.0), 1.0),
        ((5, 16), Growth(4.0, 1.0), 0.5),  # a router: its update shrinks with its inputs
    ],
)
def test_an_update_of_muon_has_the_spectral_norm_of_the_base_model_by_the_growths(
    scale: Any, shape: tuple[int, int], grown: Growth, spectral: float
) -> None:
    rule = Muon(scale=scale)
    name = "layers.0.mlp.router.weight"
    base = Part(name, shape)
    wide_shape = (int(shape[0] * grown.outputs), int(shape[1] * grown.inputs))
    wide = Part(name, wide_shape, growth=grown)
    # an orthogonalized matrix has singular values of 1
    norms = [factors(part, (), rule).lr * rule.factor(part.shape) for part in (base, wide)]
    assert norms[1] / norms[0] == pytest.approx(spectral)
    for part in (base, wide):
        of_part = factors(part, (), rule)
        assert of_part.lr * of_part.weight_decay == pytest.approx(1.0)


def optimizer_of(rule: Any) -> ParallelAMPOptimizer:
    return ParallelAMPOptimizer([stage_of(MODELS["llama"])], plan("fp32"), rule=rule)


def test_epsilon_shrinks_as_gradients_do() -> None:
    adamw = optimizer_of(AdamW(eps=1e-6)).rule
    assert isinstance(adamw, AdamW) and adamw.eps == 2.5e-7
    muon = optimizer_of(Muon(adamw=AdamW(eps=1e-6))).rule
    assert isinstance(muon, Muon) and muon.adamw.eps == 2.5e-7


def test_rules_without_known_factors_are_refused() -> None:
    with raises("optimizer.mup_rule", rule="SGD"):
        optimizer_of(SGD())
    with raises("optimizer.mup_muon_embedding", name="embedding.weight"):
        optimizer_of(Muon(by_adamw=()))


def test_a_model_of_ones_own_grows_if_its_layouts_say_so() -> None:
    """An optimizer reads the growth where it is noted: in the layout of a parameter."""
    net = nn.Linear(8, 8, bias=False)
    part = Part("weight", (8, 8), growth=Growth(2.0, 2.0))
    assert isinstance(net.weight, nn.Parameter)
    attach(net.weight, Layout((part,)))
    before = net.weight.detach().clone()
    optimizer = ParallelAMPOptimizer([net], plan("fp32"), weight_decay=0.0)
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step(0.1)
    torch.testing.assert_close(net.weight, before - 0.05)


@pytest.mark.parametrize(
    ("changes", "said", "fields"),
    [
        ({"tied": True, "mtp_layers": 1}, "model.mup_tied_mtp", {"base": 4, "mtp_layers": 1}),
        (
            {"mup_base_hidden": 0, "mup_base_head_dim": 4},
            "model.mup_base_head_dim_unused",
            {"value": 4},
        ),
        (
            {"mup_base_head_dim": 2, "attention_scalar": 4.0},
            "model.mup_attention_scalar",
            {"value": 4.0, "base": 2, "scalar": 8.0},
        ),
        (
            {"ffn": 26},
            "model.mup_width",
            {"key": "ffn", "value": 26, "base": 4, "factor": 4, "nearest": "24 or 28"},
        ),
        ({"factory": "mine.py:build"}, "model.mup_factory", {"factory": "mine.py:build"}),
    ],
)
def test_what_mup_does_not_cover_is_refused_by_name(
    changes: dict[str, Any], said: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as refused:
        ModelConfig(**{**MODELS["llama"], **changes})
    assert shows(str(refused.value), said, **fields), str(refused.value)
