"""Parts marked FP32 in a model that is trained: held and computed in FP32, in every layout, or
refused by name."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megaprec.comm.layout import Part, layout_of
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.module_wrappers import NaiveAMPModel, PlannedModel, set_fp32_attr_to_module
from megaprec.precision.plan import PrecisionPlan, plan
from models.attention.packing import UNPACKED, Packing
from models.config import ModelConfig
from models.decoder.stages import Cut, Stage
from models.engine.engine import Engine
from models.engine.options import EngineOptions
from parallel.context import Context
from parallel.dropout import MicrobatchInfo
from parallel.fp32_marks import compute_marked_in_fp32
from parallel.layers import ColumnParallelLinear, parameter
from parallel.pipeline.kinds import schedule
from tests.layouts import LENGTH, SAMPLES, Run, batches, share_of
from tests.ranks import run_ranks
from tests.refusals import raises

MODEL: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 40,
    "mlp": "swiglu",
}
MOE = MODEL | {"experts": 4, "experts_per_token": 2}
LAYER_NORM = MODEL | {"norm": "layer", "mlp_bias": True, "output_bias": True}
# Where parts of 16 bits have nothing wider beside them, so that only the mark can make something
# FP32.
NARROW: dict[str, Any] = {
    "parameters": "bf16",
    "gradients": "bf16",
    "masters": "none",
    "moments": "bf16",
}
PARTS = {
    "embedding": MODEL,
    "final_norm": MODEL,
    "layers.0.attention_norm": LAYER_NORM,
    "layers.0.attention": MODEL,
    "layers.0.attention.qkv": MODEL,
    "layers.1.attention.output": LAYER_NORM,
    "layers.1.mlp": LAYER_NORM,
    "layers.1.mlp.inner": MODEL,
    "layers.1.mlp.down": LAYER_NORM,
    "layers.2": MODEL,
    "layers.3.mlp": MOE,
}
Mark = Callable[[Stage], None]


class Marks:
    """Builds stages of which the named parts are marked, as a factory of the user's own would."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def __call__(
        self, config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...]
    ) -> Stage:
        stage = Stage(config, context, cut, tied)
        for path, module in stage.named_modules():
            if path in self.paths:
                set_fp32_attr_to_module(module)
        return stage


def engine_of(
    mesh: DeviceMesh | None,
    model: Mapping[str, Any],
    made: PrecisionPlan,
    make_stage: Any,
    zero_size: int = 0,
) -> Engine:
    pp, dp = (1 if mesh is None else mesh[axis].size() for axis in ("pp", "dp"))

    return Engine.build(
        ModelConfig(**model),
        made,
        mesh,
        schedule("1f1b", pp, 2),
        EngineOptions(micro_batch=SAMPLES // 2 // dp, seq_length=LENGTH, seed=3),
        zero_size=zero_size,
        make_stage=make_stage,
    )


def train(
    engine: Engine, mesh: DeviceMesh | None, model: Mapping[str, Any], steps: int = 3
) -> list[float]:
    run = Run(dict(model), steps=steps)
    reports = [engine.step(share_of(mesh, batch), 1e-2, n) for n, batch in enumerate(batches(run))]
    assert all(report.changed for report in reports)
    return [report.loss for report in reports]


def own_input(
    path: str, module: nn.Module, config: ModelConfig, compute: torch.dtype
) -> tuple[tuple[Any, ...], Any]:
    """What this kind of module is called with, and the floating tensor among it (None of an
    embedding)."""
    torch.manual_seed(5)
    if path == "embedding":
        return (torch.randint(config.vocab, (LENGTH, 2)),), None
    layer = path.endswith((".down", ".output"))
    features = module.weight.shape[1] if layer else config.hidden  # type: ignore[union-attr, index]
    x = torch.randn(LENGTH, 2, features).to(compute).requires_grad_()  # type: ignore[call-overload]
    last = path.rpartition(".")[2]
    if last == "attention" or path == "layers.2":
        more = (None, None)
    elif config.experts:
        more = (None,)
    else:
        more = ()
    return (x, *more), x


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def compare(mesh: DeviceMesh | None, residual: str = "bf16") -> list[tuple[str, str]]:
    """What differs between a marked part of a bf16 model and the same part of an FP32 model, given
    the same numbers."""
    wrong = []
    for path, model in PARTS.items():
        config = ModelConfig(**model)
        stream: dict[str, Any] = {"residual": torch.float32} if residual == "fp32" else {}
        marked = engine_of(mesh, model, plan("bf16", **stream), Marks(path))
        wide = engine_of(mesh, model, plan("fp32"), Stage)
        ours, theirs = (engine.stages[0].get_submodule(path) for engine in (marked, wide))
        stands = path in ("embedding", "layers.2")  # in the residual stream
        dtype = torch.float32 if stands and residual == "fp32" else torch.bfloat16
        arguments, x = own_input(path, ours, config, dtype)
        y = first(ours(*arguments))
        if y.dtype != dtype:
            wrong.append((path, f"comes out in {y.dtype}"))
        if x is None:
            z = first(theirs(*arguments))
        else:
            copy = x.detach().float().requires_grad_()
            z = first(theirs(copy, *arguments[1:]))
        if not torch.equal(y, z.to(dtype)):
            wrong.append((path, f"is {(y - z).abs().max()} off"))
        grad = torch.randn_like(y)
        y.backward(grad)
        z.backward(grad.float())
        for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if not torch.equal(own.main_grad, other.main_grad):  # type: ignore[attr-defined]
                wrong.append((path, f"gradient of {name}"))
        if x is not None and not torch.equal(x.grad, copy.grad.to(dtype)):  # type: ignore[union-attr, arg-type]
            wrong.append((path, "gradient of the input"))
    return wrong


def test_a_marked_dict_of_layers_trains_what_its_marked_layers_train() -> None:
    """Nobody calls the dict, so that its layers have to cast what they are given."""
    each = [f"layers.{n}" for n in range(MODEL["layers"])]
    losses = [
        train(engine_of(None, MODEL, plan("bf16"), Marks(*marks)), None, MODEL)
        for marks in (["layers"], each)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("residual", ["bf16", "fp32"])
def test_a_marked_part_computes_what_it_computes_in_an_fp32_model(residual: str) -> None:
    assert compare(None, residual) == []


@pytest.mark.slow
def test_a_marked_part_cut_over_tp_computes_what_it_computes_in_an_fp32_model() -> None:
    assert run_ranks(compare, {"tp": 2}) == [[], []]


def kept(engine: Engine) -> dict[str, set[torch.dtype]]:
    """The dtypes of weight, gradient, travelling gradient, master and averages of each logical name
    on a rank."""
    found = {}
    for buffer in engine.optimizer.all_buffers():
        state = [values.dtype for values in buffer.state.values()]
        masters = [] if buffer.masters is None else [buffer.masters.dtype]
        dtypes = {buffer.weights.dtype, buffer.grads.dtype, buffer.reduce_dtype, *masters, *state}
        for piece in buffer.pieces:
            found[piece.part.name] = dtypes
    return found


NAMES = (
    "embedding.weight",
    "layers.1.mlp.",
    "layers.2.attention.query.",
    "layers.2.attention.output.",
)


def trained(
    mesh: DeviceMesh | None, **changes: Any
) -> tuple[list[float], dict[str, set[torch.dtype]], Any]:
    model = MODEL | {"tied": True}
    marks = Marks("embedding", "layers.1.mlp", "layers.2.attention")
    engine = engine_of(mesh, model, plan("bf16", **changes), marks)
    losses = train(engine, mesh, model)
    return losses, kept(engine), engine.optimizer.marked


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"pp": 2, "tp": 2}])
def test_marks_hold_in_every_layout_and_train_what_one_process_trains(axes: dict[str, int]) -> None:
    alone, _, names = trained(None, **NARROW)
    for losses, dtypes, marked in run_ranks(trained, axes, **NARROW):
        assert losses == pytest.approx(alone, rel=2e-3)
        assert marked == names
        for name, found in dtypes.items():
            wide = name.startswith(NAMES) or ("layers.2.attention." in name)
            assert found == {torch.float32 if wide else torch.bfloat16}, name
        assert any(name in dtypes for name in marked)


def test_marked_weights_move_by_less_than_16_bits_can_say() -> None:
    """Without masters a bf16 weight forgets updates below its last bit; a marked one does not."""
    model = dict(MODEL)
    engine = engine_of(None, model, plan("bf16", **NARROW), Marks("layers.0.mlp"))
    train(engine, None, model, steps=1)
    for name, weight in engine.stages[0].named_parameters():
        bits = torch.equal(weight.detach(), weight.detach().bfloat16().to(weight.dtype))
        assert bits != name.startswith("layers.0.mlp."), name


@pytest.mark.parametrize("parameters", [False, True])
def test_a_marked_part_leaves_fp8(parameters: bool) -> None:
    recipe = FP8Recipe(parameters=parameters)
    model = MODEL | {"ffn": 64, "kv_heads": 4}
    engine = engine_of(None, model, plan("bf16", fp8=recipe), Marks("layers.1.mlp"))
    assert not any(name.startswith("layers.1.mlp") for name in engine.fp8.weight_names)
    assert any(name.startswith("layers.0.mlp") for name in engine.fp8.weight_names)
    train(engine, None, model)
    assert kept(engine)["layers.1.mlp.up.weight"] == {torch.float32}


class Router(nn.Module):
    """A module of the user's own: a plain torch layer beside a learned vector and a table."""

    def __init__(self, context: Context, name: str, hidden: int) -> None:
        super().__init__()
        self.scale = parameter(
            context, [Part.cut(f"{name}.scale", (hidden,), None, context.tp)], 0.0, mean=1.0
        )
        self.up = ColumnParallelLinear(
            context, hidden, hidden, name=f"{name}.up", gather_output=True
        )
        self.register_buffer("table", torch.full((hidden,), 0.5, dtype=torch.bfloat16))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = self.up(x * self.scale)
        self.seen = [x.dtype, made.dtype, self.table.dtype]  # type: ignore[list-item]
        return {"y": made * self.table}


class Own(Stage):
    """A stage of the family with a module of the user's own behind the embedding."""

    def __init__(
        self, config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...] = ()
    ) -> None:
        super().__init__(config, context, cut, tied)
        if cut.first:
            self.router = Router(context, "router", config.hidden)
            set_fp32_attr_to_module(self.router)

    def _embed(self, ids: Tensor, place: MicrobatchInfo | None, positions: Tensor | None) -> Tensor:
        x = super()._embed(ids, place, positions)
        return x + self.router(x)["y"]


def own(mesh: DeviceMesh | None) -> list[float]:
    engine = engine_of(mesh, MODEL, plan("bf16"), Own)
    losses = train(engine, mesh, MODEL)
    if 0 in engine.stages:
        router = engine.stages[0].router
        assert isinstance(router, Router)
        assert router.seen == [torch.float32] * 3
        assert {p.dtype for p in router.parameters()} == {torch.float32}
    return losses


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}])
def test_a_marked_module_of_the_users_own_computes_in_fp32(axes: dict[str, int]) -> None:
    alone = own(None)
    assert run_ranks(own, axes) == [pytest.approx(alone, rel=2e-3)] * 2


class Wrapped(nn.Module):
    """A stage that casts a part of itself."""

    def __init__(self, stage: Stage, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = wrap(stage)
        self.losses = stage.losses

    def forward(
        self, x: Tensor, place: MicrobatchInfo | None = None, packing: Packing = UNPACKED
    ) -> Tensor:
        return self.inner(x, place, packing)


@pytest.mark.parametrize("wrap", [NaiveAMPModel, lambda model: PlannedModel(model, plan("bf16"))])
def test_a_wrapper_that_casts_is_refused_within_a_stage(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    def build(config: ModelConfig, context: Context, cut: Cut, tied: tuple[int, ...]) -> Any:
        return Wrapped(Stage(config, context, cut, tied), wrap)

    with raises(
        "parallel.fp32_mark_on_wrapper", path="inner", kind=re.compile("^(NaiveAMP|Planned)Model$")
    ):
        engine_of(None, MODEL, plan("bf16"), build)


def lone_layer(made: PrecisionPlan) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(Context(made), 8, 8, name="layer")
    set_fp32_attr_to_module(layer)
    return layer


def test_a_mark_that_nobody_sees_to_is_refused_by_the_optimizer() -> None:
    made = plan("bf16")
    model = nn.ModuleDict({"deep": lone_layer(made)})
    with raises("precision.fp32_mark_unused", path="deep", dtype_name="bf16"):
        ParallelAMPOptimizer([model], made)
    compute_marked_in_fp32(model, made)
    assert ParallelAMPOptimizer([model], made).marked == ("layer.bias", "layer.weight")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_optimizer_holds_what_a_wrapper_keeps_in_fp32() -> None:
    """The wrapper computes with these weights in FP32; an optimizer that rounded them would undo
    it."""
    made = plan("bf16")
    model = nn.Sequential(lone_layer(made), ColumnParallelLinear(Context(made), 8, 8, name="other"))
    optimizer = ParallelAMPOptimizer([NaiveAMPModel(model, dtype=torch.bfloat16)], made)
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert optimizer.plan.keeps_fp32("layer.weight") and not optimizer.plan.keeps_fp32(
        "other.weight"
    )


def strange_name(made: PrecisionPlan) -> Iterator[bool]:
    layer = ColumnParallelLinear(Context(made), 8, 8, name="a[1]*")
    set_fp32_attr_to_module(layer)
    compute_marked_in_fp32(layer, made)
    kept = ParallelAMPOptimizer([layer], made).plan
    yield kept.keeps_fp32("a[1]*.weight")
    yield kept.keeps_fp32("a1x.weight")
    yield layout_of(layer.weight).parts[0].name == "a[1]*.weight"


def test_names_of_marked_parts_are_no_patterns() -> None:
    assert list(strange_name(plan("bf16"))) == [True, False, True]
