"""The world's group over NCCL, as far as it is made where there is no GPU: up to NCCL itself."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megaprec.torch_private import transfers_under_way
from parallel import mesh

pytestmark = pytest.mark.campaign


@pytest.mark.usefixtures("build_for_cuda")
@pytest.mark.parametrize("minutes", [10, 21])
def test_the_group_over_nccl_is_made_without_a_warning(
    minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning would be an error here, and stand in the place of NCCL's."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    limit = timedelta(minutes=minutes)
    with pytest.raises((RuntimeError, ValueError), match="no GPUs found"):
        mesh._form_world(dist.HashStore(), 0, 1, limit, torch.device("cuda", 0))


@pytest.mark.usefixtures("build_for_cuda")
def test_what_nccl_has_under_way_is_told_in_json() -> None:
    assert "version" in json.loads(transfers_under_way())
