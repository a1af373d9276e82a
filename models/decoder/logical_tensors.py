"""Weights of stages from whole logical tensors, before an optimizer takes them over."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.errors import UserError


@torch.no_grad()
def load_logical(stages: Iterable[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Copy the slices of whole tensors, by logical name, to the parameters of this rank's stages.

    Padding stays as it is. Raises UserError, before anything is changed, if a tensor is missing or
    has another shape. Other tensors may be there: they are of other ranks' stages.
    """
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    for parameter in parameters:
        for part in layout_of(parameter).parts:
            _require(part.name, part.shape, tensors)
    for parameter in parameters:
        # the elements of a parameter that was built blank may share one place in memory
        parameter.data = parameter.data.contiguous()
        values = parameter.data.view(-1)
        for part, start, stop in layout_of(parameter).spans():
            values[start:stop].copy_(part.take(tensors[part.name]).reshape(-1))


def _require(name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError unless there is a tensor of this name and shape."""
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError.of("model.logical_missing", name=name, shape=[*shape])
    if tuple(tensor.shape) != tuple(shape):
        raise UserError.of("model.logical_shape", name=name, found=[*tensor.shape], shape=[*shape])
