"""The law of row sums: one order of additions, however many threads work on them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from models.feed_forward.expert_bias import _sum_rows
from parallel.layers import Lookup
from parallel.linear import Add

NUM_ROWS, WIDTH, NUM_SUMS = 2048, 64, 23  # enough numbers that torch divides them among threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradient_of_tokens(rows: Tensor, numbers: Tensor) -> Tensor:
    table = nn.Parameter(torch.zeros(NUM_SUMS, WIDTH))
    Lookup.apply(numbers, table, None).backward(rows)  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def gradient_of_positions(rows: Tensor, numbers: Tensor) -> Tensor:
    table = nn.Parameter(torch.zeros(NUM_SUMS, WIDTH))
    x = torch.zeros(NUM_ROWS, 1, WIDTH)
    Add.apply(x, table, numbers.view(-1, 1)).backward(rows.view_as(x))  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def gradient_of_biases(rows: Tensor, numbers: Tensor) -> Tensor:
    return _sum_rows(rows, numbers, NUM_SUMS)


@pytest.mark.cases(1, sample=1)
@pytest.mark.parametrize("add", [gradient_of_tokens, gradient_of_positions, gradient_of_biases])
def test_rows_are_added_in_their_order_every_time(add: Callable[[Tensor, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, WIDTH, generator=generator)
    numbers = torch.randint(NUM_SUMS, (NUM_ROWS,), generator=generator)
    in_order = torch.zeros(NUM_SUMS, WIDTH)
    for row, number in zip(rows, numbers.tolist(), strict=True):
        in_order[number] += row
    for _ in range(20):
        assert torch.equal(add(rows, numbers), in_order)
