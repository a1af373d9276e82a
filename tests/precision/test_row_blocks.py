"""What is computed by blocks of rows is computed by as few of them as memory allows: whole rows, as
many as a block has room for, and one row if it has room for less."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaprec.comm import random as layout_random
from megaprec.comm import tensor_digests
from megaprec.comm.axis import Axis
from megaprec.precision import gemm
from megaprec.precision.plan import plan
from models.attention import largest_logits
from models.attention.kernels import KernelInputs
from models.config import ModelConfig
from parallel import loss
from parallel.context import Context
from tests.work import operators_of

ELEMENTS = 64  # of a block


def draws(rows: int, columns: int) -> int:
    values = torch.empty(rows, columns)
    return operators_of(lambda: draw(values)).count("aten.index_select") // 2


def draw(values: Tensor) -> None:
    """By one thread, whose operators are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_random, "ThreadPoolExecutor", Here)
        layout_random._fill_normal(values, 1, 0, values.shape[1], 1.0)


class Here:
    """Does at once what is submitted."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., object], *arguments: int) -> "Here":
        work(*arguments)
        return self

    def result(self) -> None:
        pass


def casts(rows: int, columns: int) -> int:
    total = torch.zeros(rows, columns)
    product = torch.ones(rows, columns, dtype=torch.bfloat16)
    found = operators_of(lambda: gemm._add_(total, product)).count("aten.add_")
    assert torch.equal(total, product.float())
    return found


def digests(rows: int, columns: int) -> int:
    table = torch.ones(rows, columns)
    constants = torch.ones(2, rows, dtype=torch.int64), torch.ones(2, columns, dtype=torch.int64)
    lanes = tensor_digests._lanes_of_elements
    names = operators_of(lambda: tensor_digests._sum_table(table, *constants, lanes))
    return names.count("aten.stack")


def losses(rows: int, columns: int) -> int:
    return len(loss._blocks(torch.zeros(rows, columns)))


def logits(rows: int, columns: int) -> int:
    """Of one head and sample: the columns of a block of logits are the rows of all."""
    config = ModelConfig(
        vocab=8, hidden=8, layers=1, heads=1, kv_heads=1, ffn=8, max_positions=columns
    )
    context = Context(plan("fp32"), Axis("tp"))
    inputs = KernelInputs(config, context, "attention", None, None, None, None)
    query = torch.ones(1, 1, columns, 8)
    names = operators_of(lambda: largest_logits.largest_logits(query, query, inputs))
    return names.count("aten.maximum")


CASES: dict[str, tuple[object, str, Callable[[int, int], int]]] = {
    "random numbers": (layout_random, "_BLOCK", draws),
    "casts of products": (gemm, "_ELEMENTS_PER_CAST", casts),
    "digests": (tensor_digests, "BLOCK", digests),
    "losses": (loss, "_BLOCK", losses),
    "attention logits": (largest_logits, "MOST_LOGITS", logits),
}


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(16, 16, 4), (24, 24, 12), (65, 65, 65)])
@pytest.mark.parametrize("name", CASES)
def test_a_block_has_as_many_rows_as_it_has_room_for_and_one_at_least(
    name: str, rows: int, columns: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, constant, count = CASES[name]
    monkeypatch.setattr(module, constant, ELEMENTS)
    # a row of random numbers that is longer than a block is cut
    pieces = 2 if name == "random numbers" and columns > ELEMENTS else 1
    assert count(rows, columns) == blocks * pieces


def test_losses_of_no_columns_are_one_block() -> None:
    assert loss._blocks(torch.zeros(3, 0)) == [slice(0, loss._BLOCK)]
