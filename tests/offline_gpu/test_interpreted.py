"""The kernels that torch writes for an H100, run by Triton's interpreter, compute what their leaves
and regions compute."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megaprec.comm.axis import Axis
from megaprec.comm.layout import Part
from parallel.leaves import PLAIN, LeafCall, Leaves
from parallel.loss import cross_entropy
from tests.offline_gpu.calls import (
    FAMILIES,
    FP8_KINDS,
    SMALL,
    SMALL_FP8,
    calls_of,
    fp8_calls_of,
)
from tests.parallel.test_loss import unusual_logits
from tests.pretend import bits

pytestmark = pytest.mark.campaign
# whose sizes do not depend on the model's: too many numbers for the interpreter
OF_THE_OPTIMIZER = ("squares and zeros", "adamw")


def tensors_for(call: LeafCall) -> list[Tensor]:
    """Arguments of a call; integers are any, small enough for an index of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tensors = call.on("cpu").example_tensors()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            tensor.normal_(generator=generator)
        elif tensor.dtype == torch.bool:
            tensor.bernoulli_(generator=generator)
        else:
            tensor.random_(40, generator=generator)
    return tensors


def copied(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies with the same strides, those of floating point in another dtype if one is given."""
    copies = []
    for tensor in tensors:
        of = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        copies.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=of).copy_(tensor))
    return copies


def results_of(
    function: Callable[..., Any],
    tensors: list[Tensor],
    region: bool,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The results of a leaf, or those of a region and the gradients of its inputs."""
    arguments = copied(tensors, dtype)
    if not region:
        results = function(*arguments)
        return [results] if isinstance(results, Tensor) else list(results)
    inputs = [x.requires_grad_(x.dtype.is_floating_point) for x in arguments]
    results = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in results]
    grads = torch.autograd.grad(
        results,
        [x for x in inputs if x.requires_grad],
        tangents,
        allow_unused=True,
        materialize_grads=True,
    )
    return [*(y.detach() for y in results), *grads]


def error(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact.double()).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_interpreted_kernels_are_as_near_to_float64_as_operators(
    interpreter: Any, family: str
) -> None:
    for call in calls_of(SMALL, family):
        if call.name in OF_THE_OPTIMIZER:
            continue
        tensors = tensors_for(call)
        exact_call = call.in_float64()
        exact = results_of(lambda *x, of=exact_call: of.run(x), tensors, call.region, torch.float64)
        plain = results_of(lambda *x, of=call: of.run(x), tensors, call.region)
        compiled = results_of(interpreter.compiled(call), tensors, call.region)
        for one, other, true in zip(compiled, plain, exact, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), call.name
            if not one.dtype.is_floating_point:
                assert torch.equal(one, other), call.name
                continue
            ulp = torch.finfo(one.dtype).eps * true.abs().max().item()
            assert error(one, true) <= 2 * error(other, true) + ulp, call.name


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_interpreted_fp8_casts_have_the_bits_of_operators(interpreter: Any, kind: str) -> None:
    for call in fp8_calls_of(SMALL_FP8, kind):
        tensors = tensors_for(call)
        for scale in tensors[1:]:
            scale.abs_()  # or an amax, neither of which is negative
        plain = results_of(lambda *x, of=call: of.run(x), tensors, False)
        compiled = results_of(interpreter.compiled(call), tensors, False)
        for one, other in zip(compiled, plain, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(bits(one), bits(other)), (call.name, call.arguments)


class Interpreted(Mapping[LeafCall, Any]):
    """A compiled form for each call, made when it is first asked for."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.made: dict[LeafCall, Any] = {}

    def __contains__(self, call: object) -> bool:
        return True

    def __getitem__(self, call: LeafCall) -> Any:
        if call not in self.made:
            self.made[call] = self.interpreter.compiled(call.on("cuda"))
        return self.made[call]

    def __iter__(self) -> Iterator[LeafCall]:
        return iter(self.made)

    def __len__(self) -> int:
        return 1


def test_infinities_nans_and_targets_that_are_no_words_pass_through_the_kernels_of_the_loss(
    interpreter: Any,
) -> None:
    logits, targets = unusual_logits(torch.bfloat16)
    whole = Part.cut("head.weight", (12, 4), 0, Axis("tp"))
    seen = []
    for leaves in (PLAIN, Leaves(Interpreted(interpreter))):
        given = logits.clone().requires_grad_()
        losses = cross_entropy(given * 1, targets, whole, Axis("tp"), torch.float32, True, leaves)
        losses.nan_to_num(0, 0, 0).sum().backward()
        seen.append((losses.detach(), given.grad))
    (plain, plain_grad), (losses, grad) = seen
    torch.testing.assert_close(losses, plain, equal_nan=True)
    torch.testing.assert_close(grad, plain_grad, equal_nan=True)
