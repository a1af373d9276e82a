"""Loops that would train another model than they say: each is refused in one line, before anything
has changed."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.checkpoint.save_load import load, save
from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim import names_elsewhere
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.lr import LRSchedule
from megaprec.optim.rules.muon.rule import Muon
from megaprec.optim.rules.param_groups import Group
from megaprec.optim.rules.torch_rule import TorchRule
from megaprec.optim.rules.update_rules import SGD, AdamW
from megaprec.optim.setting_ranges import require_settings
from megaprec.precision.names_elsewhere import PLAN
from megaprec.precision.plan import LossScaling, PrecisionPlan, plan
from parallel.context import Context
from parallel.plain_layers import CheckedPasses
from parallel.plain_modules import parallelize
from tests.ranks import run_ranks
from tests.refusals import raises, sentence, shows

Model = nn.Sequential


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def made(
    compute: str | PrecisionPlan = "fp32", model: nn.Module | None = None, **options: Any
) -> Any:
    model = model or make_model()
    attach_whole(model)
    numbers = plan(compute) if isinstance(compute, str) else compute
    options = {"lr": 0.1} | options
    return model, ParallelAMPOptimizer([model], numbers, **options)


def backward(model: nn.Module, optimizer: ParallelAMPOptimizer | None = None) -> None:
    x = torch.randn(4, 5, dtype=next(model.parameters()).dtype)
    loss = model(x).float().square().mean()
    (loss * optimizer.scale if optimizer else loss).backward()


def held(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# The model changes after the optimizer was built over it.


def freeze(model: Model) -> None:
    model[0].weight.requires_grad_(False)


def add(model: Model) -> None:
    model.append(nn.Linear(3, 3))


def replace(model: Model) -> None:
    model[2] = nn.Linear(7, 3)


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "frozen": (freeze, sentence("optimizer.frozen_later", names="0.weight")),
    "added": (add, sentence("optimizer.unfrozen_later", names="3.weight (and 1 more)")),
    "replaced": (
        replace,
        sentence("optimizer.unfrozen_later", names="2.weight (and 1 more)"),
    ),
    "removed": (
        lambda model: model.pop(2),
        sentence("optimizer.removed_later", names="2.weight (and 1 more)"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_were_frozen_or_added_or_removed_since_are_named_at_the_next_step(
    change: str,
) -> None:
    model, optimizer = made()
    backward(model)
    assert optimizer.step().outcome == "applied"
    CHANGES[change][0](model)
    if change != "removed":
        backward(model)
    before = held(model)
    with pytest.raises(UserError, match=CHANGES[change][1] + ".*build .*ParallelAMPOptimizer"):
        optimizer.step()
    assert all(map(torch.equal, held(model), before))


@pytest.mark.parametrize(
    "listed",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: [{"params": list(model.parameters())}],
        lambda model: dict(model.named_parameters()),
    ],
)
def test_parameters_in_place_of_the_model_are_refused_with_what_to_give(
    listed: Callable[[nn.Module], Any],
) -> None:
    model = nn.Linear(2, 2)
    attach_whole(model)
    with raises("optimizer.parts_no_modules"):
        ParallelAMPOptimizer(listed(model), plan("fp32"))


def test_a_parameter_that_was_frozen_at_first_and_no_longer_is_is_named() -> None:
    model = make_model()
    freeze(model)
    _, optimizer = made(model=model)
    backward(model)
    optimizer.step()
    model[0].weight.requires_grad_(True)
    backward(model)
    with raises("optimizer.unfrozen_later", names="0.weight"):
        optimizer.step()


def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def initialise(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.constant_(p, 0.5)


def initialise_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.fill_(0.5)


def point_elsewhere(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.full_like(p.data, 0.5)


def fill_a_row(model: nn.Module) -> None:
    for p in model.parameters():
        p.data[0].fill_(0.5)


def scale_down(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.99)


WRITES = [load_others, initialise, initialise_data, point_elsewhere, fill_a_row, scale_down]
PLANS_OF_WRITES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {},
    "bf16": {},
    "split": {"masters": "split"},
    "stochastic": {"rounding": "stochastic"},
    "no masters": {"masters": "none"},
}


def plan_of(mode: str) -> PrecisionPlan:
    compute = mode if mode in ("fp32", "fp16") else "bf16"
    scaling = LossScaling("constant", initial=1.0) if mode == "fp16" else None
    return plan(compute, scaling, **PLANS_OF_WRITES[mode])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", PLANS_OF_WRITES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_goes_on_from_weights_that_were_written_to(
    mode: str, write: Callable[[nn.Module], None], steps: int
) -> None:
    """As torch's optimizers do, whatever leaves a version and what does not, and in every step
    alike."""
    model, optimizer = made(plan_of(mode), rule=SGD(0.0), clip=0.0)
    for _ in range(steps):
        backward(model)
        optimizer.step()
    before = held(model)
    write(model)
    written = held(model)
    backward(model)
    grads = [p.main_grad.float().clone() for p in model.parameters()]
    optimizer.step()
    rtol = 1e-6 if mode == "fp32" else 2e-2
    atol = 1e-6 if mode == "fp32" else 2e-3
    for p, old, was, grad in zip(model.parameters(), before, written, grads, strict=True):
        decay = 1 - 0.1 * 0.1 * (p.dim() > 1)
        expected = was.float() * decay - 0.1 * grad
        torch.testing.assert_close(p.float(), expected, rtol=rtol, atol=atol)
        assert not torch.equal(old, was), "nothing was written"


def swap(model: nn.Module, others: Sequence[Tensor]) -> None:
    for p, other in zip(model.parameters(), others, strict=True):
        kept = p.detach().clone()
        with torch.no_grad():
            p.copy_(other)
        other.copy_(kept)


def point(model: nn.Module, others: list[Tensor]) -> None:
    for n, p in enumerate(model.parameters()):
        kept = p.data
        p.data = others[n]
        others[n] = kept


def load_back(model: nn.Module, others: list[Tensor]) -> None:
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(dict(zip(kept, others, strict=True)))
    others[:] = kept.values()


@pytest.mark.parametrize("exchange", [swap, point, load_back])
@pytest.mark.parametrize("mode", PLANS_OF_WRITES)
def test_weights_that_are_exchanged_for_an_average_and_put_back_lose_no_bit(
    mode: str, exchange: Callable[[nn.Module, list[Tensor]], None]
) -> None:
    """The masters of 16-bit weights have more bits than what is put back."""
    trained = []
    for evaluates in (False, True):
        model, optimizer = made(plan_of(mode))
        averages = [torch.full_like(p, 0.25) for p in model.parameters()]
        for _ in range(4):
            torch.manual_seed(1)
            backward(model)
            optimizer.step()
            if evaluates:
                exchange(model, averages)
                exchange(model, averages)
        trained.append(optimizer.state_dict()["tensors"])
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(values, trained[1][name]) for name, values in trained[0].items())


def test_an_averaged_model_of_torch_follows_and_is_swapped_in() -> None:
    model, optimizer = made("bf16")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for _ in range(3):
        backward(model)
        assert optimizer.step().outcome == "applied"
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    averaged = [p.clone() for p in model.parameters()]
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), averaged))


# A step of nothing.


def test_a_step_for_which_no_parameter_has_a_gradient_is_refused_and_changes_nothing() -> None:
    """Moments and weight decay would move the weights."""
    model, optimizer = made()
    backward(model)
    optimizer.step()
    before = held(model), optimizer.applied_steps.item()
    with pytest.raises(
        RuntimeError, match=r"^no parameter of the model has a gradient.*nothing was changed"
    ):
        optimizer.step()
    assert (all(map(torch.equal, held(model), before[0])), optimizer.applied_steps.item()) == (
        True,
        before[1],
    )
    backward(model)
    assert optimizer.step().outcome == "applied"


def test_a_loss_that_cannot_have_been_scaled_is_refused_at_the_first_step() -> None:
    model, optimizer = made("fp16")
    backward(model)
    with raises("optimizer.scale_never_read"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    for constant in (LossScaling("constant", 8.0), LossScaling("none")):  # which a loop may know
        model, optimizer = made(plan("fp16", constant))
        backward(model)
        assert optimizer.step().outcome == "applied"


# Numbers.

WRONG: dict[str, list[Any]] = {
    "lr": [math.nan, math.inf, -0.1, "0.1", True],
    "weight_decay": [math.nan, math.inf, -0.1, "0.1", True],
    "clip": [math.nan, -1.0, "1", True],
    "norm": [math.nan, 0.5, "2", True],
    "bucket": [math.nan, -1, 1.5, True],
    "zero_size": [math.nan, -1, 0.5, True],
    "seed": [math.nan, 0.5, None, True],
    # any text would count as true
    "average": ["sum", "no", 0],
    "overlap": ["no", 1],
    "canonical": ["no", 0],
}
# code of the refusal, and the field that has the value
CODES = {
    "lr": ("optimizer.rate_range", "rate"),
    "weight_decay": ("optimizer.rate_range", "rate"),
    "clip": ("optimizer.clip_range", "clip"),
    "norm": ("optimizer.norm_range", "norm"),
    "bucket": ("optimizer.count_range", "value"),
    "zero_size": ("optimizer.count_range", "value"),
    "seed": ("optimizer.seed", "seed"),
    "average": ("optimizer.switch", "value"),
    "overlap": ("optimizer.switch", "value"),
    "canonical": ("optimizer.switch", "value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_out_of_its_range_is_refused_by_name(name: str) -> None:
    code, field = CODES[name]
    named = {} if field == name else {"name": name}
    for value in WRONG[name]:
        with raises(code, **named, **{field: value}):
            made(**{name: value})


@pytest.mark.parametrize("value", WRONG["lr"])
def test_a_rate_of_a_step_is_refused_before_anything_changes(value: Any) -> None:
    """Given to the step, or put where torch's schedulers put it."""
    model, optimizer = made(lr=None)
    backward(model)
    before = held(model)
    with pytest.raises(UserError, match=sentence("optimizer.rate_range", name="lr", rate=value)):
        optimizer.step(lr=value)
    model, optimizer = made()
    backward(model)
    for key in ("lr", "weight_decay"):
        optimizer.param_groups[0][key] = value
        with pytest.raises(UserError, match=sentence("optimizer.rate_range", name=key, rate=value)):
            optimizer.step()
        optimizer.param_groups[0][key] = 0.1
    assert all(map(torch.equal, held(model), before))


class Scaled(nn.Sequential):
    """A sequence of layers with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3))
        self.gain = nn.Parameter(torch.ones(1))


def test_a_model_without_its_list_is_not_taken_for_a_list_of_its_layers() -> None:
    model = Scaled()
    attach_whole(model)
    with raises("optimizer.parts_not_listed", kind="Scaled"):
        ParallelAMPOptimizer(model, plan("fp32"))  # type: ignore[arg-type]
    listed = ParallelAMPOptimizer(nn.ModuleList([model]), plan("fp32"))  # type: ignore[arg-type]
    assert listed.num_elements == 5 * 3 + 3 + 1


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("plan", "bf16", "precision.not_a_plan"),
        ("plan", None, "precision.not_a_plan"),
        ("mesh", "cpu", "optimizer.mesh_kind"),
        ("mesh", 2, "optimizer.mesh_kind"),
        ("rule", "adamw", "optimizer.rule_kind"),
        ("rule", AdamW, "optimizer.rule_kind"),
        ("rule", torch.optim.AdamW, "optimizer.rule_kind"),
        ("rule", 0, "optimizer.rule_kind"),
        ("groups", "*.bias", "optimizer.groups_kind"),
        ("groups", [{"params": [], "lr": 0.1}], "optimizer.groups_kind"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(name: str, value: Any, code: str) -> None:
    model = make_model()
    attach_whole(model)
    before = held(model)
    with raises(code):
        ParallelAMPOptimizer([model], **{"plan": plan("fp32"), name: value})
    assert all(map(torch.equal, held(model), before))


def test_a_model_on_the_device_meta_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    attach_whole(model)
    with raises("optimizer.on_meta_device", path="weight"):
        ParallelAMPOptimizer([model], plan("fp32"))


@pytest.mark.parametrize(
    "kind", ["adam", nn.Linear, torch.optim.Adam([nn.Parameter(torch.ones(1))])]
)
def test_a_rule_of_torch_is_a_class_of_its_optimizers(kind: Any) -> None:
    with raises("optimizer.torch_rule_kind"):
        TorchRule(kind)


def test_the_pattern_of_a_group_is_text() -> None:
    pattern: Any = 3
    with raises("optimizer.group_pattern", pattern=3):
        Group(pattern, lr=2.0)


def test_groups_that_can_be_read_once_only_apply() -> None:
    groups = [Group("*.bias", lr=2.0)]
    generated: Any = (group for group in groups)
    _, optimizer = made(groups=generated)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("value", [math.nan, math.inf, True])
def test_a_number_of_a_rule_is_refused_by_name(value: float) -> None:
    rules = (
        lambda: AdamW(eps=value),
        lambda: SGD(value),
        lambda: AdamW((value, 0.9)),
        lambda: Group("*", value),
    )
    for rule in rules:
        with pytest.raises(UserError):
            rule()


PLANS: list[tuple[str, Any]] = [
    ("residual", "fp32"),
    ("keep_fp32", "0.weight"),
    ("cast_inputs", "rot"),
    ("on_nonfinite", "skp"),
    ("rounding", "nearset"),
    ("tf32", "false"),
    ("masters_in_checkpoint", "false"),
    ("remainders", 0),
    ("fp8", True),
    ("output", torch.int8),
    ("buffers", torch.float8_e4m3fn),
    ("pipeline", torch.int32),
    ("scaling", "dynamic"),
    ("keep_fp23", ("0.weight",)),
]


@pytest.mark.parametrize(("field", "value"), PLANS, ids=lambda x: str(x))
def test_a_field_of_a_plan_of_another_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"\b{field}\b"):
        plan("bf16", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "dynmic"),
        ("initial", "1024"),
        ("hysteresis", True),
        ("hysteresis", 1.5),
        ("maximum", "max"),
        ("growth_interval", 0.5),
        ("growth_factor", math.inf),
        ("hysteresis_refill", "never"),
    ],
)
def test_a_field_of_a_loss_scale_of_another_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=field):
        LossScaling(**{"kind": "dynamic", field: value})


# Arguments by the names of other systems.

ADAMW_OF_ANY: Callable[..., AdamW] = AdamW

CALLED: dict[str, tuple[Callable[..., object], Mapping[str, str]]] = {
    "ParallelAMPOptimizer": (ParallelAMPOptimizer, names_elsewhere.OPTIMIZER),
    "AdamW": (AdamW, names_elsewhere.RULE),
    "SGD": (SGD, names_elsewhere.RULE),
    "Group": (Group, names_elsewhere.GROUP),
    "LRSchedule": (LRSchedule, names_elsewhere.SCHEDULE),
    "PrecisionPlan": (PrecisionPlan, PLAN),
}


@pytest.mark.parametrize("name", CALLED)
def test_an_answer_to_the_name_of_another_system_names_an_argument_that_is_there(name: str) -> None:
    function, answers = CALLED[name]
    own = inspect.signature(function).parameters
    for answer in answers.values():
        for argument in re.findall(r"it is (\w+)=", answer):
            rules = (AdamW, SGD) if function in (AdamW, SGD) else (function,)
            assert any(argument in inspect.signature(rule).parameters for rule in rules), answer
    assert not own.keys() & answers.keys() or function in (AdamW, SGD)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_each_argument_of_torchs_optimizers_has_an_answer(kind: type) -> None:
    known = inspect.signature(ParallelAMPOptimizer).parameters
    for name in inspect.signature(kind).parameters:
        if name in known:
            continue
        with pytest.raises(TypeError, match=rf"has no argument '{name}': ") as raised:
            made("fp32", None, **{name: 1})
        assert isinstance(raised.value, UserError)


def test_arguments_of_other_systems_are_answered_with_ours() -> None:
    for call, answer in (
        (lambda: made(max_grad_norm=1.0), "'max_grad_norm': it is clip="),
        (lambda: made(learning_rate=0.1), "'learning_rate': it is lr="),
        (lambda: made(clipp=1.0), "'clipp'; did you mean clip?"),
        (lambda: ADAMW_OF_ANY(lr=0.1), "'lr': it is an argument of the optimizer"),
        (lambda: plan("bf16", grad_dtype="fp32"), "grad_dtype: it is gradients="),
    ):
        with pytest.raises(UserError, match=re.escape(answer)):
            call()


# Parameters that no step can train.


def overlapping() -> nn.Module:
    model = nn.Module()
    memory = torch.randn(8)
    model.a = nn.Parameter(memory[:6])
    model.b = nn.Parameter(memory[2:])
    return model


def seen_by_a_buffer(frozen: bool = False) -> nn.Module:
    model = nn.Linear(4, 4)
    seen = model.weight.data[:2]
    if frozen:
        model.seen = nn.Parameter(seen, requires_grad=False)
    else:
        model.register_buffer("seen", seen)
    return model


def same_names() -> nn.Module:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    attach_whole(first)
    attach_whole(second)
    return nn.ModuleList([first, second])


def inferred() -> nn.Module:
    with torch.inference_mode():
        return make_model()


def seen_by_two_buffers() -> nn.Module:
    """Of which the first one in the model is named."""
    values = torch.randn(8)
    model = with_parameter(values[4:])
    model.register_buffer("first", values)
    model.register_buffer("second", values[:])
    return model


def with_parameter(values: Tensor) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(values)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (
        lambda: with_parameter(torch.randn(3, dtype=torch.cfloat)),
        sentence("optimizer.not_real", path="w", dtype="complex64"),
    ),
    "inference": (inferred, sentence("optimizer.made_in_inference_mode", path="0.weight")),
    "views": (overlapping, sentence("optimizer.memory_of_two_parameters", second="b", first="a")),
    "seen by a buffer": (
        seen_by_a_buffer,
        sentence("optimizer.memory_of_untrained", stays="seen", moved="weight"),
    ),
    "seen by two buffers": (
        seen_by_two_buffers,
        sentence("optimizer.memory_of_untrained", stays="first", moved="w"),
    ),
    "seen by a frozen one": (
        lambda: seen_by_a_buffer(frozen=True),
        sentence("optimizer.memory_of_untrained", stays="seen"),
    ),
    "names": (
        same_names,
        sentence(
            "optimizer.name_twice",
            name="weight",
        ),
    ),
    "none": (nn.ReLU, sentence("optimizer.nothing_to_train")),
}


@pytest.mark.parametrize("which", MODELS)
def test_a_model_that_no_step_can_train_is_refused_when_the_optimizer_is_built(which: str) -> None:
    make, says = MODELS[which]
    with pytest.raises(UserError, match=says):
        made(model=make())


# States.


def state_with(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    _, optimizer = made("fp16")
    state = optimizer.state_dict()
    change(state)
    return state


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "negative steps": (lambda s: s.update(steps=-5), sentence("optimizer.state_steps", steps=-5)),
    "steps of NaN": (
        lambda s: s.update(steps=math.nan),
        sentence("optimizer.state_steps", steps=re.compile("nan")),
    ),
    "scale of NaN": (
        lambda s: s["scaler"].update(scale=math.nan),
        sentence("optimizer.state_scale", scale=re.compile("nan")),
    ),
    "integers": (
        lambda s: s["tensors"].update({"weight/2.bias": torch.ones(3, dtype=torch.int64)}),
        "weight/2.bias",
    ),
}


@pytest.mark.parametrize("which", STATES)
def test_a_state_with_a_wrong_number_is_refused_by_name_before_anything_is_loaded(
    which: str,
) -> None:
    change, says = STATES[which]
    model, optimizer = made("fp16", model=make_model(seed=1))
    before = held(model), optimizer.saved_numbers()
    with pytest.raises(UserError, match=says):
        optimizer.load_state_dict(state_with(change))
    assert (all(map(torch.equal, held(model), before[0])), optimizer.saved_numbers()) == (
        True,
        before[1],
    )


@pytest.mark.parametrize("count", [-5, -0.5])
def test_a_number_of_tokens_below_zero_is_refused_with_nothing_changed(count: float) -> None:
    model, optimizer = made("fp32")
    before = held(model), optimizer.saved_numbers()
    with raises("optimizer.counted_tokens"):
        optimizer.step(1e-2, counted_tokens=count)
    assert (all(map(torch.equal, held(model), before[0])), optimizer.saved_numbers()) == (
        True,
        before[1],
    )


# Ranks that are not alike.


def said_of(build: Callable[[], object]) -> str:
    try:
        build()
    except (UserError, RuntimeError) as error:
        return str(error)
    return ""


def unlike(mesh: DeviceMesh) -> dict[str, str]:
    rank = dist.get_rank()

    def build(model: nn.Module, compute: str = "fp32", **options: Any) -> ParallelAMPOptimizer:
        attach_whole(model)
        return ParallelAMPOptimizer(
            [model], plan(compute), mesh, **{"average": True, "lr": 0.1} | options
        )

    def step(rate: float) -> None:
        model = make_model()
        optimizer = build(model, lr=None)
        backward(model)
        optimizer.step(lr=rate)

    def no_batch() -> None:
        model = make_model()
        optimizer = build(model)
        if rank:
            backward(model)
        optimizer.step()

    def frozen(shift: float) -> nn.Module:
        model = make_model()
        model[0].get_parameter("weight").requires_grad_(False).add_(shift)
        return model

    def step_of_groups(
        key: str, values: tuple[float, float], clips: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """The first group, whose rate is in the report, is the same on both ranks."""
        optimizer = build(model := make_model())
        optimizer.param_groups[1][key] = values[rank]
        optimizer.clip = clips[rank]
        backward(model)
        optimizer.step()

    turned = ["0", "1"][:: 1 if rank else -1]
    return {
        "frozen": said_of(lambda: build(frozen(float(rank)))),
        "frozen alike": said_of(lambda: build(frozen(1.0))),
        "rate of a group": said_of(lambda: step_of_groups("lr", (0.2, 0.3))),
        "decay of a group": said_of(lambda: step_of_groups("weight_decay", (0.2, 0.3))),
        "a clip that was set": said_of(lambda: step_of_groups("lr", (0.2, 0.2), (1.0, 2.0))),
        "groups alike": said_of(lambda: step_of_groups("weight_decay", (0.2, 0.2))),
        "weights": said_of(lambda: build(make_model(seed=rank))),
        "weights without ZeRO": said_of(lambda: build(make_model(seed=rank), zero_size=1)),
        "shapes": said_of(lambda: build(nn.Linear(5, 7 + rank))),
        "order": said_of(lambda: build(nn.ModuleDict({name: nn.Linear(4, 4) for name in turned}))),
        "clip": said_of(lambda: build(make_model(), clip=float(rank))),
        "rule": said_of(lambda: build(make_model(), rule=AdamW((0.9, 0.9 + rank / 100)))),
        "plan": said_of(lambda: build(make_model(), "bf16" if rank else "fp32")),
        "rate": said_of(lambda: step(0.1 * (rank + 1))),
        "no batch": said_of(no_batch),
        "alike": said_of(lambda: build(make_model(), groups=[Group("0.*", 2.0)])),
        "a rule of torch": said_of(
            lambda: build(make_model(), rule=TorchRule(torch.optim.RAdam, {"eps": 1e-6}))
        ),
    }


def test_ranks_that_would_train_different_models_are_refused_on_every_rank() -> None:
    first, second = run_ranks(unlike, {"dp": 2})
    weights = sentence("optimizer.weights_differ", axis="dp", verb="begin with")
    must_say = {
        "weights": weights,
        "frozen": sentence(
            "optimizer.weights_differ", axis="dp", verb="begin with", name="0.weight"
        ),
        "rate of a group": "lr = 0.2, weight_decay = 0 on some ranks and lr = 0.3",
        "a clip that was set": "clip = 1.0 on some ranks and clip = 2.0 on others",
        "decay of a group": "lr = 0.1, weight_decay = 0.2 on some ranks",
        "weights without ZeRO": weights,
        "shapes": sentence(
            "optimizer.parameters_differ", mine="weight [7, 5]", theirs="weight [8, 5]"
        ),
        "order": sentence("optimizer.parameters_differ"),
        "clip": sentence("optimizer.settings_differ", name="clip", first="0.0", other="1.0"),
        "rule": sentence(
            "optimizer.settings_differ",
            name="rule",
            first="AdamW(betas=(0.9, 0.9), eps=1e-08)",
            other="AdamW(betas=(0.9, 0.91), eps=1e-08)",
        ),
        "plan": sentence("optimizer.settings_differ", name="plan.compute"),
        "rate": "learning rate",
        "no batch": "gradients are missing on some ranks",
    }
    for name, words in must_say.items():
        assert re.search(words, first[name]), name
        assert re.search(words, second[name]), name
    alike = {"alike", "a rule of torch", "frozen alike", "groups alike"}
    for name in alike:
        assert (first[name], second[name]) == ("", "")
    assert first.keys() == {*must_say, *alike}


def test_an_optimizer_is_not_built_in_inference_mode() -> None:
    model = make_model()
    with torch.inference_mode(), raises("optimizer.inference_mode"):
        made(model=model)


# Models.


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4))


def resized() -> nn.Module:
    model = nn.Linear(3, 3)
    attach_whole(model)
    model.weight.data = torch.ones(5, 3)
    return model


HELD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lazy, sentence("comm.lazy_module", name="0.weight")),
    "resized": (
        resized,
        sentence("optimizer.shape_changed", path="weight", shape="(5, 3)", expected="(3, 3)"),
    ),
}


@pytest.mark.parametrize("which", HELD)
def test_a_parameter_without_a_shape_or_of_another_than_its_layout_is_named(
    which: str,
) -> None:
    make, says = HELD[which]
    with pytest.raises(UserError, match=says):
        made(model=make())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_frozen_whole_and_complex_numbers_stay_as_they_are(compute: str, tmp_path: Path) -> None:
    """They may be indices, codes or phases, which a dtype of weights cannot hold."""
    kept = {
        "codes": torch.tensor([2**25 + 1, -3]),
        "bytes": torch.tensor([250, 1], dtype=torch.uint8),
        "mask": torch.tensor([True, False]),
        "phases": torch.tensor([1j, 2.0]),
    }

    def build(values: dict[str, Tensor]) -> Any:
        model = make_model()
        for name, value in values.items():
            model.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
        return made(compute, model)

    model, optimizer = build(kept)
    for name, value in kept.items():
        assert torch.equal(model.get_parameter(name), value)
    with raises(
        "optimizer.frozen_tensor_in_state",
        name="phases",
        obstacle=re.compile("^files hold no complex64"),
    ):
        save(tmp_path, 1, optimizer, {})
    del kept["phases"]
    _, optimizer = build(kept)
    path = save(tmp_path, 1, optimizer, {})
    other, resumed = build({name: torch.zeros_like(value) for name, value in kept.items()})
    load(path, resumed)
    for name, value in kept.items():
        assert torch.equal(other.get_parameter(name), value)


@pytest.mark.parametrize("place", [0, -1])
def test_one_number_that_was_written_through_data_counts_in_any_block(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaprec.optim.state.flat_buffer._COMPARED_ELEMENTS", 5)
    model, optimizer = made(plan("bf16"), rule=SGD(0.0), clip=0.0, weight_decay=0.0)
    weight = next(model.parameters()).data.view(-1)
    weight[place] = 64.0
    backward(model)
    optimizer.step()
    assert weight[place] > 60


@pytest.mark.parametrize(("layers", "optimizer"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_layers_and_optimizer_of_different_plans_are_refused(layers: str, optimizer: str) -> None:
    model = parallelize(make_model(), Context(plan(layers)), {"0": "column", "2": "row"})
    with raises("optimizer.plans_differ", path=0, name="compute"):
        made(optimizer, model=model)


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic"}, {"masters": "split"}], ids=str)
def test_weights_that_a_loop_clamps_after_each_step_are_clamped(options: dict[str, Any]) -> None:
    """As WGAN's loop does through `data`, which leaves no trace."""
    model, optimizer = made(plan("bf16", **options), rule=SGD(0.0), lr=0.0)
    for _ in range(5):
        backward(model)
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.01, 0.01)
    backward(model)
    optimizer.step()
    largest = 0.01 * (1 + 2**-7)  # stochastic rounding may draw the neighbour
    assert all(p.abs().amax() <= largest for p in held(model))


def test_a_step_within_autocast_is_the_step_without() -> None:
    for rule in (lambda: AdamW(), lambda: Muon(by_adamw=(), ns_dtype="fp32")):
        models = []
        for on in (False, True):
            model, optimizer = made(rule=rule())
            torch.manual_seed(1)
            backward(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                optimizer.step()
            models.append(model)
        assert all(map(torch.equal, held(models[0]), held(models[1])))


def test_parallel_layers_within_autocast_are_refused() -> None:
    model = parallelize(make_model(), Context(plan("fp32")), {"0": "column", "2": "row"})
    with (
        torch.autocast("cpu", torch.bfloat16),
        raises("parallel.autocast"),
    ):
        model(torch.randn(4, 5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def on_tensor_ranks(mesh: DeviceMesh, apart: int) -> list[str]:
    """What each of four steps says, from step `apart` on with samples of this rank's own."""
    tp = Axis.of(mesh, "tp")
    said: list[str] = []
    CheckedPasses.require_same = lambda *_: None  # type: ignore[method-assign]  # it would refuse the input before the step does
    torch.manual_seed(0)
    model = parallelize(Block(), Context(plan("fp32"), tp), {"up": "column", "down": "row"})
    optimizer = ParallelAMPOptimizer([model], plan("fp32"), mesh, lr=0.1, average=False)
    for step in range(1, 5):
        seed = step + (tp.rank * 100 if step >= apart else 0)
        x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        said.append(said_of(optimizer.step))
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("apart", [1, 3, 9])
def test_tensor_ranks_with_samples_of_their_own_are_refused_soon_and_others_never(
    apart: int,
) -> None:
    first, second = run_ranks(on_tensor_ranks, {"tp": 2}, apart=apart)
    assert first == second
    refused = [
        step
        for step, words in enumerate(first, 1)
        if shows(words, "optimizer.replicated_gradients_differ")
    ]
    assert refused == {1: [1, 2, 4], 3: [4], 9: []}[apart]
    assert all(not words for step, words in enumerate(first, 1) if step not in refused)


# Parameters of other classes, and parameters that become others.


class OwnParameter(nn.Parameter):
    """A class of a user's."""


def test_a_gradient_of_a_parameter_of_a_users_class_is_not_found_empty_either() -> None:
    model = make_model()
    model[0].weight = OwnParameter(model[0].weight.detach())  # type: ignore[arg-type]
    made(model=model)
    backward(model)
    assert isinstance(model[0].weight, OwnParameter)
    with raises("optimizer.grad_is_taken", name="0.weight"):
        nn.utils.clip_grad_norm_([model[0].weight], 1.0)


def test_parameters_that_torch_exchanges_in_place_are_refused_before_anything_changes() -> None:
    model, optimizer = made()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load_others(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    backward(model)
    with pytest.raises(RuntimeError, match=r"^0\.weight \(and 3 more\) was cast or moved after"):
        optimizer.step()


@pytest.mark.parametrize("clip", [math.nan, -1.0])
def test_a_clip_that_a_loop_sets_to_no_norm_is_refused_before_anything_changes(clip: Any) -> None:
    model, optimizer = made()
    backward(model)
    before = held(model)
    optimizer.clip = clip
    with raises("optimizer.clip_range"):
        optimizer.step()
    assert all(map(torch.equal, held(model), before))
    optimizer.clip = 1.0
    assert optimizer.step().outcome == "applied"


SETTINGS: dict[str, Any] = {
    "clip": 1.0,
    "norm": 2.0,
    "bucket": 0,
    "zero_size": 0,
    "keep_layers": 0,
    "keep_bytes": 0,
    "seed": 0,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "ema": 0.0,
}


@pytest.mark.parametrize(
    ("name", "last", "beyond"),
    [
        ("clip", 0.0, -1e-9),
        ("norm", 1.0, 0.999),
        ("bucket", 0, -1),
        ("zero_size", 0, -1),
        ("keep_layers", 0, -1),
        ("keep_bytes", 0, -1),
        ("lr", 0.0, -1e-9),
        ("weight_decay", 0.0, -1e-9),
        ("ema", 0.0, -1e-9),
        ("ema", 0.999, 1.0),
    ],
)
def test_the_end_of_a_range_belongs_to_it_and_what_is_beyond_does_not(
    name: str, last: float, beyond: float
) -> None:
    require_settings(**{**SETTINGS, name: last})
    with pytest.raises(UserError):
        require_settings(**{**SETTINGS, name: beyond})
