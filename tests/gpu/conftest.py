"""Each law of this folder holds on the CPU, where it is tried everywhere, and on a GPU, where there
is one."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
