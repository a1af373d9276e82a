"""What can be known of a GPU without one, in an environment with torch's build for CUDA
(`make offline-gpu`)."""

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def require_build_for_cuda() -> None:
    if torch.version.cuda is None or find_spec("triton") is None:
        pytest.skip("needs torch's build for CUDA: make offline-gpu")


@pytest.fixture(scope="session")
def build_for_cuda() -> None:
    """torch's kernels for CUDA, which nothing can run."""
    require_build_for_cuda()


@pytest.fixture(scope="session")
def pretended() -> Iterator[Any]:
    """A `PretendedH100`."""
    require_build_for_cuda()
    module: Any = importlib.import_module("tests.offline_gpu.pretended_h100")
    with pytest.MonkeyPatch.context() as patch:
        yield module.PretendedH100(patch)


@pytest.fixture
def h100(pretended: Any) -> Any:
    """A `PretendedH100` that compiles and runs nothing."""
    if pretended.interpreted:
        pytest.skip("TRITON_INTERPRET=1 is set: nothing is compiled to machine code")
    return pretended


@pytest.fixture
def interpreter(pretended: Any) -> Any:
    """A `PretendedH100` whose kernels are interpreted."""
    if not pretended.interpreted:
        pytest.skip("needs TRITON_INTERPRET=1")
    return pretended
