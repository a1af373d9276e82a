"""Sums done in another order on two processes than on one: each of them must be caught, and none
without a change.

A mutation changes two processes only, so that the two layouts part. Each reorders additions; in
exact arithmetic all of them would be right.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaprec.comm import virtual
from megaprec.comm.virtual import VirtualAxis
from megaprec.optim import model_buffers
from megaprec.optim.state import partial_grads
from megaprec.precision.gemm import Gemm
from models.decoder import cutting
from models.engine import engine
from models.feed_forward import moe
from parallel import layers, linear, norms
from parallel.lockstep import COLLECTIVES
from tests.layouts import Run, train
from tests.models.test_canonical import MODELS, require_equal, run_of
from tests.planting import put

Mutation = Callable[[], None]


def in_order(leaves: Sequence[Tensor]) -> Tensor:
    """The sum from left to right, in place of the tree."""
    return reduce(
        torch.add, [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves]
    )


def crossed(leaves: Sequence[Tensor]) -> Tensor:
    """The sum by a tree of other pairs."""
    if len(leaves) > 1:
        return in_order([in_order(leaves[::2]), in_order(leaves[1::2])])
    return in_order(leaves)


def unwidened(leaves: Sequence[Tensor]) -> Tensor:
    """The sum by the tree, but each node rounded to the dtype of the leaves."""
    while len(leaves) > 1:
        leaves = [in_order(leaves[n : n + 2]).to(leaves[0].dtype) for n in range(0, len(leaves), 2)]
    return leaves[0]


def reversed_rows(rows: Tensor) -> Tensor:
    """The rows of a sum over tokens, the last first: the sum has other bits for more than a few
    rows."""
    return rows.flip(0)


def collective(name: str, what: Any) -> None:
    assert name in COLLECTIVES
    COLLECTIVES[name] = what


def interleaved_sum(self: VirtualAxis, leaves: Sequence[Tensor]) -> Tensor:
    gathered = self.real.gather(torch.stack([*leaves])).unbind()
    return crossed(gathered).to(leaves[0].dtype)


def sum_of_parts_first(self: VirtualAxis, leaves: Sequence[Tensor]) -> list[Tensor]:
    total = interleaved_sum(self, leaves)
    return [total.chunk(self.size)[v] for v in self.ranks]


def sum_of_rounded(self: VirtualAxis, leaves: Sequence[Tensor]) -> list[Tensor]:
    total = unwidened(self.real.gather(torch.stack([*leaves])).unbind())
    return [total.chunk(self.size)[v] for v in self.ranks]


def rounded_nodes(self: VirtualAxis, leaves: Sequence[Tensor]) -> list[Tensor]:
    return [unwidened(leaves)]


def flipped_gradient(inner: Any) -> Any:
    def add_gradient(vector: Any, rows: Tensor, goes: Any) -> Any:
        return inner(vector, reversed_rows(rows), goes)

    return add_gradient


def flipped_norm(inner: Any) -> Any:
    def gradients(
        grad: Tensor, x: Tensor, inverse: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        turned = (each.flip(0, 1) for each in (grad, x, inverse))  # [s, b, hidden]
        return inner(grad, x, inverse, *settings)[0], inner(*turned, *settings)[1]

    return gradients


def flipped_lookup(ctx: Any, grad: Tensor) -> Any:
    ids, foreign = ctx.saved_tensors
    total = layers.begin_cleared(ctx.weight)
    if foreign is not None:
        grad = grad.masked_fill(foreign.unsqueeze(-1), 0)
    rows = grad.reshape(-1, grad.shape[-1]).to(total.dtype).flip(0)
    total.index_put_((ids.reshape(-1).flip(0),), rows, accumulate=True)
    return None, None, None, None, None


def halves_of_k(self: Gemm, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The product summed over its inner dimension in two pieces."""
    k = x.shape[1] // 2
    wide = x.float() if x.dtype != torch.float64 else x
    w = weight.to(wide.dtype)
    return (F.linear(wide[:, :k], w[:, :k]) + F.linear(wide[:, k:], w[:, k:])).to(self.out), (x,)


def weight_gradient_in_halves(self: Gemm, total: Tensor, grad: Any, x: Any, first: bool) -> None:
    """The product summed over tokens in two pieces."""
    g, values = (one[0].float() for one in (grad, x))
    n = len(g) // 2
    made = g[:n].t() @ values[:n] + g[n:].t() @ values[n:]
    total.copy_(made) if first else total.add_(made)


def input_gradient_in_halves(self: Gemm, grad: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    g = grad[0].float()
    w = weight.float()
    n = g.shape[1] // 2
    return (g[:, :n] @ w[:n] + g[:, n:] @ w[n:]).to(dtype)


def shared_ends(inner: Any) -> Any:
    """The tied head adds its gradient to the embedding's parameter, in the order of the passes."""

    def build(*args: Any) -> Any:
        return inner(*args[:-1], False)

    return build


def flipped_take(ctx: Any, grad: Tensor) -> Any:
    (places,) = ctx.saved_tensors
    rows = grad[places]
    return in_order(rows.flip(1).unbind(1)).to(grad.dtype), None, None


def exponentials_by_halves(inner: Any) -> Any:
    """The sum of a row's exponentials in two pieces."""

    def sum_of(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if args == (-1,) and self.dim() == 2 and self.shape[1] > 8 and not options:
            n = self.shape[1] // 2
            return inner(self[:, :n], -1) + inner(self[:, n:], -1)
        return inner(self, *args, **options)

    return sum_of


def loss_from_the_last(inner: Any) -> Any:
    def sum_of(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if not args and not options and self.dim() == 2:
            return in_order(self.t().flip(0).reshape(-1).unbind())
        return inner(self, *args, **options)

    return sum_of


MUTATIONS: dict[str, tuple[str, str, Mutation]] = {
    "every sum over virtual ranks goes left to right": (
        "llama",
        "fp32",
        lambda: put(virtual, "tree_sum", in_order),
    ),
    "every sum over virtual ranks pairs others": (
        "llama",
        "fp32",
        lambda: put(virtual, "tree_sum", crossed),
    ),
    "every sum over virtual ranks rounds its nodes": (
        "llama",
        "bf16",
        lambda: put(virtual, "tree_sum", unwidened),
    ),
    "processes exchange rounded nodes": (
        "gpt2",
        "bf16",
        lambda: put(VirtualAxis, "_nodes", rounded_nodes),
    ),
    "sums of whole tensors pair others": (
        "gpt2",
        "fp32",
        lambda: collective("sum", interleaved_sum),
    ),
    "scattered sums pair others": (
        "mixtral",
        "fp32",
        lambda: collective("scatter_sum", sum_of_parts_first),
    ),
    "scattered sums round each part": (
        "llama",
        "bf16",
        lambda: collective("scatter_sum", sum_of_rounded),
    ),
    "partial gradients are summed in another order": (
        "llama",
        "fp32",
        lambda: put(VirtualAxis, "sum", interleaved_sum),
    ),
    "partial gradients of a router are summed in another order": (
        "mixtral",
        "fp32",
        lambda: put(VirtualAxis, "sum", interleaved_sum),
    ),
    "gradients of norms are summed from the last token": (
        "llama",
        "fp32",
        lambda: put(norms, "_norm_gradients", flipped_norm(norms._norm_gradients)),
    ),
    "gradients of biases are summed from the last token": (
        "gpt2",
        "fp32",
        lambda: put(linear, "add_gradient", flipped_gradient(linear.add_gradient)),
    ),
    "gradients of an embedding are summed from the last token": (
        "llama",
        "fp32",
        lambda: put(layers.Lookup, "backward", staticmethod(flipped_lookup)),
    ),
    "products are summed in two pieces": (
        "llama",
        "fp32",
        lambda: put(Gemm, "forward", halves_of_k),
    ),
    "gradients of weights are summed in two pieces": (
        "gpt2",
        "fp32",
        lambda: put(Gemm, "add_weight_gradient_", weight_gradient_in_halves),
    ),
    "gradients of inputs are summed in two pieces": (
        "llama",
        "fp32",
        lambda: put(Gemm, "input_gradient", input_gradient_in_halves),
    ),
    "a tied head adds to the embedding": (
        "gpt2",
        "fp32",
        lambda: put(engine, "build", shared_ends(cutting.build)),
    ),
    "a token's experts are summed in another order": (
        "mixtral",
        "fp32",
        lambda: put(moe.TakeRows, "backward", staticmethod(flipped_take)),
    ),
    "exponentials of the vocabulary are summed in two pieces": (
        "llama",
        "fp32",
        lambda: put(Tensor, "sum", exponentials_by_halves(Tensor.sum)),
    ),
    "losses are summed from the last token": (
        "llama",
        "fp32",
        lambda: put(Tensor, "sum", loss_from_the_last(Tensor.sum)),
    ),
    "tied gradients are summed after another rounding": (
        "gpt2",
        "fp32",
        lambda: put(model_buffers.ModelBuffers, "sum_tied_and_virtual", rounded_copies),
    ),
}


def rounded_copies(self: model_buffers.ModelBuffers) -> None:
    """Partial gradients and tied ones are added in half precision."""
    assert self._virtual is not None
    partial_grads.sum_partial_slices(self.all, self._virtual)
    for first, second in self.twins:
        total = (first.grads.bfloat16() + second.grads.bfloat16()).float()
        first.grads.copy_(total)
        second.grads.copy_(total)


def plant(name: str) -> None:
    """Change this process, if there are two of them."""
    if dist.get_world_size() > 1:
        MUTATIONS[name][2]()


def nothing() -> None: ...


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_sum_in_another_order_is_caught(name: str) -> None:
    model, precision, _ = MUTATIONS[name]
    run = mutated(model, precision, partial(plant, name))
    with pytest.raises(AssertionError):
        require_equal(train(run), train(run, tp=2))


@pytest.mark.cases(0, sample=1)
@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_change_nothing_is_caught(model: str, precision: str) -> None:
    run = mutated(model, precision, nothing)
    require_equal(train(run), train(run, tp=2))


def mutated(model: str, precision: str, before: Mutation) -> Run:
    """Eight virtual ranks, four on each of two processes, and three experts a token: two addends
    have one order."""
    sizes = {"heads": 8, "layers": 2} | ({"experts_per_token": 3} if model == "mixtral" else {})
    return run_of(model, precision, steps=2, shards=8, model=MODELS[model] | sizes, before=before)
