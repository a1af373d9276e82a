"""Activations that are not kept for the backward pass but made again in it: memory for time.

What is made again is a function of tensors that are kept. Autograd's hooks for saved tensors replace what it would
save in the function by numbers, and the first number that the backward pass asks for calls the function a second time.
That call ends as soon as it has made everything that was saved; its own graph is thrown away, so each gradient is
still made once, from the graph of the first call.

What comes after the function often saves its result: the product behind a norm or an activation. `into` names it, and
then the result is not kept either. (`torch.utils.checkpoint` has no such thing, and its first use imports torch's
compiler, which takes 75 MB and two seconds of each rank.)

Numbers do not change by a bit. Dropout is a function of logical places and draws nothing, losses that live in the
graph enter it once, and what a layer only notes, like largest magnitudes, is noted twice with the same value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Module = Literal["attention", "activation", "norm"]
MODULES: tuple[Module, ...] = get_args(Module)
"""Parts of a layer that can be made again by themselves: all between attention's products, the activation function
between those of a feed-forward or expert, and the norms before both and before the head."""


@dataclass(frozen=True)
class Recompute:
    """What a stage makes again.

    modules: some of MODULES, in every layer. fraction, layers: of a stage's layers, the first so many as a whole: the
    share, rounded down, or, if it is not 0, the number.
    """

    modules: tuple[Module, ...] = ()
    fraction: float = 0.0
    layers: int = 0

    def whole(self, layers: int) -> int:
        """How many of a stage's layers are made again as a whole, the first ones."""
        return min(self.layers, layers) if self.layers else int(layers * self.fraction)

    def within(self, whole: bool) -> "Recompute":
        """For a layer. In one that is made again as a whole, the activation function is made again from the product
        before it all the same: then that product is the last thing that the layer makes again, and not the one after.
        """
        return Recompute(("activation",)) if whole else Recompute(self.modules)

    def run(
        self,
        module: Module,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        into: Callable[[Tensor], Tensor] = lambda made: made,
    ) -> Tensor:
        """into(function(x)), where `function` is of the module of this name."""
        return recomputed(function, x, into) if module in self.modules else into(function(x))


KEEP = Recompute()
"""Nothing is made again."""


def recomputed(
    function: Callable[[Tensor], Tensor], x: Tensor, into: Callable[[Tensor], Tensor] = lambda made: made
) -> Tensor:
    """into(function(x)), of which only x is kept, and what `into` saves besides the result of `function`.

    function: always does the same. In evaluation, and where x has no gradient, nothing is made again.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return into(function(x))
    call = _Call(function, x)
    with saved_tensors_hooks(call.pack, call.unpack):
        made = function(x)
    return call.hand(made, into)


class _Stop(Exception):
    """Everything that is needed has been made."""


class _Call:
    """A call of `function`: what autograd would have saved in it, by number, and its result."""

    RESULT = -1

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function = function
        self.input: Any = _Keep.apply(x)  # the tensor, for in torch 2.11 its grad_fn does not outlive it
        self.count = 0
        self.wants_result = False
        self.made: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        if number not in self.made:
            self._make()
        return self.made.pop(number)

    def hand(self, result: Tensor, into: Callable[[Tensor], Tensor]) -> Tensor:
        """into(result), which asks for the result again where it would save it."""
        storage, size, in_order = result.untyped_storage()._cdata, result.numel(), result.is_contiguous()

        def pack(tensor: Tensor) -> Tensor | torch.Size:
            views = tensor.untyped_storage()._cdata == storage and tensor.numel() == size
            same = views and in_order and tensor.is_contiguous()  # else the shape alone does not say which elements
            self.wants_result |= same
            return tensor.shape if same else tensor

        def unpack(packed: Tensor | torch.Size) -> Tensor:
            return packed if isinstance(packed, Tensor) else self.unpack(self.RESULT).view(packed)

        with saved_tensors_hooks(pack, unpack):
            return into(result)

    def _make(self) -> None:
        """Calls the function again, to its end or until it has made all that was saved."""
        (x,) = self.input.grad_fn.saved_tensors
        made: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            made.append(tensor.detach())  # with its graph it would hold this call, and the call it, for ever
            if len(made) == self.count and not self.wants_result:
                raise _Stop

        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, _no_graph):
                result = self.function(x.detach().requires_grad_())
            if self.wants_result:
                self.made[self.RESULT] = result.detach()
        except _Stop:
            pass
        assert len(made) == self.count, f"made {len(made)} tensors again of {self.count}: not the same computation"
        self.made |= enumerate(made)


def _no_graph(packed: object) -> Tensor:
    raise AssertionError("what is made again has no backward pass of its own")


class _Keep(torch.autograd.Function):
    """Keeps x as any operator keeps what its backward pass needs, so that what encloses it can make x again too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("nothing is computed from this")
