"""What the world's group is asked for on GPUs, by a stand-in for torch's part."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import mesh


def test_the_options_of_nccl_have_the_time_limit_of_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch warns on every rank of options with another one, and its own is ten minutes."""
    asked: dict[str, Any] = {}
    ten = timedelta(minutes=10)
    nccl = SimpleNamespace(Options=lambda **settings: SimpleNamespace(_timeout=ten, **settings))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda _, **settings: asked.update(settings))
    monkeypatch.setattr(mesh, "_start_backward_thread", lambda _: None)
    limit = timedelta(minutes=21)
    mesh._form_world(dist.HashStore(), 0, 1, limit, torch.device("cuda", 0))
    assert asked["timeout"] == asked["pg_options"]._timeout == limit
    assert asked["pg_options"].is_high_priority_stream
