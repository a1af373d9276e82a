"""Counts kernels launched and bytes moved, on tensors without storage.

Every operator that is no view stands for one launch, and a compiled leaf or region for one launch
in each direction.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.leaves import Leaves, call_of
from parallel.regions import compiled_region

# no kernel: allocations, and views that torch does not declare as such
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "promote_types"}
# their bytes are those of weights, activations and gradients, which every implementation moves
PRODUCTS = {
    "mm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
}
# overwrite their first argument without reading it
WRITES = {"copy_", "zero_", "fill_"}


@dataclass
class Cost:
    """Launches of all kernels, and bytes that kernels other than products and attention move."""

    launches: int = 0
    bytes: int = 0

    def add(self, name: str, tensors: list[Tensor]) -> None:
        self.launches += 1
        if name not in PRODUCTS:
            self.bytes += sum(map(bytes_of, tensors))

    def without(self, other: "Cost") -> "Cost":
        return Cost(self.launches - other.launches, self.bytes - other.bytes)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's own elements; a dim that is expanded is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator which returns nothing writes to, such as a fused update."""
    written: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(value)
    return written


class Counting(TorchDispatchMode):
    """Adds the cost of every operator to `cost`, unless it is None."""

    def __init__(self) -> None:
        super().__init__()
        self.cost: Cost | None = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if self.cost is not None and not func.is_view and name not in NO_LAUNCH:
            read = args[1:] if name in WRITES else args
            written = [*tensors_in(result)]
            if result is None:
                written = _overwritten(func, args, kwargs)
            named = [value for key, value in kwargs.items() if key != "out"]
            self.cost.add(name, [*tensors_in((*read, *named)), *written])
        return result

    @contextmanager
    def as_one(self, *, inputs: Callable[[], Any]) -> Iterator[list[Tensor]]:
        """Count what runs inside as one launch, which reads the inputs and writes what is put into
        the list."""
        cost = self.cost
        results: list[Tensor] = []
        self.cost = None
        try:
            yield results
        finally:
            self.cost = cost
        assert cost is not None
        cost.add("fused", [*tensors_in(inputs()), *results])


class Fused(Leaves):
    """Leaves and regions as if they were compiled: each call is one launch."""

    def __init__(self, counting: Counting) -> None:
        super().__init__(by_region=True)
        object.__setattr__(self, "counting", counting)

    def __call__(
        self,
        leaf: Callable[..., Any],
        *arguments: Any,
        otherwise: Callable[..., Any] | None = None,
    ) -> Any:
        with self.counting.as_one(inputs=lambda: arguments) as results:  # type: ignore[attr-defined]
            returned = leaf(*arguments)
            results += tensors_in(returned)
        return returned

    def call_region(self, region: Callable[..., Any], *arguments: Any) -> Any:
        counting: Counting = self.counting  # type: ignore[attr-defined]

        def one_launch(graph: Callable[..., Any], _: list[Tensor]) -> Callable[..., Any]:
            def run(*tensors: Tensor) -> Any:
                with counting.as_one(inputs=lambda: tensors) as results:
                    returned = graph(*tensors)
                    results += tensors_in(returned)
                return returned

            return run

        cost = counting.cost
        counting.cost = Cost()  # of the trace, which is no part of a step
        passes = compiled_region(call_of(region, arguments, region=True), one_launch)
        counting.cost = cost
        return passes(*tensors_in(arguments))
