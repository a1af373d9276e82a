"""Recomputation of a function in the backward pass, instead of keeping the activations that it
saves for it.

The recomputed part is a function of tensors that are kept. Autograd's hooks for saved tensors store
a number in place of each tensor that the function would save. The first number that the backward
pass asks for calls the function a second time. That call ends as soon as it has computed every
saved tensor; its own graph is discarded, so each gradient is still computed once, from the graph of
the first call.

The operation after the function often saves the function's result: for example the matrix product
after a norm or an activation function. `then` names that operation, and then the result is not kept
either. (`torch.utils.checkpoint` has no such option, and its first use imports torch's compiler,
which costs each rank 75 MB and two seconds.)

Recomputation does not change a single bit. Dropout is a function of logical coordinates and draws
nothing from a generator, a loss that lives in the graph enters it once, and a statistic such as
amax is recorded twice with the same value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megaprec.torch_private import storage_address


def recomputed(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    then: Callable[[Tensor], Any] = lambda result: result,
) -> Any:
    """Return then(function(x)), keeping only x and what `then` saves apart from the result of
    `function`.

    function: must compute the same values in every call.
    then: the operation after it, or several operations on the same result.
    Nothing is recomputed in evaluation or if x needs no gradient.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return then(function(x))
    # autograd saves numbers in place of the function's tensors
    call = _Call(function, x)
    with saved_tensors_hooks(call.pack, call.unpack):
        result = function(x)
    return call.apply_next(result, then)


class _Stop(Exception):
    """Signal that every tensor that the backward pass needs has been recomputed."""


class _Call:
    """One call of `function`: the tensors that autograd would have saved in it, by number, and its
    result.

    function: is called again in the backward pass.
    count: how many tensors the call would have saved.
    wants_result: the operation after the function would have saved its result.
    recomputed: the tensors by number, from their recomputation until the backward pass takes them.
    """

    RESULT = -1  # the number of the result

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function = function
        # keep the tensor: in torch 2.11 its grad_fn does not outlive it
        self.input: Any = _Keep.apply(x)
        self.count = 0
        self.wants_result = False
        self.recomputed: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Return the number that autograd saves in place of a tensor."""
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        """Return the tensor of a number, recomputed with all others when the first is wanted."""
        if number not in self.recomputed:
            self._recompute()
        return self.recomputed.pop(number)

    def apply_next(self, result: Tensor, then: Callable[[Tensor], Any]) -> Any:
        """Return then(result), where the backward pass recomputes the result if `then` would save
        it."""
        storage = storage_address(result)
        size = result.numel()
        in_order = result.is_contiguous()

        def pack(tensor: Tensor) -> Tensor | torch.Size:
            """Return what autograd saves in place of a tensor: of the result, or a view of all of
            it, the shape alone."""
            has_same_elements = storage_address(tensor) == storage and tensor.numel() == size
            # if either were not contiguous, the shape would not identify the elements
            is_result = has_same_elements and in_order and tensor.is_contiguous()
            self.wants_result |= is_result
            return tensor.shape if is_result else tensor

        def unpack(packed: Tensor | torch.Size) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return self.unpack(self.RESULT).view(packed)

        with saved_tensors_hooks(pack, unpack):
            return then(result)

    def _recompute(self) -> None:
        """Call the function again, to its end or until it has computed every tensor that it would
        have saved, and keep these in `recomputed`, with the result if that is wanted."""
        (x,) = self.input.grad_fn.saved_tensors
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            # detached: its graph and this call would keep each other alive
            saved.append(tensor.detach())
            if len(saved) == self.count and not self.wants_result:
                raise _Stop

        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, _no_graph):
                result = self.function(x.detach().requires_grad_())
            if self.wants_result:
                self.recomputed[self.RESULT] = result.detach()
        except _Stop:
            pass
        assert len(saved) == self.count, (
            f"recomputed {len(saved)} of {self.count} tensors: not the same computation"
        )
        # by number: the second call saves its tensors in the order of the first
        self.recomputed |= enumerate(saved)


def _no_graph(packed: object) -> Tensor:
    raise AssertionError("a recomputation has no backward pass of its own")


class _Keep(torch.autograd.Function):
    """Save x as operators save their inputs, so that an enclosing recomputation can recompute x
    too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("no gradient flows through a placeholder")
