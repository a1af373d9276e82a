"""Kernels of other packages for recurrent layers, where they are installed, compute on a GPU what
plain torch computes in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.recurrent import delta_rule, kernel_calls, state_space
from models.recurrent.kernel_choice import (
    CONVOLUTION,
    DELTA_RULE,
    ROW_DECAY_RULE,
    STATE_SPACE,
    KernelSetting,
    Package,
    choose,
)
from models.recurrent.short_convolution import short_convolution
from tests.recurrent.recurrences import DrawnDelta, DrawnStateSpace
from tests.recurrent.stand_ins import FUNCTIONS
from tests.recurrent.test_kernel_choice import made_and_gradients

TOLERANCE = 0.02  # relative, of results and gradients in bf16
PRODUCTS = torch.bfloat16
DOCUMENTS = pytest.mark.parametrize("documents", [0.0, 0.1])
# of several chunks, of which the last has fewer tokens; stand-ins compute token by token
LENGTH = {"cuda": 300, "cpu": 9}


def kernel_on(device: str, package: Package) -> Callable[..., Any]:
    """The package's kernel on a GPU; on a CPU its stand-in."""
    if device == "cpu":
        return FUNCTIONS[package]
    kernel, name = choose(
        package, KernelSetting(device, PRODUCTS, canonical=False, deterministic=False)
    )
    return kernel or pytest.skip(name)


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        error = (ours.detach().cpu().double() - exact).norm()
        assert error <= TOLERANCE * exact.norm(), (number, error)


def rounded(x: Tensor) -> Tensor:
    """Numbers that both dtypes have."""
    return x.to(PRODUCTS).to(x.dtype)


def on(device: str, x: Tensor) -> Tensor:
    return x.to(device, torch.float32)


@DOCUMENTS
@pytest.mark.parametrize("package", [DELTA_RULE, ROW_DECAY_RULE])
def test_the_delta_rule_is_that_of_plain_torch(
    package: Package, documents: float, device: str
) -> None:
    kernel = kernel_on(device, package)
    length = LENGTH[device]
    by_row = package == ROW_DECAY_RULE
    sizes = DrawnDelta(2, 4, length, 64, 64, 64, 1.0, documents, 3, by_row)
    inputs, _ = sizes.inputs()
    keys = ("query", "key", "value", "log_decay", "strength")
    tensors = [rounded(getattr(inputs, key)) for key in keys]
    begins = None if inputs.begins is None else inputs.begins.to(device)

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=True)))
        return delta_rule.chunked(here)[:1]

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        placed = dict(zip(keys, (on(device, x) for x in leaves), strict=True))
        here = replace(inputs, **placed, begins=begins)
        return [kernel_calls.delta_rule(kernel, here, None, PRODUCTS)[0].cpu()]

    assert_near(made_and_gradients(theirs, tensors), made_and_gradients(ours, tensors))


@DOCUMENTS
def test_the_state_space_is_that_of_plain_torch(documents: float, device: str) -> None:
    kernel = kernel_on(device, STATE_SPACE)
    length = LENGTH[device]
    sizes = DrawnStateSpace(2, 2, 2, length, 64, 64, 64, 1.0, documents, 3)
    inputs, state = sizes.inputs()
    keys = ("query", "key", "value", "step", "rate")
    tensors = [rounded(x) for x in (*(getattr(inputs, key) for key in keys), state)]
    begins = None if inputs.begins is None else inputs.begins.to(device)

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=False)))
        return state_space.chunked(here, leaves[-1])

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        *placed, state = (on(device, x) for x in leaves)
        here = replace(inputs, **dict(zip(keys, placed, strict=True)), begins=begins)
        made = kernel_calls.state_space(kernel, here, state, PRODUCTS)
        return [x.cpu() for x in made]

    assert_near(made_and_gradients(theirs, tensors), made_and_gradients(ours, tensors))


@pytest.mark.parametrize("given", ["documents", "before"])
def test_the_convolution_is_that_of_plain_torch(given: str, device: str) -> None:
    kernel = kernel_on(device, CONVOLUTION)
    dice = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(shape, generator=dice, dtype=torch.float64)
        for shape in ((50, 2, 64), (64, 4), (64,), (3, 2, 64))
    ]
    begins = torch.rand(2, 50, generator=dice) < 0.1 if given == "documents" else None
    if given == "documents":
        tensors.pop()

    def ours(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None) -> Any:
        return [F.silu(short_convolution(x, weight, before, begins, bias))]

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        x, weight, bias, *before = (on(device, leaf) for leaf in leaves)
        earlier = before[0] if before else None
        numbers = None if begins is None else begins.to(device)
        made = kernel_calls.convolution(kernel, x, weight, bias, earlier, numbers)
        return [made.cpu()]

    assert_near(made_and_gradients(theirs, tensors), made_and_gradients(ours, tensors))
