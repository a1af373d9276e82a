"""Wrappers for any torch module: what is cast, what is never rounded, and what comes out."""

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaprec.comm.axis import Axis
from megaprec.comm.layout import attach_whole
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.module_wrappers import (
    NaiveAMPModel,
    PlannedModel,
    mark_fp32,
    set_fp32_attr_to_module,
)
from megaprec.precision.parallel_modes import ParallelMode
from megaprec.precision.plan import LossScaling, plan
from megaprec.precision.tf32 import tf32
from tests.ranks import run_ranks
from tests.refusals import raises, sentence, shows

THIRD = 1 / 3  # no half precision has it


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Seen(nn.Module):
    """Two linear layers and buffers; keeps the dtypes of everything it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, THIRD)
        self.register_buffer("table", torch.full((3,), THIRD))
        self.register_buffer("count", torch.tensor([7]))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = [x.dtype, args, kwargs]
        return self.second(self.first(x))


class Returns(nn.Module):
    """Gives back what it is given."""

    def forward(self, value: Any) -> Any:
        return value


def test_parameters_and_floating_buffers_are_cast_and_integers_are_not() -> None:
    model = NaiveAMPModel(Seen(), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {name: b.dtype for name, b in model.named_buffers()} == {
        "model.table": torch.bfloat16,
        "model.count": torch.int64,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_part_marked_fp32_keeps_its_values_and_computes_in_fp32(dtype: torch.dtype) -> None:
    inner = Seen()
    set_fp32_attr_to_module(inner.second)
    model = NaiveAMPModel(inner, output_to_fp32=False, dtype=dtype)
    assert inner.second.weight.dtype == torch.float32
    assert torch.equal(inner.second.weight, torch.full((2, 4), THIRD))
    assert inner.first.weight.dtype == dtype
    inputs: list[torch.dtype] = []
    inner.second.register_forward_hook(
        lambda _, args, out: inputs.append(args[0].dtype) or inputs.append(out.dtype)
    )
    assert model(torch.ones(1, 4)).dtype == dtype
    assert inputs[0] == torch.float32


def test_a_whole_model_marked_fp32_is_left_as_it_is() -> None:
    inner = Seen()
    set_fp32_attr_to_module(inner)
    NaiveAMPModel(inner, dtype=torch.float16)
    assert {p.dtype for p in inner.parameters()} == {torch.float32}
    assert torch.equal(inner.table, torch.full((3,), THIRD))  # type: ignore[arg-type]


def test_a_weight_that_a_marked_part_shares_is_never_rounded() -> None:
    inner = Seen()
    inner.second = nn.Linear(4, 4)
    inner.first.weight = inner.second.weight
    value = inner.second.weight.detach().clone()
    set_fp32_attr_to_module(inner.second)
    NaiveAMPModel(inner, dtype=torch.bfloat16)
    assert torch.equal(inner.first.weight, value)


def test_inputs_are_cast_by_position_by_keyword_and_nested_but_integers_and_doubles_are_not() -> (
    None
):
    inner = Seen()
    one = torch.ones(2)
    ids = torch.tensor([1])
    NaiveAMPModel(inner, dtype=torch.float16)(
        torch.ones(1, 4), ids, [one, (one, None)], mask=one, more={"x": one, "i": ids}
    )
    x, args, kwargs = inner.seen
    assert x == torch.float16
    assert args[0].dtype == torch.int64
    assert args[1][0].dtype == args[1][1][0].dtype == torch.float16 and args[1][1][1] is None
    assert isinstance(args[1][1], tuple)
    assert kwargs["mask"].dtype == kwargs["more"]["x"].dtype == torch.float16
    assert kwargs["more"]["i"].dtype == torch.int64
    assert one.dtype == torch.float32
    passed = NaiveAMPModel(Returns(), output_to_fp32=False)(torch.ones(1, dtype=torch.float64))
    assert passed.dtype == torch.float64


@pytest.mark.parametrize(("to_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_outputs_come_back_in_the_containers_they_left_in(
    to_fp32: bool, dtype: torch.dtype
) -> None:
    model = NaiveAMPModel(Returns(), output_to_fp32=to_fp32, dtype=torch.bfloat16)
    one = torch.ones(1)
    pair = model(Pair(one, torch.tensor([2])))
    assert isinstance(pair, Pair) and (pair.left.dtype, pair.right.dtype) == (dtype, torch.int64)
    assert isinstance(model((one, one)), tuple)
    assert isinstance(model([one]), list)
    out = model({"a": (one,)})
    assert isinstance(out, dict) and out["a"][0].dtype == dtype
    assert model("text") == "text"


def test_eval_and_train_return_the_wrapper_and_set_both() -> None:
    model = NaiveAMPModel(Seen())
    assert model.eval() is model
    assert not model.training and not model.model.training
    assert model.train() is model
    assert model.training and model.model.training


def test_a_dtype_that_is_none_is_refused() -> None:
    with raises("precision.dtype_argument"):
        NaiveAMPModel(Seen(), dtype=torch.int8)


@pytest.mark.parametrize("name", ["torch.float16", "torch.half", "torch.bfloat16", "torch.float32"])
def test_a_dtype_may_be_the_string_of_a_configuration(name: str) -> None:
    """internlm/initialize/launch.py takes these four and torch.tf32."""
    model = NaiveAMPModel(Seen(), dtype=name)
    assert (
        {p.dtype for p in model.parameters()}
        == {model.dtype}
        == {getattr(torch, name.removeprefix("torch."))}
    )


def test_torch_tf32_is_fp32_and_allows_tf32() -> None:
    with tf32(False):
        model = NaiveAMPModel(Seen(), dtype="torch.tf32")
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (
            True,
            True,
        )
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["torch.bf16", "float8", 16, None, torch.float64])
def test_a_dtype_of_no_model_is_refused_in_one_line(dtype: Any) -> None:
    with raises(
        "precision.dtype_argument", strings=re.compile(r"torch\.bfloat16.*torch\.tf32")
    ) as refused:
        NaiveAMPModel(Seen(), dtype=dtype)
    assert len(refused.value.problems) == 1


def test_gradients_of_both_precisions_arrive() -> None:
    inner = Seen()
    set_fp32_attr_to_module(inner.second)
    NaiveAMPModel(inner, dtype=torch.bfloat16)(torch.ones(1, 4)).sum().backward()
    grads = [p.grad for p in inner.parameters()]
    assert [g.dtype for g in grads if g is not None] == [p.dtype for p in inner.parameters()]


def _average(mesh: DeviceMesh) -> list[list[float]]:
    """Buffers of both ranks of dp after a training pass, two passes in evaluation, and one with the
    axis tp."""
    dp = Axis.of(mesh, "dp")
    inner = Seen()
    model = NaiveAMPModel(inner, parallel_mode=dp, dtype=torch.float32)
    values = []

    def call(start: float) -> None:
        inner.table.fill_(start)  # type: ignore[operator]
        model(torch.ones(1, 4))
        values.append(inner.table[0].item())  # type: ignore[index]

    call(float(dp.rank))
    model.eval()
    call(float(dp.rank))
    call(float(dp.rank))
    model.train()
    call(float(dp.rank))
    assert inner.count.item() == 7  # type: ignore[operator]
    other = Seen()
    other.table.fill_(float(dp.rank))  # type: ignore[operator]
    NaiveAMPModel(other, parallel_mode=Axis.of(mesh, "tp"), dtype=torch.float32)(torch.ones(1, 4))
    return [values, [other.table[0].item()]]  # type: ignore[index]


def test_floating_buffers_are_averaged_over_their_axis_in_training_and_once_in_evaluation() -> None:
    for rank, (values, other) in enumerate(run_ranks(_average, {"dp": 2, "tp": 1})):
        assert values == [0.5, 0.5, float(rank), 0.5]
        assert other == [float(rank)]


class Foreign(Enum):
    """Members with names of InternEvo's modes and values of their own."""

    DATA = auto()
    TENSOR = auto()
    GLOBAL = auto()


def _mean_of_ranks(**arguments: Any) -> float:
    """What a buffer that is the rank's number comes to by one forward pass."""
    inner = Seen()
    inner.table.fill_(float(dist.get_rank()))  # type: ignore[operator]
    NaiveAMPModel(inner, dtype=torch.float32, **arguments)(torch.ones(1, 4))
    return inner.table[0].item()  # type: ignore[index]


# By what it is called: how the group is given, and the dims of the mesh that it runs along.
GROUPS: dict[str, tuple[Callable[[DeviceMesh], dict[str, Any]], tuple[str, ...]]] = {
    "default": (lambda mesh: {"mesh": mesh}, ("dp",)),
    "member": (lambda mesh: {"mesh": mesh, "parallel_mode": ParallelMode.TENSOR}, ("tp",)),
    "foreign": (lambda mesh: {"mesh": mesh, "parallel_mode": Foreign.TENSOR}, ("tp",)),
    "name": (lambda mesh: {"mesh": mesh, "parallel_mode": "PIPELINE"}, ("pp",)),
    "value": (lambda mesh: {"mesh": mesh, "parallel_mode": "pipe"}, ("pp",)),
    "dotted": (lambda mesh: {"mesh": mesh, "parallel_mode": "ParallelMode.DATA"}, ("dp",)),
    "dim of the mesh": (lambda mesh: {"mesh": mesh, "parallel_mode": "tp"}, ("tp",)),
    "model": (lambda mesh: {"mesh": mesh, "parallel_mode": ParallelMode.MODEL}, ("pp", "tp")),
    "global": (lambda mesh: {"parallel_mode": "global"}, ("pp", "dp", "tp")),
    "one dim": (lambda mesh: {"parallel_mode": mesh["dp"]}, ("dp",)),
    "process group": (lambda mesh: {"parallel_mode": mesh.get_group("tp")}, ("tp",)),
    "axis": (lambda mesh: {"parallel_mode": Axis.of(mesh, "pp")}, ("pp",)),
}


def _means(mesh: DeviceMesh) -> dict[str, float]:
    return {name: _mean_of_ranks(**arguments(mesh)) for name, (arguments, _) in GROUPS.items()}


def _refused(mesh: DeviceMesh) -> dict[str, str]:
    """The one line with which each is refused in a world that is cut; empty if it is not."""
    said = {}
    for name, arguments in {
        "default": {},
        "mesh": {"parallel_mode": mesh},
        "nameless": {"mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("all",))},
        "zero1": {"parallel_mode": "zero1", "mesh": mesh},
        "unknown": {"parallel_mode": "dataa"},
        "number": {"parallel_mode": 3},
        "off": {"sync_buffer": False},
    }.items():
        try:
            NaiveAMPModel(Seen(), **arguments)  # type: ignore[arg-type]
            said[name] = ""
        except UserError as error:
            (said[name],) = error.problems
    later = NaiveAMPModel(Seen(), sync_buffer=False)
    with pytest.raises(UserError):
        later.sync_buffer = True
    return said


@pytest.mark.parametrize("axes", [{"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}])
def test_every_way_to_name_a_group_averages_over_that_group(axes: dict[str, int]) -> None:
    sizes = [axes.get(name, 1) for name in ("pp", "dp", "tp")]
    ranks = torch.arange(4.0).view(sizes)
    for rank, found in enumerate(run_ranks(_means, axes)):
        for name, (_, dims) in GROUPS.items():
            mean = ranks.mean([("pp", "dp", "tp").index(dim) for dim in dims], keepdim=True)
            assert found[name] == mean.expand_as(ranks).flatten()[rank].item(), name


def test_a_group_that_cannot_be_known_is_refused_and_never_left_out_in_silence() -> None:
    for said in run_ranks(_refused, {"dp": 2, "tp": 2}):
        assert said.pop("off") == ""
        assert shows(said["default"], "precision.parallel_mode_unused", mode="ParallelMode.DATA")
        assert shows(said["mesh"], "precision.parallel_mode_dims", ndim=3)
        assert shows(said["nameless"], "precision.parallel_mode_dim", dims="all")
        assert "ParallelMode.ZERO1" in said["zero1"]
        assert "did you mean data" in said["unknown"]
        assert "ZERO3_DP" in said["number"]


def _plain(mesh: DeviceMesh) -> list[Any]:
    """In a world of two that was joined again, so that nothing has cut it: the means, then what a
    cut model meets."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.PrefixStore("again", store))
    means = [
        _mean_of_ranks(),
        _mean_of_ranks(parallel_mode="data"),
        _mean_of_ranks(parallel_mode=Foreign.GLOBAL),
    ]
    with pytest.raises(UserError, match=r"ParallelMode\.TENSOR: without a mesh"):
        NaiveAMPModel(Seen(), parallel_mode=Foreign.TENSOR)
    cut = Seen()
    attach_whole(cut, Axis("tp", rank, 2, dist.group.WORLD))
    with pytest.raises(UserError, match="the model over ranks"):
        NaiveAMPModel(cut)
    return means


def test_in_a_world_that_nothing_cuts_the_default_is_all_ranks() -> None:
    assert run_ranks(_plain, {"dp": 2}) == [[0.5, 0.5, 0.5]] * 2


def test_alone_every_mode_is_this_rank_and_buffers_stay_as_they_are() -> None:
    for mode in ParallelMode:
        model = NaiveAMPModel(Seen(), parallel_mode=mode)
        assert not model.sync_buffer


def _kinds_of_buffers(mesh: DeviceMesh) -> dict[str, Tensor]:
    model = Seen()
    rank = dist.get_rank()
    model.register_buffer("fine", torch.full((2,), THIRD + rank, dtype=torch.float64))
    model.register_buffer("turn", torch.full((2,), complex(rank, -rank)))
    model.register_buffer("none", None)
    NaiveAMPModel(model, dtype=torch.float32, parallel_mode=mesh["dp"], sync_buffer=True)
    wrapped = NaiveAMPModel(nn.Identity(), dtype=torch.float32, parallel_mode=mesh["dp"])
    model.fine = torch.full((2,), THIRD + rank, dtype=torch.float64)
    wrapped.model = model
    wrapped(torch.ones(1, 4))
    return dict(model.named_buffers())


def test_buffers_of_doubles_and_complex_numbers_are_averaged_as_such() -> None:
    for buffers in run_ranks(_kinds_of_buffers, {"dp": 2}):
        assert torch.equal(buffers["fine"], torch.full((2,), THIRD + 0.5, dtype=torch.float64))
        assert torch.equal(buffers["turn"], torch.full((2,), complex(0.5, -0.5)))
        assert buffers["count"].item() == 7


def test_patterns_mark_the_modules_whose_parameters_they_name() -> None:
    inner = Seen()
    mark_fp32(inner, ("second.*",))
    NaiveAMPModel(inner, dtype=torch.float16)
    assert (inner.first.weight.dtype, inner.second.weight.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize(("inputs", "arrives"), [("root", torch.bfloat16), ("none", torch.float32)])
def test_a_planned_model_has_the_dtypes_of_its_plan(inputs: str, arrives: torch.dtype) -> None:
    bf16 = plan(
        "bf16",
        keep_fp32=("second.*",),
        buffers=torch.float32,
        output=torch.float16,
        cast_inputs=inputs,
    )
    inner = Seen()
    inner.first = nn.Identity()  # type: ignore[assignment]
    model = PlannedModel(inner, bf16)
    assert (inner.second.weight.dtype, inner.table.dtype) == (torch.float32, torch.float32)
    assert model(torch.ones(1, 4)).dtype == torch.float16
    assert inner.seen[0] == arrives


def test_a_pattern_of_a_plan_that_matches_no_parameter_is_refused() -> None:
    with raises(
        "precision.pattern_unmatched", pattern="secnd.weight", hint="; did you mean second.weight?"
    ):
        PlannedModel(Seen(), plan("bf16", keep_fp32=("first.*", "secnd.weight")))


def test_inner_modules_cast_what_they_are_given_if_the_plan_says_so() -> None:
    inner = Seen()
    PlannedModel(inner, plan("bf16", cast_inputs="inner"))(torch.ones(1, 4))
    assert inner.seen[0] == torch.float32
    with pytest.raises(RuntimeError):
        PlannedModel(Seen(), plan("bf16", cast_inputs="none"))(torch.ones(1, 4))


def test_a_plan_with_wider_parameters_than_products_is_autocasts_to_run() -> None:
    with raises("precision.parameters_wider"):
        PlannedModel(Seen(), plan("bf16", parameters="fp32"))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("output_to_fp32", "False"),
        ("output_to_fp32", None),
        ("sync_buffer", "no"),
        ("sync_buffer", 0),
    ],
)
def test_a_switch_of_another_kind_is_refused_by_name(argument: str, value: Any) -> None:
    with raises("precision.not_a_bool", name=argument, value=value):
        NaiveAMPModel(Seen(), **{argument: value})


def test_a_mesh_of_another_kind_is_refused() -> None:
    anything: Any = 3
    with raises("precision.not_a_mesh", mesh=3):
        NaiveAMPModel(Seen(), mesh=anything)


def test_what_is_no_module_or_no_plan_is_refused_by_name() -> None:
    anything: Any = "bf16"
    with raises("precision.not_a_plan", plan="bf16"):
        PlannedModel(Seen(), anything)
    for wrap in (NaiveAMPModel, lambda model: PlannedModel(model, plan("bf16"))):
        with raises("precision.not_a_module", name="model", value="bf16"):
            wrap(anything)
    with raises("precision.not_a_module", name="module", value="bf16"):
        set_fp32_attr_to_module(anything)


@pytest.mark.parametrize("wrap", [NaiveAMPModel, lambda model: PlannedModel(model, plan("bf16"))])
def test_a_mark_that_comes_too_late_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Seen()
    set_fp32_attr_to_module(model.first)
    wrap(model)
    set_fp32_attr_to_module(model.first)  # as it is already
    with raises("precision.fp32_mark_too_late", kind="Linear"):
        set_fp32_attr_to_module(model.second)
    with raises("precision.fp32_mark_too_late"):
        set_fp32_attr_to_module(wrap(Seen()))


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_a_batch_norm_trains_in_fp32_within_a_model_in_16_bits_or_is_refused_with_the_pattern(
    compute: str,
) -> None:
    def steps_of(**options: Any) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
        )
        attach_whole(model)
        made = plan(compute, LossScaling("constant", initial=1.0), **options)
        optimizer = ParallelAMPOptimizer([model], made, lr=0.01)
        wrapped = PlannedModel(model, made)
        x = torch.randn(8, 4)
        losses = []
        for _ in range(3):
            loss = (wrapped(x) - x).square().mean()
            loss.backward()
            losses.append(optimizer.step(loss=loss.detach()).loss)
        return model, losses

    words = sentence(
        "precision.batch_norm",
        module=1,
        module_kind="BatchNorm1d",
        buffers="fp32",
        sensitive="fp32",
        pattern="1.*",
    )
    with pytest.raises(UserError, match=words):
        steps_of()
    model, losses = steps_of(keep_fp32=("1.*",))
    assert losses[-1] < losses[0]
    kept = {
        name: value.dtype
        for name, value in model.state_dict().items()
        if "running" in name or name[0] == "1"
    }
    kept.pop("1.num_batches_tracked")
    assert set(kept.values()) == {torch.float32}
