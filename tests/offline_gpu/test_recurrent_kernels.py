"""The Triton kernels of flash-linear-attention and mamba-ssm themselves, interpreted on tensors of a
CPU, compute what plain torch does, forward and backward.

They need no build for CUDA: Triton, numpy before 2.4 and the packages' sources are enough. That of
causal-conv1d is written in CUDA, and is tried on a GPU alone (`tests/gpu/test_recurrent.py`).
"""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.recurrent import delta_rule, kernel_calls, state_space
from models.recurrent.delta_rule import DeltaInputs
from models.recurrent.kernel_choice import DELTA_RULE, ROW_DECAY_RULE, STATE_SPACE, Package
from models.recurrent.state_space import StateSpaceInputs
from tests.recurrent.recurrences import DrawnDelta, DrawnStateSpace
from tests.recurrent.test_kernel_choice import made_and_gradients

# The interpreter's use of numpy is deprecated, and a package warns that there is no GPU.
pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("ignore")]
CLOSE = 1e-5  # of the largest element, of sums in FP32
DOCUMENTS = pytest.mark.parametrize("documents", [0.0, 0.1])


class NoGuard:
    """Takes the place of torch.cuda.device: there is none."""

    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class Number(int):
    """A number of a loop, which in Triton is a tensor and has a dtype."""

    def to(self, dtype: object) -> "Number":
        return self


def numbers(*bounds: Any) -> Iterator[Number]:
    return map(Number, range(*map(int, bounds)))


def run_smallest(autotuner: Any, *arguments: Any, **named: Any) -> Any:
    """Run a kernel in its smallest blocks, without timing the others."""
    choice = min(autotuner.configs, key=lambda config: sum(config.kwargs.values()))
    autotuner.best_config = choice
    settings = choice.all_kwargs()
    if choice.pre_hook:
        positional = dict(zip(autotuner.arg_names, arguments, strict=False))
        choice.pre_hook({**positional, **named, **settings})
    return autotuner.fn.run(*arguments, **named, **settings)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton, and TRITON_INTERPRET=1")
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
    monkeypatch.setattr(autotuner.Autotuner, "run", run_smallest)
    monkeypatch.setattr(torch.cuda, "device", NoGuard)
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@DOCUMENTS
@pytest.mark.parametrize("package", [DELTA_RULE, ROW_DECAY_RULE])
def test_interpreted_kernels_of_flash_linear_attention_compute_the_delta_rule(
    package: Package, documents: float, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention: pip install --no-deps fla-core")
    module = importlib.import_module(package.module)
    for name, loaded in [*sys.modules.items()]:
        if name.startswith("fla.ops"):
            monkeypatch.setattr(loaded, "range", numbers, raising=False)
    # It stops on GPUs for which this Triton compiles wrongly; an interpreter does not compile.
    gradients: Any = importlib.import_module("fla.ops.common.chunk_o")
    monkeypatch.setattr(gradients, "IS_NVIDIA_HOPPER", False, raising=False)
    by_row = package == ROW_DECAY_RULE
    sizes = DrawnDelta(2, 2, 70, 16, 16, 64, 1.0, documents, 3, by_row)
    inputs, state = sizes.inputs()
    keys = ("query", "key", "value", "log_decay", "strength")
    tensors = [*(getattr(inputs, key) for key in keys), state]
    kernel = getattr(module, package.function)

    def given(leaves: Sequence[Tensor]) -> tuple[DeltaInputs, Tensor | None]:
        here = replace(inputs, **dict(zip(keys, leaves, strict=False)))
        return here, None if documents else leaves[-1]

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        outputs, last = delta_rule.chunked(*given(leaves))
        return [outputs] if documents else [outputs, last]

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        made = kernel_calls.delta_rule(kernel, *given(leaves), torch.float32)
        return [x for x in made if x is not None]

    # with documents there is no state before
    wide = tensors[:-1] if documents else tensors
    found = made_and_gradients(theirs, [x.float() for x in wide])
    assert_close(found, made_and_gradients(ours, wide))


@DOCUMENTS
def test_interpreted_kernels_of_mamba_ssm_compute_the_state_space(
    documents: float, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("mamba_ssm")
    if spec is None:
        pytest.skip("needs mamba-ssm, of which the Python sources are enough")
    # The package itself imports extensions that are compiled for a GPU.
    package: Any = ModuleType("mamba_ssm")
    package.__path__ = spec.submodule_search_locations
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    kernel = getattr(importlib.import_module(STATE_SPACE.module), STATE_SPACE.function)
    # several chunks
    monkeypatch.setattr(kernel_calls, "MAMBA_CHUNK", 32)
    sizes = DrawnStateSpace(1, 2, 2, 70, 16, 16, 64, 1.0, documents, 3)
    inputs, state = sizes.inputs()
    keys = ("query", "key", "value", "step", "rate")
    tensors = [*(getattr(inputs, key) for key in keys), state]

    def given(leaves: Sequence[Tensor]) -> tuple[StateSpaceInputs, Tensor]:
        return replace(inputs, **dict(zip(keys, leaves, strict=False))), leaves[-1]

    def ours(*leaves: Tensor) -> Sequence[Tensor]:
        return state_space.chunked(*given(leaves))

    def theirs(*leaves: Tensor) -> Sequence[Tensor]:
        return kernel_calls.state_space(kernel, *given(leaves), torch.float32)

    found = made_and_gradients(theirs, [x.float() for x in tensors])
    assert_close(found, made_and_gradients(ours, tensors))


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        distance = (ours.double() - exact).abs().max()
        assert distance <= CLOSE * max(1.0, exact.abs().max().item()), (number, distance)
