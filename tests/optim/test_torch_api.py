"""The optimizer where a torch optimizer is expected: what loops reach for works, or is refused with
what to do."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.param_groups import Group
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.optim.torch_api import FIXED
from megaprec.precision.plan import plan
from tests.project.test_readme import ROOT
from tests.refusals import raises, sentence

LR = 0.25
STEPS = 6
GROUPS = [Group("0.bias", lr=4.0), Group("2.weight", lr=0.5)]
FACTORS = {"0.weight": 1.0, "0.bias": 4.0, "2.weight": 0.5, "2.bias": 1.0}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.5, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def made(compute: str = "fp32", **options: Any) -> tuple[nn.Sequential, ParallelAMPOptimizer]:
    model = make_model()
    attach_whole(model)
    options = {"rule": SGD(0.0), "weight_decay": 0.0, "clip": 0.0} | options
    return model, ParallelAMPOptimizer([model], plan(compute), **options)


def loss_of(model: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_change_the_rate_that_is_really_used(name: str) -> None:
    """Against torch's own SGD under the same scheduler, with a group for each factor."""
    model, optimizer = made(lr=LR, groups=GROUPS)
    theirs = make_model()
    by_factor = {
        f: [p for n, p in theirs.named_parameters() if FACTORS[n] == f] for f in (1.0, 4.0, 0.5)
    }
    torchs = torch.optim.SGD([{"params": some, "lr": LR * f} for f, some in by_factor.items()])
    ours_moves = SCHEDULERS[name](optimizer)
    theirs_moves = SCHEDULERS[name](torchs)
    rates = set()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        rates.add(report_lr := optimizer.step().lr)
        ours_moves.step()
        torchs.zero_grad()
        loss_of(theirs, step).backward()
        assert report_lr == torchs.param_groups[0]["lr"]
        torchs.step()
        theirs_moves.step()
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    assert len(rates) > 2, "the rate hardly moved"
    assert set(ours_moves.get_last_lr()) == set(theirs_moves.get_last_lr())


def sequential(o: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    )


def chained(o: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    )


ALL_OF_TORCH: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "LRScheduler": lambda o: HalvesEachStep(o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, 3),
}


class HalvesEachStep(lr_scheduler.LRScheduler):
    """A scheduler of a user's own."""

    def get_lr(self) -> list[float]:
        return [group["initial_lr"] * 0.5**self.last_epoch for group in self.optimizer.param_groups]


def test_every_scheduler_of_torch_is_among_those_that_are_tried() -> None:
    assert set(lr_scheduler.__all__) <= ALL_OF_TORCH.keys()


@pytest.mark.parametrize("name", ALL_OF_TORCH)
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (AdamW(betas=(0.9, 0.999)), lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.999))),
        (SGD(0.8), lambda groups: torch.optim.SGD(groups, momentum=0.8)),
    ],
    ids=["adamw", "sgd"],
)
def test_every_scheduler_of_torch_trains_as_with_torchs_own_optimizer(
    name: str, ours: Any, torchs: Any
) -> None:
    """Those that cycle momentum or the first beta too, beside the rate."""
    model, optimizer = made(lr=LR, rule=ours)
    theirs = make_model()
    decays = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() < 2]
    expected = torchs(
        [{"params": decays, "lr": LR, "weight_decay": 0.0}, {"params": others, "lr": LR}]
    )
    expected.param_groups[1]["weight_decay"] = 0.0
    schedulers = ALL_OF_TORCH[name](optimizer), ALL_OF_TORCH[name](expected)
    cycled = set()
    for step in range(STEPS):
        for one, now, scheduler in (
            (model, optimizer, schedulers[0]),
            (theirs, expected, schedulers[1]),
        ):
            now.zero_grad()
            loss_of(one, step).backward()
            now.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        keys = ("lr", "betas", "momentum")
        state = [
            {key: group[key] for key in keys if key in group} for group in optimizer.param_groups
        ]
        assert state == [
            {key: group[key] for key in keys if key in group} for group in expected.param_groups
        ]
        cycled.add(str(state[0].get("betas", state[0].get("momentum"))))
        for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6)
    assert (len(cycled) > 2) == (name in ("CyclicLR", "OneCycleLR"))


def test_a_cycled_momentum_goes_on_where_a_state_was_saved_and_one_that_is_not_cycled_is_the_rules() -> (
    None
):
    model, optimizer = made(lr=LR, rule=AdamW())
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.95)
    loss_of(model).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    _, resumed = made(lr=LR, rule=AdamW())
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["betas"] == (0.95, 0.95)
    _, plain = made(lr=LR, rule=AdamW(betas=(0.5, 0.6)))
    _, other = made(lr=LR, rule=AdamW())
    other.load_state_dict(plain.state_dict())
    assert other.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("betas", [(1.5, 0.9), (0.9,), "0.9", None])
def test_betas_in_a_group_that_no_rule_can_have_are_refused_before_anything_changes(
    betas: Any,
) -> None:
    model, optimizer = made(lr=LR, rule=AdamW())
    loss_of(model).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["betas"] = betas
    with raises("optimizer.betas"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_param_groups_hold_every_parameter_once_and_the_numbers_really_used() -> None:
    model, optimizer = made(lr=LR, groups=GROUPS, weight_decay=0.1)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            decays = 0.1 if p.dim() > 1 else 0.0
            assert (group["lr"], group["weight_decay"]) == (LR * FACTORS[names[id(p)]], decays)
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    optimizer.param_groups[0]["weight_decay"] = 0.5  # that of factors 1, the first weight's alone
    loss_of(model).backward()
    weight.main_grad.zero_()  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - LR * 0.5))


def test_state_goes_on_with_the_rates_it_had() -> None:
    """A scheduler that computes each rate from the last one."""

    def run(steps: range, state: Any = None) -> tuple[nn.Module, list[float], Any]:
        model, optimizer = made(lr=LR, rule=AdamW())
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        if state:
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        used = []
        for step in steps:
            loss_of(model, step).backward()
            used.append(optimizer.step().lr)
            scheduler.step()
        return model, used, copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    model, used, _ = run(range(STEPS))
    _, first, state = run(range(3))
    resumed, second, _ = run(range(3, STEPS), state)
    assert first + second == used
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_zero_grad_forgets_the_gradients_of_this_step() -> None:
    model, optimizer = made(lr=LR)
    expected, other = made(lr=LR)
    for wrong in (True, False):
        loss_of(model, 7 if wrong else 0).backward()
        if wrong:
            optimizer.zero_grad()
    loss_of(expected).backward()
    assert str(optimizer.step()) == str(other.step())
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


def unscale(optimizer: ParallelAMPOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


REACHED: dict[str, Callable[[nn.Module, ParallelAMPOptimizer], object]] = {
    "clip_grad_norm_": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "grad": lambda model, optimizer: next(model.parameters()).grad,
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "unscale_": lambda model, optimizer: unscale(optimizer),
    "another optimizer": lambda model, optimizer: torch.optim.SGD(model.parameters(), 0.1).step(),
}


@pytest.mark.parametrize("what", REACHED)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_looking_for_gradients_where_there_are_none_says_where_they_are(
    what: str, compute: str
) -> None:
    model, optimizer = made(compute, lr=LR)
    model(torch.randn(4, 5, dtype=plan(compute).compute)).square().mean().backward()
    with raises("optimizer.grad_is_taken", name="0.weight"):
        REACHED[what](model, optimizer)
    optimizer.step()
    assert next(model.parameters()).grad is None, "there is none after a step"
    model.zero_grad()


def test_torchs_scaler_is_refused_and_a_disabled_one_does_nothing() -> None:
    model, optimizer = made("fp16", lr=LR)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    scaler.scale(model(torch.randn(4, 5).half()).float().mean()).backward()
    with raises("optimizer.two_scalers"):
        scaler.step(optimizer)
    model, optimizer = made(lr=LR)
    off = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[attr-defined]
    off.scale(loss_of(model)).backward()
    report: Any = off.step(optimizer)
    assert report.outcome == "applied"


def test_the_learning_rate_is_given_in_one_place() -> None:
    _, without = made()
    _, has = made(lr=LR)
    with raises("optimizer.rate_missing"):
        lr_scheduler.StepLR(without, 1)
    with raises("optimizer.rate_missing"):
        without.step()
    with raises("optimizer.rate_twice"):
        has.step(lr=0.1)
    with raises("optimizer.rate_is_closure"):
        has.step(lambda: 1.0)  # type: ignore[arg-type]
    with raises("optimizer.groups_fixed"):
        has.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("key", "value", "lr"),
    [
        ("betas", (0.5, 0.9), None),  # beside an lr a step reads them
        ("eps", 1e-3, LR),
        ("eps", 1e-3, None),
        ("momentum", 0.5, LR),
        ("foreach", True, LR),
    ],
)
def test_an_option_of_the_rule_in_a_group_is_refused_and_no_step_is_made_without_it(
    key: str, value: Any, lr: float | None
) -> None:
    model, optimizer = made(lr=lr, rule=AdamW())
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model).backward()
    optimizer.param_groups[0][key] = value
    with pytest.raises(
        UserError,
        match=sentence("optimizer.group_option_unread", unread=re.compile(re.escape(str(key)))),
    ):
        optimizer.step(None if lr else LR)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    del optimizer.param_groups[0][key]
    optimizer.param_groups[0]["name"] = sentence("optimizer.groups_fixed")  # the caller's own
    assert optimizer.step(None if lr else LR).outcome == "applied"


def test_accelerate_is_refused_where_it_would_wrap_the_optimizer() -> None:
    """Its own code: the wrapper says of each step that it was not skipped, and its scheduler moves
    on."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = made(lr=LR)
    for prepare in (accelerator.prepare, accelerator.prepare_optimizer):
        with raises("optimizer.accelerate_prepare"):
            prepare(optimizer)
    with raises("optimizer.accelerate_prepare"):
        accelerator.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1))


def test_the_page_states_the_defaults() -> None:
    page = (ROOT / "docs" / "optimizer.md").read_text()
    defaults = {
        name: one.default
        for name, one in inspect.signature(ParallelAMPOptimizer).parameters.items()
    }
    assert f"`clip={defaults['clip']}`" in page
    assert f"`weight_decay={defaults['weight_decay']}`" in page
    assert f"`rule=AdamW(betas={AdamW().betas})`" in page
    assert f"`rule=AdamW(eps={AdamW().eps})`".replace("e-08", "e-8") in page
    torchs = inspect.signature(torch.optim.AdamW).parameters
    assert f"| {torchs['weight_decay'].default}, of all |" in page
    assert f"| {torchs['betas'].default} |" in page
    model, optimizer = made(lr=LR, rule=AdamW())
    loss_of(model).backward()
    optimizer.step()
    assert {"weight/0.weight", "exp_avg/0.weight"} <= optimizer.state_dict()["tensors"].keys()


@pytest.mark.parametrize("name", FIXED)
def test_what_an_optimizer_was_built_with_is_not_set_in_vain(name: str) -> None:
    _, optimizer = made(lr=LR)
    with pytest.raises(
        UserError,
        match=sentence("optimizer.fixed_setting", name=name),
    ):
        setattr(optimizer, name, 0.5)
    optimizer.clip = 0.5  # each step looks at it
    optimizer.mine = name  # type: ignore[attr-defined]


def test_every_argument_of_an_optimizer_is_looked_at_later_or_may_not_be_set() -> None:
    arguments = set(inspect.signature(ParallelAMPOptimizer.__init__).parameters) - {"self"}
    assert arguments - set(FIXED) == {"clip", "observers"}


def test_a_rule_that_counts_steps_is_one_optimizers_alone() -> None:
    counting = rule("RAdam")
    made(rule=counting)
    with raises("optimizer.rule_shared", kind="TorchRule"):
        made(rule=counting)
    frozen = AdamW()
    assert made(rule=frozen)[1].rule is made(rule=frozen)[1].rule, (
        "what never changes may be shared"
    )


def test_gradients_put_into_grad_by_hand_are_taken() -> None:
    model, optimizer = made(lr=LR)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    for p, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was - 2 * LR)


def test_gradients_from_before_the_optimizer_was_built_are_of_its_first_step() -> None:
    model = make_model()
    loss_of(model).backward()
    attach_whole(model)
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), lr=LR)
    norm = torch.cat([p.main_grad.flatten() for p in model.parameters()]).norm().item()  # type: ignore[union-attr]
    assert norm > 0
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(
    "change", [nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16)]
)
def test_a_model_cast_after_the_optimizer_was_built_is_refused_at_the_next_step(
    change: Callable[[nn.Module], object],
) -> None:
    model, optimizer = made(lr=LR)
    change(model)
    with pytest.raises(
        RuntimeError,
        match=re.escape("0.weight (and 3 more) was cast or moved after the optimizer"),
    ):
        optimizer.step()


def test_copies_and_compiled_models_have_ordinary_gradients_and_train() -> None:
    model, optimizer = made(lr=LR)
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    assert all(p.grad is not None for p in twin.parameters())
    compiled = torch.compile(model, backend="eager")
    loss_of(compiled).backward()
    optimizer.step()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(p, other - LR * other.grad)


def test_a_copy_of_a_trained_model_can_be_pickled_as_the_model_can() -> None:
    """As loops do that keep an average of the weights."""
    model, _ = made(lr=LR)
    for one in (model, copy.deepcopy(model)):
        again = pickle.loads(pickle.dumps(one))
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        assert {type(p) for p in again.parameters()} == {nn.Parameter}


def test_every_buffer_says_which_parameters_have_left_it() -> None:
    model, optimizer = made(lr=LR)
    assert not [name for buffer in optimizer.all_buffers() for name in buffer.reclaim_parameters()]
    weight = model.get_parameter("2.weight")
    weight.data = weight.data.clone()
    assert not [
        name for buffer in optimizer.all_buffers() for name in buffer.reclaim_parameters()
    ], "it was not moved home"
    weight.data = weight.data.half()
    assert [name for buffer in optimizer.all_buffers() for name in buffer.reclaim_parameters()] == [
        "2.weight"
    ]


@pytest.mark.slow
def test_building_and_stepping_import_no_compiler() -> None:
    """It would take every rank of a run over a second."""
    program = (
        "import sys, torch, megaprec\n"
        "model = torch.nn.Linear(2, 2)\n"
        "megaprec.attach_whole(model)\n"
        "optimizer = megaprec.ParallelAMPOptimizer([model], megaprec.plan('fp32'), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "assert optimizer.step().outcome == 'applied'\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_gradient_of_this_step_is_neither_discarded_nor_replaced_in_vain() -> None:
    """Where torch would begin anew, or take what it is given, the sum in the optimizer's memory
    goes on."""
    model, optimizer = made(lr=LR)
    weight = model.get_parameter("0.weight")
    for value in (None, torch.zeros_like(weight)):
        loss_of(model, 7).backward()
        with raises("optimizer.grad_beside_main_grad", name="0.weight"):
            weight.grad = value
        optimizer.zero_grad()
        weight.grad = value
    weight.grad = None
    expected, other = made(lr=LR)
    loss_of(expected).backward()
    loss_of(model).backward()
    assert str(optimizer.step()) == str(other.step())


def test_gradients_of_rows_alone_and_gradients_with_a_graph_are_added_as_they_are() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(6, 3, sparse=True)
    twin = nn.Embedding(6, 3)
    twin.load_state_dict(table.state_dict())
    attach_whole(table)
    optimizer = ParallelAMPOptimizer(
        [table], plan("fp32"), lr=LR, rule=SGD(0.0), weight_decay=0.0, clip=0.0
    )
    ids = torch.tensor([1, 1, 2])
    for _ in range(2):
        table(ids).square().mean().backward()
        twin(ids).square().mean().backward()
    table(ids).square().mean().backward(inputs=[table.weight])
    twin(ids).square().mean().backward(create_graph=False)
    optimizer.step()
    torch.optim.SGD(twin.parameters(), LR).step()
    torch.testing.assert_close(table.weight, twin.weight)
    model, optimizer = made(lr=LR)
    with pytest.warns(
        UserWarning, match="create_graph=True will create a reference cycle"
    ):  # torch's own
        loss_of(model).backward(create_graph=True)
    assert all(not p.main_grad.requires_grad for p in model.parameters())  # type: ignore[union-attr]


def deep(model: nn.Module, optimizer: ParallelAMPOptimizer) -> object:
    return copy.deepcopy(optimizer)


def reset(model: nn.Module, optimizer: ParallelAMPOptimizer) -> None:
    optimizer.state = {}


ELSEWHERE: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "deepcopy": (deep, sentence("optimizer.not_copyable")),
    "copy": (lambda model, optimizer: copy.copy(optimizer), sentence("optimizer.not_copyable")),
    "pickle": (
        lambda model, optimizer: pickle.dumps(optimizer),
        sentence("optimizer.not_copyable"),
    ),
    "state": (
        lambda model, optimizer: optimizer.state[model[0].weight],
        sentence("optimizer.state_not_readable"),
    ),
    "reset": (reset, sentence("optimizer.state_not_writable")),
    "hook": (
        lambda _, optimizer: optimizer.register_state_dict_pre_hook(print),
        sentence("optimizer.state_hook"),
    ),
    "hook of loading": (
        lambda _, optimizer: optimizer.register_load_state_dict_post_hook(print),
        sentence("optimizer.state_hook"),
    ),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_only_torchs_optimizers_have_is_refused_and_never_found_empty(what: str) -> None:
    reach, says = ELSEWHERE[what]
    with pytest.raises(UserError, match=says):
        reach(*made(lr=LR))


def replaced(optimizer: ParallelAMPOptimizer) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 99.0


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        lambda optimizer: optimizer.param_groups.append({"params": [], "lr": 1.0}),
        lambda optimizer: optimizer.param_groups.pop(),
        lambda optimizer: optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
        lambda optimizer: optimizer.param_groups[0]["params"].pop(),
        lambda optimizer: optimizer.param_groups[0].update(params=[nn.Parameter(torch.ones(1))]),
    ],
)
def test_groups_that_are_not_those_of_the_optimizer_are_refused_and_no_step_is_made_without_them(
    change: Callable[[ParallelAMPOptimizer], object],
) -> None:
    model, optimizer = made(lr=LR)
    loss_of(model).backward()
    change(optimizer)
    with raises("optimizer.groups_replaced"):
        optimizer.step()


def test_hooks_of_a_step_are_called() -> None:
    model, optimizer = made(lr=LR)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    loss_of(model).backward()
    optimizer.step()
    assert called == ["before", "after"]
