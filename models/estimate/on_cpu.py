"""Tensors without storage that say that they are on a CPU.

Operators on them are those that this machine's processor would run.
torch's own fake tensors do the same in more time: they check and cache what a compiler needs to
know.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaprec.torch_private import no_torch_function, tensor_on_device
from models.estimate.results import is_factory, result_on_meta

_CPU = torch.device("cpu")
_META = torch.device("meta")


class _OnCPU(Tensor):
    """A meta tensor that operators take for one on a CPU until a kernel is chosen.

    meta: the tensor, of the same storage, that the kernel gets.
    """

    meta: Tensor

    @staticmethod
    def __new__(cls: type["_OnCPU"], meta: Tensor) -> "_OnCPU":
        self = tensor_on_device(cls, meta, _CPU)
        self.meta = meta
        return self

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride] (torch's is no property)
        return _CPU

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] (torch's reads the numbers)
        return f"{self.meta!r} on a CPU"

    __torch_function__ = no_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return _CPU
        return _on_meta(func, args, kwargs or {})


class OnCPU(TorchDispatchMode):
    """All tensors made inside are without storage and say that they are on a CPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return _OnCPU.__torch_dispatch__(func, types, args, kwargs)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results of an operator, which are tensors, others, or
    lists of these."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def _on_meta(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Return the result of an operator whose arguments say that they are on a CPU, computed on meta
    tensors; it says so too."""
    if func is torch.ops.aten.lift_fresh.default:
        # torch.tensor([1, 2]) has made a real tensor, because its numbers need one.
        real = args[0]
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        return _OnCPU(meta)
    if "device" in kwargs or is_factory(func):
        kwargs = kwargs | {"device": _META}
    bare_args = [_unwrap(value) for value in args]
    bare_kwargs = {key: _unwrap(value) for key, value in kwargs.items()}
    return _wrap(result_on_meta(func, tuple(bare_args), bare_kwargs))


def _wrap(value: Any) -> Any:
    """Return a result whose meta tensors say that they are on a CPU."""
    if isinstance(value, Tensor):
        return _OnCPU(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_wrap, value))
    return value


def _unwrap(value: Any) -> Any:
    """Return an argument with its meta tensors. Raises TypeError for a real tensor."""
    if isinstance(value, _OnCPU):
        return value.meta
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    # The tensor that torch makes of a number has no dimensions.
    if isinstance(value, Tensor) and value.dim():
        raise TypeError(
            f"a real tensor {list(value.shape)} among tensors without storage: its bytes "
            "would not be counted"
        )
    return value
