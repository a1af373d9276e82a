"""The gradients of a flat buffer, held whole or, under ZeRO-2, whole only until they are reduced.

Without ZeRO-2 the gradients of all parameters of the buffer lie in one flat tensor for good, in
which micro-batches accumulate. Under ZeRO-2 that tensor is allocated for the first gradient of a
micro-batch and given up when the gradients are reduced; the rank keeps a sum of its own slice.
While there is no memory, `main_grad` of a parameter is an `AbsentGradient`, and no parameter counts
as having a gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megaprec.comm.layout import layout_of
from megaprec.comm.main_grad import (
    AbsentGradient,
    attach_main_grad,
    forget_gradient,
    take_gradients,
)


class GradBuffer:
    """The gradients of `parameters`, and the views that are their `main_grad`.

    starts: the first element of each parameter among the `size` elements.
    own: this rank's slice of the elements.
    sharded: the whole is given up when it is reduced.

    local: this rank's slice [local] of the gradients, or under ZeRO-2 the sum of those that were
        reduced in this step.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        starts: Sequence[int],
        size: int,
        own: slice,
        dtype: torch.dtype,
        device: torch.device,
        sharded: bool,
    ) -> None:
        self.sharded = sharded
        self.dtype = dtype
        self._parameters = parameters
        self._starts = starts
        self._size = size
        self._device = device
        self._whole: Tensor | None = None
        self._has_sum = False  # True once gradients of this step were added to `local`
        if sharded:
            self.local = torch.zeros(own.stop - own.start, dtype=dtype, device=device)
            views = self._absent()
        else:
            self._whole = torch.zeros(size, dtype=dtype, device=device)
            self.local = self._whole[own]
            views = self._views_of(self._whole)
        self._lasting_views = views  # the `main_grad` of parameters while nothing is allocated
        self._views = views

    def _absent(self) -> list[Tensor | AbsentGradient]:
        """Return for each parameter what stands for a view of its gradient without memory."""
        absent: list[Tensor | AbsentGradient] = []
        for parameter in self._parameters:
            name = layout_of(parameter).parts[0].name
            absent.append(AbsentGradient(name, parameter.shape, self.dtype))
        return absent

    def _views_of(self, flat: Tensor) -> list[Tensor | AbsentGradient]:
        """Return a view of `flat` [size] for each parameter, of its shape."""
        views: list[Tensor | AbsentGradient] = []
        for parameter, start in zip(self._parameters, self._starts, strict=True):
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            views.append(view)
        return views

    def attach(self, number: int) -> None:
        """Accumulate all later gradients of parameter `number` here."""
        make_room = self.make_room if self.sharded else None
        attach_main_grad(self._parameters[number], self._views[number], make_room)

    def collects(self, number: int) -> bool:
        """Return True if gradients of parameter `number` come here, and fit: no other optimizer
        has taken it, it was not exchanged, and it still has its shape."""
        parameter = self._parameters[number]
        view = self._views[number]
        return getattr(parameter, "main_grad", None) is view and parameter.shape == view.shape

    @property
    def whole(self) -> Tensor | None:
        """Return the gradients [size] of all parameters; None while they have no memory."""
        return self._whole

    def make_room(self) -> None:
        """Allocate the whole, if it is not, for gradients to accumulate in; its values are
        undefined."""
        if self._whole is not None:
            return
        self._whole = torch.empty(self._size, dtype=self.dtype, device=self._device)
        # what lies between parameters is reduced too
        stop = 0
        for parameter, start in zip(self._parameters, self._starts, strict=True):
            self._whole[stop:start].zero_()
            stop = start + parameter.numel()
        self._whole[stop:].zero_()
        self._set_main_grads(self._views_of(self._whole))

    def release_for_reduction(self) -> None:
        """Under ZeRO-2, let go of the flat gradients: the caller, which reduces them, then holds
        the only reference. Further gradients of the step get memory of their own."""
        if self.sharded:
            take_gradients(self._parameters)
            self.free()

    def free(self) -> None:
        """Give up a sharded whole and what is in it: no parameter has a gradient then."""
        if self.sharded and self._whole is not None:
            self._whole = None
            for parameter in self._parameters:
                forget_gradient(parameter)
            self._set_main_grads(self._lasting_views)

    def _set_main_grads(self, views: list[Tensor | AbsentGradient]) -> None:
        self._views = views
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.main_grad = view  # type: ignore[attr-defined]

    def add_reduced(self, reduced: Tensor) -> None:
        """Add reduced gradients [local] to those of earlier micro-batches of the step."""
        if self._has_sum:
            self.local.add_(reduced)
        else:
            self.local.copy_(reduced)
        self._has_sum = True

    def forget(self) -> None:
        """Begin a new step: the next reduced gradients overwrite the sum of this one."""
        self._has_sum = False
        self.free()

    def lasting_bytes(self) -> int:
        """Return the bytes that are held between steps."""
        held = self.local if self.sharded or self._whole is None else self._whole
        return held.nbytes
