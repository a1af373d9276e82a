"""Results of operators on meta tensors that are looked up are those that torch computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.torch_private import storage_address
from models.estimate.results import result_on_meta

aten: Any = torch.ops.aten
META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, type(tensor)


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (meta(3, 4), meta(5, 4).t()), {}),
    (aten.add.Tensor, (meta(3, 1), meta(1, 4, dtype=torch.bfloat16)), {"alpha": 2}),
    (aten.mul.Tensor, (meta(3, dtype=torch.int64), meta(3).expand(2, 3)), {}),
    (aten.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    (aten.sort.stable, (meta(7),), {"stable": True, "dim": 0, "descending": False}),
    (aten._to_copy.default, (meta(2, 3).t(),), {"dtype": torch.float64}),
    (aten.zeros.default, ([2, 3],), {"device": META}),
    (aten._softmax.default, (meta(2, 3), -1, False), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_a_result_that_is_looked_up_is_a_new_tensor_as_torch_computes_it(call: Any) -> None:
    func, args, kwargs = call
    computed = func(*args, **kwargs)
    first = result_on_meta(func, args, kwargs)
    again = result_on_meta(func, args, kwargs)
    if isinstance(computed, Tensor):
        computed, first, again = (computed,), (first,), (again,)
    for one, other, third in zip(computed, first, again, strict=True):
        assert form(one) == form(other) == form(third)
        assert storage_address(other) != storage_address(third)


def test_numbers_are_told_apart_by_their_types() -> None:
    """A sum of integers and 1.0 is a float, and 1 equals 1.0."""
    counts = meta(3, dtype=torch.int64)
    sums = [result_on_meta(aten.add.Tensor, (counts, number), {}) for number in (1, 1.0, 1)]
    assert [one.dtype for one in sums] == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize("func", [aten.view.default, aten._unsafe_view.default])
def test_a_view_keeps_the_memory_of_its_tensor(func: Any) -> None:
    """Also one of whose operator torch does not say that it returns a view."""
    for _ in range(2):
        tensor = meta(2, 3)
        view = result_on_meta(func, (tensor, [6]), {})
        assert storage_address(view) == storage_address(tensor)


def test_an_operator_in_place_returns_its_argument() -> None:
    for _ in range(2):
        tensor = meta(2, 3)
        assert result_on_meta(aten.add_.Tensor, (tensor, 1.0), {}) is tensor


def test_a_tensor_with_storage_is_computed_with() -> None:
    for number in (1.0, 2.0):
        result = result_on_meta(aten.neg.default, (torch.tensor(number),), {})
        assert result.item() == -number


def test_a_result_has_the_default_dtype_of_its_call() -> None:
    counts = meta(3, dtype=torch.int64)
    quotients = list[Tensor]()
    before = torch.get_default_dtype()
    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            quotients.append(result_on_meta(aten.div.Tensor, (counts, counts), {}))
        finally:
            torch.set_default_dtype(before)
    assert [one.dtype for one in quotients] == [torch.float32, torch.float64, torch.float32]


def test_random_numbers_are_drawn_once() -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(3) for _ in range(2)]
    torch.manual_seed(0)
    for one in drawn:
        assert torch.equal(result_on_meta(aten.randn.default, ([3],), {}), one)
