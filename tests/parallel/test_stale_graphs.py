"""A backward pass through weights that a step has changed since is refused, as it is for layers of
torch."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megaprec import SGD, Axis, ParallelAMPOptimizer, UserError, attach_whole, plan
from parallel import ColumnParallelLinear, Context, RMSNorm, VocabParallelEmbedding
from tests.refusals import raises, sentence

CONTEXT = Context(plan("fp32"), Axis("tp"))
X = torch.ones(3, 1, 4, requires_grad=True)

LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: ColumnParallelLinear(CONTEXT, 4, 4, name="own"), "own.weight"),
    "norm": (lambda: RMSNorm(CONTEXT, 4, name="own"), "own.weight"),
}


def optimizer_of(layer: nn.Module) -> ParallelAMPOptimizer:
    attach_whole(layer)
    return ParallelAMPOptimizer([layer], CONTEXT.plan, lr=0.1, rule=SGD(0.0))


@pytest.mark.parametrize("name", LAYERS)
def test_a_loss_from_before_a_step_has_no_gradient_after_it(name: str) -> None:
    layer = LAYERS[name][0]()
    optimizer = optimizer_of(layer)
    first = layer(X).sum()
    second = layer(X).square().sum()
    first.backward()
    optimizer.step()
    with pytest.raises(
        UserError,
        match=sentence("optimizer.weight_changed_before_backward", name=LAYERS[name][1]),
    ):
        second.backward()


@pytest.mark.parametrize("name", LAYERS)
def test_nor_after_a_write_to_the_weights(name: str) -> None:
    layer = LAYERS[name][0]()
    optimizer_of(layer)
    loss = layer(X).sum()
    with torch.no_grad():
        next(layer.parameters()).mul_(2)
    with raises("optimizer.weight_changed_before_backward"):
        loss.backward()


def test_a_table_whose_rows_are_only_copied_has_its_gradient_all_the_same() -> None:
    """The gradient of a row does not depend on the weights; torch's embedding allows it too."""
    table = VocabParallelEmbedding(CONTEXT, 5, 4, name="own")
    optimizer = optimizer_of(table)
    ids = torch.zeros(3, 1, dtype=torch.long)
    first = table(ids).sum()
    second = table(ids).sum()
    first.backward()
    optimizer.step()
    second.backward()
    assert optimizer.step().grad_norm == pytest.approx(3 * 2.0)
