"""What a loop of one's own asks autograd for, parallel layers give as plain ones do, or say that
they do not."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.main_grad import has_gradient
from megaprec.errors import UserError
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.update_rules import SGD
from megaprec.precision.plan import plan
from parallel.context import Context
from parallel.plain_modules import parallelize
from tests.refusals import raises, sentence

LR = 0.1


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(6, 4),
        nn.RMSNorm(4, eps=1e-5),
        nn.Linear(4, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    ).double()


def layers() -> nn.Module:
    return parallelize(plain(), Context(plan("fp64")), {"0": "vocab", "2": "column", "4": "row"})


def trained() -> tuple[nn.Module, ParallelAMPOptimizer]:
    model = layers()
    return model, ParallelAMPOptimizer(
        [model], plan("fp64"), lr=LR, rule=SGD(0.0), weight_decay=0.0, clip=0.0
    )


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    ids = torch.randint(6, (3, 2), generator=torch.Generator().manual_seed(seed))
    return model(ids).square().mean()


def after_one_step() -> nn.Module:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    loss_of(model).backward()
    optimizer.step()
    return model


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)


def of_inputs(model: Any) -> tuple[Tensor, ...]:
    x = torch.randn(
        3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    return torch.autograd.grad(model[1:](x).square().sum(), x)


def of_weights(model: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(model, 1), list(model.parameters()))


@pytest.mark.parametrize("ask", [of_inputs, of_weights])
def test_gradients_that_autograd_returns_are_those_of_torch_and_are_not_part_of_the_step(
    ask: Callable[[Any], tuple[Tensor, ...]],
) -> None:
    model, optimizer = trained()
    for mine, told in zip(ask(model), ask(plain()), strict=True):
        torch.testing.assert_close(mine, told)
    loss_of(model).backward()
    optimizer.step()
    assert same(model, after_one_step())


def test_a_backward_pass_to_some_inputs_accumulates_no_other_gradients() -> None:
    model, _ = trained()
    loss_of(model).backward(inputs=[model.get_parameter("4.weight")])
    given = [name for name, p in model.named_parameters() if has_gradient(p)]
    assert given == ["4.weight"]


def test_a_hook_of_a_weight_that_would_never_see_a_gradient_is_refused() -> None:
    for name in ("0.weight", "1.weight", "2.weight", "3.bias", "4.bias"):
        model, _ = trained()
        model.get_parameter(name).register_hook(lambda grad: grad)
        with pytest.raises(UserError, match=sentence("optimizer.hook_never_called", name=name)):
            loss_of(model).backward()


def test_a_gradient_that_is_to_be_differentiated_is_refused() -> None:
    model, _ = trained()
    with raises("optimizer.second_derivative"):
        loss_of(model).backward(create_graph=True)


def penalized(model: Any) -> Tensor:
    x = torch.randn(
        3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    y = model[2:](x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + grad.square().mean()


def test_a_penalty_on_gradients_of_inputs_is_that_of_torch() -> None:
    model, optimizer = trained()
    twin = plain()
    penalized(model).backward()
    penalized(twin).backward()
    for p in twin.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    torch.optim.SGD(twin.parameters(), LR).step()
    optimizer.step()
    assert same(model, twin)


def test_a_model_that_was_saved_whole_has_gradients_of_its_own_and_its_layouts() -> None:
    model, _ = trained()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copy = torch.load(file, weights_only=False)
    optimizer = torch.optim.SGD(copy.parameters(), LR)
    loss_of(copy).backward()
    optimizer.step()
    assert same(copy, after_one_step())
    ParallelAMPOptimizer([copy], plan("fp64"))
