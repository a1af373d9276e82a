"""Marks of containers, which are never called themselves, and plans that a wrapper cannot carry
out."""

import pytest
import torch
from torch import Tensor, nn

from megaprec.fp8.state import FP8State
from megaprec.precision.fp8_recipe import FP8Recipe
from megaprec.precision.marks import outermost_marked
from megaprec.precision.module_wrappers import NaiveAMPModel, PlannedModel, set_fp32_attr_to_module
from megaprec.precision.plan import plan
from parallel import Context, parallelize
from tests.refusals import raises


class Layers(nn.Module):
    """Layers in a list of dicts; keeps the dtypes of what each is called with and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in (child for block in self.layers for child in block.children()):
            y = layer(x)
            self.seen.append((x.dtype, y.dtype))
            x = y
        return self.head(x)


@pytest.mark.parametrize("planned", [False, True])
def test_the_modules_in_a_marked_container_compute_in_fp32(planned: bool) -> None:
    model = Layers()
    given = list[torch.dtype]()
    set_fp32_attr_to_module(model.layers)
    if planned:
        wrapped = PlannedModel(model, plan("bf16"))
    else:
        wrapped = NaiveAMPModel(model, dtype=torch.bfloat16)
    for module in model.layers.modules():
        if isinstance(module, nn.LayerNorm | nn.Linear):
            module.register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    assert wrapped(torch.ones(2, 4)).dtype == torch.float32
    assert given == [torch.float32] * 4
    assert model.seen == [(torch.bfloat16, torch.bfloat16)] * 4
    assert {p.dtype for p in model.layers.parameters()} == {torch.float32}
    assert model.head.weight.dtype == torch.bfloat16


def test_parts_of_a_marked_container_are_what_is_called_and_a_list_of_parameters_is_one_itself() -> (
    None
):
    model = Layers()
    set_fp32_attr_to_module(model.layers)
    assert [path for path, _ in outermost_marked(model)] == [
        f"layers.{n}.{name}" for n in "01" for name in ("norm", "up")
    ]
    alone = nn.ModuleDict({"tables": nn.ParameterList([torch.ones(2)])})
    set_fp32_attr_to_module(alone)
    assert [path for path, _ in outermost_marked(alone)] == ["tables"]


def test_a_planned_model_does_not_leave_fp8_out_in_silence() -> None:
    fp8 = plan("bf16", fp8=FP8Recipe(kind="current"))
    with raises("precision.fp8_only_casts", fp8_kind="current", model_kind="Sequential"):
        PlannedModel(nn.Sequential(nn.Linear(16, 16)), fp8)
    context = Context(fp8, fp8=FP8State.over(None, fp8.fp8, layers=1))  # type: ignore[arg-type]
    net = parallelize(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), context, {"0": "column", "1": "row"}
    )
    PlannedModel(net, fp8)
