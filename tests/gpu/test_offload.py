"""Masters and moments in host memory: copies beside the update leave the bits as they are, and the
device holds a few tiles of them."""

import pytest
import torch
from torch import Tensor, nn

from megaprec.comm.layout import attach_whole
from megaprec.optim.optimizer import ParallelAMPOptimizer
from megaprec.optim.rules.rule_table import rule
from megaprec.optim.state.host_memory import HostMemory
from megaprec.precision.plan import plan
from tests.offload import CpuHostMemory

STEPS = 4
SIZES = {"cpu": 32, "cuda": 3000}  # of a matrix: on a GPU a buffer has several tiles


def host_memory(device: str) -> HostMemory:
    return HostMemory() if device == "cuda" else CpuHostMemory()


def trained(
    device: str, name: str, masters: str, memory: HostMemory | None
) -> tuple[dict[str, Tensor], ParallelAMPOptimizer]:
    """The optimizer and its state after some steps, of which the second is skipped."""
    torch.manual_seed(0)
    size = SIZES[device]
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)).to(device)
    attach_whole(model)
    precision = plan("bf16", masters=masters)
    options = {"by_adamw": []} if name == "muon" else {}
    optimizer = ParallelAMPOptimizer(
        [model],
        precision,
        lr=1e-3,
        rule=rule(name, options),
        ema=0.9,
        offload=memory,
        bucket=size * size,
    )
    x = torch.linspace(-1, 1, 8 * size, device=device).view(8, size).bfloat16()
    for step in range(STEPS):
        loss = model(x).float().square().mean() * (float("inf") if step == 1 else 1.0)
        (loss * optimizer.scale).backward()
        assert optimizer.step(loss=loss.detach()).changed == (step != 1)
    return optimizer.state_dict()["tensors"], optimizer


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_in_host_memory_has_the_bits_of_state_on_the_device(
    device: str, name: str, masters: str
) -> None:
    expected, _ = trained(device, name, masters, None)
    ours, _ = trained(device, name, masters, host_memory(device))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


def test_the_device_holds_few_bytes_of_it(device: str) -> None:
    memory = host_memory(device)
    _, optimizer = trained(device, "adamw", "fp32", memory)
    buffers = optimizer.all_buffers()
    state = [tensor for buffer in buffers for tensor in buffer.state.values()]
    assert all(tensor.device.type == "cpu" for tensor in state)
    if device == "cuda":
        assert all(tensor.is_pinned() for tensor in state)
    most = 3 * 16 * memory.tile_elements
    assert sum(len(staging._room) for staging in memory._staging) <= most
