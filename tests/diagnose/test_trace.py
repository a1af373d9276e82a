"""The first tensor that is not finite is named, with the module in which it arose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.comm.main_grad import attach_main_grad
from megaprec.diagnose.nonfinite_trace import NonfiniteFinding, Trace


class Break(torch.autograd.Function):
    """x itself, but for what `forward` and `backward` make of it and of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.change = backward
        return forward(x.clone())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # noqa: ANN001
        return ctx.change(grad), None, None


def same(x: Tensor) -> Tensor:
    return x


def spoilt(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[1] = torch.inf
    return x


class Pair(nn.Module):
    """Two linear layers and, between them, `Break`; the first returns a tuple. `scale` is a
    parameter of its own."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor] = same,
        backward: Callable[[Tensor], Tensor] = same,
    ) -> None:
        super().__init__()
        self.first = Tupled(4, 6)
        self.second = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.change = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x)
        return x + self.second(Break.apply(y * self.scale, *self.change))


class Tupled(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.bias


def model(middle: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), middle or Pair(), nn.Linear(4, 2))


def traced(
    net: nn.Module, x: Tensor | None = None, loss: Callable[[Tensor], Tensor] = torch.sum
) -> Trace:
    x = torch.arange(15.0).view(5, 3) / 10 if x is None else x
    with Trace(net) as trace:
        value = loss(net(x))
        trace.look("loss", value)
        value.backward()
    return trace


def found_in(
    net: nn.Module, x: Tensor | None = None, loss: Callable[[Tensor], Tensor] = torch.sum
) -> NonfiniteFinding:
    found = traced(net, x, loss).found
    assert found is not None
    return found


def test_a_finite_pass_finds_nothing_and_changes_no_number() -> None:
    net = model()
    plain = model()
    trace = traced(net)
    plain(torch.arange(15.0).view(5, 3) / 10).sum().backward()
    assert trace.found is None
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    said = [glance.what for glance in trace.seen]
    assert said[:6] == [
        "input of the model",
        "input of 0",
        "output of 0",
        "input of 1",
        "input of 1.first",
        "output of 1.first",
    ]
    assert said[-1] == "gradient of the output of 0"
    assert all(glance.largest > 0 for glance in trace.seen)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_what_an_earlier_step_has_left_in_main_grad_is_no_gradient_of_this_one() -> None:
    """The last layer is not used, so no gradient overwrites what lies there."""
    net = model()
    attach_whole(net)
    for parameter in net.parameters():
        attach_main_grad(parameter, torch.full_like(parameter, torch.inf))
    with Trace(net) as trace:
        net[1](net[0](torch.ones(5, 3))).sum().backward()
    assert trace.found is None


def test_a_module_is_named_whose_weight_makes_its_output_overflow() -> None:
    net = model()
    net.get_parameter("1.second.weight").data.fill_(3e38)
    found = found_in(net)
    assert (found.module, found.kind, found.what) == ("1.second", "Linear", "output of 1.second")
    assert found.parameters == ("1.second.weight", "1.second.bias")
    assert found.shape == (5, 4)
    assert found.elements == 20
    assert 0 < found.infs + found.nans <= 20
    assert found.dtype == torch.float32
    assert 0 < found.given < 10


def test_what_breaks_between_the_parts_of_a_module_is_laid_to_that_module() -> None:
    found = found_in(model(Pair(forward=spoilt)))
    assert (found.module, found.kind, found.what) == ("1", "Pair", "input of 1.second")
    assert (found.parameters, found.infs, found.nans) == (("1.scale",), 1, 0)
    back = found_in(model(Pair(backward=spoilt)))
    assert (back.module, back.what, back.infs) == ("1", "gradient of 1.scale", 1)


def test_a_module_is_named_whose_backward_breaks() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Break.apply(x, same, spoilt)

    found = found_in(model(Broken()))
    assert (found.module, found.kind, found.what) == ("1", "Broken", "gradient of the input of 1")
    assert found.given == 1.0 or found.given > 0


def test_a_residual_does_not_hide_which_branch_broke() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = nn.Linear(4, 4)
            self.bad = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.good(x) + self.bad(x)

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Break.apply(x, same, spoilt)

    assert found_in(model(Residual())).module == "1.bad"


def test_a_gradient_of_a_weight_is_found_even_if_all_that_passes_is_finite() -> None:
    """A sum over tokens of what is finite: 5 x 3e38."""
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        net.get_submodule("0").get_parameter("weight").fill_(1e-38)
        net.get_submodule("1").get_parameter("weight").fill_(1.0)
    found = found_in(net, torch.full((5, 3), 1e38), lambda y: 2 * y.sum())
    assert (found.module, found.what, found.parameters) == (
        "0",
        "gradient of 0.weight",
        ("0.weight",),
    )
    assert (found.infs, found.shape) == (3, (1, 3))


@pytest.mark.parametrize(
    ("x", "loss", "module", "what"),
    [
        (torch.full((5, 3), torch.nan), torch.sum, None, "input of the model"),
        (None, lambda y: y.sum() * torch.inf, None, "loss"),
        (
            None,
            lambda y: Break.apply(y, same, spoilt).sum(),
            None,
            "gradient of the output of the model",
        ),
    ],
)
def test_what_the_model_is_given_and_what_is_made_of_its_output_may_be_to_blame(
    x: Tensor | None, loss: Callable[[Tensor], Tensor], module: None, what: str
) -> None:
    found = found_in(model(), x, loss)
    assert (found.module, found.kind, found.what) == (module, "", what)


def test_a_failure_inside_leaves_no_hooks() -> None:
    net = model()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), Trace(net):
        net(torch.ones(2, 9))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
