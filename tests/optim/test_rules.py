"""The laws of update rules: torch's optimizers on whole tensors, however the state is cut, and
nothing else."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.rules.torch_rule import TorchRule
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.precision.plan import LossScaling, plan
from tests.given import declare
from tests.logical import INF, SHAPES, Case, Result, Tensors, gradient, initial, results
from tests.refusals import raises, sentence

CLOSE = 1e-12
STEPS = 6
BAD = 2
RESTART = 4
CLIP = 4.0
DECAY = 0.1
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adamw", {}),
    "SGD": ("sgd", {}),
    "SGD nesterov": ("SGD", {"momentum": 0.8, "nesterov": True}),
    "SGD plain": ("sgd", {"momentum": 0.0}),
    "Adadelta": ("Adadelta", {}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "Adam": ("Adam", {"betas": (0.8, 0.99)}),
    "Adam amsgrad": ("Adam", {"amsgrad": True, "maximize": True}),
    "Adam decoupled": ("Adam", {"decoupled_weight_decay": True, "foreach": True}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"momentum_decay": 0.1}),
    "RAdam": ("RAdam", {"betas": (0.8, 0.9)}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Rprop": ("Rprop", {}),
}
DEFAULTS: dict[str, dict[str, Any]] = {"AdamW": {"betas": (0.9, 0.95)}, "SGD": {"momentum": 0.9}}
LARGE = {"Adadelta": 1.0, "Adagrad": 0.3}  # learning rates


def case(name: str) -> Case:
    return Case(
        "fp64",
        rule=RULES[name],
        clip=CLIP,
        steps=STEPS,
        bad=(BAD,),
        restart=RESTART,
        lr=LARGE.get(name, 0.01),
    )


@cache
def torchs(name: str) -> Tensors:
    """The weights after the same steps, but for the one that is skipped, by torch's own class."""
    kind = name.split()[0]
    options = RULES[name][1]
    options = DEFAULTS.get(kind, {}) | options
    weights = {n: initial(n, torch.float64) for n in SHAPES}
    decays = kind != "Rprop"
    groups = [
        {"params": [w], "weight_decay": DECAY if w.dim() >= 2 else 0.0}
        if decays
        else {"params": [w]}
        for w in weights.values()
    ]
    optimizer = getattr(torch.optim, kind)(groups, lr=LARGE.get(name, 0.01), **options)
    for step in range(STEPS):
        for n, w in weights.items():
            w.grad = gradient(n, step)
        nn.utils.clip_grad_norm_(list(weights.values()), CLIP)
        if step != BAD:
            optimizer.step()
    return weights


def require_close(ours: Result, theirs: Tensors) -> None:
    assert ours.weights.keys() == theirs.keys()
    for name, weights in theirs.items():
        torch.testing.assert_close(ours.weights[name], weights, rtol=CLOSE, atol=CLOSE, msg=name)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=str)
def test_a_rule_is_torchs_class_on_whole_tensors(axes: dict[str, int]) -> None:
    """Clipped, with a skipped step, and carried over into a new optimizer on the way."""
    names = list(RULES)[:: 3 if "tp" in axes else 1]
    for name, result in zip(names, results([case(n) for n in names], axes), strict=True):
        assert [r.outcome == "applied" for r in result.reports] == [
            step != BAD for step in range(STEPS)
        ]
        assert all(r.grad_norm > CLIP for r in result.reports if r.outcome == "applied")
        try:
            require_close(result, torchs(name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_every_class_of_torch_is_taken_or_refused() -> None:
    """So that a new one in torch is noticed."""
    kinds = {
        n
        for n, k in vars(torch.optim).items()
        if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)
    }
    taken = {name.split()[0] for name in RULES} | {"Muon"}  # tests/optim/test_muon.py
    assert kinds - taken == {"Optimizer", *REFUSED}


LION: dict[str, dict[str, Any]] = {"Lion": {}, "Lion betas": {"betas": (0.95, 0.98)}}


def lion(betas: tuple[float, float]) -> Tensors:
    """The weights after the same steps, but for the one that is skipped, by the formula of the
    paper (arXiv 2302.06675, program 1), written plainly."""
    weights = {n: initial(n, torch.float64) for n in SHAPES}
    momentum = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(STEPS):
        if step == BAD:
            continue
        gradients = {n: gradient(n, step) for n in SHAPES}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        for n, w in weights.items():
            g = gradients[n] * min(1.0, CLIP / (norm + 1e-6))
            update = torch.sign(betas[0] * momentum[n] + (1 - betas[0]) * g)
            decay = DECAY if w.dim() >= 2 else 0.0
            weights[n] = w - 0.01 * (update + decay * w)
            momentum[n] = betas[1] * momentum[n] + (1 - betas[1]) * g
    return weights


@pytest.mark.cases(2)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"shard_gradients": True}, {"shard_weights": True}], ids=str
)
def test_lion_is_its_formula_on_whole_tensors(
    axes: dict[str, int], options: dict[str, bool]
) -> None:
    """Clipped, with an overflow that must not enter the momentum, and carried over into a new
    optimizer on the way; its gradients and weights whole or shared by replicas."""
    cases = [replace(case("SGD"), rule=("lion", given), options=options) for given in LION.values()]
    for given, result in zip(LION.values(), results(cases, axes), strict=True):
        assert [r.outcome == "applied" for r in result.reports] == [
            step != BAD for step in range(STEPS)
        ]
        require_close(result, lion(given.get("betas", (0.9, 0.99))))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Adafactor": ("optimizer.torch_rule_not_elementwise", {}),
    "ASGD": ("optimizer.torch_rule_scalar_state", {"name": "eta"}),
    "LBFGS": ("optimizer.torch_rule_flat", {"error": re.compile("closure")}),
    "SparseAdam": ("optimizer.torch_rule_flat", {"error": re.compile("dense gradients")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_not_elementwise_is_refused_by_name(name: str) -> None:
    code, fields = REFUSED[name]
    with raises(code, title=re.compile(f"^optimizer torch.*{name}$"), **fields):
        rule(name)


class Made(torch.optim.Optimizer):
    """A step of a test's own. `change` makes an update of (gradient, weights)."""

    change: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda grad, weights: grad)  # type: ignore[assignment]

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["beta"]).add_(type(self).change(p.grad, p))
                p.sub_(group["lr"] * mean)


class Normalized(Made):
    change = staticmethod(lambda grad, weights: grad / (grad.norm() + 1e-6))  # type: ignore[assignment]


class ClippedByItself(Made):
    change = staticmethod(lambda grad, weights: grad / max(1.0, float(grad.norm()) / 100))  # type: ignore[assignment]


class Restless(Made):
    change = staticmethod(lambda grad, weights: grad + 1e-3)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Normalized, ClippedByItself])
def test_a_class_that_looks_at_the_whole_tensor_is_refused(kind: type[Made]) -> None:
    with pytest.raises(
        UserError, match=sentence("optimizer.torch_rule_not_elementwise", title=kind.__name__)
    ):
        TorchRule(kind)


def test_a_class_that_would_fill_padding_is_refused() -> None:
    with raises("optimizer.torch_rule_moves_zero", title=re.compile("Restless$")):
        TorchRule(Restless)


def momentum(
    made: TorchRule | SGD, steps: int, state: dict[str, Any] | None = None
) -> ParallelAMPOptimizer:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp64"), rule=made, weight_decay=0.0)
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        optimizer.all_buffers()[0].grads[:8] = 0.1
        declare(optimizer)
        optimizer.step(0.1)
    return optimizer


def test_a_class_of_ones_own_that_counts_no_steps_is_resumed() -> None:
    """Having no numbers to restore must not be taken for never having been stepped."""

    def fresh() -> TorchRule:
        return TorchRule(Made, {"beta": 0.9})

    whole = momentum(fresh(), 5).state_dict()
    resumed = momentum(fresh(), 2, momentum(fresh(), 3).state_dict()).state_dict()
    plain = momentum(SGD(0.9), 5).state_dict()
    for name in ("weight", "bias"):
        assert torch.equal(resumed["tensors"][f"weight/{name}"], whole["tensors"][f"weight/{name}"])
        torch.testing.assert_close(
            whole["tensors"][f"weight/{name}"],
            plain["tensors"][f"weight/{name}"],
            rtol=1e-13,
            atol=0,
        )


def test_averages_of_another_class_with_the_same_names_are_not_taken_for_its_own() -> None:
    """Adam counts steps itself, which our AdamW leaves to the optimizer."""
    state = momentum(AdamW(), 3).state_dict()  # type: ignore[arg-type]
    with raises("optimizer.torch_rule_state", needed="step", loaded="nothing"):
        momentum(TorchRule(torch.optim.Adam), 1, state)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "no-such-rule",
            {},
            sentence("optimizer.rule_unknown", name="no-such-rule", names="adamw, sgd, lion, muon"),
        ),
        ("Optimizer", {}, sentence("optimizer.rule_unknown", names="adamw, sgd, lion, muon")),
        (
            "adamw",
            {"beta": 1},
            sentence("optimizer.rule_options", name="adamw", option="beta", known="betas, eps"),
        ),
        (
            "adamw",
            {"betas": (0.9, 1.0)},
            sentence("optimizer.betas", betas="[0.9, 1.0]"),
        ),
        ("adamw", {"betas": (0.9,)}, sentence("optimizer.betas")),
        ("adamw", {"eps": 0.0}, sentence("optimizer.eps", eps=0.0)),
        ("sgd", {"momentum": 1.0}, sentence("optimizer.momentum", momentum=1.0)),
        ("sgd", {"momentum": 0.0, "nesterov": True}, sentence("optimizer.nesterov")),
        (
            "RAdam",
            {"lr": 1.0},
            sentence("optimizer.torch_rule_step_option", title=re.compile("RAdam"), option="lr"),
        ),
        (
            "RAdam",
            {"weight_decay": 1.0},
            sentence("optimizer.torch_rule_step_option", option="weight_decay"),
        ),
        (
            "RAdam",
            {"beta": 1.0},
            sentence(
                "optimizer.rule_options", name="RAdam", option="beta", known=re.compile("eps")
            ),
        ),
        ("RAdam", {"betas": (0.9, 2.0)}, "RAdam.*beta"),
    ],
)
def test_what_no_rule_can_be_made_of_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rule(name, options)


def test_a_nonfinite_step_moves_neither_averages_nor_scalars() -> None:
    """Skipped as the very first one, it leaves the averages for torch to begin with."""
    cases = [
        Case("fp32", rule=RULES["NAdam"], steps=n, bad=bad)
        for n, bad in ((3, (2,)), (2, ()), (1, (0,)), (0, ()))
    ]
    later, earlier, first, none = results(cases, {"dp": 2})
    for ours, theirs in ((later, earlier), (first, none)):
        assert ours.kinds.keys() == theirs.kinds.keys()
        for kind, tensors in theirs.kinds.items():
            assert all(torch.equal(ours.kinds[kind][n], values) for n, values in tensors.items()), (
                kind
            )
        assert ours.numbers == theirs.numbers
    assert earlier.numbers["rule"] == pytest.approx(
        {"step": 2.0, "mu_product": earlier.numbers["rule"]["mu_product"]}
    )
    assert INF not in earlier.numbers["rule"].values()


@pytest.mark.parametrize("name", ["AdamW", "SGD plain", "Adagrad", "Lion", "Muon"])
@pytest.mark.parametrize("canonical", [False, True])
def test_clipping_is_right_where_scale_and_clip_make_a_divisor_beyond_fp32(
    name: str, canonical: bool
) -> None:
    """Gradients of 0.5 have a norm of 4: 2**126 times 4 / 0.25 is more than FP32 holds."""
    plain, scaled = (one_clipped_step(name, scale, canonical) for scale in (1.0, 2.0**126))
    assert plain.keys() == scaled.keys()
    for kind, values in plain.items():
        assert values.count_nonzero() == values.numel()
        torch.testing.assert_close(scaled[kind], values, rtol=1e-6, atol=0.0)


def one_clipped_step(name: str, scale: float, canonical: bool) -> dict[str, Tensor]:
    """Weights and moments after a step of a matrix of zeros."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(model.weight)
    attach_whole(model)
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "Lion": ("lion", {}),
        "Muon": ("muon", {"by_adamw": []}),
        "Adagrad": ("Adagrad", {}),
    }
    kind, options = others.get(name) or RULES[name]
    optimizer = ParallelAMPOptimizer(
        [model],
        plan("fp32", LossScaling("constant", scale)),
        rule=rule(kind, options),
        clip=0.25,
        weight_decay=0.0,
        average=False,
        canonical=canonical,
    )
    (model.weight.sum() * 0.5 * optimizer.scale).backward()
    loss = torch.zeros(1)
    if canonical:
        optimizer.end_microbatch(0, 1)
    report = optimizer.step(lr=1.0, loss=loss if canonical else loss[0])
    assert report.outcome == "applied" and report.grad_norm == pytest.approx(4.0)
    return optimizer.state_dict()["tensors"]
