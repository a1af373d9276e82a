"""Parameters whose values have no memory at present (ZeRO-3), and the error of reading them.

torch does not look whether a tensor's storage has memory: a kernel that reads it ends the process.
So such a parameter gets a class whose operations raise UserError, but for those that read no
values. The class that it had comes back with its values.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import new_class
from typing import Any, ClassVar

from torch import nn

from megaprec.comm.layout import has_layout, layout_of
from megaprec.errors import UserError
from megaprec.torch_private import without_torch_function

# names of methods and attributes that read no values
_ABOUT_A_TENSOR = frozenset(
    (
        "shape",
        "size",
        "dim",
        "ndim",
        "numel",
        "nelement",
        "stride",
        "dtype",
        "layout",
        "device",
        "itemsize",
        "nbytes",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_leaf",
        "is_inference",
        "requires_grad",
        "requires_grad_",
        "retains_grad",
        "grad",
        "grad_fn",
        "grad_dtype",
        "output_nr",
        "name",
        "names",
        "_version",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "storage_offset",
        "untyped_storage",
        "is_shared",
        "data_ptr",
        "__hash__",
        "__len__",
    )
)


class AbsentParameter(nn.Parameter):
    """A parameter without values. Raises UserError for whatever would read or write them.

    present: the class of the parameter when it has values.
    """

    present: ClassVar[type[nn.Parameter]] = nn.Parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, one of torch's functions or attributes, if it reads no values. Raises
        UserError for any other."""
        if _name_of(func) not in _ABOUT_A_TENSOR:
            raise UserError.of(
                "optimizer.weight_without_memory", name=next(_logical_names(args), "a weight")
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of one of torch's functions, or of the attribute that a getter reads."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _logical_names(arguments: Iterable[Any]) -> Iterator[str]:
    """Yield the logical names of the absent parameters among arguments of one of torch's functions,
    also of those in lists."""
    for argument in arguments:
        if isinstance(argument, AbsentParameter) and has_layout(argument):
            yield layout_of(argument).parts[0].name
        elif isinstance(argument, list | tuple):
            yield from _logical_names(argument)


@cache
def _absent_class(present: type[nn.Parameter]) -> type[AbsentParameter]:
    """Return the class of parameters of class `present` that have no values."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace["present"] = present

    return new_class(f"Absent{present.__name__}", (AbsentParameter, present), exec_body=fill)


def mark_absent(parameters: Iterable[nn.Parameter]) -> None:
    """Have the parameters raise UserError when their values are read."""
    for parameter in parameters:
        if not isinstance(parameter, AbsentParameter):
            parameter.__class__ = _absent_class(type(parameter))


def mark_present(parameters: Iterable[nn.Parameter]) -> None:
    """Give the parameters back the classes that they had."""
    for parameter in parameters:
        present = getattr(type(parameter), "present", None)
        if present is not None:
            parameter.__class__ = present
