"""Copies to the host are begun at once, and have the numbers of that moment."""

import torch

from megaprec.checkpoint.host_copies import HostCopies, allocate_pinned
from megaprec.comm.axis import start_copy_to_host


def test_a_copy_has_the_numbers_from_before_later_work(device: str) -> None:
    values = torch.arange(1 << 22, device=device, dtype=torch.float32)
    if device == "cpu":
        copies = HostCopies(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        copied = copies.start(values)
    else:
        assert allocate_pinned(64).is_pinned()
        copies = HostCopies()
        copied = copies.start(values)
        wait = copies.wait_for_started()
        values.zero_()
        wait()
    assert torch.equal(copied, torch.arange(1 << 22, dtype=torch.float32))


def test_counts_come_to_the_host(device: str) -> None:
    counts = torch.arange(8, device=device)
    wait = start_copy_to_host(counts)
    assert wait().tolist() == [*range(8)]
