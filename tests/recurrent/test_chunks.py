"""Recurrences take time that grows with the number of tokens, not with its square."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.recurrent.chunks import in_chunks, one_by_one
from tests.recurrent.recurrences import RECURRENCES


def operators_behind(result: Tensor) -> set[str]:
    """The names of all operators in the graph that autograd goes back through."""
    open_nodes: list[Any] = [result.grad_fn]
    seen: set[Any] = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize("rule", ["chunked", "recurrent"])
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_no_slice_has_a_gradient_of_the_size_of_the_whole(recurrence: str, rule: str) -> None:
    one = RECURRENCES[recurrence]
    inputs, state = one.odd.inputs()
    inputs.value.requires_grad_()
    outputs, _ = getattr(one.module, rule)(inputs, state)
    assert "UnbindBackward0" in operators_behind(outputs)
    assert "SelectBackward0" not in operators_behind(outputs)


def test_a_slice_by_index_is_found() -> None:
    x = torch.zeros(1, 1, 4, requires_grad=True)
    assert "SelectBackward0" in operators_behind(x[:, :, 1])
    (first, *_) = (one for (one,) in one_by_one(x))
    assert "SelectBackward0" not in operators_behind(first)


def test_zeros_fill_up_the_last_chunk() -> None:
    tokens = torch.arange(1, 11).view(1, 1, 5, 2)
    chunks = in_chunks(tokens, 4)
    assert chunks.shape == (1, 1, 2, 4, 2)
    assert chunks.flatten().tolist() == [*range(1, 11), *[0] * 6]
    assert in_chunks(tokens[..., 0] > 3, 5).flatten().tolist() == [False, False, True, True, True]
