"""Checkpoints of a loop of one's own hold frozen weights, and say which buffers they do not
hold."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from megaprec import ParallelAMPOptimizer, load, plan, save
from megaprec.comm.layout import attach_whole
from tests.refusals import raises


class Running(nn.Module):
    """Subtracts a running mean, as a BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("constant", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().float().mean(0), 0.1)  # type: ignore[operator]
        return (x - self.mean.to(x)) * self.constant.to(x) * self.scale  # type: ignore[operator]


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 8), Running(), nn.Linear(8, 1))
    made[0].requires_grad_(False)
    return made


def optimizer_of(made: nn.Module) -> ParallelAMPOptimizer:
    attach_whole(made)
    return ParallelAMPOptimizer([made], plan("bf16"), lr=1e-2)


def test_frozen_weights_are_saved_and_loaded_and_changed_buffers_are_named(tmp_path: Path) -> None:
    made = model(0)
    optimizer = optimizer_of(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing has changed yet
        save(tmp_path / "before", 0, optimizer, {})
    (made(torch.randn(6, 4, dtype=torch.bfloat16)).float().mean() * optimizer.scale).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"is in no checkpoint, because it is a buffer") as said:
        path = save(tmp_path / "after", 1, optimizer, {})
    assert [str(w.message).partition(" ")[0] for w in said] == ["1.mean"]
    other = model(1)
    taking = optimizer_of(other)
    assert not torch.equal(other.get_parameter("0.weight"), made.get_parameter("0.weight"))
    with warnings.catch_warnings():
        # frozen weights are bf16, and have no masters that could be narrower
        warnings.simplefilter("error")
        load(path, taking)
    for (name, one), (_, theirs) in zip(
        other.named_parameters(), made.named_parameters(), strict=True
    ):
        assert torch.equal(one, theirs), name


def test_all_statistics_of_a_batch_norm_are_named(tmp_path: Path) -> None:
    """torch's kernel writes to mean and variance unseen, and only the count of batches has a new
    version."""
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    attach_whole(made)
    optimizer = ParallelAMPOptimizer([made], plan("fp32"), lr=1e-2)
    made(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"is in no checkpoint") as said:
        save(tmp_path, 1, optimizer, {})
    named = {str(w.message).partition(" ")[0] for w in said}
    assert named == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_frozen_parameter_without_a_layout_is_refused_by_name(tmp_path: Path) -> None:
    made = model(0)
    attach_whole(made[2])
    attach_whole(made[1], prefix="norm.")
    optimizer = ParallelAMPOptimizer([made], plan("fp32"), lr=1e-2)
    with raises(
        "optimizer.frozen_tensor_in_state",
        name="0.weight",
        obstacle=re.compile("^it has no layout"),
    ):
        save(tmp_path, 1, optimizer, {})
    assert not [*tmp_path.rglob("*.safetensors")]
