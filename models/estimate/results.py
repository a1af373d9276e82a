"""Results of operators on meta tensors, computed once for arguments that are alike.

The shape of a result is computed by torch in Python, in up to a millisecond. Layers that are alike
ask for the same shapes again, and so do the stages and the layouts of a run.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megaprec.torch_private import storage_address

_META = torch.device("meta")


class _TensorForm(NamedTuple):
    """Shape, strides and dtype of a tensor, on which the forms of results depend."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _SequenceForm(NamedTuple):
    """The forms of a list or tuple."""

    kind: type
    forms: tuple[Any, ...]


class _ConstantForm(NamedTuple):
    """A value that is no tensor. Its type too tells it from others: 1 equals 1.0 and True."""

    kind: type
    value: Any


class _FormlessError(TypeError):
    """Raised for a tensor of which a form does not say all: a real one, or of a subclass."""


def result_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator (a `torch._ops.OpOverload`) on meta tensors.

    Results that are new tensors are made by their forms, which are computed once for arguments of
    the same forms. All other results, such as views, are computed each time.
    """
    if _may_share_memory(func):
        return func(*args, **kwargs)
    # a real tensor is made anew each time, because it may be of random numbers
    if is_factory(func) and kwargs.get("device") != _META:
        return func(*args, **kwargs)
    try:
        form_of_args = _form_of(args)
        # as pairs, for a dict is no key of a cache
        form_of_kwargs = tuple((key, _form_of(value)) for key, value in kwargs.items())
        # the dtype of floats that nothing else decides
        default_dtype = torch.get_default_dtype()
        form = _form_of_result(func, form_of_args, form_of_kwargs, default_dtype)
    except TypeError:  # of a formless tensor, or of a value that is no key
        form = None
    if form is None:
        return func(*args, **kwargs)
    return _make_of_form(form)


@lru_cache(maxsize=1024)
def is_factory(func: Any) -> bool:
    """Return True if an operator reads no tensor: what it makes is on the device that it is
    told."""
    arguments = func._schema.arguments
    reads_tensors = any("Tensor" in str(argument.type) for argument in arguments)
    takes_device = any(argument.name == "device" for argument in arguments)
    return takes_device and not reads_tensors


@lru_cache(maxsize=1024)
def _may_share_memory(func: Any) -> bool:
    """Return True if an operator writes to an argument, or returns one or a view of one."""
    schema = func._schema
    values = (*schema.arguments, *schema.returns)
    return any(value.alias_info is not None for value in values)


@lru_cache(maxsize=1 << 14)
def _form_of_result(
    func: Any, args: Any, kwargs: tuple[tuple[str, Any], ...], default_dtype: torch.dtype
) -> Any:
    """Return the form of the result of an operator whose arguments have these forms; None if not
    all of it are tensors with a memory of their own.

    default_dtype: torch's present one, on which results depend: a part of the cache's key.
    """
    new_args = _make_of_form(args)
    new_kwargs = {key: _make_of_form(form) for key, form in kwargs}
    result = func(*new_args, **new_kwargs)
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        return None
    form = _form_of(result)
    # a tensor that is made by its form must take as much memory
    copy_of_result = _make_of_form(form)
    copies = copy_of_result if isinstance(result, tuple) else (copy_of_result,)
    for tensor, copy in zip(tensors, copies, strict=True):
        memory = tensor.untyped_storage()
        memory_of_copy = copy.untyped_storage()
        if memory.nbytes() != memory_of_copy.nbytes():
            return None
    # some operators return an argument, or one memory twice, and do not say so
    arguments = [value for value in new_args if isinstance(value, Tensor)]
    all_tensors = (*tensors, *arguments)
    memories = {storage_address(tensor) for tensor in all_tensors}
    if len(memories) < len(all_tensors):
        return None
    return form


def _form_of(value: Any) -> Any:
    """Return the form of a value: of a tensor, of a list or tuple, or of a constant. Raises
    _FormlessError for a tensor that is not a plain meta tensor."""
    if isinstance(value, Tensor):
        # a subclass may have more than shape, strides and dtype
        if type(value) not in (Tensor, nn.Parameter) or not value.is_meta:
            raise _FormlessError
        return _TensorForm(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        forms = tuple(map(_form_of, value))
        return _SequenceForm(type(value), forms)
    return _ConstantForm(type(value), value)


def _make_of_form(form: Any) -> Any:
    """Return new tensors of a form, or the value that it stands for."""
    if isinstance(form, _TensorForm):
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META)
    if isinstance(form, _SequenceForm):
        values = map(_make_of_form, form.forms)
        # a NamedTuple is made of its fields, a list or tuple of an iterable
        is_named = hasattr(form.kind, "_fields")
        return form.kind(*values) if is_named else form.kind(values)
    return form.value
